"""Ratios of two sides from their per-repeat values, with exact intervals, and how many repeats a ratio needs.

The estimate is Hodges and Lehmann's on the logarithms; the interval holds the ratios that the matching exact
test would not reject (Hollander & Wolfe, Nonparametric Statistical Methods, chapters 3 and 4): the signed-rank
test where the two sides share blocks, the rank-sum test where they don't. A level that so few repeats cannot
carry gives infinite bounds. Ties among the values make the intervals wider than need be, never narrower. A value
of 0 ranks below every other, an infinite one above, so that a bound or an estimate can be 0 or infinite. Above
_MANY repeats the null distribution is taken for normal.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from roseinfer.bench.stats import Interval
from roseinfer.errors import InputError

ENOUGH_STANDARD_ERROR: Final = math.log(1.15 / 1.10) / 1.28
"""Of a log ratio, 0.035: at a true ratio of 1.15 nine estimates in ten lie above 1.10 (1.28 is the 90 % quantile)."""

_TIE: Final = 1 + 1e-9
"""A tail probability equal to its bound must count as within it, whatever the last bit says."""

_LOG_OF_INFINITY: Final = 1e6
"""Above the logarithm of any double, and finite, as is its negative for 0: so the ratio of 0 to 0 is 1."""

_LARGEST_LOG: Final = math.log(sys.float_info.max)

_MANY: Final = 300
"""Repeats a side up to which the null distributions are counted out."""

_NOTHING: Final = Interval(-math.inf, math.nan, math.inf)


def paired_ratio(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> Interval:
    """The typical ratio a / b over paired blocks (each float64[blocks]), with the exact signed-rank interval.

    The estimate is the median of the Walsh averages of log(a / b), the bounds are order statistics of these.
    Blocks with a NaN on either side are left out. Unbounded when the pairs cannot carry the level (fewer
    than 6 at 95 %); NaN and unbounded where there is no value, or a negative one. Raises InputError when the
    sides differ in length.
    """
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if left.shape != right.shape:
        raise InputError("pairs", f"{left.size} and {right.size}", "both sides need the same blocks")
    paired = ~(np.isnan(left) | np.isnan(right))
    left, right = left[paired], right[paired]
    if not _have_ratio(left, right):
        return _NOTHING
    logs = _logs(left) - _logs(right)
    i, j = np.triu_indices(logs.size)
    return _between((logs[i] + logs[j]) / 2, _signed_rank_cut(logs.size, (1 - level) / 2))


def unpaired_ratio(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> Interval:
    """The typical ratio a / b of independent repeats (float64[its repeats] each), with the exact rank-sum interval.

    The estimate is the median of all log(a_i / b_j), the bounds are order statistics of these. NaN values
    are left out. Unbounded when the repeats cannot carry the level (fewer than 4 a side at 95 %); NaN and
    unbounded where a side has no value, or a negative one.
    """
    left, right = _measured(a), _measured(b)
    if not _have_ratio(left, right):
        return _NOTHING
    logs = np.subtract.outer(_logs(left), _logs(right)).ravel()
    return _between(logs, _rank_sum_cut(left.size, right.size, (1 - level) / 2))


def repeats_needed(a: ArrayLike, b: ArrayLike, paired: bool) -> int:
    """Repeats a side at which the standard error of log(a / b) is at most ENOUGH_STANDARD_ERROR, from this spread.

    With pairs the spread is the standard deviation of the log ratios, else both sides' variances add up. At
    least 2; and 2 where fewer values than that leave the spread unknown. Zeros among other values make it huge.
    """
    if paired:
        left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
        logs = [_measured(_logs(left) - _logs(right))]
    else:
        logs = [_logs(_measured(a)), _logs(_measured(b))]
    variance = sum(float(np.var(values, ddof=1)) for values in logs if values.size >= 2)
    return max(2, math.ceil(variance / ENOUGH_STANDARD_ERROR**2))


def fewest_repeats(level: float, paired: bool) -> int:
    """The repeats a side from which an interval at `level` has bounds: 6 pairs, or 4 against 4, at 95 %."""
    n = 1
    while 2 * rarest((n, n), paired) > (1 - level) * _TIE:
        n += 1
    return n


def rarest(repeats: tuple[int, int], paired: bool) -> float:
    """The probability that chance puts all repeats of one side above the other's, in pairs each above its own."""
    return float(0.5 ** min(repeats)) if paired else 1 / math.comb(sum(repeats), repeats[0])


def _between(logs: NDArray[np.float64], cut: int) -> Interval:
    """The median of `logs`, and the order statistics that lie `cut` from both ends; unbounded where `cut` is 0."""
    ordered = np.sort(logs)
    point = _ratio(float(np.median(ordered)))
    if cut == 0:
        return Interval(-math.inf, point, math.inf)
    return Interval(_ratio(float(ordered[cut - 1])), point, _ratio(float(ordered[-cut])))


def _ratio(log: float) -> float:
    return math.inf if log > _LARGEST_LOG else math.exp(log)


def _signed_rank_cut(n: int, tail: float) -> int:
    """How many values of the signed-rank statistic, from 0 up, together have at most the probability `tail`."""
    if n > _MANY:
        return _normal_cut(n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24, tail)
    return int(np.count_nonzero(np.cumsum(_signed_rank_pmf(n)) <= tail * _TIE))


def _rank_sum_cut(m: int, n: int, tail: float) -> int:
    """How many values of the rank-sum statistic, from 0 up, together have at most the probability `tail`."""
    if min(m, n) > _MANY:
        return _normal_cut(m * n / 2, m * n * (m + n + 1) / 12, tail)
    return int(np.count_nonzero(np.cumsum(_rank_sum_pmf(m, n)) <= tail * _TIE))


def _normal_cut(mean: float, variance: float, tail: float) -> int:
    """With the usual correction for continuity."""
    return max(0, math.floor(mean + 0.5 + math.sqrt(variance) * float(ndtri(tail))))


@lru_cache(maxsize=64)
def _signed_rank_pmf(n: int) -> NDArray[np.float64]:
    """P(T = t) of the signed-rank statistic of n values without ties: float64[n (n + 1) / 2 + 1].

    Each rank is in the sum or not, with even chances, so a rank r averages the distribution with itself
    shifted by r.
    """
    pmf = np.ones(1)
    for rank in range(1, n + 1):
        pmf = (np.pad(pmf, (0, rank)) + np.pad(pmf, (rank, 0))) / 2
    return pmf


@lru_cache(maxsize=64)
def _rank_sum_pmf(m: int, n: int) -> NDArray[np.float64]:
    """P(U = u) of the rank-sum statistic of m against n values without ties, u up to the middle: float64[m n // 2 + 1].

    The counts are the coefficients of the Gaussian binomial, the product over i = 1..m of
    (1 - q^(n + i)) / (1 - q^i). Of each factor the numerator subtracts the series shifted by n + i, and the
    denominator sums it in strides of i; i / (n + i) turns the counts into probabilities as it goes. Up to the
    middle the coefficients only rise, so nothing cancels.
    """
    size = m * n // 2 + 1
    pmf = np.zeros(size)
    pmf[0] = 1
    for i in range(1, m + 1):
        shifted = pmf[: max(0, size - n - i)].copy()
        pmf[n + i :] -= shifted
        rows = -(-size // i)
        strided = np.pad(pmf, (0, rows * i - size)).reshape(rows, i)
        pmf = np.cumsum(strided, axis=0).ravel()[:size] * (i / (n + i))
    return pmf


def _have_ratio(left: NDArray[np.float64], right: NDArray[np.float64]) -> bool:
    return bool(left.size and right.size and left.min() >= 0 and right.min() >= 0)


def _measured(values: ArrayLike) -> NDArray[np.float64]:
    flat = np.asarray(values, dtype=np.float64).ravel()
    return flat[~np.isnan(flat)]


def _logs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of values >= 0. NaN stays NaN."""
    with np.errstate(divide="ignore"):
        logs: NDArray[np.float64] = np.clip(np.log(values), -_LOG_OF_INFINITY, _LOG_OF_INFINITY)
    return logs
