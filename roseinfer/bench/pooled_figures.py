"""A metric over all repeats of a cell, with an interval at any level that resamples whole repeats."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roseinfer.bench.ratios import fewest_repeats
from roseinfer.bench.records import derive
from roseinfer.bench.sides import Side, exactly
from roseinfer.bench.stats import Interval, cluster_bootstrap, median_interval, percentiles, smallest_sample
from roseinfer.bench.summary import METRICS, SUMMARY_SCHEMA, samples_of

_DRAWS: Final = 2000
_ROUGH: Final = 10
"""Below so many repeats a bootstrap covers clearly less than its level: at 95 %, 71 % of 4 repeats, 83 % of 10."""

_LATENCY: Final = re.compile(r"(p50|p95|p99|max|mean)_(\w+)_ms")
_PERCENT: Final = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
_PER: Final = {
    **dict.fromkeys(("reject_rate", "error_rate", "good_share"), "offered"),
    **dict.fromkeys(("request_throughput", "output_throughput", "request_goodput"), "duration_s"),
}
"""What a rate is per, and so what weighs it when repeats are put together."""


class PooledFigure(NamedTuple):
    """`smallest_n` is the sample from which it may be called by its name, `carries` the repeats that give bounds."""

    interval: Interval
    n: int
    repeats: int
    smallest_n: int = 1
    carries: int = 1
    remark: str = ""


def pooled_figure(run: Side, cell: str, metric: str, level: float) -> PooledFigure:
    """The figure of one cell: percentiles of all requests together, rates of the sums, counts as they are.

    Where only a figure of each repeat is known it is the median of these, and the remark says so.
    """
    seed = int(run.manifest["seed"])
    repeats = run.repeats[cell]
    r, n = len(run.values(cell, metric)), run.count(cell, metric)
    carries = _bootstrap_carries(level)
    rough = (
        f"a bootstrap of {r} repeats covers less than {100 * level:.4g} %" if carries <= r < _ROUGH else ""
    )
    value = run.pooled_value(cell, metric)
    latency = _LATENCY.fullmatch(metric)
    if latency and latency[2] in METRICS:
        least = smallest_sample(_PERCENT[latency[1]]) if latency[1] in ("p50", "p95", "p99") else 1
        if run.is_simulated:
            return PooledFigure(exactly(value), n, r, least)
        runs_ms = _samples_ms(run, cell, latency[2])
        if latency[1] == "mean":
            sums = [(float(run_ms.sum()), float(run_ms.size)) for run_ms in runs_ms]
            interval = _bootstrap_rate(sums, level, seed)
        else:
            interval = cluster_bootstrap(runs_ms, _PERCENT[latency[1]], draws=_DRAWS, seed=seed, level=level)
        return PooledFigure(_carried(interval, r, carries), n, r, least, carries, rough)
    if run.is_simulated or pa.types.is_integer(SUMMARY_SCHEMA.field(metric).type):
        return PooledFigure(exactly(value), n, r)
    if metric in _PER:
        weights = repeats[_PER[metric]].to_numpy(dtype=np.float64)
        sums = [
            (float(x * w), float(w))
            for x, w in zip(repeats[metric], weights, strict=True)
            if not math.isnan(x * w)
        ]
        return PooledFigure(_carried(_bootstrap_rate(sums, level, seed), r, carries), n, r, 1, carries, rough)
    typical = median_interval(run.values(cell, metric), level)
    return PooledFigure(typical, n, r, 1, fewest_repeats(level, paired=True), "the median over repeats")


def _bootstrap_carries(level: float) -> int:
    """Repeats at which drawing the same one each time is rarer than a tail: the least that can bound anything."""
    r = 2
    while r**-r > (1 - level) / 2:
        r += 1
    return r


def _carried(interval: Interval, repeats: int, carries: int) -> Interval:
    return interval if repeats >= carries else Interval(-math.inf, interval.point, math.inf)


def _samples_ms(run: Side, cell: str, metric: str) -> list[NDArray[np.float64]]:
    rows = run.requests[run.requests["cell_id"] == cell]
    return [1e3 * samples_of(repeat)[metric] for _, repeat in derive(rows).groupby("repeat", sort=True)]


def _bootstrap_rate(sums: Sequence[tuple[float, float]], level: float, seed: int) -> Interval:
    """sum of the first over sum of the second, resampling whole repeats; unbounded where the second is 0."""
    parts = np.array(sums, dtype=np.float64).reshape(-1, 2)
    r = len(parts)
    whole = parts.sum(axis=0)
    point = float(whole[0] / whole[1]) if whole[1] else math.nan
    if not whole[1]:
        return Interval(-math.inf, point, math.inf)
    drawn = np.random.default_rng(seed).multinomial(r, np.full(r, 1 / r), size=_DRAWS) @ parts
    tail = 100 * (1 - level) / 2
    lo, hi = percentiles(drawn[:, 0] / drawn[:, 1], (tail, 100 - tail))
    return Interval(lo, point, hi)
