"""Measuring an experiment: every cell once per repeat, in a shuffled order of its own, kept as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from roseinfer.bench.environment import describe_environment
from roseinfer.bench.options import Cell, Experiment
from roseinfer.bench.store import RunFolder
from roseinfer.bench.summary import sort_cells, summarise
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import WARM_UP, WorkloadSource, workload_sha256
from roseinfer.engine import InferenceEngine

Progress = Callable[[str], None]
"""Told in words what starts now."""


def order(experiment: Experiment) -> list[list[Cell]]:
    """The cells in the order of each repeat: a block that holds every cell once, in seeded shuffled order.

    Cells are so paired within a block, and a machine that drifts hits all of them alike.
    """
    cells = experiment.cells
    rngs = [np.random.default_rng([experiment.options.seed, repeat]) for repeat in range(experiment.options.repeats)]
    return [[cells[i] for i in rng.permutation(len(cells))] for rng in rngs]


def manifest(experiment: Experiment, engine: InferenceEngine, workload: pd.DataFrame, command: str) -> dict[str, Any]:
    """What run.json says about a run before it starts."""
    return {
        "command": command,
        "configuration": experiment.configuration(),
        "seed": experiment.options.seed,
        "slos": list(experiment.slos),
        "metadata": dict(experiment.metadata),
        "model": asdict(engine.description),
        "workload_sha256": workload_sha256(workload),
        "order": [[cell.cell_id for cell in block] for block in order(experiment)],
        "environment": describe_environment(),
        "percentile_method": "inverted_cdf",
    }


def warm_up(experiment: Experiment, engine: InferenceEngine, source: WorkloadSource, progress: Progress) -> None:
    """Unrecorded bursts under the smallest limit, with prompts of their own: first-time costs fall here."""
    limits = sorted(cell.max_inflight for cell in experiment.cells if cell.max_inflight is not None)
    for run in range(experiment.options.warmup_runs):
        progress(f"warm-up {run + 1}/{experiment.options.warmup_runs}")
        for shape in dict.fromkeys(cell.shape for cell in experiment.cells):
            cell = shape._replace(max_inflight=limits[0] if limits else None)
            InProcessTarget(engine, experiment).run(cell, source.draw(shape, WARM_UP + run))


def measure(
    experiment: Experiment,
    engine: InferenceEngine,
    source: WorkloadSource,
    folder: RunFolder,
    progress: Progress,
) -> None:
    """Measures what is not on disk yet. Interrupted at any moment, it loses at most the running cell."""
    target = InProcessTarget(engine, experiment)
    finished = folder.finished_cells()
    blocks = order(experiment)
    total = sum(map(len, blocks))
    done = len(finished)
    for repeat, block in enumerate(blocks):
        for cell in block:
            if (cell.cell_id, repeat) in finished:
                continue
            done += 1
            progress(f"{done}/{total} repeat {repeat + 1}/{len(blocks)} {cell.cell_id}")
            result = target.run(cell, source.draw(cell.shape, repeat))
            folder.write_cell(
                cell.cell_id, repeat, result.requests, result.steps, {**result.facts.to_json(), **result.notes}
            )


def conclude(experiment: Experiment, folder: RunFolder, workload: pd.DataFrame) -> pd.DataFrame:
    """Summarises a run whose cells are all measured, compacts its files, and returns the summary."""
    summary = sort_cells(
        summarise(
            folder.read_requests(),
            read_facts(folder),
            seed=experiment.options.seed,
            max_error_share=experiment.options.max_error_share,
        )
    )
    folder.compact(summary, workload)
    folder.mark_done()
    return summary


def read_facts(folder: RunFolder) -> Mapping[tuple[str, int], CellFacts]:
    """The facts of a run's cells, without the notes kept beside them."""
    names = CellFacts.__dataclass_fields__
    return {
        key: CellFacts.from_json({name: value for name, value in facts.items() if name in names})
        for key, facts in folder.read_facts().items()
    }
