"""A run as one side of a comparison, and what its cells make of a metric."""

from __future__ import annotations

import math
import re
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
from roseinfer.bench.records import FACTORS, REQUEST_SCHEMA, cached_share, flattened
from roseinfer.bench.stats import Interval, smallest_sample
from roseinfer.bench.store import RunFolder, differences
from roseinfer.bench.summary import pooled

MACHINE: Final = ("cpu_model", "cores_usable", "gpus")
"""What of the environment makes another machine of it. Threads, versions and the like are notes."""

FAR: Final = 10_000
"""More repeats than this are not a number to collect."""

_ONLY_SOMETIMES: Final = ("_reject_ms", "_time_to_error_ms", "_time_to_timeout_ms")

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
        """The run as far as it is finished. Raises InputError(argument, path) where there is none."""
        return cls(RunFolder.open(path, argument).finished_part())

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

    def factors(self, cell: str) -> dict[str, float | str | None]:
        """What a rule's `cells` is compared with: the limit as text, numbers as float, None where there is none."""
        row = self.cells[cell]
        others = {factor: None if pd.isna(row[factor]) else float(row[factor]) for factor in FACTORS[1:]}
        return {"admission": row["admission"], **others}

    @cached_property
    def repeats(self) -> dict[str, pd.DataFrame]:
        """The rows of each cell, one a repeat; the index is the repeat."""
        rows = self.summary[self.summary["repeat"].notna()].set_index("repeat", drop=False)
        return {str(cell): own for cell, own in rows.groupby("cell_id", sort=False)}

    def values(self, cell: str, metric: str) -> pd.Series[float]:
        """The metric in each repeat that measured it."""
        return self.repeats[cell][metric].astype("float64").dropna()

    def unmeasured(self, cell: str, metric: str) -> str | None:
        """Where the metric should have been measured and was not, in words; None where nothing is missing.

        Refusals and failures are the exception: a repeat without any has no latency of them, and is the better for it.
        """
        values = self.values(cell, metric)
        if values.empty or math.isnan(self.pooled_value(cell, metric)):
            return f"{self.name} has no {metric}: not measured"
        missing, of = len(self.repeats[cell]) - len(values), len(self.repeats[cell])
        if missing and not metric.endswith(_ONLY_SOMETIMES):
            return f"{self.name} has no {metric} in {missing} of {of} repeats: not measured"
        return None

    def pooled_value(self, cell: str, metric: str) -> float:
        """The metric over all repeats; NaN where it was not measured."""
        value = self.cells[cell][metric]
        return math.nan if pd.isna(value) else float(value)

    def count(self, cell: str, metric: str) -> int:
        """What the metric was taken from: latencies, or for other metrics offered requests."""
        n = self.cells[cell].get(_count_name(metric))
        return int(self.cells[cell]["offered"] if n is None or pd.isna(n) else n)

    def shares(self, cell: str) -> tuple[float, float]:
        """Of the offered requests: how many were refused, and served (within the goals, where there are any)."""
        row = self.cells[cell]
        served = row["completed"] / row["offered"] if pd.isna(row["good_share"]) else row["good_share"]
        return float(row["reject_rate"]), float(served)

    def name_of_percentile(self, cell: str, metric: str) -> str | None:
        """What "p99" is where a repeat (of a simulation: all of them) has too few values: "max of 16 in a repeat"."""
        percent, counts = re.match(r"p(\d\d)_", metric), self.repeats[cell].get(_count_name(metric))
        if percent is None or counts is None or not (counts > 0).any():
            return None
        n = self.count(cell, metric) if self.is_simulated else int(counts[counts > 0].min())
        if n >= smallest_sample(int(percent[1])):
            return None
        return f"max of {n}" + ("" if self.is_simulated else " in a repeat")

    def invalid_reason(self) -> str | None:
        """What makes the run invalid; None for a valid one."""
        bad = self.summary[~self.summary["valid"].astype(bool) & self.summary["repeat"].notna()]
        if bad.empty:
            return None
        first = bad.iloc[0]
        where = f"{first['cell_id']} repeat {int(first['repeat']) + 1}: {first['invalid_reasons']}"
        return f"{len(bad)} of {int(self.summary['repeat'].notna().sum())} cells and repeats, the first is {where}"

    def unfinished(self) -> str | None:
        """What is there of a run that is not done; None for one that is."""
        if self.folder.is_done:
            return None
        done, order = len(self.folder.finished_cells()), self.manifest.get("order")
        planned = (
            sum(map(len, order)) if order else len(self.cells) * self.manifest["configuration"]["repeats"]
        )
        return f"{self.name} is not finished: {done} of {planned} cells and repeats are"


def _count_name(metric: str) -> str:
    return "n_" + metric.partition("_")[2].removesuffix("_ms")


def share_blocks(a: Side, b: Side) -> bool:
    """Repeat k of both was measured in one block: they can be compared in pairs."""
    return a.blocks is not None and a.blocks == b.blocks


def how_compared(run: Side, baseline: Side) -> str:
    """What their ratios are, in words."""
    if run.is_simulated:
        return "simulated: ratios of figures over all repeats, exact"
    if share_blocks(run, baseline):
        return "compared in pairs, block by block"
    return "compared as two independent samples of repeats"


@dataclass(frozen=True)
class Comparison:
    """How a metric of `run` relates to that of `baseline` in one cell: the ratio run / baseline with its interval."""

    interval: Interval
    n: tuple[int, int]  # of run and baseline
    repeats: tuple[int, int]  # that measured it; pairs: twice the same
    needed: int  # repeats a side that carry the level, and from which the ratio is precise enough
    carries: int  # repeats a side that carry the level, where both have as many

    @property
    def enough(self) -> bool:
        return min(self.repeats) >= self.needed

    @property
    def is_erratic(self) -> bool:
        """The repeats differ so much, as 0 does from all else, that a typical ratio does not speak for the rest."""
        return self.needed >= FAR


def compare_cell(run: Side, baseline: Side, cell: str, metric: str, level: float) -> Comparison:
    """The ratio of run to baseline. Zero on both sides alike is a ratio of 1, and a simulated run has no spread."""
    pairs = share_blocks(run, baseline)
    a, b = values_of(run, baseline, cell, metric)
    n, repeats = (run.count(cell, metric), baseline.count(cell, metric)), (len(a), len(b))
    if run.is_simulated:
        return Comparison(exactly(_ratio(run, baseline, cell, metric)), n, repeats, 1, 1)
    return comparison_of(a, b, paired=pairs, level=level, n=n)


def values_of(
    run: Side, baseline: Side, cell: str, metric: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The metric in the repeats of both sides; of sides that share blocks only in the blocks that both measured."""
    a, b = run.values(cell, metric), baseline.values(cell, metric)
    if share_blocks(run, baseline):
        both = a.index.intersection(b.index)
        a, b = a[both], b[both]
    return np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)


def comparison_of(
    run: NDArray[np.float64], baseline: NDArray[np.float64], *, paired: bool, level: float, n: tuple[int, int]
) -> Comparison:
    """The ratio of the per-repeat values of two sides, those of shared blocks at the same place."""
    repeats, carried = (len(run), len(baseline)), fewest_repeats(level, paired)
    if min(repeats) and not run.any() and not baseline.any():
        return Comparison(exactly(1.0), n, repeats, carried, carried)
    interval = (paired_ratio if paired else unpaired_ratio)(run, baseline, level)
    needed = max(carried, repeats_needed(run, baseline, paired))
    return Comparison(interval, n, repeats, needed, carried)


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


def other_repeats(run: Side, baseline: Side) -> str | None:
    """Why two simulated runs, of which all repeats are compared together, cannot be; None where they can."""
    if not run.is_simulated:
        return None
    for cell in run.repeats.keys() & baseline.repeats.keys():
        a, b = (set(side.repeats[cell].index) for side in (run, baseline))
        if a != b:
            return f"has other repeats in {cell}, {len(b)} against {len(a)}: simulated runs are compared as a whole"
    return None


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
    cached = [_per_cent(cached_share(side.requests)) for side in (baseline, run)]
    if cached[0] != cached[1]:
        notes.append(f"prompt tokens from a cache: baseline {cached[0]}, run {cached[1]}")
    return notes


def _without_machine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    environment = {"source_sha256": manifest.get("environment", {}).get("source_sha256")}
    return {**manifest, "environment": environment}


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
