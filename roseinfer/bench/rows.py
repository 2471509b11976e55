"""From what a target saw to rows of the record: one per offered request, one per engine step.

The in-process and the simulated target both end here, so that a column means the same in either. What a client of a
server saw has rows of its own: `http.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import pandas as pd

from roseinfer.bench.environment import public_text
from roseinfer.bench.experiment import Cell
from roseinfer.bench.records import Outcome
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import Workload
from roseinfer.errors import QUEUE_TIMEOUT, RoseinferError, SchedulerManagerOverloadedError
from roseinfer.executor import StepRecord
from roseinfer.request import FinishReason, TokenEvent
from roseinfer.stream import Timings

OUTCOMES: Final = {
    FinishReason.STOP: Outcome.COMPLETED,
    FinishReason.LENGTH: Outcome.COMPLETED,
    FinishReason.ERROR: Outcome.ERROR,
    FinishReason.ABORT: Outcome.CANCELLED,
}


class CellResult(NamedTuple):
    """Frames as `RunFolder.write_cell` takes them; `notes` is JSON-able and only for the record.

    `attempts` is None where clients do not retry: every request is one try then.
    """

    requests: pd.DataFrame
    steps: pd.DataFrame
    facts: CellFacts
    notes: dict[str, Any]
    attempts: pd.DataFrame | None = None


class CellInterrupted(KeyboardInterrupt):
    """A user stopped a cell; `result` is what it had come to. Whoever does not know it sees a KeyboardInterrupt."""

    def __init__(self, result: CellResult) -> None:
        super().__init__()
        self.result = result


@dataclass(slots=True)
class Attempt:
    """One request as its client saw it: never sent, or refused, or answered (`timings`). Where clients retry, one try.

    `scheduled_s` is the workload's, in seconds from time zero; the other moments are clock seconds. `permitted_s` is
    when the client's own cap let it go, None where it did not hold it back. `waiting` and `inflight` are what it met
    when it was sent. `returned_s` is when submitting it came back. `gave_up_s` is when the client stopped waiting for
    it, at its deadline or because a user interrupted it, or without having sent it (`unsent_because` says why). The end
    of a stream is the last event of the last delivery, unless the client gave up before: what it brought after that was
    not read.
    """

    scheduled_s: float
    permitted_s: float | None = None
    sent_s: float | None = None
    returned_s: float | None = None
    waiting: int | None = None
    inflight: int | None = None
    timings: Timings | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    failure: RoseinferError | None = None
    deliveries: list[tuple[float, list[TokenEvent]]] = field(default_factory=list)
    gave_up_s: float | None = None
    unsent_because: str | None = None
    is_interrupted: bool = False
    predicted_ttft_s: float | None = None  # by the admission that let it in
    earlier: list[Attempt] = field(
        default_factory=list
    )  # the tries of the same request before this, of the last


@dataclass
class EarlierTries:
    """What the tries held that another one followed: how many slots, and for how long, in slot-seconds.

    One that was never given back adds no time: admission's own integral shows it.
    """

    slots: int = 0
    held_s: float = 0.0

    def add(self, reserved_s: float, released_s: float | None) -> None:
        self.slots += 1
        self.held_s += 0.0 if released_s is None else released_s - reserved_s


INTERRUPTED: Final = "interrupted"
"""Why a request has no end, or was never sent, of which a user stopped the run."""


def unsent_because(cap: int | None) -> str:
    """Why a request that the client's own cap held back to the end was not sent."""
    return f"not sent: --max-concurrency {cap} was reached until --duration ended"


def factor_columns(
    target: str, model: str, cell: Cell, workload: Workload, *, is_one_text: bool = False
) -> dict[str, Any]:
    """The columns that are the same in all rows of a cell: what it was asked to be, null where nothing was asked.

    `is_one_text`: all prompts are --prompt, whose length is then theirs.
    """
    prompt_len = int(workload.prompt_tokens[0]) if is_one_text else cell.prompt_len
    return {
        "target": target,
        "model": model,
        "admission": str(cell.admission),
        "max_inflight": cell.max_inflight if cell.admission.is_count_alone else None,
        "burst_size": cell.burst_size,
        "prompt_len": prompt_len,
        "output_len": cell.output_len,
        "arrival": workload.arrival,
        "request_rate": cell.request_rate,
    }


def request_row(attempt: Attempt, t0: float) -> dict[str, Any]:
    """The columns of REQUEST_SCHEMA that one request fills, of which `attempt` is the last try; seconds from `t0`."""
    first = attempt.earlier[0] if attempt.earlier else attempt
    scheduled_s = first.scheduled_s
    if attempt.sent_s is None:
        return {
            "scheduled_s": scheduled_s,
            "attempts": 0,
            "outcome": Outcome.INCOMPLETE,
            "error": attempt.unsent_because,
            "ended_s": _since(t0, attempt.gave_up_s),
        }
    assert first.sent_s is not None
    row: dict[str, Any] = {
        "scheduled_s": scheduled_s,
        "permitted_s": scheduled_s if first.permitted_s is None else first.permitted_s - t0,
        "sent_s": first.sent_s - t0,
        "last_sent_s": attempt.sent_s - t0 if attempt.earlier else None,
        "attempts": len(attempt.earlier) + 1,
        "waiting_at_send": first.waiting,
        "inflight_at_send": first.inflight,
    }
    returned_s = _since(t0, attempt.returned_s)
    if attempt.failure is not None and attempt.is_interrupted:  # it would have tried again
        gave_up_s = _since(t0, attempt.gave_up_s)
        return row | {"outcome": Outcome.INCOMPLETE, "ended_s": gave_up_s, "error": INTERRUPTED}
    if isinstance(attempt.failure, SchedulerManagerOverloadedError):
        return row | {
            "outcome": Outcome.REJECTED,
            "rejected_s": returned_s,
            "ended_s": returned_s,
            "reject_reason": attempt.failure.reason,
            "reject_stage": attempt.failure.stage,
        }
    if attempt.failure is not None:
        return row | {"outcome": Outcome.ERROR, "ended_s": returned_s, "error": error_text(attempt.failure)}
    return row | {"admitted_s": returned_s} | _answer(attempt, t0)


_OF_TRIES: Final = (
    "ended_s outcome reject_reason error received_first_s received_last_s output_tokens".split()
)


def attempt_rows(request_index: int, last: Attempt, t0: float) -> Iterator[dict[str, Any]]:
    """The columns of ATTEMPT_SCHEMA for each try of one request; seconds from `t0`."""
    for number, attempt in enumerate((*last.earlier, last), 1):
        if attempt.sent_s is None:
            return  # it was never sent
        row = request_row(replace(attempt, earlier=[]), t0)
        refusal: BaseException | None = attempt.failure
        if attempt.deliveries:
            refusal = attempt.deliveries[-1][1][-1].error
        hint_s = refusal.retry_after_s if isinstance(refusal, SchedulerManagerOverloadedError) else None
        yield {
            "request_index": request_index,
            "attempt": number,
            "sent_s": attempt.sent_s - t0,
            "retry_after_s": hint_s,
            **{name: row.get(name) for name in _OF_TRIES},
        }


def _answer(attempt: Attempt, t0: float) -> dict[str, Any]:
    """What became of a request that has a stream."""
    assert attempt.timings is not None
    stamps = {name: _since(t0, stamp) for name, stamp in attempt.timings._asdict().items()}
    tokens = [
        (received_s - t0, [event for event in events if event.token_id is not None])
        for received_s, events in attempt.deliveries
    ]
    chunks = [(received_s, events) for received_s, events in tokens if events]
    token_times_s = [event.time_s - t0 for _, events in chunks for event in events]
    if attempt.gave_up_s is not None:
        # The engine may have gone on for a moment; the record holds what the client got.
        stamps["first_token_s"] = token_times_s[0] if token_times_s else None
        stamps["last_token_s"] = token_times_s[-1] if token_times_s else None
        end = {
            "ended_s": attempt.gave_up_s - t0,
            "outcome": Outcome.INCOMPLETE if attempt.is_interrupted else Outcome.TIMEOUT,
            "finish_reason": FinishReason.ABORT,
            "error": INTERRUPTED if attempt.is_interrupted else None,
        }
    else:
        ended_s, last_events = attempt.deliveries[-1]
        event = last_events[-1]
        assert event.finish_reason is not None
        end = {
            "ended_s": ended_s - t0,
            "outcome": OUTCOMES[event.finish_reason],
            "finish_reason": event.finish_reason,
            "error": None if event.error is None else error_text(event.error),
        }
        if isinstance(event.error, SchedulerManagerOverloadedError):
            end |= {
                "outcome": outcome_of_drop(event.error),
                "rejected_s": end["ended_s"],
                "reject_reason": event.error.reason,
                "reject_stage": event.error.stage,
                "error": None,
            }
    return {
        **stamps,
        **end,
        "received_first_s": chunks[0][0] if chunks else None,
        "received_last_s": chunks[-1][0] if chunks else None,
        "prompt_tokens": attempt.prompt_tokens,
        "cached_tokens": attempt.cached_tokens,
        "predicted_ttft_s": attempt.predicted_ttft_s,
        "output_tokens": len(token_times_s),
        "token_times_s": token_times_s or None,
        "chunk_times_s": [received_s for received_s, _ in chunks] or None,
        "chunk_tokens": [len(events) for _, events in chunks] or None,
    }


def outcome_of_drop(error: SchedulerManagerOverloadedError) -> Outcome:
    """What became of a request that was dropped while it waited."""
    return Outcome.TIMEOUT if error.reason == QUEUE_TIMEOUT else Outcome.REJECTED


STEP_COLUMNS: Final = tuple(
    "step plan_start_s exec_start_s exec_end_s published_s prefill_requests prefill_tokens prefill_attention_pairs"
    " decode_requests context_tokens cached_tokens waiting running kv_tokens inflight_limit members".split()
)


def step_row(number: int, step: StepRecord, t0: float, index_of: Mapping[int, int]) -> dict[str, Any]:
    """The columns of STEP_SCHEMA; seconds from `t0`. `index_of` gives the request_index of a request id."""
    return dict(zip(STEP_COLUMNS, step_values(number, step, t0, index_of.__getitem__), strict=True))


def step_values(
    number: int, step: StepRecord, t0: float, index_of: Callable[[int], int] | None
) -> tuple[Any, ...]:
    """A step's row in the order of STEP_COLUMNS. Without `index_of` it has no members."""
    plan, (_, exec_start_s, exec_end_s), plan_start_s, published_s, *counts = step
    members = None
    if index_of is not None:
        members = [
            {"request_index": index_of(request.request_id), "start": start, "n_tokens": n_tokens}
            for request, start, n_tokens, _ in plan.spans
        ]
    return (
        *(number, plan_start_s - t0, exec_start_s - t0, exec_end_s - t0, published_s - t0),
        *plan.composition(),
        *counts,
        members,
    )


def _since(t0: float, stamp: float | None) -> float | None:
    return None if stamp is None else stamp - t0


def error_text(error: BaseException) -> str:
    """What a record says of an error: nothing of this machine."""
    return f"{type(error).__name__}: {public_text(str(error))}"
