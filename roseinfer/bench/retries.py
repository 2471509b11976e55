"""Clients that come back: whether a try is followed by another, and when. The same for all targets.

No clock, no lock: whoever asks from several threads guards it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random
from typing import Final

from roseinfer.errors import NEVER, SchedulerManagerOverloadedError

RETRIES: Final = ("none", "immediate", "exponential", "retry-after")

MOST_TRIES: Final = 5
"""Of one request, the first included."""

FIRST_DELAY_S: Final = 0.5
LONGEST_DELAY_S: Final = 8.0
"""The longest delay that can be drawn doubles from the one to the other."""

BUDGET_RESERVE: Final = 10
"""Retries that a budget holds at most, and at the start: a long calm saves up no storm."""

_PARTS: Final = 1000
"""Of one retry that a budget counts in: a tenth of a retry, ten times, is a whole one."""

LEAST_BUDGET: Final = 1 / _PARTS


@dataclass(frozen=True)
class RetryPolicy:
    """A policy of --retry, with the --retry-budget and the --per-try-timeout on top of it; None: not asked for.

    `immediate` and `exponential` do not look at what the server asks for, as many clients do not. `retry-after` waits
    that long first. Delays are drawn from nothing to their longest (full jitter): clients that were refused together
    would else come back together. With a budget every request adds that share of a retry, and every retry takes one:
    retries are at most BUDGET_RESERVE + budget * requests. `per_try_timeout_s` after it was sent a try is given up.
    """

    name: str = "none"
    budget: float | None = None
    per_try_timeout_s: float | None = None

    @property
    def is_on(self) -> bool:
        return self.name != "none"


class Retrier:
    """One client with its budget, in one cell and repeat.

    A delay follows from the seed, the request and the number of its tries alone, whatever comes before it.
    """

    def __init__(self, policy: RetryPolicy, seed: int) -> None:
        self.policy = policy
        self._seed = seed
        self._earned = 0 if policy.budget is None else round(_PARTS * policy.budget)  # by a request, in parts
        self._saved = BUDGET_RESERVE * _PARTS

    def begin(self) -> None:
        """A request is sent for the first time."""
        self._saved = min(self._saved + self._earned, BUDGET_RESERVE * _PARTS)

    def delay_s(
        self, request_index: int, n_tries: int, *, retry_after_s: float | None = None, left_s: float = inf
    ) -> float | None:
        """Seconds from the end of a failed try, the last of `n_tries`, to the next; None gives the request up.

        `retry_after_s` is what the server asked for. A try that would not begin within `left_s` is none, and costs the
        budget nothing.
        """
        policy = self.policy
        if not policy.is_on or n_tries >= MOST_TRIES or (policy.budget is not None and self._saved < _PARTS):
            return None
        delay_s = 0.0
        if policy.name != "immediate":
            rng = Random(f"{self._seed} {request_index} {n_tries}")
            delay_s = rng.uniform(0.0, min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (n_tries - 1)))
        if policy.name == "retry-after":
            delay_s += retry_after_s or 0.0
        if delay_s >= left_s:
            return None
        if policy.budget is not None:
            self._saved -= _PARTS
        return delay_s

    def delay_after_s(
        self, failure: BaseException | None, request_index: int, n_tries: int, left_s: float = inf
    ) -> float | None:
        """`delay_s` after a try that ended with this error of an engine; None: its client did not wait for the end."""
        if failure is None:
            return self.delay_s(request_index, n_tries, left_s=left_s)
        if not isinstance(failure, SchedulerManagerOverloadedError) or failure.reason in NEVER:
            return None  # no waiting mends it
        return self.delay_s(request_index, n_tries, retry_after_s=failure.retry_after_s, left_s=left_s)
