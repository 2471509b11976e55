"""What a client of a server tries again, and what never."""

from __future__ import annotations

from typing import Final

from roseinfer.bench.http.exchange import Failure, HttpAttempt
from roseinfer.errors import NEVER

_NO_ANSWER: Final = (Failure.REFUSED, Failure.RESET, Failure.CLOSED)
_NEVER: Final = ("insufficient_quota", *NEVER)


def is_worth_a_retry(attempt: HttpAttempt) -> bool:
    """A refusal, or a connection that broke before the head of an answer: nothing was begun that a retry would repeat.

    A server may refuse late, after its 200, as long as no text has come. What its client gave up is tried again, too:
    where that was at the deadline of the request, no time is left for it.

    An exhausted quota is none, nor a request that exceeds the budget of tokens by itself: they come with a 429, and no
    waiting mends them.
    """
    if attempt.is_busy:
        return attempt.error_code not in _NEVER and attempt.reject_reason not in _NEVER
    if attempt.failure is Failure.TIMEOUT:
        return True
    return attempt.failure in _NO_ANSWER and attempt.head_s is None
