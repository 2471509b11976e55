"""Threads that tokenise prompts, so that submitting text costs its caller a queue entry."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from roseinfer.executor import Tokenizer


class _Job(NamedTuple):
    text: str
    wanted: Callable[[], bool]
    done: Callable[[list[int] | BaseException], None]


class TokenizerPool:
    """`workers` threads, each with a tokenizer of its own. `done` runs in the worker, with ids or the exception."""

    def __init__(self, workers: int, make_tokenizer: Callable[[], Tokenizer]) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._work, args=(make_tokenizer(),), name=f"roseinfer-tokenize-{i}", daemon=True
            )
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def encode(
        self, text: str, wanted: Callable[[], bool], done: Callable[[list[int] | BaseException], None]
    ) -> None:
        """Queues a prompt. It is passed over, without a word to `done`, if it is not wanted any more at its turn."""
        self._jobs.put(_Job(text, wanted, done))

    def close(self) -> None:
        """Ends the threads once the prompts queued so far are done. Harmless when repeated."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, tokenizer: Tokenizer) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.wanted():
                continue
            result: list[int] | BaseException
            try:
                result = tokenizer.encode(job.text)
            except BaseException as error:  # a panic of the tokenizers library is no Exception
                result = error
            job.done(result)
