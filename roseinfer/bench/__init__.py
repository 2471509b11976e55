"""Measuring: workloads, targets, records, statistics, sweeps, figures, and the command line over them.

import roseinfer.bench as rb
requests = rb.load_requests("results/sweep/20260101T000000Z-abcd")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load_requests", "load_steps", "load_summary"]


def load_requests(run: str | Path) -> pd.DataFrame:
    """A row per offered request of a run (`records.REQUEST_SCHEMA`), with the derived durations in seconds.

    Of a run that is not finished, what is on disk. Raises InputError where `run` holds none.
    """
    from roseinfer.bench.records import derive
    from roseinfer.bench.store import RunFolder

    return derive(RunFolder.open(Path(run)).read_requests())


def load_steps(run: str | Path) -> pd.DataFrame:
    """A row per engine step of a run (`records.STEP_SCHEMA`). Else as `load_requests`."""
    from roseinfer.bench.store import RunFolder

    return RunFolder.open(Path(run)).read_steps()


def load_summary(run: str | Path) -> pd.DataFrame:
    """A row per cell and repeat, and a pooled one per cell whose `repeat` is null (`summary.SUMMARY_SCHEMA`).

    Else as `load_requests`.
    """
    from roseinfer.bench.store import RunFolder
    from roseinfer.bench.sweep import summary_of

    return summary_of(RunFolder.open(Path(run)))
