"""The in-process target: plays a workload against a SchedulerManager and writes down what happened to each request."""

from __future__ import annotations

import time
from typing import Any, Final

import pandas as pd

from roseinfer.bench.client import Client
from roseinfer.bench.environment import GcPause, GcPauses
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.rows import (
    CellInterrupted,
    CellResult,
    EarlierTries,
    attempt_rows,
    factor_columns,
    request_row,
    step_row,
)
from roseinfer.bench.stats import spread_of
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import Workload
from roseinfer.errors import RoseinferError, RunError
from roseinfer.executor import Clock, Engine, Executor, StepRecord, Tokenizer
from roseinfer.manager import SchedulerManager
from roseinfer.sim.cost_model import CostModel

LONGEST_PAUSES: Final = 5


class InProcessTarget:
    """Runs cells of an experiment on one engine, each cell with a manager of its own."""

    name = "in-process"

    def __init__(self, engine: Engine, experiment: Experiment) -> None:
        self._engine = _ThriftyEngine(engine)
        cost_model = experiment.options.cost_model
        self._cost_model = None if cost_model is None else CostModel.read(cost_model)
        self._experiment = experiment

    def run(self, cell: Cell, workload: Workload) -> CellResult:
        """One cell and repeat, from the first arrival to the last delivery.

        Raises RunError where the engine cannot be set up for it, CellInterrupted where a user stops it once something
        was sent.
        """
        load, steps = self._experiment.load, list[StepRecord]()
        with self._manager(cell, steps) as manager:
            client = Client(manager, load, workload, ignore_eos=not self._experiment.options.stop_at_eos)
            with GcPauses(time.perf_counter) as gc_pauses, client:
                inflight_at_start = manager.inflight
                played = client.play()
        client.note_timings()
        counts, t0 = manager.counts(), played.t0
        earlier = EarlierTries()
        for attempt in (one for last in played.attempts for one in last.earlier):
            if attempt.timings is not None:
                earlier.add(attempt.timings.reserved_s, attempt.timings.released_s)
        tries = (row for index, last in enumerate(played.attempts) for row in attempt_rows(index, last, t0))
        is_one_text = self._experiment.options.prompt is not None
        factors = factor_columns(
            self.name, self._experiment.model_name, cell, workload, is_one_text=is_one_text
        )
        # How many a closed loop offers until its time ends, or its user's patience, is known to nobody else.
        has_end = load.duration_s is None and played.interrupted_s is None
        open_ended = workload.scheduled_s is None and not has_end
        result = CellResult(
            requests=pd.DataFrame(
                [
                    {
                        **factors,
                        "request_index": index,
                        "priority": workload.class_of(index),
                        **request_row(attempt, t0),
                    }
                    for index, attempt in enumerate(played.attempts)
                ]
            ),
            steps=pd.DataFrame(
                [step_row(number, step, t0, played.index_of) for number, step in enumerate(steps)]
            ),
            facts=CellFacts(
                offered=len(played.attempts) if open_ended else len(workload.prompt_tokens),
                limit=cell.max_inflight,
                token_limit=cell.admission.tokens,
                peak_inflight=counts.peak_inflight,
                peak_held_tokens=counts.peak_held_tokens,
                inflight_integral_s=counts.inflight_integral_s,
                inflight_at_start=inflight_at_start,
                earlier_slots=earlier.slots,
                earlier_held_s=earlier.held_s,
                started_utc=played.started_utc,
                max_concurrency=load.max_concurrency,
                peak_outstanding=played.peak_outstanding,
                ramp_s=load.ramp_s if load.is_closed else None,
                ran_out_s=played.ran_out_s if load.ends_by_time_alone else None,
                may_be_cached=self._experiment.prompts_may_be_alike,
                interrupted_s=None if played.interrupted_s is None else played.interrupted_s - t0,
            ),
            notes={
                "max_num_batched_tokens": manager.limits.max_num_batched_tokens,
                "kv_cache_tokens": manager.kv_cache_tokens,
                "gc": _gc_notes(gc_pauses.pauses, t0),
                "refill_lag_s": spread_of(played.refill_lags_s),
            },
            attempts=pd.DataFrame(list(tries)) if load.retries.is_on else None,
        )
        if played.interrupted_s is None:
            return result
        if all(attempt.sent_s is None for attempt in played.attempts):
            raise KeyboardInterrupt
        raise CellInterrupted(result)

    def end_block(self) -> None:
        """Every cell has a manager of its own already."""

    def _manager(self, cell: Cell, steps: list[StepRecord]) -> SchedulerManager:
        options = self._experiment.options
        self._engine.start_over()
        try:
            return SchedulerManager(
                self._engine,
                max_batch_size=options.max_batch_size,
                max_active_requests=options.max_active_requests,
                admission=str(cell.admission),
                scheduling=options.scheduling,
                cost_model=self._cost_model,
                max_num_batched_tokens=options.max_num_batched_tokens,
                kv_cache_tokens=options.kv_cache_tokens,
                tokenize_workers=self._experiment.tokenize_workers,
                prefix_cache=options.prefix_cache,
                nvtx=options.nvtx,
                clock=time.perf_counter,
                on_step=steps.append,
            )
        except (MemoryError, RuntimeError) as error:  # torch raises the latter where memory is short
            if isinstance(error, RoseinferError):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise RunError(f"the engine could not be set up for {cell.cell_id}: {reason}") from error


class _ThriftyEngine:
    """An engine whose tokenizers are made once and lent to one manager after another: a copy costs tenths of a second.

    Managers must follow each other, with `start_over` in between: a tokenizer serves one thread at a time.
    """

    def __init__(self, engine: Engine) -> None:
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.vocab_size
        self.eos_token_ids = engine.eos_token_ids
        self.paged_attn = engine.paged_attn
        self.launches_async = engine.launches_async
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
