"""How busy a loop is that waits for events: what it does between two waits holds back what comes meanwhile."""

from __future__ import annotations

from array import array
from typing import Final

WINDOW_S: Final = 0.1
"""A loop may idle over a minute, and have been the bottleneck for a tenth of a second of it."""

AT_ONCE_S: Final = 20e-6
"""A wait that is shorter was none: something had come before it."""


class LoopLoad:
    """Told of every wait, in order, in clock seconds. What is not waiting is being busy, with whatever it be.

    `longest_turn_s` is the longest time between two waits, `busy_share_max` the share of the busiest whole window.
    What is read now may lie there since `since_s`: `read_lags_s` is for whoever reads to note how long that is.
    """

    def __init__(self, start_s: float) -> None:
        self.longest_turn_s = 0.0
        self.busy_share_max = 0.0
        self.since_s = start_s
        self.read_lags_s = array("d")
        self._start_s = start_s
        self._woke_s = start_s
        self._waited_all_s = 0.0
        self._waited_s = 0.0  # in the window that began last
        self._window_end_s = start_s + WINDOW_S

    @property
    def busy_share(self) -> float:
        """Of all the time up to the last wait."""
        ran_s = self._woke_s - self._start_s
        return 1.0 - self._waited_all_s / ran_s if ran_s > 0 else 0.0

    def waited(self, from_s: float, to_s: float) -> None:
        """A wait, for nothing maybe."""
        turn_s = from_s - self._woke_s
        if turn_s > self.longest_turn_s:  # noqa: PLR1730 (faster than max, which every turn would pay)
            self.longest_turn_s = turn_s
        self.since_s = self._woke_s if to_s - from_s < AT_ONCE_S else to_s
        self._woke_s = to_s
        self._waited_all_s += to_s - from_s
        if to_s >= self._window_end_s:
            self._end_windows(from_s, to_s)
        else:
            self._waited_s += to_s - from_s

    def _end_windows(self, from_s: float, to_s: float) -> None:
        """Those that ended in the turn before this wait, and the one that ends in it: the next begins as it is over."""
        while from_s >= self._window_end_s:
            self._end_window(self._waited_s)
            self._waited_s = 0.0
            self._window_end_s += WINDOW_S
        if to_s >= self._window_end_s:
            self._end_window(self._waited_s + self._window_end_s - from_s)
            self._waited_s = 0.0
            self._window_end_s = to_s + WINDOW_S
        else:
            self._waited_s += to_s - from_s

    def _end_window(self, waited_s: float) -> None:
        self.busy_share_max = max(self.busy_share_max, 1.0 - waited_s / WINDOW_S)
