"""The in-process target: plays a workload against a SchedulerManager and writes down what happened to each request.

One thread sends, one consumer takes all deliveries from one mailbox, the engine thread computes. Nothing here
waits for the server before the next send.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import pandas as pd

from roseinfer.bench.environment import GcPause, GcPauses, public_text
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.records import Outcome
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import Workload
from roseinfer.errors import RoseinferError, RunError, SchedulerManagerOverloadedError
from roseinfer.executor import Clock, Engine, Executor, Span, Tokenizer
from roseinfer.manager import SchedulerManager, StepRecord
from roseinfer.request import FinishReason, SamplingParams, TokenEvent
from roseinfer.stream import Mailbox, RequestStream

LEAD_S: Final = 0.01
"""Time between the last preparation and the first arrival."""

LOOK_UP_S: Final = 0.1
"""How often the consumer looks up from an empty mailbox: how many streams will end is known last."""

LONGEST_PAUSES: Final = 5

OUTCOMES: Final = {
    FinishReason.STOP: Outcome.COMPLETED,
    FinishReason.LENGTH: Outcome.COMPLETED,
    FinishReason.ERROR: Outcome.ERROR,
    FinishReason.ABORT: Outcome.CANCELLED,
}


class CellResult(NamedTuple):
    """Frames as `RunFolder.write_cell` takes them; `notes` is JSON-able and only for the record."""

    requests: pd.DataFrame
    steps: pd.DataFrame
    facts: CellFacts
    notes: dict[str, Any]


@dataclass(slots=True)
class _Attempt:
    """One request as its sender and its consumer saw it; clock seconds. It has a stream, or a failure."""

    sent_s: float = 0.0
    waiting: int = 0
    returned_s: float = 0.0
    stream: RequestStream | None = None
    failure: RoseinferError | None = None
    deliveries: list[tuple[float, list[TokenEvent]]] = field(default_factory=list)


class InProcessTarget:
    """Runs cells of an experiment on one engine, each cell with a manager of its own."""

    name = "in-process"

    def __init__(self, engine: Engine, experiment: Experiment) -> None:
        self._engine = _ThriftyEngine(engine)
        self._experiment = experiment

    def run(self, cell: Cell, workload: Workload) -> CellResult:
        """One burst, or one paced run, from the first arrival to the last delivery.

        Raises RunError where the engine cannot be set up for it.
        """
        steps: list[StepRecord] = []
        manager = self._manager(cell, steps)
        with manager, GcPauses(time.perf_counter) as gc_pauses, _Consumer(manager) as consumer:
            inflight_at_start = manager.inflight
            t0 = time.perf_counter() + LEAD_S
            started_utc = datetime.now(UTC) + timedelta(seconds=LEAD_S)
            attempts = self._send(manager, consumer.mailbox, workload, t0)
            consumer.finish(sum(attempt.stream is not None for attempt in attempts))
        index_of = {a.stream.request_id: index for index, a in enumerate(attempts) if a.stream is not None}
        for received_s, events in consumer.batches:
            for request_id, its_events in _by_request(events).items():
                attempts[index_of[request_id]].deliveries.append((received_s, its_events))
        counts = manager.counts()
        factors = self._factors(cell, workload)
        rows = [
            {**factors, "request_index": index, **_row(attempt, float(workload.scheduled_s[index]), t0)}
            for index, attempt in enumerate(attempts)
        ]
        return CellResult(
            requests=pd.DataFrame(rows),
            steps=pd.DataFrame([_step_row(number, step, t0, index_of) for number, step in enumerate(steps)]),
            facts=CellFacts(
                offered=len(workload.scheduled_s),
                limit=cell.max_inflight,
                peak_inflight=counts.peak_inflight,
                inflight_integral_s=counts.inflight_integral_s,
                inflight_at_start=inflight_at_start,
                started_utc=started_utc.isoformat(),
            ),
            notes={
                "max_num_batched_tokens": manager.limits.max_num_batched_tokens,
                "kv_cache_tokens": manager.kv_cache_tokens,
                "gc": _gc_notes(gc_pauses.pauses, t0),
            },
        )

    def _manager(self, cell: Cell, steps: list[StepRecord]) -> SchedulerManager:
        options = self._experiment.options
        self._engine.start_over()
        try:
            return SchedulerManager(
                self._engine,
                max_batch_size=options.max_batch_size,
                max_active_requests=options.max_active_requests,
                max_inflight_requests=cell.max_inflight,
                max_num_batched_tokens=options.max_num_batched_tokens,
                kv_cache_tokens=options.kv_cache_tokens,
                tokenize_workers=self._experiment.tokenize_workers,
                clock=time.perf_counter,
                on_step=steps.append,
            )
        except (MemoryError, RuntimeError) as error:  # torch raises the latter where memory is short
            if isinstance(error, RoseinferError):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise RunError(f"the engine could not be set up for {cell.cell_id}: {reason}") from error

    def _send(
        self, manager: SchedulerManager, mailbox: Mailbox, workload: Workload, t0: float
    ) -> list[_Attempt]:
        clock = time.perf_counter
        ignore_eos = not self._experiment.options.stop_at_eos
        due_s = (t0 + workload.scheduled_s).tolist()
        params = [
            SamplingParams(max_new_tokens=int(n), ignore_eos=ignore_eos) for n in workload.output_tokens
        ]
        attempts = [_Attempt() for _ in due_s]
        for attempt, due, prompt, its_params in zip(attempts, due_s, workload.prompts, params, strict=True):
            # To an absolute time: being late once never shifts the next.
            if (early_s := due - clock()) > 0:
                time.sleep(early_s)
            attempt.waiting = manager.waiting
            attempt.sent_s = clock()
            try:
                attempt.stream = manager.submit(prompt, its_params, mailbox=mailbox)
                attempt.returned_s = clock()
            except RoseinferError as failure:
                attempt.returned_s = clock()
                # Its traceback would keep this frame alive, and with it the manager and its KV cache.
                attempt.failure = failure.with_traceback(None)
        return attempts

    def _factors(self, cell: Cell, workload: Workload) -> dict[str, Any]:
        paced = self._experiment.is_paced
        return {
            "target": self.name,
            "model": self._experiment.model_name,
            "admission": "none" if cell.max_inflight is None else f"inflight:{cell.max_inflight}",
            "max_inflight": cell.max_inflight,
            "burst_size": cell.burst_size,
            "prompt_len": int(workload.prompt_tokens[0]),
            "output_len": cell.output_len,
            "arrival": "constant" if paced else "burst",
            "request_rate": 1 / self._experiment.interval_s if paced else None,
        }


class _ThriftyEngine:
    """An engine whose tokenizers are made once and lent to one manager after another: a copy costs tenths of a second.

    Managers must follow each other, with `start_over` in between: a tokenizer serves one thread at a time.
    """

    def __init__(self, engine: Engine) -> None:
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.vocab_size
        self.eos_token_ids = engine.eos_token_ids
        self.default_num_batched_tokens = engine.default_num_batched_tokens
        self.default_kv_cache_tokens = engine.default_kv_cache_tokens
        self._engine = engine
        self._tokenizers: list[Tokenizer] = []
        self._lent = 0

    def start_over(self) -> None:
        self._lent = 0

    def make_tokenizer(self) -> Tokenizer:
        if self._lent == len(self._tokenizers):
            self._tokenizers.append(self._engine.make_tokenizer())
        self._lent += 1
        return self._tokenizers[self._lent - 1]

    def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> Executor:
        return self._engine.make_executor(
            num_kv_blocks=num_kv_blocks, max_batch_size=max_batch_size, clock=clock
        )


class _Consumer:
    """Takes deliveries in a thread of its own; one clock reading a delivery. Its thread ends with the `with`."""

    def __init__(self, manager: SchedulerManager) -> None:
        self.mailbox = manager.new_mailbox()
        self.batches: list[tuple[float, list[TokenEvent]]] = []
        self._manager = manager
        self._expected: float = float("inf")
        self._thread = threading.Thread(target=self._take, name="roseinfer-consumer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(0)  # what is missing after an exception, an interrupt say, will not come

    def finish(self, expected: int) -> None:
        """Returns once `expected` streams have ended."""
        self._expected = expected
        self._thread.join()

    def _take(self) -> None:
        ended = 0
        while ended < self._expected:
            events = self.mailbox.take(timeout_s=LOOK_UP_S)
            if events:
                self.batches.append((time.perf_counter(), events))
                for event in events:
                    if event.finish_reason is not None:
                        self._manager.acknowledge(event.request_id)
                        ended += 1


def _by_request(events: list[TokenEvent]) -> dict[int, list[TokenEvent]]:
    grouped: dict[int, list[TokenEvent]] = {}
    for event in events:
        grouped.setdefault(event.request_id, []).append(event)
    return grouped


def _row(attempt: _Attempt, scheduled_s: float, t0: float) -> dict[str, Any]:
    """The columns of REQUEST_SCHEMA that one attempt fills; seconds from t0."""
    sent_s, returned_s = attempt.sent_s - t0, attempt.returned_s - t0
    row: dict[str, Any] = {
        "scheduled_s": scheduled_s,
        "permitted_s": scheduled_s,
        "sent_s": sent_s,
        "attempts": 1,
        "waiting_at_send": attempt.waiting,
    }
    if isinstance(attempt.failure, SchedulerManagerOverloadedError):
        return row | {
            "outcome": Outcome.REJECTED,
            "rejected_s": returned_s,
            "ended_s": returned_s,
            "reject_reason": attempt.failure.reason,
            "reject_stage": "submit",
            "inflight_at_send": attempt.failure.inflight,
        }
    if attempt.failure is not None:
        return row | {"outcome": Outcome.ERROR, "ended_s": returned_s, "error": _error_text(attempt.failure)}
    assert attempt.stream is not None
    tokens = [
        (received, [e for e in events if e.token_id is not None]) for received, events in attempt.deliveries
    ]
    chunks = [(received - t0, events) for received, events in tokens if events]
    ended_s, last_events = attempt.deliveries[-1]
    end = last_events[-1]
    assert end.finish_reason is not None
    token_times_s = [event.time_s - t0 for _, events in chunks for event in events]
    stamps = attempt.stream.timings._asdict()
    return row | {
        **{name: None if stamp is None else stamp - t0 for name, stamp in stamps.items()},
        "admitted_s": returned_s,
        "ended_s": ended_s - t0,
        "received_first_s": chunks[0][0] if chunks else None,
        "received_last_s": chunks[-1][0] if chunks else None,
        "outcome": OUTCOMES[end.finish_reason],
        "error": None if end.error is None else _error_text(end.error),
        "prompt_tokens": attempt.stream.prompt_tokens,
        "cached_tokens": 0,  # there is no prefix cache: every prompt token is computed
        "output_tokens": len(token_times_s),
        "finish_reason": end.finish_reason,
        "inflight_at_send": attempt.stream.inflight_before,
        "token_times_s": token_times_s or None,
        "chunk_times_s": [received for received, _ in chunks] or None,
        "chunk_tokens": [len(events) for _, events in chunks] or None,
    }


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {public_text(str(error))}"


def _step_row(number: int, step: StepRecord, t0: float, index_of: dict[int, int]) -> dict[str, Any]:
    """The columns of STEP_SCHEMA; seconds from t0."""
    spans = step.plan.spans
    prefills = [span for span in spans if not _is_decode(span)]
    decodes = [span for span in spans if _is_decode(span)]
    return {
        "step": number,
        "plan_start_s": step.plan_start_s - t0,
        "exec_start_s": step.result.exec_start_s - t0,
        "exec_end_s": step.result.exec_end_s - t0,
        "published_s": step.published_s - t0,
        "prefill_requests": len(prefills),
        "prefill_tokens": sum(span.n_tokens for span in prefills),
        "prefill_attention_pairs": sum(
            s.n_tokens * s.start + s.n_tokens * (s.n_tokens + 1) // 2 for s in prefills
        ),
        "decode_requests": len(decodes),
        "context_tokens": sum(span.start + 1 for span in decodes),
        "cached_tokens": 0,
        "waiting": step.waiting,
        "running": step.running,
        "kv_tokens": step.kv_tokens,
        "members": [
            {
                "request_index": index_of[span.request.request_id],
                "start": span.start,
                "n_tokens": span.n_tokens,
            }
            for span in spans
        ],
    }


def _is_decode(span: Span) -> bool:
    return span.start >= span.request.prompt_len


def _gc_notes(pauses: list[GcPause], t0: float) -> dict[str, Any]:
    """How often and for how long the collector stopped the process, and its longest stops."""
    longest = sorted(pauses, key=lambda pause: pause.duration_s, reverse=True)[:LONGEST_PAUSES]
    return {
        "count": len(pauses),
        "total_s": sum(pause.duration_s for pause in pauses),
        "longest": [
            {"start_s": pause.start_s - t0, "duration_s": pause.duration_s, "generation": pause.generation}
            for pause in longest
        ],
    }
