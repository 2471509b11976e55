"""The simulated target: plays a workload against the core on a virtual clock, at the speed of a cost model.

No thread, no torch, no clock: two runs of the same flags give the same rows, on every machine. Rows leave as they are
complete, so that memory holds what is in flight and a row group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol
from zlib import crc32

import numpy as np
import pandas as pd
import pyarrow as pa

from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.load import CLOSED_LOOP_REFUSED_PAUSE_S
from roseinfer.bench.priorities import TtftDeadlines
from roseinfer.bench.records import ATTEMPT_SCHEMA, REQUEST_SCHEMA, STEP_SCHEMA
from roseinfer.bench.retries import Retrier
from roseinfer.bench.row_groups import RowGroups
from roseinfer.bench.rows import (
    STEP_COLUMNS,
    CellResult,
    EarlierTries,
    factor_columns,
    step_values,
    unsent_because,
)
from roseinfer.bench.sim_rows import (
    SENT_COLUMNS,
    TRY_COLUMNS,
    InOrder,
    sent_values,
    try_values,
    unsent_values,
)
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import Workload
from roseinfer.errors import InputError
from roseinfer.executor import StepRecord
from roseinfer.no_gc import no_gc
from roseinfer.request import Request
from roseinfer.sim.client import ClientRules
from roseinfer.sim.cost_model import COMPOSITION, CostModel, OutsideFitted
from roseinfer.sim.costs import Costs
from roseinfer.sim.virtual import Arrival, Sent, SimLimits, new_arrival, request_index, simulate

VIRTUAL_START_UTC: Final = "1970-01-01T00:00:00+00:00"
"""When every simulated cell began: the wall clock has no part in it."""

LEAST_BATCHED_TOKENS: Final = 512
MOST_TOKENS: Final = 1 << 20
"""What a request may span, and what the KV cache holds, where the user names neither: no bound in practice."""

OUTSIDE_FITTED: Final = "outside_fitted"
"""What a cell's facts call the steps that the cost model says nothing of."""

_FIRST: Final = STEP_COLUMNS.index(COMPOSITION[0])
_COMPOSITION: Final = slice(_FIRST, _FIRST + len(COMPOSITION))
"""Where in a step's values its composition is."""


class RowTaker(Protocol):
    """Takes row groups of "requests" and "steps"; a `store.CellWriter` is one."""

    def add(self, name: str, rows: pa.Table) -> None: ...


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
            **self._cost_model.to_json(),
            "model": self._cost_model.name,
            "source": "cost-model",
            "device": "virtual clock",
        }

    def run(self, cell: Cell, workload: Workload) -> CellResult:
        """One cell and repeat, from the first arrival (time zero) to the last token."""
        taken = _Frames()
        facts, notes = self.record(cell, [workload], taken)
        tries = taken.frame("attempts", ATTEMPT_SCHEMA) if self._experiment.load.retries.is_on else None
        requests, steps = taken.frame("requests", REQUEST_SCHEMA), taken.frame("steps", STEP_SCHEMA)
        return CellResult(requests, steps, facts, notes, tries)

    def record(
        self, cell: Cell, blocks: Iterable[Workload], taker: RowTaker
    ) -> tuple[CellFacts, dict[str, Any]]:
        """`run` for a workload that comes in blocks, and rows that leave as they are complete: facts and notes."""
        load, limits = self._experiment.load, self.limits(cell)
        blocks = iter(blocks)
        first = next(blocks)
        rules = self._rules(first)
        factors = factor_columns(self.name, self._cost_model.name, cell, first)
        class_names = None if first.classes is None else first.classes.names
        is_closed = first.scheduled_s is None
        keeps_times = not self._experiment.options.no_token_times
        columns = SENT_COLUMNS if class_names is None else ("priority", *SENT_COLUMNS)
        requests = RowGroups(REQUEST_SCHEMA, columns, factors, lambda rows: taker.add("requests", rows))
        steps = RowGroups(STEP_SCHEMA, STEP_COLUMNS, {}, lambda rows: taker.add("steps", rows))
        in_order = InOrder(requests.add)
        tries = RowGroups(ATTEMPT_SCHEMA, TRY_COLUMNS, {}, lambda rows: taker.add("attempts", rows))
        tries_in_order = InOrder(lambda rows: [*map(tries.add, rows)])
        earlier = EarlierTries()
        index_of = request_index if keeps_times else None
        fitted = self._cost_model.fitted
        outside = None if fitted is None else OutsideFitted(fitted)
        n_steps = 0

        def add_row(index: int, priority: int, values: tuple[Any, ...]) -> None:
            in_order.add(index, values if class_names is None else (class_names[priority], *values))

        def on_request(sent: Sent) -> None:
            add_row(sent.index, sent.priority, sent_values(sent, keeps_times))
            if rules.retrier is not None:
                tries_in_order.add(sent.index, tuple(map(try_values, (*sent.earlier, sent))))
                for one in sent.earlier:
                    if isinstance(one.fate, Request):
                        earlier.add(one.fate.reserved_s, one.fate.ticket.released_s)

        def on_step(step: StepRecord) -> None:
            nonlocal n_steps
            values = step_values(n_steps, step, 0.0, index_of)
            steps.add(values)
            n_steps += 1
            if outside is not None:
                outside.add(values[_COMPOSITION])

        with no_gc():
            run = simulate(
                _arrivals(first, blocks, load.ttft_deadlines),
                limits,
                self._costs(cell, first.repeat),
                rules,
                on_request=on_request,
                on_step=on_step,
            )
        # What a closed loop did not come to was never offered.
        for index, arrival in run.unsent:
            why = unsent_because(rules.max_concurrency)
            add_row(index, arrival.priority, unsent_values(index, arrival, rules.duration_s, why))
            tries_in_order.add(index, ())
        in_order.finish(run.offered)
        requests.finish()
        tries.finish()
        steps.finish()
        counts = run.admission.counts()
        facts = CellFacts(
            offered=run.offered,
            limit=cell.max_inflight,
            token_limit=cell.admission.tokens,
            peak_inflight=counts.peak_inflight,
            peak_held_tokens=counts.peak_held_tokens,
            inflight_integral_s=counts.inflight_integral_s,
            inflight_at_start=0,
            earlier_slots=earlier.slots,
            earlier_held_s=earlier.held_s,
            started_utc=VIRTUAL_START_UTC,
            max_concurrency=rules.max_concurrency,
            peak_outstanding=run.peak_outstanding,
            ramp_s=load.ramp_s if is_closed else None,
            ran_out_s=run.last_sent_s if load.ends_by_time_alone and run.is_exhausted else None,
        )
        notes: dict[str, Any] = {
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "kv_cache_tokens": limits.kv_cache_tokens,
        }
        if outside is not None:
            notes[OUTSIDE_FITTED] = outside.facts()
        return facts, notes

    def check_fitted(self) -> None:
        """Raises InputError for prompts so long that each of them makes a step unlike all that the model has seen."""
        fitted, options = self._cost_model.fitted, self._experiment.options
        if fitted is None or self._experiment.load.prompt_lengths.kind != "fixed":
            return  # of lengths that vary, the facts of the cells say how many steps were too large
        most = fitted.range["prefill_tokens"][1]
        for cell in self._experiment.cells:
            if cell.prompt_len is None:
                continue
            step_tokens = min(cell.prompt_len, self.limits(cell).max_num_batched_tokens)
            if step_tokens > most:
                raise InputError(
                    "--prompt-len",
                    str(cell.prompt_len),
                    f"makes steps of {step_tokens} prefill tokens; --cost-model {options.cost_model} was fitted to at"
                    f" most {most:g}",
                )

    def end_block(self) -> None:
        """Every cell starts from an empty engine already."""

    def limits(self, cell: Cell) -> SimLimits:
        """The sizes of the simulated engine."""
        options = self._experiment.options
        return SimLimits(
            admission=str(cell.admission),
            scheduling=options.scheduling,
            cost_model=self._cost_model
            if cell.admission.needs_cost_model or options.ttft_deadline is not None
            else None,
            max_batch_size=options.max_batch_size,
            max_active_requests=options.max_active_requests,
            # As an engine on a CPU chooses it.
            max_num_batched_tokens=options.max_num_batched_tokens
            or max(LEAST_BATCHED_TOKENS, 2 * options.max_batch_size),
            kv_cache_tokens=options.kv_cache_tokens or max(MOST_TOKENS, self.max_model_len),
            max_model_len=self.max_model_len,
            # Token ids cost nothing there, and so need no worker.
            tokenize_workers=1 if options.pretok else options.tokenize_workers,
        )

    def _costs(self, cell: Cell, repeat: int) -> Costs:
        """All limits of a shape meet the same noise, step by step; repeats and seeds meet other noise."""
        options = self._experiment.options
        words = [options.seed, repeat, crc32(cell.shape.cell_id.encode())]
        seed = int(np.random.SeedSequence(words).generate_state(1)[0])
        return self._cost_model.costs(
            seed, as_text=not options.pretok, tokenize_workers=options.tokenize_workers
        )

    def _rules(self, workload: Workload) -> ClientRules:
        load = self._experiment.load
        return ClientRules(
            max_concurrency=load.max_concurrency,
            user_starts_s=load.user_starts_s if load.is_closed else None,
            refused_pause_s=CLOSED_LOOP_REFUSED_PAUSE_S,
            duration_s=load.duration_s,
            timeout_s=load.timeout_s,
            retrier=partial(Retrier, load.retries, workload.prompt_seed) if load.retries.is_on else None,
            per_try_timeout_s=load.retries.per_try_timeout_s,
        )


def outside_lines(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence on the simulated steps that the cost model says nothing of, from the facts of all cells."""
    n_steps = n_outside = 0.0
    columns = dict[str, None]()
    for known in facts:
        outside = known.get(OUTSIDE_FITTED) or {"steps": 0, "share": 0.0, "by_column": {}}
        n_steps += outside["steps"]
        n_outside += outside["steps"] * outside["share"]
        columns |= dict.fromkeys(outside["by_column"])
    if not columns:
        return []
    names = ", ".join(column for column in COMPOSITION if column in columns)
    share = f"{100 * n_outside / n_steps:.3g} %"
    return [
        f"Warning: {share} of the simulated steps lie outside of what the cost model was fitted to, in {names}"
    ]


class _Frames:
    """Keeps all that it takes."""

    def __init__(self) -> None:
        self._tables: dict[str, list[pa.Table]] = {"requests": [], "steps": [], "attempts": []}

    def add(self, name: str, rows: pa.Table) -> None:
        self._tables[name].append(rows)

    def frame(self, name: str, schema: pa.Schema) -> pd.DataFrame:
        tables = self._tables[name]
        frame: pd.DataFrame = pa.concat_tables(tables).to_pandas() if tables else pd.DataFrame()
        return frame


def _arrivals(first: Workload, others: Iterator[Workload], deadlines: TtftDeadlines) -> Iterator[Arrival]:
    block: Workload | None = first
    while block is not None:
        n = len(block.prompt_tokens)
        due_s = [0.0] * n if block.scheduled_s is None else block.scheduled_s.tolist()
        lengths = block.prompt_tokens.tolist(), block.output_tokens.tolist()
        places = [0] * n if block.classes is None else block.classes.places.tolist()
        deadlines_s = deadlines.of(() if block.classes is None else block.classes.names)
        deadlines_of_requests = [deadlines_s[place] for place in places]
        yield from map(new_arrival, zip(due_s, *lengths, places, deadlines_of_requests, strict=True))
        block = next(others, None)
