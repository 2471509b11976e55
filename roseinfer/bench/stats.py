"""Percentiles by nearest rank, and intervals that say how sure they are.

The method is the nearest rank (numpy's "inverted_cdf") everywhere, counted in integers: sums of floats come
out one rank too high at some sample sizes. The unit of sampling is the run, not the request: the requests
of one burst are places in one queue, so the intervals here resample or rank whole runs. A bound that the
sample cannot give is infinite ("unbounded"), and a number that nothing was measured for is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, bdtrc

from roseinfer.errors import InputError

PERCENTILE_METHOD: Final = "inverted_cdf"

_TIE: Final = 1 + 1e-9
"""A tail probability equal to its bound must count as within it, whatever the last bit says."""


class Interval(NamedTuple):
    """An estimate between its bounds: infinite where the sample cannot bound it, NaN where it is empty."""

    lo: float
    point: float
    hi: float


def percentile(values: ArrayLike, p: float) -> float:
    """The p-th percentile of `values` (any shape) by nearest rank; NaN when nothing was measured.

    NaN entries are "not measured" and count nowhere; inf counts as the largest value. Raises InputError
    unless 0 <= p <= 100.
    """
    return percentiles(values, (p,))[0]


def spread_of(values: ArrayLike) -> dict[str, float] | None:
    """p50, p99 and the largest; None of nothing."""
    p50, p99, largest = percentiles(values, (50, 99, 100))
    return None if math.isnan(largest) else {"p50": p50, "p99": p99, "max": largest}


def percentiles(values: ArrayLike, ps: Sequence[float]) -> list[float]:
    """`percentile` for every p of `ps`, with one sort."""
    ordered = _ordered(values)
    return [_at_rank(ordered, nearest_rank(p, ordered.size)) for p in ps]


def nearest_rank(p: float, n: int) -> int:
    """ceil(n * p / 100) counted from 1 (p = 0 gives the smallest), 0 when n = 0.

    `p` is taken as the decimal number it prints as: 99.9 is 999/1000, not the nearest float to it.
    """
    if not 0 <= p <= 100:
        raise InputError("percentile", p, "must lie between 0 and 100")
    return min(n, max(1, math.ceil(n * _exact(p) / 100)))


def smallest_sample(p: float) -> int:
    """The sample size from which the p-th percentile is below the maximum: 100 for p99, 1000 for p99.9."""
    if not 0 <= p < 100:
        raise InputError("percentile", p, "must lie between 0 and 100, and below 100")
    return max(2, math.ceil(100 / (100 - _exact(p))))


def trusted_sample(p: float, level: float = 0.95) -> int:
    """The sample size from which the maximum reaches the true p-th percentile with probability `level`.

    The smallest n with (p/100)^n <= 1 - level, for independent values: 59 for p95, 299 for p99.
    """
    if not 0 < p < 100:
        raise InputError("percentile", p, "must lie between 0 and 100, both excluded")
    return math.ceil(math.log(1 - level) / math.log(p / 100))


def percentile_label(p: float, n: int) -> str:
    """What that percentile of `n` values may be called: "p99", "max (n=64)" where it is that, or "n/a"."""
    if n == 0:
        return "n/a"
    return f"max (n={n})" if nearest_rank(p, n) == n else f"p{p:g}"


def order_ranks(n: int, q: float, level: float = 0.95) -> tuple[int, int]:
    """Ranks (from 1) of the order statistics that hold the quantile q of n independent values with `level`.

    Exact, distribution free: the largest lo with P(Bin(n, q) < lo) <= a/2 and the smallest hi with
    P(Bin(n, q) >= hi) <= a/2, a = 1 - level. A lo of 0 or a hi of n + 1 is unbounded.
    """
    tail = float((1 - _exact(level)) / 2) * _TIE
    k = np.arange(n)
    lo = int(np.count_nonzero(bdtr(k, n, q) <= tail))
    hi = n + 1 - int(np.count_nonzero(bdtrc(k, n, q) <= tail))
    return lo, hi


def median_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """The median (nearest rank) with its order-statistic interval; unbounded below 6 values at 95 %."""
    ordered = _ordered(values)
    n = ordered.size
    if n == 0:
        return Interval(math.nan, math.nan, math.nan)
    lo, hi = order_ranks(n, 0.5, level)
    return Interval(
        float(ordered[lo - 1]) if lo >= 1 else -math.inf,
        _at_rank(ordered, nearest_rank(50, n)),
        float(ordered[hi - 1]) if hi <= n else math.inf,
    )


def cluster_bootstrap(
    runs: Sequence[NDArray[np.float64]], p: float, *, draws: int = 2000, seed: int, level: float = 0.95
) -> Interval:
    """The pooled p-th percentile of `runs` (each float64[its n]) with an interval that resamples whole runs.

    Each draw takes as many runs as there are, with replacement, and reads the percentile of their union.
    The bounds are percentiles of the draws. Runs without a measured value take no part; one run alone is
    unbounded, because nothing says how runs differ. Identical runs give zero width. Same seed, same answer.
    """
    clusters = [ordered for run in runs if (ordered := _ordered(run)).size]
    if not clusters:
        return Interval(math.nan, math.nan, math.nan)
    if len(clusters) == 1:
        return Interval(-math.inf, _at_rank(clusters[0], nearest_rank(p, clusters[0].size)), math.inf)
    pooled = np.sort(np.concatenate(clusters))
    point = _at_rank(pooled, nearest_rank(p, pooled.size))

    n_runs = len(clusters)
    times_drawn = np.random.default_rng(seed).multinomial(n_runs, np.full(n_runs, 1 / n_runs), size=draws)
    sizes = np.array([cluster.size for cluster in clusters])
    share = _exact(p) / 100
    ranks = np.maximum(1, -(-(times_drawn @ sizes) * share.numerator // share.denominator))

    # Bisect for all draws at once, over the pooled values: a value is reached once the drawn runs hold
    # `rank` values up to it. Nothing of the size draws x values is ever made.
    first, last = np.zeros(draws, dtype=np.int64), np.full(draws, pooled.size - 1)
    while np.any(first < last):
        middle = (first + last) // 2
        value, back = np.unique(pooled[middle], return_inverse=True)
        held = np.zeros(draws, dtype=np.int64)
        for cluster, times in zip(clusters, times_drawn.T, strict=True):
            held += times * np.searchsorted(cluster, value, side="right")[back]
        reached = held >= ranks
        first, last = np.where(reached, first, middle + 1), np.where(reached, middle, last)
    tail = 100 * float((1 - _exact(level)) / 2)
    lo, hi = percentiles(pooled[first], (tail, 100 - tail))
    return Interval(lo, point, hi)


def _ordered(values: ArrayLike) -> NDArray[np.float64]:
    flat = np.asarray(values, dtype=np.float64).ravel()
    return np.sort(flat[~np.isnan(flat)])


def _at_rank(ordered: NDArray[np.float64], rank: int) -> float:
    return float(ordered[rank - 1]) if rank >= 1 else math.nan


@lru_cache(maxsize=64)
def _exact(number: float) -> Fraction:
    return Fraction(str(float(number)))
