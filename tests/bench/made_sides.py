"""Sides of a comparison whose every per-repeat figure is given, without a folder, and runs on disk to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.sides import Side
from roseinfer.bench.store import RunFolder
from roseinfer.bench.summary import SUMMARY_SCHEMA, sort_cells, summarise
from tests.bench.rows import as_read, facts_by_cell, facts_of, measured

ENVIRONMENT = {"cpu_model": "abacus", "cores_usable": 2, "gpus": []}
MANIFEST = {
    "seed": 0,
    "environment": ENVIRONMENT,
    "configuration": {"max-error-share": 0.01, "repeats": 1},
    "model": {"model": "scripted", "weights": "none", "device": "cpu", "source": "builtin"},
    "workload_sha256": "w",
}
NO_LIMIT = 0

Figures = Mapping[str, Any]
"""A metric of each repeat, or one figure that all repeats have."""


def side(
    cells: Mapping[int, Figures] | None = None,
    *,
    name: str = "run",
    requests: pd.DataFrame | None = None,
    invalid: str | None = None,
    finished: int = 1,
    done: bool = True,
    **manifest: Any,
) -> Side:
    """`cells` maps a limit (NO_LIMIT: none) to its figures; what is not given is that of a healthy cell."""
    folder = SimpleNamespace(
        run_id=name,
        manifest={"seed": 0, "environment": ENVIRONMENT, "configuration": {"repeats": 8}, **manifest},
        is_done=done,
        finished_cells=lambda: set(range(finished)),
    )
    made = Side(folder)  # type: ignore[arg-type]
    if cells is not None:
        rows = [row for limit, figures in cells.items() for row in _cell(limit, figures, invalid)]
        columns = [
            pa.array([row.get(field.name) for row in rows], type=field.type, from_pandas=True)
            for field in SUMMARY_SCHEMA
        ]
        made.summary = sort_cells(pa.Table.from_arrays(columns, schema=SUMMARY_SCHEMA).to_pandas())
    made.requests = as_read([]) if requests is None else requests
    return made


def measured_side(requests: pd.DataFrame, *, name: str = "run", **manifest: Any) -> Side:
    """The side whose summary is that of these rows (`rows.measured`)."""
    made = side(name=name, requests=requests, **manifest)
    made.summary = sort_cells(summarise(requests, facts_by_cell(requests)))
    return made


def stored_run(
    output_dir: Path,
    run_id: str,
    service_s: Sequence[float] = (0.01,) * 6,
    *,
    done: bool = True,
    **manifest: Any,
) -> RunFolder:
    """A run on disk: a burst of 8 in each repeat, at a server that takes so long for one request."""
    run = RunFolder.create(output_dir, "gate", run_id, {**MANIFEST, **manifest})
    for repeat, seconds in enumerate(service_s):
        rows = measured(repeat=repeat, service_s=seconds)
        cell = str(rows["cell_id"].iloc[0])
        run.write_cell(cell, repeat, rows, pd.DataFrame(), facts_of(rows).to_json())
    if done:
        run.mark_done()
    return run


def _cell(limit: int, figures: Figures, invalid: str | None) -> list[dict[str, Any]]:
    repeats = max([len(values) for values in figures.values() if isinstance(values, Sequence)], default=8)
    healthy: dict[str, Any] = {
        "offered": 128,
        "completed": 128,
        "rejected": 0,
        "reject_rate": 0.0,
        "error_rate": 0.0,
    }
    healthy |= {"n_ttft": 128, "p99_ttft_ms": 100.0, "output_throughput": 50.0}
    factors: dict[str, Any] = {
        "cell_id": f"inflight_{limit or 'none'}",
        "admission": str(AdmissionSpec(limit or None)),
        "max_inflight": limit or None,
        "burst_size": 128,
    }
    rows = []
    for repeat in range(repeats):
        own = {
            key: values[repeat] if isinstance(values, Sequence) else values for key, values in figures.items()
        }
        about: dict[str, Any] = {"repeat": repeat, "valid": invalid is None, "invalid_reasons": invalid}
        rows.append({**factors, **healthy, **about, **own})
    counts = ("offered", "completed", "rejected", "n_ttft")
    pooled: dict[str, Any] = {
        name: sum(row[name] for row in rows)
        if name in counts
        else float(np.mean([row[name] for row in rows]))
        for name in rows[0]
        if name not in ("repeat", "valid", "invalid_reasons", *factors)
    }
    return [
        *rows,
        {**factors, **pooled, "repeats": repeats, "valid": invalid is None, "invalid_reasons": invalid},
    ]


def around(typical: float, spread: float, n: int) -> list[float]:
    """`n` values whose logarithms are evenly spread around that of `typical` with about this standard deviation."""
    places = (np.arange(n) + 0.5) / n - 0.5
    return [float(value) for value in typical * np.exp(spread * places * np.sqrt(12))]
