"""The in-process target: plays a workload against a SchedulerManager and writes down what happened to each request.

One thread sends, one consumer takes all deliveries from one mailbox, the engine thread computes. Nothing here
waits for the server before the next send.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pandas as pd

from roseinfer.bench.environment import GcPauses
from roseinfer.bench.options import Cell, Experiment
from roseinfer.bench.records import Outcome
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import Workload
from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.executor import Engine, Span
from roseinfer.manager import SchedulerManager, StepRecord
from roseinfer.request import FinishReason, SamplingParams, TokenEvent
from roseinfer.stream import Mailbox, RequestStream

LEAD_S = 0.01
"""Time between the last preparation and the first arrival."""

OUTCOMES = {
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
    """One request as its sender and its consumer saw it; clock seconds."""

    sent_s: float = 0.0
    waiting: int = 0
    returned_s: float = 0.0
    stream: RequestStream | None = None
    refusal: SchedulerManagerOverloadedError | None = None
    deliveries: list[tuple[float, list[TokenEvent]]] = field(default_factory=list)


class InProcessTarget:
    """Runs cells of an experiment on one engine, each cell with a manager of its own."""

    name = "in-process"

    def __init__(self, engine: Engine, experiment: Experiment) -> None:
        self._engine = engine
        self._experiment = experiment

    def run(self, cell: Cell, workload: Workload) -> CellResult:
        """One burst, or one paced run, from the first arrival to the last delivery."""
        options = self._experiment.options
        steps: list[StepRecord] = []
        manager = SchedulerManager(
            self._engine,
            max_batch_size=options.max_batch_size,
            max_active_requests=options.max_active_requests,
            max_inflight_requests=cell.max_inflight,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_cache_tokens=options.kv_cache_tokens,
            tokenize_workers=options.tokenize_workers,
            clock=time.perf_counter,
            on_step=steps.append,
        )
        with manager, GcPauses(time.perf_counter) as gc_pauses:
            inflight_at_start = manager.inflight
            consumer = _Consumer(manager)
            t0 = time.perf_counter() + LEAD_S
            started_utc = datetime.now(UTC)
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
                "gc_pauses": [(pause.start_s - t0, pause.duration_s, pause.generation) for pause in gc_pauses.pauses],
            },
        )

    def _send(self, manager: SchedulerManager, mailbox: Mailbox, workload: Workload, t0: float) -> list[_Attempt]:
        clock = time.perf_counter
        ignore_eos = not self._experiment.options.stop_at_eos
        due_s = (t0 + workload.scheduled_s).tolist()
        params = [SamplingParams(max_new_tokens=int(n), ignore_eos=ignore_eos) for n in workload.output_tokens]
        attempts = [_Attempt() for _ in due_s]
        for attempt, due, prompt, its_params in zip(attempts, due_s, workload.prompts, params, strict=True):
            # To an absolute time: being late once never shifts the next.
            if (early_s := due - clock()) > 0:
                time.sleep(early_s)
            attempt.waiting = manager.waiting
            attempt.sent_s = clock()
            try:
                attempt.stream = manager.submit(prompt, its_params, mailbox=mailbox)
            except SchedulerManagerOverloadedError as refusal:
                attempt.returned_s = clock()
                attempt.refusal = refusal
            else:
                attempt.returned_s = clock()
        return attempts

    def _factors(self, cell: Cell, workload: Workload) -> dict[str, Any]:
        paced = self._experiment.is_paced
        return {
            "target": self.name,
            "model": self._experiment.options.model,
            "admission": "none" if cell.max_inflight is None else f"inflight:{cell.max_inflight}",
            "max_inflight": cell.max_inflight,
            "burst_size": cell.burst_size,
            "prompt_len": int(workload.prompt_tokens[0]),
            "output_len": cell.output_len,
            "arrival": "constant" if paced else "burst",
            "request_rate": 1 / self._experiment.interval_s if paced else None,
        }


class _Consumer:
    """Takes deliveries in a thread of its own; one clock reading a delivery."""

    def __init__(self, manager: SchedulerManager) -> None:
        self.mailbox = manager.new_mailbox()
        self.batches: list[tuple[float, list[TokenEvent]]] = []
        self._manager = manager
        self._expected: float = float("inf")
        self._thread = threading.Thread(target=self._take, name="roseinfer-consumer", daemon=True)
        self._thread.start()

    def finish(self, expected: int) -> None:
        """Returns once `expected` streams have ended."""
        self._expected = expected
        self._thread.join()

    def _take(self) -> None:
        ended = 0
        while ended < self._expected:
            events = self.mailbox.take(timeout_s=0.1)  # looks up now and then: `expected` is known last
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
    if attempt.refusal is not None:
        return row | {
            "outcome": Outcome.REJECTED,
            "rejected_s": returned_s,
            "ended_s": returned_s,
            "reject_reason": attempt.refusal.reason,
            "reject_stage": "submit",
            "inflight_at_send": attempt.refusal.inflight,
        }
    assert attempt.stream is not None
    tokens = [(received, [e for e in events if e.token_id is not None]) for received, events in attempt.deliveries]
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
        "error": None if end.error is None else f"{type(end.error).__name__}: {end.error}",
        "prompt_tokens": attempt.stream.prompt_tokens,
        "cached_tokens": 0,  # there is no prefix cache: every prompt token is computed
        "output_tokens": len(token_times_s),
        "finish_reason": end.finish_reason,
        "inflight_at_send": attempt.stream.inflight_before,
        "token_times_s": token_times_s,
        "chunk_times_s": [received for received, _ in chunks],
        "chunk_tokens": [len(events) for _, events in chunks],
    }


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
        "prefill_attention_pairs": sum(s.n_tokens * s.start + s.n_tokens * (s.n_tokens + 1) // 2 for s in prefills),
        "decode_requests": len(decodes),
        "context_tokens": sum(span.start + 1 for span in decodes),
        "cached_tokens": 0,
        "waiting": step.waiting,
        "running": step.running,
        "kv_tokens": step.kv_tokens,
        "members": [
            {"request_index": index_of[span.request.request_id], "start": span.start, "n_tokens": span.n_tokens}
            for span in spans
        ],
    }


def _is_decode(span: Span) -> bool:
    return span.start >= span.request.prompt_len
