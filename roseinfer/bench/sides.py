"""A run as one side of a comparison, and what its cells make of a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from roseinfer.bench.labels import tidy_cells
from roseinfer.bench.measurement import summary_of
from roseinfer.bench.ratios import fewest_repeats, paired_ratio, repeats_needed, unpaired_ratio
from roseinfer.bench.records import FACTORS, REQUEST_SCHEMA, flattened
from roseinfer.bench.stats import Interval
from roseinfer.bench.store import RunFolder, differences
from roseinfer.bench.summary import pooled

MACHINE: Final = ("cpu_model", "cores_usable", "gpus")
"""What of the environment makes another machine of it. Threads, versions and the like are notes."""

_SAME_S: Final = 1e-9
"""Moments on a virtual clock that differ by less are the same."""


class Side:
    """A run that is compared. `name` is its folder's."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.name = folder.run_id
        self.manifest = folder.manifest

    @classmethod
    def open(cls, path: Path, argument: str) -> Side:
        """Raises InputError(argument, path) where there is no run."""
        return cls(RunFolder.open(path, argument))

    @cached_property
    def is_empty(self) -> bool:
        """Without a row: nothing was measured, or nothing was finished."""
        return not self.folder.finished_cells() or self.summary.empty

    @cached_property
    def summary(self) -> pd.DataFrame:
        summary: pd.DataFrame = summary_of(self.folder)
        return summary

    @cached_property
    def requests(self) -> pd.DataFrame:
        return self.folder.read_requests()

    @property
    def is_simulated(self) -> bool:
        return bool(self.manifest.get("target", "engine") == "sim")

    @property
    def blocks(self) -> str | None:
        """What runs that share their blocks have in common."""
        return self.manifest.get("blocks")

    @cached_property
    def cells(self) -> dict[str, Mapping[str, Any]]:
        """The pooled row of each cell, in the summary's order, with its name for readers as `label`."""
        rows = pooled(self.summary)
        labelled = rows.assign(label=tidy_cells(rows)["cell"].astype(str).to_numpy())
        return {
            str(row["cell_id"]): {str(name): value for name, value in row.items()}
            for row in labelled.to_dict("records")
        }

    def factors(self, cell: str) -> dict[str, float | None]:
        row = self.cells[cell]
        return {factor: None if pd.isna(row[factor]) else float(row[factor]) for factor in FACTORS}

    def values(self, cell: str, metric: str) -> pd.Series[float]:
        """The metric in each repeat that measured it."""
        repeats = self.summary[(self.summary["cell_id"] == cell) & self.summary["repeat"].notna()]
        return repeats.set_index("repeat")[metric].astype("float64").dropna()

    def pooled_value(self, cell: str, metric: str) -> float:
        """The metric over all repeats; NaN where it was not measured."""
        value = self.cells[cell][metric]
        return math.nan if pd.isna(value) else float(value)

    def count(self, cell: str, metric: str) -> int:
        """What the metric was taken from: latencies, or for other metrics offered requests."""
        n = self.cells[cell].get("n_" + metric.partition("_")[2].removesuffix("_ms"))
        return int(self.cells[cell]["offered"] if n is None or pd.isna(n) else n)

    def invalid_reason(self) -> str | None:
        """What makes the run invalid; None for a valid one."""
        bad = self.summary[~self.summary["valid"].astype(bool) & self.summary["repeat"].notna()]
        if bad.empty:
            return None
        first = bad.iloc[0]
        where = f"{first['cell_id']} repeat {int(first['repeat']) + 1}: {first['invalid_reasons']}"
        return f"{len(bad)} of {int(self.summary['repeat'].notna().sum())} cells and repeats, the first is {where}"


def share_blocks(a: Side, b: Side) -> bool:
    """Repeat k of both was measured in one block: they can be compared in pairs."""
    return a.blocks is not None and a.blocks == b.blocks


def how_compared(run: Side, baseline: Side) -> str:
    """What the intervals of their ratios are, in words."""
    if run.is_simulated:
        return "simulated: exact, without intervals"
    if share_blocks(run, baseline):
        return "compared in pairs, block by block"
    return "compared as two independent samples of repeats"


@dataclass(frozen=True)
class Comparison:
    """How a metric of `run` relates to that of `baseline` in one cell: the ratio run / baseline with its interval."""

    interval: Interval
    n: int
    repeats: tuple[int, int]  # of run and baseline, that measured it; pairs: twice the same
    needed: int  # repeats a side that carry the level, and from which the ratio is precise enough
    carries: int  # repeats a side that carry the level at all

    @property
    def enough(self) -> bool:
        return min(self.repeats) >= self.needed


def compare_cell(run: Side, baseline: Side, cell: str, metric: str, level: float) -> Comparison:
    """The ratio of run to baseline. Zero on both sides alike is a ratio of 1, and a simulated run has no spread."""
    pairs = share_blocks(run, baseline)
    a, b = run.values(cell, metric), baseline.values(cell, metric)
    if pairs:
        both = a.index.intersection(b.index)
        a, b = a[both], b[both]
    n, repeats = run.count(cell, metric), (len(a), len(b))
    if run.is_simulated:
        return Comparison(exactly(_ratio(run, baseline, cell, metric)), n, repeats, 1, 1)
    return comparison_of(_array(a), _array(b), paired=pairs, level=level, n=n)


def _array(values: pd.Series[float]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def comparison_of(
    run: NDArray[np.float64], baseline: NDArray[np.float64], *, paired: bool, level: float, n: int
) -> Comparison:
    """The ratio of the per-repeat values of two sides, those of shared blocks at the same place."""
    repeats, carries = (len(run), len(baseline)), fewest_repeats(level, paired)
    ever, before = bool(run.any()), bool(baseline.any())
    if min(repeats) and not ever and not before:
        return Comparison(exactly(1.0), n, repeats, carries, carries)
    if min(repeats) and ((run.all() and not before) or (baseline.all() and not ever)):
        point = math.inf if ever else 0.0  # always against never: as far apart as ranks can be
        sure = min(repeats) >= carries
        interval = exactly(point) if sure else Interval(-math.inf, point, math.inf)
        return Comparison(interval, n, repeats, carries, carries)
    interval = (paired_ratio if paired else unpaired_ratio)(run, baseline, level)
    needed = max(carries, repeats_needed(run, baseline, paired))
    return Comparison(interval, n, repeats, needed, carries)


def compare_shares(run: Side, baseline: Side, cell: str, metric: str, level: float) -> Interval:
    """The difference run - baseline of a share of the offered requests, which may be 0 and then has no ratio."""
    a, b = run.values(cell, metric), baseline.values(cell, metric)
    difference = run.pooled_value(cell, metric) - baseline.pooled_value(cell, metric)
    if run.is_simulated or (a.nunique() == 1 and b.nunique() == 1 and a.iloc[0] == b.iloc[0]):
        return exactly(difference)
    ratio = unpaired_ratio
    if share_blocks(run, baseline):
        both = a.index.intersection(b.index)
        a, b, ratio = a[both], b[both], paired_ratio
    found = ratio(np.exp(_array(a)), np.exp(_array(b)), level)  # log of a ratio of exp is a difference
    return Interval(*(math.log(bound) if 0 < bound < math.inf else bound for bound in found))


def exactly(value: float) -> Interval:
    return Interval(value, value, value)


def _ratio(run: Side, baseline: Side, cell: str, metric: str) -> float:
    a, b = run.pooled_value(cell, metric), baseline.pooled_value(cell, metric)
    if b == 0:
        return 1.0 if a == 0 else math.inf if a > 0 else math.nan
    return round(a / b, 9)


def other_machine(run: Side, baseline: Side) -> list[str]:
    """How the machines differ; simulated runs are equal on every machine."""
    if run.is_simulated and baseline.is_simulated:
        return []
    now, before = (side.manifest.get("environment", {}) for side in (run, baseline))
    return [
        f"{key.replace('_', ' ')} {now.get(key)}, of the baseline {before.get(key)}"
        for key in MACHINE
        if now.get(key) != before.get(key)
    ]


def notes_on(run: Side, baseline: Side) -> list[str]:
    """What differs between how the two were measured, beyond their cells; a line each."""
    before, now = (
        _without_machine(side.manifest) if run.is_simulated else side.manifest for side in (baseline, run)
    )
    notes = []
    if run.is_simulated:
        differing, of, first = differing_rows(run, baseline)
        where = "" if first is None else f", the first: {first}"
        notes.append(f"{differing} of {of} simulated requests differ from the baseline's{where}")
    notes += [f"baseline and run differ: {difference}" for difference in differences(before, now)]
    notes += [
        f"{side.name} is not finished: {len(side.folder.finished_cells())} cells and repeats are"
        for side in (baseline, run)
        if not side.folder.is_done
    ]
    cached = [_cached_share(side.requests) for side in (baseline, run)]
    if cached[0] != cached[1]:
        notes.append(
            f"prompt tokens from a cache: baseline {_per_cent(cached[0])}, run {_per_cent(cached[1])}"
        )
    return notes


def _without_machine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    environment = {"source_sha256": manifest.get("environment", {}).get("source_sha256")}
    return {**manifest, "environment": environment}


def _cached_share(requests: pd.DataFrame) -> float | None:
    known = requests[requests["cached_tokens"].notna()]
    total = float(known["prompt_tokens"].sum())
    return round(float(known["cached_tokens"].sum()) / total, 3) if total else None


def _per_cent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.1f} %"


def differing_rows(run: Side, baseline: Side) -> tuple[int, int, str | None]:
    """Rows that differ between two simulated runs, of how many, and where the first is."""
    key = ["cell_id", "repeat", "request_index"]
    sides = [side.requests.set_index(key).sort_index() for side in (run, baseline)]
    rows = sides[0].index.union(sides[1].index)
    a, b = (side.reindex(rows) for side in sides)
    differs = np.array(~(rows.isin(sides[0].index) & rows.isin(sides[1].index)))
    for field in REQUEST_SCHEMA:
        if field.name in a and field.name in b and field.name not in ("run_id", *key):
            differs |= _differ(a[field.name], b[field.name], field.type)
    if not differs.any():
        return 0, len(rows), None
    cell, repeat, index = rows[int(np.argmax(differs))]
    return int(differs.sum()), len(rows), f"{cell} repeat {int(repeat) + 1} request {int(index)}"


def _differ(a: pd.Series[Any], b: pd.Series[Any], kind: pa.DataType) -> NDArray[np.bool_]:
    if pa.types.is_list(kind):
        (x, x_items), (y, y_items) = (flattened(lists, kind.value_type) for lists in (a, b))
        same = x_items == y_items
        differs = ~same
        apart = _apart(x[np.repeat(same, x_items)], y[np.repeat(same, y_items)])
        differs[np.repeat(np.flatnonzero(same), x_items[same])[apart]] = True
    elif pa.types.is_string(kind):
        differs = np.not_equal(*(side.astype(object).fillna("").to_numpy() for side in (a, b)))
    else:
        differs = _apart(a.to_numpy(dtype=np.float64), b.to_numpy(dtype=np.float64))
    return np.asarray(differs, dtype=bool)


def _apart(x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray(~np.isclose(x, y, rtol=0, atol=_SAME_S, equal_nan=True), dtype=bool)
