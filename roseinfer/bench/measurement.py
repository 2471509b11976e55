"""Measuring an experiment: every cell once per repeat, in a shuffled order of its own, kept as it is finished."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.environment import describe_environment
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.goals import parse_goal
from roseinfer.bench.records import HTTP
from roseinfer.bench.rows import CellInterrupted, CellResult
from roseinfer.bench.sim_target import RowTaker, SimTarget
from roseinfer.bench.stats import PERCENTILE_METHOD
from roseinfer.bench.store import CellKey, RunFolder
from roseinfer.bench.summary import SUMMARY_SCHEMA, sort_cells, summarise
from roseinfer.bench.termination import held
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import WARM_UP, Workload, WorkloadSource, workload_sha256

UNUSED: Final = (
    "status_code prompt_tokens finish_reason inflight_at_send waiting_at_send chunk_tokens"
).split()
"""Columns of requests that no figure is made of."""


class Target(Protocol):
    """What is measured: an engine in this process, a simulated one, or a server."""

    def run(self, cell: Cell, workload: Workload) -> CellResult:
        """One cell and repeat."""
        ...

    def end_block(self) -> None:
        """All cells of a repeat were run; what one repeat started, the next does not find."""
        ...


class Bench(NamedTuple):
    """What cells are run on; `model` says in run.json what computes."""

    target: Target
    source: WorkloadSource
    model: dict[str, Any]


class Progress(Protocol):
    """Told in words what starts now, and, of the cells, how many of how many are done."""

    def __call__(self, doing: str, done: int | None = None, total: int | None = None) -> None: ...


class CellRun(NamedTuple):
    """A cell in one repeat: what is run at a time."""

    cell: Cell
    repeat: int

    @property
    def key(self) -> CellKey:
        return self.cell.cell_id, self.repeat

    def __str__(self) -> str:
        return f"{self.cell.cell_id}, repeat {self.repeat + 1}"


@dataclass
class Recorded:
    """Everything that a cell left, held until it is saved: rows by the name of their table, and facts."""

    rows: list[tuple[str, pd.DataFrame | pa.Table]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, rows: pd.DataFrame | pa.Table) -> None:
        self.rows.append((name, rows))


RunCells = Callable[[RunFolder, Sequence[CellRun], Callable[[CellRun], None]], None]
"""Runs and saves cells; the last argument is told of each as it begins."""


def order(experiment: Experiment) -> list[list[Cell]]:
    """The cells in the order of each repeat: a block that holds every cell once, in seeded shuffled order.

    Cells are so paired within a block, and a machine that drifts hits all of them alike. Those that share a server
    which is started for them follow each other: then servers are shuffled, and the cells of each.
    """
    servers: dict[object, list[Cell]] = {}
    for cell in experiment.cells:
        servers.setdefault(experiment.server_of(cell), []).append(cell)
    blocks = []
    for repeat in range(experiment.options.repeats):
        rng = np.random.default_rng([experiment.options.seed, repeat])
        groups = list(servers.values())
        if len(groups) > 1:
            groups = [groups[i] for i in rng.permutation(len(groups))]
        blocks.append([cells[i] for cells in groups for i in rng.permutation(len(cells))])
    return blocks


def manifest(
    experiment: Experiment,
    model: Mapping[str, Any],
    workload: Iterable[pd.DataFrame],
    workload_notes: Sequence[str],
    command: str,
    environment: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """What run.json says about a run before it starts. `model` describes what computes, `environment` where.

    None is this machine.
    """
    return {
        "command": command,
        "target": HTTP if experiment.is_http else experiment.options.target,
        "configuration": experiment.configuration(),
        "seed": experiment.options.seed,
        "slos": list(experiment.slos),
        "goodput": list(experiment.goals),
        "metadata": dict(experiment.metadata),
        "model": dict(model),
        "workload_sha256": workload_sha256(workload),
        "workload_notes": list(workload_notes),
        "order": [[cell.cell_id for cell in block] for block in order(experiment)],
        "environment": describe_environment() if environment is None else dict(environment),
        "percentile_method": PERCENTILE_METHOD,
    }


def warm_up_bursts(experiment: Experiment, source: WorkloadSource) -> Iterator[tuple[Cell, Workload]]:
    """What `warm_up` runs, with the shape of the cells that it is for.

    A burst is twice as large as what runs at a time, so that refusals are met too. However long the measurement is,
    it is no longer than that.
    """
    options = experiment.options
    limit = min(options.max_batch_size, options.max_active_requests or options.max_batch_size)
    size = min(2 * limit, experiment.load.max_concurrency or 2 * limit)
    for run in range(experiment.warmup_runs):
        for shape in dict.fromkeys(cell.shape for cell in experiment.cells):
            yield shape.at(AdmissionSpec(limit)), _first_at_once(source.draw(shape, WARM_UP + run), size)


def warm_up(experiment: Experiment, target: Target, source: WorkloadSource, progress: Progress) -> None:
    """Unrecorded bursts with prompts of their own: first-time costs fall here.

    Their limit is what runs at a time, so that every batch size that the measurement can meet is met here.
    """
    shapes = len({cell.shape for cell in experiment.cells})
    for number, (cell, burst) in enumerate(warm_up_bursts(experiment, source)):
        if number % shapes == 0:
            progress(f"warm-up {number // shapes + 1}/{experiment.warmup_runs}")
        target.run(cell, burst)


def _first_at_once(workload: Workload, most: int) -> Workload:
    n = min(most, len(workload.prompt_tokens))
    return Workload(
        scheduled_s=np.zeros(n),
        prompts=[workload.prompts[index] for index in range(n)],
        prompt_tokens=workload.prompt_tokens[:n],
        output_tokens=workload.output_tokens[:n],
        prompt_seed=workload.prompt_seed,
        arrival="burst",
    )


def measure(experiment: Experiment, folder: RunFolder, progress: Progress, run_cells: RunCells) -> None:
    """Measures what is not on disk yet.

    Interrupted at any moment, it loses at most the cells that are running; of one against a server or an engine of this
    process it keeps what there is, to be measured anew.
    """
    finished = folder.finished_cells()
    blocks = order(experiment)
    total = sum(map(len, blocks))
    runs = [CellRun(cell, repeat) for repeat, block in enumerate(blocks) for cell in block]
    done = count(len(finished))

    def begins(run: CellRun) -> None:
        progress(f"repeat {run.repeat + 1}/{len(blocks)}, {run.cell.cell_id}", next(done), total)

    run_cells(folder, [run for run in runs if run.key not in finished], begins)


def run_cells(
    bench: Bench, folder: RunFolder, todo: Sequence[CellRun], begins: Callable[[CellRun], None]
) -> None:
    """Runs and saves one cell after the other."""
    for _, block in groupby(todo, key=lambda run: run.repeat):
        gc.collect()  # of the cells before: within a cell most of the heap is frozen
        for run in block:
            begins(run)
            run_and_save(run, bench, folder)
        bench.target.end_block()


def run_and_save(run: CellRun, bench: Bench, folder: RunFolder) -> None:
    if isinstance(bench.target, SimTarget):
        with folder.cell(*run.key) as writer:  # what a simulation leaves may be larger than memory
            writer.facts = record(run, bench, writer)
        return
    with held():  # a signal that comes when all is measured waits until it is saved
        try:
            recorded = run_cell(run, bench)
        except CellInterrupted as interrupted:
            save(run, _recorded(interrupted.result), folder)
            raise
        save(run, recorded, folder)


def run_cell(run: CellRun, bench: Bench) -> Recorded:
    recorded = Recorded()
    recorded.facts = record(run, bench, recorded)
    return recorded


def record(run: CellRun, bench: Bench, taker: RowTaker) -> dict[str, Any]:
    """What every way to run cells does with each of them: its rows go to `taker`, its facts are returned."""
    target, source = bench.target, bench.source
    if isinstance(target, SimTarget):
        facts, notes = target.record(run.cell, source.blocks(run.cell.shape, run.repeat), taker)
        return {**facts.to_json(), **notes}
    return _take(target.run(run.cell, source.draw(run.cell.shape, run.repeat)), taker)


def _take(result: CellResult, taker: RowTaker) -> dict[str, Any]:
    taker.add("requests", result.requests)
    taker.add("steps", result.steps)
    if result.attempts is not None:
        taker.add("attempts", result.attempts)
    return {**result.facts.to_json(), **result.notes}


def _recorded(result: CellResult) -> Recorded:
    recorded = Recorded()
    recorded.facts = _take(result, recorded)
    return recorded


def save(run: CellRun, recorded: Recorded, folder: RunFolder) -> None:
    with folder.cell(*run.key) as writer:
        for name, rows in recorded.rows:
            writer.add(name, rows)
        writer.facts = recorded.facts


def conclude(folder: RunFolder, workload: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Summarises a run whose cells are all measured, compacts its files, and returns the summary.

    `workload` is its table, in parts.
    """
    summary = summary_of(folder)
    folder.compact(summary, workload)
    folder.mark_done()
    return summary


def summary_of(folder: RunFolder) -> pd.DataFrame:
    """The summary of a run, or of what is finished of it. One with other columns than ours is made anew."""
    saved = folder.read_summary()
    if saved is not None and list(saved.columns) == SUMMARY_SCHEMA.names:
        return saved
    names = CellFacts.__dataclass_fields__
    facts = {
        key: CellFacts.from_json({name: value for name, value in cell.items() if name in names})
        for key, cell in folder.read_facts().items()
    }
    manifest = folder.manifest
    return sort_cells(
        summarise(
            folder.read_requests(without=UNUSED),
            facts,
            seed=int(manifest["seed"]),
            max_error_share=float(manifest["configuration"]["max-error-share"]),
            goals=[parse_goal(text) for text in manifest.get("goodput", ())],
        )
    )
