"""Shedding by standing delay, where waiting requests are taken up: CoDel, in the form that folly gave it for requests.

A queue that only absorbs a burst empties soon: then somebody in every interval has hardly waited. A queue that stands
makes everybody wait, the luckiest too. So the least delay of an interval says which of the two it is.

    at the end of an interval    overloaded := least delay in it > target
    at every dequeue             drop if overloaded and delay > 2 target

The first one of an interval is never dropped: something is served and measured however long the overload lasts.
Rule and names: folly, `Codel` (its defaults, 100 ms and 5 ms, are far below one step of a language model).

Pure: no clock, no lock. Whoever takes requests up guards it.
"""

from __future__ import annotations

import math

from roseinfer.errors import InputError


class CoDel:
    """Judges one queue. Raises InputError unless 0 < target_s < interval_s, both finite."""

    def __init__(self, target_s: float, interval_s: float) -> None:
        if not 0.0 < target_s < math.inf:
            raise InputError("codel target", target_s, "must be a finite number of seconds > 0")
        if not target_s < interval_s < math.inf:
            raise InputError(
                "codel interval", interval_s, f"must be finite and exceed the target, {target_s} s"
            )
        self.target_s = target_s
        self.interval_s = interval_s
        self.is_overloaded = False
        self._least_s = 0.0  # in this interval
        self._ends_s = -math.inf

    def should_drop(self, now: float, delay_s: float) -> bool:
        """Whether the request that is taken up `now` after `delay_s` is to be shed. Asked for every one, once."""
        if now >= self._ends_s:
            # What an interval long ago showed says nothing of now.
            is_recent = now < self._ends_s + self.interval_s
            self.is_overloaded = is_recent and self._least_s > self.target_s
            self._ends_s = now + self.interval_s
            self._least_s = delay_s
            return False
        self._least_s = min(self._least_s, delay_s)
        return self.is_overloaded and delay_s > 2 * self.target_s
