"""The simulated target: plays a workload against the core on a virtual clock, at the speed of a cost model.

No thread, no torch, no clock: two runs of the same flags give the same rows, on every machine.
"""

from __future__ import annotations

from typing import Any, Final

import pandas as pd

from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.load import CLOSED_LOOP_REFUSED_PAUSE_S
from roseinfer.bench.rows import (
    Attempt,
    CellResult,
    factor_columns,
    request_row,
    step_row,
    unsent_because,
)
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import Workload
from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.request import FinishReason, Request, TokenEvent
from roseinfer.sim.client import ClientRules
from roseinfer.sim.cost_model import CostModel
from roseinfer.sim.virtual import TOKEN_ID, Arrival, Sent, SimLimits, SimRun, simulate
from roseinfer.stream import Timings

VIRTUAL_START_UTC: Final = "1970-01-01T00:00:00+00:00"
"""When every simulated cell began: the wall clock has no part in it."""

LEAST_BATCHED_TOKENS: Final = 512
MOST_TOKENS: Final = 1 << 20
"""What a request may span, and what the KV cache holds, where the user names neither: no bound in practice."""


class SimTarget:
    """Runs cells of an experiment on a simulated engine, each cell from an empty one."""

    name = "sim"

    def __init__(self, cost_model: CostModel, experiment: Experiment) -> None:
        self._cost_model = cost_model
        self._experiment = experiment

    @property
    def max_model_len(self) -> int:
        """Tokens (prompt + output) that one request may span."""
        return self._experiment.options.max_model_len or MOST_TOKENS

    def describe(self) -> dict[str, Any]:
        """What computes, as run.json says it: the coefficients of the cost model."""
        return {
            **self._cost_model.describe(),
            "model": self._cost_model.name,
            "source": "cost-model",
            "device": "virtual clock",
        }

    def run(self, cell: Cell, workload: Workload) -> CellResult:
        """One cell and repeat, from the first arrival (time zero) to the last token."""
        load, limits, rules = self._experiment.load, self._limits(cell), self._rules()
        run = simulate(_arrivals(workload), limits, self._cost_model.step_seconds, rules)
        attempts = self._attempts(run, workload, rules)
        factors = factor_columns(self.name, self._cost_model.name, cell, workload)
        counts = run.admission.counts()
        index_of = {index: index for index in range(len(attempts))}
        return CellResult(
            requests=pd.DataFrame(
                [
                    {**factors, "request_index": index, **request_row(attempt, 0.0)}
                    for index, attempt in enumerate(attempts)
                ]
            ),
            steps=pd.DataFrame(
                [step_row(number, step, 0.0, index_of) for number, step in enumerate(run.steps)]
            ),
            facts=CellFacts(
                offered=len(attempts),
                limit=cell.max_inflight,
                peak_inflight=counts.peak_inflight,
                inflight_integral_s=counts.inflight_integral_s,
                inflight_at_start=0,
                started_utc=VIRTUAL_START_UTC,
                max_concurrency=rules.max_concurrency,
                peak_outstanding=run.peak_outstanding,
                ramp_s=load.ramp_s if load.is_closed else None,
                ran_out_s=run.sent[-1].time_s if load.ends_by_time_alone and run.sent[-1] else None,
            ),
            notes={
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "kv_cache_tokens": limits.kv_cache_tokens,
            },
        )

    def end_block(self) -> None:
        """Every cell starts from an empty engine already."""

    def _limits(self, cell: Cell) -> SimLimits:
        options = self._experiment.options
        return SimLimits(
            max_inflight_requests=cell.max_inflight,
            max_batch_size=options.max_batch_size,
            max_active_requests=options.max_active_requests,
            # As an engine on a CPU chooses it.
            max_num_batched_tokens=options.max_num_batched_tokens
            or max(LEAST_BATCHED_TOKENS, 2 * options.max_batch_size),
            kv_cache_tokens=options.kv_cache_tokens or max(MOST_TOKENS, self.max_model_len),
            max_model_len=self.max_model_len,
        )

    def _rules(self) -> ClientRules:
        load = self._experiment.load
        return ClientRules(
            max_concurrency=load.max_concurrency,
            user_starts_s=load.user_starts_s if load.is_closed else None,
            refused_pause_s=CLOSED_LOOP_REFUSED_PAUSE_S,
            duration_s=load.duration_s,
            timeout_s=load.timeout_s,
        )

    @staticmethod
    def _attempts(run: SimRun, workload: Workload, rules: ClientRules) -> list[Attempt]:
        attempts = []
        for index, sent in enumerate(run.sent):
            if sent is not None:
                scheduled_s = sent.time_s
                if workload.scheduled_s is not None:
                    scheduled_s = float(workload.scheduled_s[index])
                deadline_s = None
                if index in run.timed_out:
                    assert rules.timeout_s is not None
                    deadline_s = sent.time_s + rules.timeout_s
                attempts.append(_attempt(sent, scheduled_s, deadline_s, int(workload.prompt_tokens[index])))
            elif workload.scheduled_s is not None:  # what a closed loop did not come to was never offered
                why = unsent_because(rules.max_concurrency)
                scheduled_s = float(workload.scheduled_s[index])
                attempts.append(Attempt(scheduled_s, gave_up_s=rules.duration_s, unsent_because=why))
        return attempts


def _arrivals(workload: Workload) -> list[Arrival]:
    n = len(workload.prompt_tokens)
    due_s = [0.0] * n if workload.scheduled_s is None else workload.scheduled_s.tolist()
    return list(map(Arrival, due_s, workload.prompt_tokens.tolist(), workload.output_tokens.tolist()))


def _attempt(sent: Sent, scheduled_s: float, deadline_s: float | None, prompt_tokens: int) -> Attempt:
    """What the client of one request saw; it reads every token at the end of its step."""
    attempt = Attempt(
        scheduled_s,
        permitted_s=sent.time_s,
        sent_s=sent.time_s,
        returned_s=sent.time_s,
        waiting=sent.waiting,
        prompt_tokens=prompt_tokens,
    )
    if not isinstance(sent.fate, Request):
        attempt.failure = sent.fate
        if isinstance(sent.fate, SchedulerManagerOverloadedError):
            attempt.inflight = sent.fate.inflight
        return attempt
    request = sent.fate
    attempt.inflight = request.ticket.inflight_before
    attempt.timings = Timings.of(request)
    attempt.gave_up_s = deadline_s
    last = len(request.token_times_s) if request.finish_reason is FinishReason.LENGTH else None
    attempt.deliveries = [
        (
            time_s,
            [TokenEvent(request.request_id, TOKEN_ID, time_s, FinishReason.LENGTH if n == last else None)],
        )
        for n, time_s in enumerate(request.token_times_s, 1)
    ]
    return attempt
