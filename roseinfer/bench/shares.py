"""Shares of the offered requests over several repeats, and how sure they are: the repeat is what is resampled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roseinfer.bench.stats import Interval, percentiles

_DRAWS = 2000


def share_interval(counts: ArrayLike, offered: ArrayLike, *, seed: int) -> Interval:
    """sum(counts) / sum(offered) (each [repeats]) with its 95 % interval; unbounded where one repeat is all."""
    part, whole = np.asarray(counts, dtype=np.float64), np.asarray(offered, dtype=np.float64)
    if not whole.sum():
        return Interval(math.nan, math.nan, math.nan)
    return _interval(float(part.sum() / whole.sum()), resampled(part, whole, seed=seed))


def share_gap(a: ArrayLike, b: ArrayLike, offered: ArrayLike, *, seed: int) -> Interval:
    """How much larger the share `a` is than `b` of the same offered requests, pair by pair (each [repeats])."""
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    return share_interval(difference, offered, seed=seed)


def resampled(counts: NDArray[np.float64], offered: NDArray[np.float64], *, seed: int) -> NDArray[np.float64]:
    """Shares that as many repeats, drawn with replacement, would have had: float64[draws]; empty of one repeat."""
    n = counts.size
    if n < 2:
        return np.empty(0)
    times = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=_DRAWS)
    shares: NDArray[np.float64] = (times @ counts) / (times @ offered)
    return shares


def _interval(point: float, draws: NDArray[np.float64]) -> Interval:
    if not draws.size:
        return Interval(-math.inf, point, math.inf)
    lo, hi = percentiles(draws, (2.5, 97.5))
    return Interval(lo, point, hi)
