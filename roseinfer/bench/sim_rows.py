"""Rows of the simulated target's requests, made without a detour: there may be millions.

They say what `rows.request_row` says of the same request; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from roseinfer.bench.records import Outcome
from roseinfer.bench.rows import OUTCOMES, error_text, outcome_of_drop
from roseinfer.errors import InvariantError, RoseinferError, SchedulerManagerOverloadedError
from roseinfer.request import ABORT, Request
from roseinfer.sim.virtual import Arrival, Sent

_BEFORE_OUTCOME: Final = (
    "request_index scheduled_s permitted_s sent_s last_sent_s attempts waiting_at_send inflight_at_send"
    " ended_s".split()
)
_UNSERVED: Final = "rejected_s reject_reason reject_stage error".split()
_SERVED: Final = (
    "admitted_s reserved_s tokenized_s first_scheduled_s first_token_s last_token_s finished_s released_s"
    " received_first_s received_last_s finish_reason prompt_tokens predicted_ttft_s cached_tokens output_tokens"
    " token_times_s chunk_times_s chunk_tokens".split()
)
SENT_COLUMNS: Final = (*_BEFORE_OUTCOME, "outcome", *_UNSERVED, *_SERVED)
_OF_BOTH: Final = "ended_s outcome reject_reason received_first_s received_last_s output_tokens".split()
_PLACES: Final = [SENT_COLUMNS.index(name) for name in _OF_BOTH]
_ERROR: Final = SENT_COLUMNS.index("error")
TRY_COLUMNS: Final = ("request_index", "attempt", "sent_s", "retry_after_s", *_OF_BOTH, "error")
"""The one text is the last: its length is what RowGroups counts."""

_NOT_SERVED: Final = (None,) * len(_SERVED)
_NOT_REFUSED: Final[tuple[object, ...]] = (None,) * len(_UNSERVED)


def sent_values(sent: Sent, keeps_times: bool) -> tuple[Any, ...]:
    """The row of a request that was sent, in the order of SENT_COLUMNS; without `keeps_times` no list is in it.

    `sent` is its last try.
    """
    fate = sent.fate
    first, last_sent_s = (sent.earlier[0], sent.sent_s) if sent.earlier else (sent, None)
    met = first.fate.ticket.inflight_before if isinstance(first.fate, Request) else _met(first.fate)
    begun = first.sent_s, last_sent_s, sent.attempt, first.waiting, met
    known = sent.index, sent.due_s, sent.permitted_s, *begun
    if not isinstance(fate, Request):
        at_s = sent.returned_s
        if isinstance(fate, SchedulerManagerOverloadedError):
            refused = (at_s, Outcome.REJECTED, at_s, fate.reason, fate.stage, None)
            return (*known, *refused, *_NOT_SERVED)
        failed = (at_s, Outcome.ERROR, None, None, None, error_text(fate))
        return (*known, *failed, *_NOT_SERVED)
    received_s = sent.received_s
    n = len(received_s)
    times_s = fate.token_times_s
    unserved = _NOT_REFUSED
    if sent.gave_up_s is not None:
        # The engine may have gone on for a moment; the record holds what the client got.
        times_s = times_s[:n]
        ended_s, outcome, reason = sent.gave_up_s, Outcome.TIMEOUT, ABORT
    else:
        assert fate.finish_reason is not None
        assert sent.ended_s is not None
        ended_s, outcome, reason = sent.ended_s, OUTCOMES[fate.finish_reason], fate.finish_reason
        if isinstance(sent.error, SchedulerManagerOverloadedError):
            outcome = outcome_of_drop(sent.error)
            unserved = (ended_s, sent.error.reason, sent.error.stage, None)
        elif sent.error is not None:
            unserved = (None, None, None, error_text(sent.error))
    lists = (times_s, received_s, [1] * n) if n and keeps_times else (None, None, None)
    ticket = fate.ticket
    first_s, last_s, received_first_s, received_last_s = (
        (times_s[0], times_s[-1], received_s[0], received_s[-1]) if n else (None, None, None, None)
    )
    served = (
        *(sent.returned_s, fate.reserved_s, fate.tokenized_s, fate.first_scheduled_s, first_s, last_s),
        *(fate.finished_s, ticket.released_s, received_first_s, received_last_s, reason, sent.prompt_tokens),
        *(ticket.predicted_ttft_s, fate.cached_tokens, n),
    )
    return (*known, ended_s, outcome, *unserved, *served, *lists)


def unsent_values(index: int, arrival: Arrival, gave_up_s: float | None, why: str) -> tuple[Any, ...]:
    """The row of a request that the client held back to the end."""
    known = index, arrival.time_s, None, None, None, 0, None, None, gave_up_s
    return (*known, Outcome.INCOMPLETE, None, None, None, why, *_NOT_SERVED)


def try_values(sent: Sent) -> tuple[Any, ...]:
    """The row of one try, in the order of TRY_COLUMNS."""
    row = sent_values(sent, False)
    refusal = sent.error if isinstance(sent.fate, Request) else sent.fate
    hint_s = refusal.retry_after_s if isinstance(refusal, SchedulerManagerOverloadedError) else None
    return (sent.index, sent.attempt, sent.sent_s, hint_s, *[row[place] for place in _PLACES], row[_ERROR])


def _met(fate: RoseinferError) -> int | None:
    """What was in flight when it was sent, and refused."""
    return fate.inflight if isinstance(fate, SchedulerManagerOverloadedError) else None


class InOrder:
    """Hands rows on in the order of their indexes: whoever ends early waits for those before."""

    def __init__(self, hand_on: Callable[[tuple[Any, ...]], object]) -> None:
        self._hand_on = hand_on
        self._early: dict[int, tuple[Any, ...]] = {}
        self.count = 0
        """Rows handed on."""

    def add(self, index: int, row: tuple[Any, ...]) -> None:
        early = self._early
        if index != self.count:
            early[index] = row
            return
        self._hand_on(row)
        self.count += 1
        while early and self.count in early:
            self._hand_on(early.pop(self.count))
            self.count += 1

    def finish(self, offered: int) -> None:
        """Raises InvariantError unless the rows of all `offered` requests were handed on."""
        if self._early or self.count != offered:
            raise InvariantError(
                f"{offered} requests were offered, and {self.count} rows handed on; {len(self._early)} wait for others"
            )
