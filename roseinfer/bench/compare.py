"""What differs between two runs: per cell and metric the ratio B / A with its interval, and an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from roseinfer.bench.check import FALSE_ALARMS
from roseinfer.bench.distributions import distance_between
from roseinfer.bench.judgement import (
    ERRATIC,
    collect_text,
    few_values,
    is_latency,
    joined,
    log,
    not_carried,
    repeats_wanted,
)
from roseinfer.bench.records import Outcome, derive
from roseinfer.bench.sides import (
    Comparison,
    Side,
    compare_cell,
    how_compared,
    notes_on,
    other_repeats,
    share_blocks,
)
from roseinfer.bench.stats import Interval
from roseinfer.bench.steady_state import steady_rows
from roseinfer.errors import InputError

METRICS: Final = ("p99_ttft_ms", "p99_queue_wait_ms", "p50_ttft_ms", "output_throughput", "reject_rate")
DISTRIBUTION: Final = "ttft_distribution"


class Answer(StrEnum):
    SAME = "SAME"
    DIFFERENT = "DIFFERENT"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One metric in one cell. `figure` is the ratio B / A; `a` and `b` are the figures pooled over repeats.

    Beside latencies stand the shares of the offered requests that were `refused` and `served`.
    For the distribution of TTFT there is no ratio, but `distance` (Kolmogorov-Smirnov) and its `p`.
    """

    cell: str
    metric: str
    answer: Answer
    a: float = math.nan
    b: float = math.nan
    figure: Interval | None = None
    distance: float | None = None
    p: float | None = None
    n: tuple[int, int]
    repeats: tuple[int, int]
    refused: tuple[float, ...] = ()
    served: tuple[float, ...] = ()
    collect: int | None = None
    remark: str = ""


@dataclass(frozen=True)
class Differences:
    """What `compare` found. `level` is that of every interval (NaN: there are none) and of the distributions together.

    SAME is within a factor of 1 + `margin`.
    """

    a: str
    b: str
    how: str
    level: float
    margin: float
    rows: Sequence[Difference]
    notes: Sequence[str]


def compare(a: Side, b: Side, *, margin: float = 0.10) -> Differences:
    """Compares the cells that both have. Raises InputError where there is none, or `margin` is not above 0.

    A measured and a simulated run are no such pair: how far one is from the other says `prediction.errors`.
    """
    check_margin(margin)
    if a.is_simulated != b.is_simulated:
        raise InputError("B", b.name, "one of the runs is simulated, the other is not")
    cells = common_cells(a, b)
    if (reason := other_repeats(b, a)) is not None:
        raise InputError("A", a.name, reason)
    notes = [*notes_on(b, a), *notes_on_each(a, b)]
    level = 1 - FALSE_ALARMS / (len(cells) * (len(METRICS) + 1))  # the distribution is one more
    rows = []
    for cell in cells:
        rows += [_metric(a, b, cell, metric, level, margin) for metric in METRICS]
        if not b.is_simulated:
            rows.append(_distribution(a, b, cell, 1 - level))
    if b.is_simulated:
        level = math.nan
    return Differences(a.name, b.name, how_compared(b, a), level, margin, rows, notes)


def check_margin(margin: float) -> None:
    """Raises InputError unless it is above 0."""
    if not 0 < margin < math.inf:
        raise InputError("--margin", margin, "must be a number > 0")


def common_cells(a: Side, b: Side) -> list[str]:
    """The cells that both have. Raises InputError where there is none."""
    cells = [cell for cell in a.cells if cell in b.cells]
    if not cells:
        raise InputError("B", b.name, f"has no cell in common with {a.name}")
    return cells


def notes_on_each(a: Side, b: Side) -> list[str]:
    """The cells that one side has alone, and what is wrong with a side; a line each."""
    notes = []
    for side, other in ((a, b), (b, a)):
        lone = [str(row["label"]) for cell, row in side.cells.items() if cell not in other.cells]
        if lone:
            notes.append(f"only in {side.name}: {'; '.join(lone)}")
        if (reason := side.unfinished()) is not None:
            notes.append(reason)
        if (reason := side.invalid_reason()) is not None:
            notes.append(f"INVALID: {side.name}: {reason}")
    return notes


def _metric(a: Side, b: Side, cell: str, metric: str, level: float, margin: float) -> Difference:
    values = a.pooled_value(cell, metric), b.pooled_value(cell, metric)
    shares = [side.shares(cell) for side in (a, b)] if is_latency(metric) else []
    row = Difference(
        cell=str(b.cells[cell]["label"]),
        metric=metric,
        answer=Answer.UNKNOWN,
        a=values[0],
        b=values[1],
        n=(a.count(cell, metric), b.count(cell, metric)),
        repeats=(len(a.values(cell, metric)), len(b.values(cell, metric))),
        refused=tuple(refused for refused, _ in shares),
        served=tuple(served for _, served in shares),
    )
    for side in (a, b):
        if missing := side.unmeasured(cell, metric):
            return replace(row, remark=missing)
    comparison = compare_cell(b, a, cell, metric, level)
    answer, collect = answer_of(comparison, margin)
    remark = few_values((a, b), cell, metric)
    if answer is Answer.UNKNOWN:
        remark = joined(
            remark,
            not_carried(comparison, level),
            ERRATIC if comparison.is_erratic else collect_text(collect),
        )
    return replace(
        row,
        answer=answer,
        figure=comparison.interval,
        repeats=(comparison.repeats[1], comparison.repeats[0]),
        collect=collect,
        remark=remark,
    )


def answer_of(comparison: Comparison, margin: float) -> tuple[Answer, int | None]:
    """DIFFERENT: the interval excludes 1. SAME: it is within a factor of 1 + margin. Else the repeats to collect."""
    lo, e, hi = comparison.interval
    if lo > 1 or hi < 1:
        return Answer.DIFFERENT, None
    if lo >= 1 / (1 + margin) and hi <= 1 + margin and not comparison.is_erratic:
        return Answer.SAME, None
    repeats = min(comparison.repeats)
    if math.isnan(e) or comparison.is_erratic:
        return Answer.UNKNOWN, None
    if lo == -math.inf:
        return Answer.UNKNOWN, max(1, comparison.needed - repeats)
    below, above = log(e) - log(lo), log(hi) - log(e)
    off, towards_one = abs(log(e)), above if e < 1 else below
    wanted = [
        repeats_wanted(repeats, towards_one, off),
        repeats_wanted(repeats, max(below, above), math.log1p(margin) - off),
    ]
    known = [number for number in wanted if number is not None]
    return Answer.UNKNOWN, max(1, max(min(known), comparison.needed) - repeats) if known else None


def _distribution(a: Side, b: Side, cell: str, alpha: float) -> Difference:
    """Whether the distribution of TTFT differs, by whole repeats; it sees a change of spread that no ratio shows."""
    paired = share_blocks(a, b)
    values = [_ttfts_ms(side, cell) for side in (a, b)]
    if paired:
        both = values[0].keys() & values[1].keys()
        values = [{repeat: side[repeat] for repeat in sorted(both)} for side in values]
    left, right = ([*side.values()] for side in values)
    found = distance_between(left, right, paired=paired, seed=int(a.manifest["seed"]))
    # It cannot say that there is no difference: what it does not find is unknown.
    answer = Answer.DIFFERENT if found.p <= alpha else Answer.UNKNOWN
    return Difference(
        cell=str(b.cells[cell]["label"]),
        metric=DISTRIBUTION,
        answer=answer,
        distance=found.distance,
        p=found.p,
        n=(sum(map(len, left)), sum(map(len, right))),
        repeats=(len(left), len(right)),
        remark="" if answer is Answer.DIFFERENT else "no difference shown",
    )


def _ttfts_ms(side: Side, cell: str) -> dict[int, NDArray[np.float64]]:
    own = side.requests[side.requests["cell_id"] == cell]
    if own.empty:
        return {}
    rows = steady_rows(derive(own))
    done = rows[rows["outcome"] == Outcome.COMPLETED]
    return {
        int(repeat): 1e3 * done.loc[done["repeat"] == repeat, "ttft_s"].dropna().to_numpy(dtype=np.float64)
        for repeat in sorted(done["repeat"].unique())
    }
