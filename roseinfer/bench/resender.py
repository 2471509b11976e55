"""The second sender of the in-process client: sends the tries of those who come back, when they are due."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final

from roseinfer.bench.retries import Retrier
from roseinfer.bench.rows import Attempt
from roseinfer.bench.termination import LONGEST_WAIT_S, interruptible

if TYPE_CHECKING:
    from roseinfer.bench.client import Asked
    from roseinfer.prompt import Prompt

clock: Final = time.perf_counter


class Offer:
    """A request that its client has come to: `attempt` is its last try so far, `deadline_s` (clock seconds) its end."""

    __slots__ = ("asked", "attempt", "deadline_s", "index", "prompt")

    def __init__(self, index: int, attempt: Attempt, prompt: Prompt, asked: Asked) -> None:
        self.index = index
        self.attempt = attempt
        self.prompt = prompt
        self.asked = asked
        self.deadline_s = inf


class Resender:
    """Decides which tries are followed by another, and sends those in a thread of its own.

    So the schedule of first tries is kept whoever comes back. Any thread says that a try has ended.
    """

    def __init__(self, retrier: Retrier) -> None:
        self._retrier = retrier
        self._condition = threading.Condition()  # guards what follows up to the empty line
        self._due: list[tuple[float, int, Offer]] = []  # a heap; the number keeps equals in order
        self._numbers = count()
        self._open = 0  # requests that another try may follow
        self._is_closed = False

        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, send: Callable[[Offer], None]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(send,), name="roseinfer-resender", daemon=True
        )
        self._thread.start()

    def begin(self) -> None:
        """A request is sent for the first time."""
        with self._condition:
            self._retrier.begin()
            self._open += 1

    def is_last(
        self, offer: Offer, ended_s: float, failure: BaseException | None, *, is_served: bool
    ) -> bool:
        """The try of this offer has ended (clock seconds); False: another follows.

        `failure` is None where it was served, or its client gave it up.
        """
        with self._condition:
            delay_s = None
            if not is_served and not self._is_closed:
                n_tries = len(offer.attempt.earlier) + 1
                left_s = offer.deadline_s - ended_s
                delay_s = self._retrier.delay_after_s(failure, offer.index, n_tries, left_s)
            if delay_s is None:
                self._open -= 1
            else:
                heapq.heappush(self._due, (ended_s + delay_s, next(self._numbers), offer))
            self._condition.notify_all()
        return delay_s is None

    def finish(self) -> None:
        """Returns once no try will follow, or after `close`. Raises whatever its thread died of."""
        with self._condition:
            while self._open and not self._is_closed:
                with interruptible():
                    self._condition.wait(LONGEST_WAIT_S)
        self.stop()
        if self._failure is not None:
            raise self._failure

    def waiting(self) -> list[Attempt]:
        """The last tries of those for whom another would follow."""
        with self._condition:
            return [offer.attempt for _, _, offer in self._due]

    def close(self) -> None:
        """No other try follows, whoever waits for one."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def stop(self) -> None:
        """Ends its thread."""
        self.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self, send: Callable[[Offer], None]) -> None:
        try:
            while (offer := self._take()) is not None:
                send(offer)
        except BaseException as error:  # else the client would wait for its tries for ever
            self._failure = error
            self.close()

    def _take(self) -> Offer | None:
        """Waits for the next try that is due; None after `close`."""
        with self._condition:
            while not self._is_closed:
                left_s = self._due[0][0] - clock() if self._due else LONGEST_WAIT_S
                if left_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._condition.wait(min(left_s, LONGEST_WAIT_S))
            return None
