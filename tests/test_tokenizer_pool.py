from __future__ import annotations

import queue
import threading

import pytest

from roseinfer.tokenizer_pool import TokenizerPool
from tests.scripted import ScriptedTokenizer

Result = list[int] | BaseException


class Panic(BaseException):
    """Like the tokenizers library's own, no Exception."""


class TroubledTokenizer(ScriptedTokenizer):
    """Notes who uses it. Raises on "error" and "panic"; "wait" waits."""

    def __init__(self) -> None:
        self.users: set[int] = set()
        self.began = threading.Event()
        self.go_on = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.users.add(threading.get_ident())
        match text:
            case "error":
                raise ValueError(text)
            case "panic":
                raise Panic(text)
            case "wait":
                self.began.set()
                self.go_on.wait()
        return super().encode(text)


class Office:
    """A pool, its tokenizers and what it answered, in order."""

    def __init__(self, workers: int) -> None:
        self.tokenizers: list[TroubledTokenizer] = []
        self.answers: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.pool = TokenizerPool(workers, self._make)

    def _make(self) -> TroubledTokenizer:
        self.tokenizers.append(TroubledTokenizer())
        return self.tokenizers[-1]

    def encode(self, text: str, *, wanted: bool = True) -> None:
        self.pool.encode(text, lambda: wanted, self.answers.put)


def test_a_prompt_is_answered_with_its_ids() -> None:
    office = Office(1)
    office.encode("ab")
    assert office.answers.get() == [97, 98]
    office.pool.close()


def test_every_worker_has_a_tokenizer_of_its_own() -> None:  # case B13
    office = Office(4)
    for _ in range(4):
        office.encode("wait")
    for tokenizer in office.tokenizers:
        tokenizer.began.wait()  # all four at once
    for tokenizer in office.tokenizers:
        tokenizer.go_on.set()
    for _ in range(40):
        office.encode("x")
    office.pool.close()
    users = [tokenizer.users for tokenizer in office.tokenizers]
    assert [len(threads) for threads in users] == [1] * 4
    assert len(set.union(*users)) == 4


@pytest.mark.parametrize(("text", "kind"), [("error", ValueError), ("panic", Panic)])
def test_an_error_is_an_answer_and_the_worker_goes_on(text: str, kind: type[BaseException]) -> None:
    office = Office(1)
    office.encode(text)
    assert isinstance(office.answers.get(), kind)
    office.encode("a")
    assert office.answers.get() == [97]
    office.pool.close()


def test_a_prompt_that_nobody_wants_any_more_is_passed_over() -> None:
    office = Office(1)
    office.encode("panic", wanted=False)
    office.encode("a")
    office.pool.close()
    assert office.answers.get() == [97]
    assert office.answers.empty()


def test_close_ends_the_threads_after_what_was_queued_and_may_be_repeated() -> None:
    office = Office(2)
    for _ in range(20):
        office.encode("a")
    office.pool.close()
    assert office.answers.qsize() == 20
    assert not any(thread.is_alive() for thread in office.pool._threads)
    office.pool.close()


def test_a_tokenizer_that_cannot_be_made_leaves_no_thread_behind() -> None:
    made: list[int] = []

    def make() -> ScriptedTokenizer:
        if made:
            raise OSError("no such file")
        made.append(1)
        return ScriptedTokenizer()

    with pytest.raises(OSError, match="no such file"):
        TokenizerPool(2, make)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("roseinfer-tokenize")]
