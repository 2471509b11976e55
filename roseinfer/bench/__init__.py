"""Measuring: workloads, targets, records, statistics, sweeps, figures, and the command line over them.

import roseinfer.bench as rb

run = rb.sweep(max_inflight=[0, 16, 64], repeats=4)
requests = rb.load_requests(run)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load_requests", "load_steps", "load_summary", "sweep"]


def sweep(**flags: Any) -> Path:
    """Measures as `roseinfer-bench sweep` does, and returns the run's folder; prints nothing and draws nothing.

    The flags are those of the command line, with underscores: `max_inflight=[0, 16]` (0 or None: no limit),
    `slo="p99_ttft:250"`, `quiet=False` for progress on stderr. Raises InputError for what the command line refuses,
    RunError where measuring fails. `roseinfer-bench plot RUN` draws the figures.
    """
    from roseinfer.bench.unattended import run_sweep

    return run_sweep(flags)


def load_requests(run: str | Path) -> pd.DataFrame:
    """A row per offered request of a run (`records.REQUEST_SCHEMA`), with the derived durations in seconds.

    Further columns, in every frame here: `limit` ("16", "64", "no limit") and `cell` ("limit 16, burst of 128"), both
    ordered categories in which "no limit" is last. Of a run that is not finished, what is on disk. Raises
    InputError where `run` holds none.
    """
    from roseinfer.bench.labels import tidy_cells
    from roseinfer.bench.records import derive
    from roseinfer.bench.store import RunFolder

    return tidy_cells(derive(RunFolder.open(Path(run)).read_requests()))


def load_steps(run: str | Path) -> pd.DataFrame:
    """A row per engine step of a run (`records.STEP_SCHEMA`), with its duration `exec_s`. Else as `load_requests`."""
    from roseinfer.bench.labels import tidy_cells
    from roseinfer.bench.records import FACTORS
    from roseinfer.bench.store import RunFolder

    folder = RunFolder.open(Path(run))
    steps = folder.read_steps()
    cells = tidy_cells(folder.read_requests()[["cell_id", *FACTORS]].drop_duplicates("cell_id"))
    names = cells.set_index("cell_id").reindex(steps["cell_id"])
    exec_s = steps["exec_end_s"] - steps["exec_start_s"]
    return steps.assign(exec_s=exec_s, limit=names["limit"].array, cell=names["cell"].array)


def load_summary(run: str | Path) -> pd.DataFrame:
    """A row per cell and repeat, and a pooled one per cell whose `repeat` is null (`summary.SUMMARY_SCHEMA`).

    Else as `load_requests`.
    """
    from roseinfer.bench.labels import tidy_cells
    from roseinfer.bench.measurement import summary_of
    from roseinfer.bench.store import RunFolder

    return tidy_cells(summary_of(RunFolder.open(Path(run))))
