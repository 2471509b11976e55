"""Shares of the offered requests over several repeats, and how sure they are: the repeat is the unit of sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roseinfer.bench.stats import Interval, median_interval, percentiles

_DRAWS = 2000

FEWEST_PAIRS: Final = 6
"""So many give a median an interval of 95 %: fewer all lie on one side of it more than once in 20."""


def share_interval(counts: ArrayLike, offered: ArrayLike, *, seed: int) -> Interval:
    """sum(counts) / sum(offered) (each [repeats]) with its 95 % interval; unbounded where one repeat is all."""
    part, whole = np.asarray(counts, dtype=np.float64), np.asarray(offered, dtype=np.float64)
    if not whole.sum():
        return Interval(math.nan, math.nan, math.nan)
    return _interval(float(part.sum() / whole.sum()), resampled(part, whole, seed=seed))


def paired_gap(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> Interval:
    """By how much the share of `a` lies above that of `b` in the median repeat; each has (count, offered) per repeat.

    By order statistics: unbounded below `FEWEST_PAIRS`. A bootstrap of so few pairs is far too narrow.
    """
    shares_a, shares_b = ([count / offered for count, offered in repeats] for repeats in (a, b))
    return median_interval(np.subtract(shares_a, shares_b))


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
