"""From what a client of a server saw to rows of the record: one per offered request, one per try."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from roseinfer.bench.environment import public_text
from roseinfer.bench.http.exchange import Failure, HttpAttempt, HttpRequest
from roseinfer.bench.records import Outcome
from roseinfer.bench.rows import INTERRUPTED
from roseinfer.errors import QUEUE_TIMEOUT

_FROM_THE_QUEUE: Final = (QUEUE_TIMEOUT, "codel", "evicted")
"""Reasons of those that were dropped while they waited, as roseinfer's server names them."""

_NOT_ITS_LIMIT: Final = ("draining", "engine_dead")
"""Reasons of a 503 that have nothing to do with how much is in flight."""

MOST_SECONDS: Final = 1e9
"""What is longer is no duration, but a moment, or another unit."""


def request_row(request: HttpRequest, t0: float) -> dict[str, Any]:
    """The columns of REQUEST_SCHEMA that one request fills; seconds from `t0`.

    It counts from its first try, and ends as its last one did.
    """
    if not request.tries:
        return {
            "scheduled_s": request.scheduled_s,
            "attempts": 0,
            "outcome": Outcome.INCOMPLETE,
            "error": request.unsent_because,
            "ended_s": _since(t0, request.gave_up_s),
        }
    first, last = request.tries[0], request.tries[-1]
    permitted_s = _since(t0, request.permitted_s)
    came = _what_came(last, t0)
    if request.gave_up_s is not None:
        came |= {"outcome": Outcome.INCOMPLETE, "error": INTERRUPTED, "reject_reason": None}
        came["ended_s"] = _since(t0, request.gave_up_s)
    is_refused = came["outcome"] is Outcome.REJECTED or came["reject_reason"] is not None
    stage = "queued" if came["reject_reason"] in _FROM_THE_QUEUE else "submit"
    timings = last.timings or {}
    return {
        "scheduled_s": request.scheduled_s,
        "permitted_s": request.scheduled_s if permitted_s is None else permitted_s,
        "sent_s": _since(t0, first.sent_s),
        "last_sent_s": None if first is last else _since(t0, last.sent_s),
        "rejected_s": _since(t0, _refused_s(last)) if is_refused else None,
        "reject_stage": stage if is_refused else None,
        "attempts": len(request.tries),
        "inflight_at_send": request.inflight,
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": last.cached_tokens,
        "finish_reason": last.finish_reason,
        "server_queue_s": _seconds(timings.get("queue_s")),
        "server_prefill_s": _seconds(timings.get("prefill_s")),
        **came,
    }


def attempt_rows(request_index: int, request: HttpRequest, t0: float) -> Iterator[dict[str, Any]]:
    """The columns of ATTEMPT_SCHEMA for each try of one request; seconds from `t0`."""
    for number, attempt in enumerate(request.tries, 1):
        row = _what_came(attempt, t0)
        del row["chunk_times_s"], row["chunk_tokens"]
        yield {
            "request_index": request_index,
            "attempt": number,
            "sent_s": _since(t0, attempt.sent_s),
            "retry_after_s": attempt.retry_after_s,
            **row,
        }


def outcome_of(attempt: HttpAttempt) -> Outcome:
    """Refused are a 429, and a 503 for want of room: also one that a server thought of after its 200, before any text.

    The client's deadline is a timeout, as is that of a server's queue; what a user cut short is incomplete; all else
    that is no whole answer is an error.
    """
    if attempt.failure is None:
        return Outcome.COMPLETED
    if attempt.failure is Failure.INTERRUPTED:
        return Outcome.INCOMPLETE
    if attempt.failure is Failure.TIMEOUT:
        return Outcome.TIMEOUT
    if not attempt.is_busy or attempt.reject_reason in _NOT_ITS_LIMIT:
        return Outcome.ERROR
    return Outcome.TIMEOUT if attempt.reject_reason == QUEUE_TIMEOUT else Outcome.REJECTED


def _what_came(attempt: HttpAttempt, t0: float) -> dict[str, Any]:
    """The columns that a request and a try have in common."""
    outcome = outcome_of(attempt)
    times_s = [received_s - t0 for received_s, _ in attempt.deliveries]
    tokens = [count for _, count in attempt.deliveries]
    return {
        "ended_s": _since(t0, attempt.ended_s),
        "received_first_s": times_s[0] if times_s else None,
        "received_last_s": times_s[-1] if times_s else None,
        "outcome": outcome,
        "reject_reason": attempt.reject_reason if attempt.is_busy and outcome is not Outcome.ERROR else None,
        "status_code": attempt.status_code,
        "error": None if outcome is Outcome.COMPLETED else _error_text(attempt),
        "output_tokens": attempt.output_tokens,
        "chunk_times_s": times_s or None,
        "chunk_tokens": tokens if tokens and None not in tokens else None,
    }


def _error_text(attempt: HttpAttempt) -> str:
    kind = str(attempt.failure)
    if attempt.failure is Failure.STATUS:
        kind = f"status {attempt.status_code}"
    elif attempt.failure is Failure.STREAM_ERROR and attempt.error_code is not None:
        kind += f" {attempt.error_code}"
    return kind if not attempt.error else f"{kind}: {public_text(attempt.error)}"


def _refused_s(attempt: HttpAttempt) -> float | None:
    """The status says it all, unless that was a 200."""
    return attempt.ended_s if attempt.failure is Failure.STREAM_ERROR else attempt.head_s


def _since(t0: float, stamp: float | None) -> float | None:
    return None if stamp is None else stamp - t0


def _seconds(value: object) -> float | None:
    """What a server says is a duration, if it is one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < MOST_SECONDS else None  # type: ignore[operator, arg-type]
