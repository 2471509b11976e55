"""A bound on what a client keeps outstanding."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable
from math import inf
from typing import Final

from roseinfer.bench.termination import LONGEST_WAIT_S, interruptible

clock: Final = time.perf_counter


class Permits:
    """A bound on what a client has outstanding. One thread takes permits, in order; any gives them back.

    Counts what is outstanding on its own: `peak_outstanding` is the most that there ever was.
    """

    def __init__(self) -> None:
        self.peak_outstanding = 0
        self._outstanding = 0
        self._free_s: list[float] = []  # a heap: when each permit that nobody holds comes free, or came
        self._is_closed = False
        self._condition = threading.Condition()

    def hand_out(self, times_s: Iterable[float]) -> None:
        """Permits to begin with, each from its time on (clock seconds)."""
        self._free_s = sorted(times_s)

    @property
    def is_free(self) -> bool:
        """`take` would return a permit at once."""
        with self._condition:
            return bool(self._free_s) and self._free_s[0] <= clock()

    def take(self, until_s: float) -> float | None:
        """Waits for a permit and returns when it came free (both in clock seconds).

        None once it is `until_s`, whatever is free then, or after `close`.
        """
        with interruptible():
            pass  # also where nothing has to wait
        with self._condition:
            while True:
                now = clock()
                next_s = self._free_s[0] if self._free_s else inf
                if now >= until_s or self._is_closed:
                    return None
                if next_s <= now:
                    self._outstanding += 1
                    self.peak_outstanding = max(self.peak_outstanding, self._outstanding)
                    return heapq.heappop(self._free_s)
                with interruptible():
                    self._condition.wait(min(next_s - now, until_s - now, LONGEST_WAIT_S))

    def give_back(self, at_s: float) -> None:
        """A request has ended, however it did; its permit comes free at `at_s` (clock seconds)."""
        with self._condition:
            self._outstanding -= 1
            heapq.heappush(self._free_s, at_s)
            self._condition.notify()

    def close(self) -> None:
        """No permit will come any more."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
