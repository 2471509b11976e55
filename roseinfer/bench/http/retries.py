"""Clients that try again: when, and what they never try again."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from roseinfer.bench.http.exchange import Failure, HttpAttempt
from roseinfer.errors import TOKENS_NEVER_FIT

MOST_TRIES: Final = 5
"""Of one request, the first included."""

FIRST_DELAY_S: Final = 0.5
LONGEST_DELAY_S: Final = 8.0
"""The longest delay that can be drawn doubles from the one to the other."""

_NO_ANSWER: Final = (Failure.REFUSED, Failure.RESET, Failure.CLOSED)
_NEVER: Final = ("insufficient_quota", TOKENS_NEVER_FIT)


def is_worth_a_retry(attempt: HttpAttempt) -> bool:
    """A refusal, or a connection that broke before the head of an answer: nothing was begun that a retry would repeat.

    A server may refuse late, after its 200, as long as no text has come.

    An exhausted quota is none, nor a request that exceeds the budget of tokens by itself: they come with a 429, and no
    waiting mends them.
    """
    if attempt.is_busy:
        return attempt.error_code not in _NEVER and attempt.reject_reason not in _NEVER
    return attempt.failure in _NO_ANSWER and attempt.head_s is None


@dataclass(frozen=True)
class Retries:
    """A policy of --retry.

    `immediate` and `exponential` do not look at what the server asks for, as many clients do not. `retry-after` waits
    that long first. Delays are drawn from nothing to their longest (full jitter): clients that were refused together
    would else come back together.
    """

    name: str

    @property
    def is_on(self) -> bool:
        return self.name != "none"

    def delay_s(self, attempt: HttpAttempt, n_tries: int, rng: Random) -> float | None:
        """Seconds from the end of `attempt`, the last of `n_tries`, to the next; None gives the request up."""
        if not self.is_on or n_tries >= MOST_TRIES or not is_worth_a_retry(attempt):
            return None
        if self.name == "immediate":
            return 0.0
        jitter_s = rng.uniform(0.0, min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (n_tries - 1)))
        floor_s = attempt.retry_after_s or 0.0 if self.name == "retry-after" else 0.0
        return floor_s + jitter_s
