"""Measuring an experiment: every cell once per repeat, in a shuffled order of its own, kept as it is finished."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd

from roseinfer.bench.environment import describe_environment
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.stats import PERCENTILE_METHOD
from roseinfer.bench.store import RunFolder
from roseinfer.bench.summary import sort_cells, summarise
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import WARM_UP, WorkloadSource, workload_sha256
from roseinfer.executor import Engine
from roseinfer.model_source import check_model_source

if TYPE_CHECKING:
    from roseinfer.engine import EngineDescription


class Progress(Protocol):
    """Told in words what starts now, and, of the cells, how many of how many are done."""

    def __call__(self, doing: str, done: int | None = None, total: int | None = None) -> None: ...


def order(experiment: Experiment) -> list[list[Cell]]:
    """The cells in the order of each repeat: a block that holds every cell once, in seeded shuffled order.

    Cells are so paired within a block, and a machine that drifts hits all of them alike.
    """
    cells = experiment.cells
    rngs = [
        np.random.default_rng([experiment.options.seed, repeat])
        for repeat in range(experiment.options.repeats)
    ]
    return [[cells[i] for i in rng.permutation(len(cells))] for rng in rngs]


def manifest(
    experiment: Experiment, description: EngineDescription, workload: pd.DataFrame, command: str
) -> dict[str, Any]:
    """What run.json says about a run before it starts."""
    kind = check_model_source(experiment.options.model).kind
    return {
        "command": command,
        "configuration": experiment.configuration(),
        "seed": experiment.options.seed,
        "slos": list(experiment.slos),
        "metadata": dict(experiment.metadata),
        "model": {**asdict(description), "model": experiment.model_name, "source": str(kind)},
        "workload_sha256": workload_sha256(workload),
        "order": [[cell.cell_id for cell in block] for block in order(experiment)],
        "environment": describe_environment(),
        "percentile_method": PERCENTILE_METHOD,
    }


def warm_up(experiment: Experiment, engine: Engine, source: WorkloadSource, progress: Progress) -> None:
    """Unrecorded bursts with prompts of their own: first-time costs fall here.

    Their limit is what runs at a time, so that every batch size that the measurement can meet is met here.
    """
    options = experiment.options
    target = InProcessTarget(engine, experiment)
    limit = min(options.max_batch_size, options.max_active_requests or options.max_batch_size)
    for run in range(options.warmup_runs):
        progress(f"warm-up {run + 1}/{options.warmup_runs}")
        for shape in dict.fromkeys(cell.shape for cell in experiment.cells):
            target.run(shape._replace(max_inflight=limit), source.draw(shape, WARM_UP + run))


def measure(
    experiment: Experiment, engine: Engine, source: WorkloadSource, folder: RunFolder, progress: Progress
) -> None:
    """Measures what is not on disk yet. Interrupted at any moment, it loses at most the running cell."""
    target = InProcessTarget(engine, experiment)
    finished = folder.finished_cells()
    blocks = order(experiment)
    total = sum(map(len, blocks))
    done = len(finished)
    for repeat, block in enumerate(blocks):
        gc.collect()  # of the cells before: within a cell most of the heap is frozen
        for cell in block:
            if (cell.cell_id, repeat) in finished:
                continue
            progress(f"repeat {repeat + 1}/{len(blocks)}, {cell.cell_id}", done, total)
            result = target.run(cell, source.draw(cell.shape, repeat))
            facts = {**result.facts.to_json(), **result.notes}
            folder.write_cell(cell.cell_id, repeat, result.requests, result.steps, facts)
            done += 1


def conclude(folder: RunFolder, workload: pd.DataFrame) -> pd.DataFrame:
    """Summarises a run whose cells are all measured, compacts its files, and returns the summary."""
    summary = summary_of(folder)
    folder.compact(summary, workload)
    folder.mark_done()
    return summary


def summary_of(folder: RunFolder) -> pd.DataFrame:
    """The summary of a run, or of what is finished of it."""
    saved = folder.read_summary()
    if saved is not None:
        return saved
    names = CellFacts.__dataclass_fields__
    facts = {
        key: CellFacts.from_json({name: value for name, value in cell.items() if name in names})
        for key, cell in folder.read_facts().items()
    }
    manifest = folder.manifest
    return sort_cells(
        summarise(
            folder.read_requests(),
            facts,
            seed=int(manifest["seed"]),
            max_error_share=float(manifest["configuration"]["max-error-share"]),
        )
    )
