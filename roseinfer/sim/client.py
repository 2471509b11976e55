"""The simulated client: which request may be sent, and when. No clock: `now` is an argument.

A schedule is kept whatever the server does, unless the client's own cap binds: then requests are held back, first
come first served. In a closed loop there is no schedule: every request is held back, and a user who is free takes
the next.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class ClientRules(NamedTuple):
    """What a client does besides sending on schedule. Seconds; None: not asked for.

    max_concurrency: requests outstanding at a time. user_starts_s: a closed loop of so many users, and when each of
    them comes. refused_pause_s: from a refusal to the next request of that user. duration_s: nothing is sent from
    then on. timeout_s: from sending to giving up.
    """

    max_concurrency: int | None = None
    user_starts_s: tuple[float, ...] | None = None
    refused_pause_s: float = 0.0
    duration_s: float | None = None
    timeout_s: float | None = None

    @property
    def is_closed(self) -> bool:
        return self.user_starts_s is not None


class Outbox:
    """The requests that are held back, and how many more may be outstanding.

    `held` is what was due and not sent yet. A request is outstanding from `take` to `ended`.
    """

    def __init__(self, rules: ClientRules, n_requests: int) -> None:
        self.held: deque[int] = deque(range(n_requests) if rules.is_closed else ())
        self.outstanding = 0
        self.peak = 0
        everybody = float("inf") if rules.max_concurrency is None else rules.max_concurrency
        self._allowed = 0 if rules.is_closed else everybody
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
        """A user of a closed loop comes, or comes back."""
        self._allowed += 1

    def remove_user(self) -> None:
        """A user of a closed loop leaves for a while."""
        self._allowed -= 1
