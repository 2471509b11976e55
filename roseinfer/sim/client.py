"""The simulated client: which request may be sent, and when. No clock: `now` is an argument.

A schedule is kept whatever the server does, unless the client's own cap binds: then requests are held back, first
come first served. In a closed loop there is no schedule: every request is held back, and a user who is free takes
the next.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from roseinfer.errors import InvariantError


class ClientRules(NamedTuple):
    """What a client does besides sending on schedule. Seconds; None: not asked for.

    max_concurrency: requests outstanding at a time, or, `is_closed`, users. ramp_s: time in which the users of a
    closed loop start, evenly. duration_s: nothing is sent from then on. timeout_s: from sending to giving up.
    """

    max_concurrency: int | None = None
    is_closed: bool = False
    ramp_s: float | None = None
    duration_s: float | None = None
    timeout_s: float | None = None


class Permits:
    """The requests that are held back, and how many more may be outstanding.

    `held` is what was due and not sent yet. A request is outstanding from `take` to `ended`.
    """

    def __init__(self, rules: ClientRules, n_requests: int) -> None:
        if rules.is_closed and rules.max_concurrency is None:
            raise InvariantError("a closed loop without users")
        self.held: deque[int] = deque(range(n_requests) if rules.is_closed else ())
        self.outstanding = 0
        self.peak = 0
        everybody = float("inf") if rules.max_concurrency is None else rules.max_concurrency
        self._allowed = 1 if _has_ramp(rules) else everybody
        self._until_s = float("inf") if rules.duration_s is None else rules.duration_s

    def take(self, now: float) -> int | None:
        """The request to send now, None while there is none or it has to wait."""
        if not self.held or self.outstanding >= self._allowed or now >= self._until_s:
            return None
        self.outstanding += 1
        self.peak = max(self.peak, self.outstanding)
        return self.held.popleft()

    def ended(self) -> None:
        """A request is over for the client, however it ended."""
        self.outstanding -= 1

    def add_user(self) -> None:
        """One more user of the ramp has started."""
        self._allowed += 1


def user_starts_s(rules: ClientRules) -> list[float]:
    """When the second, third ... user of a closed loop with a ramp starts: max(1, floor(N t / ramp)) are there at t."""
    if not _has_ramp(rules):
        return []
    assert rules.max_concurrency is not None
    assert rules.ramp_s is not None
    return [k * rules.ramp_s / rules.max_concurrency for k in range(2, rules.max_concurrency + 1)]


def _has_ramp(rules: ClientRules) -> bool:
    # Of a schedule the ramp is part: there it is in the arrivals.
    return rules.is_closed and bool(rules.ramp_s)
