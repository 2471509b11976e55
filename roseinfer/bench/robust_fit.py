"""Non-negative coefficients of seconds, fitted to relative errors, with rare stalls apart."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from roseinfer.sim.cost_model import LARGEST_RATIO

FAR_OUT_FENCE: Final = 3.0
"""Quartile distances above the upper quartile from where a value is "far out" (Tukey, Exploratory Data Analysis)."""

LEAST_STALL_RATIO: Final = 1.5
"""Less over what is usual is no stall, however alike the rest is."""

_MOST_ROUNDS: Final = 50
_SETTLED: Final = 1e-12
_LARGEST_RATIO: Final = 10.0
"""What a row may count for at most while the coefficients are still far off."""


class RobustFit(NamedTuple):
    """`coefficients` float64[columns] >= 0; `ratios` float64[rows], measured / predicted; `stalled` bool[rows]."""

    coefficients: NDArray[np.float64]
    ratios: NDArray[np.float64]
    stalled: NDArray[np.bool_]


def robust_fit(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> RobustFit:
    """Coefficients such that columns[rows, columns] @ coefficients is near `seconds`[rows] > 0, in relative terms.

    Least squares of measured / predicted - 1, by weights of 1 / predicted from the round before: a short step counts
    as much as a long one, and the mean is met (weights of 1 / measured would lie below it). After each round a row
    is a stall where its ratio is above both the far-out fence of all ratios and LEAST_STALL_RATIO; the next round goes
    without it. At most a quarter of any rows can be stalls.
    """
    predicted = seconds
    stalled = np.zeros(seconds.size, dtype=bool)
    coefficients = np.zeros(columns.shape[1])
    for _ in range(_MOST_ROUNDS):
        before = coefficients, stalled
        coefficients = _non_negative(columns[~stalled], seconds[~stalled], 1 / predicted[~stalled])
        predicted = np.maximum(columns @ coefficients, seconds / _LARGEST_RATIO)
        ratios = seconds / predicted
        lower, upper = np.quantile(ratios, (0.25, 0.75))
        stalled = ratios > max(LEAST_STALL_RATIO, upper + FAR_OUT_FENCE * (upper - lower))
        moved = np.abs(coefficients - before[0]).max() > _SETTLED * coefficients.max()
        if not moved and np.array_equal(stalled, before[1]):
            break
    # Nothing but what a file may hold bounds these: what a stall adds is all of it.
    predicted = np.maximum(columns @ coefficients, seconds / LARGEST_RATIO)
    return RobustFit(coefficients, seconds / predicted, stalled)


def _non_negative(
    columns: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    weighted = columns * weights[:, None]
    sizes = np.linalg.norm(weighted, axis=0)
    used = sizes > 0  # a column of zeros says nothing: its coefficient is 0
    coefficients = np.zeros(columns.shape[1])
    # Columns of one size: attention pairs are in the thousands where requests are a few.
    coefficients[used] = nnls(weighted[:, used] / sizes[used], seconds * weights)[0] / sizes[used]
    return coefficients
