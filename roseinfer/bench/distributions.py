"""Do two sides differ in distribution, also where their typical values agree?

The statistic is Kolmogorov and Smirnov's largest distance between the two distribution functions. Its textbook
p-value takes values for independent, and the requests of one burst are places in one queue; so p is found by
giving whole repeats to the sides anew (within blocks, where the sides share them) and counting how often the
distance is as large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MOST: Final = 4000
"""Ways to share out the repeats: up to so many are all tried, of more so many are drawn."""
_GRID: Final = 500
"""Values at which the distribution functions are compared, order statistics of all values together."""
_AT_ONCE: Final = 500


class Distance(NamedTuple):
    """The largest difference of two distribution functions, and how often chance makes one as large."""

    distance: float
    p: float


def distance_between(
    a: Sequence[NDArray[np.float64]], b: Sequence[NDArray[np.float64]], *, paired: bool, seed: int
) -> Distance:
    """`a` and `b` hold the values of each repeat; paired ones share a block at the same place. NaN without values."""
    runs = [np.sort(run) for run in (*a, *b)]
    values = np.sort(np.concatenate([np.empty(0), *runs]))
    if not sum(run.size for run in a) or not sum(run.size for run in b):
        return Distance(math.nan, math.nan)
    grid = values[np.unique(np.linspace(0, values.size - 1, min(values.size, _GRID)).astype(np.int64))]
    held = np.array([np.searchsorted(run, grid, side="right") for run in runs], dtype=np.float64)
    sizes = np.array([run.size for run in runs], dtype=np.float64)

    def distances(in_a: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore", divide="ignore"):  # a side may get the empty repeats only
            ours = (in_a @ held) / (in_a @ sizes)[:, None]
            theirs = ((1 - in_a) @ held) / ((1 - in_a) @ sizes)[:, None]
        return np.asarray(np.nan_to_num(np.abs(ours - theirs)).max(axis=1), dtype=np.float64)

    measured = np.array([[1.0] * len(a) + [0.0] * len(b)])
    found = float(distances(measured)[0])
    labelings, is_all = _labelings(len(a), len(b), paired, np.random.default_rng(seed))
    hits = total = 0
    for first in range(0, len(labelings), _AT_ONCE):
        some = labelings[first : first + _AT_ONCE]
        hits += int(np.count_nonzero(distances(some) >= found - 1e-12))
        total += len(some)
    return Distance(found, hits / total if is_all else (1 + hits) / (1 + total))


def _labelings(a: int, b: int, paired: bool, rng: np.random.Generator) -> tuple[NDArray[np.float64], bool]:
    """Which repeats are of side a (float64[labelings, a + b] of 0 and 1), and whether these are all labelings."""
    if paired:
        is_all = 2**a <= _MOST
        kept = (
            np.array(list(product((1.0, 0.0), repeat=a))) if is_all else rng.integers(0, 2, (_MOST, a)) * 1.0
        )
        return np.hstack([kept, 1 - kept]), is_all
    measured = np.repeat([1.0, 0.0], [a, b])
    if math.comb(a + b, a) > _MOST:
        return rng.permuted(np.tile(measured, (_MOST, 1)), axis=1), False
    chosen = np.array(list(combinations(range(a + b), a)))
    rows = np.zeros((len(chosen), a + b))
    np.put_along_axis(rows, chosen, 1.0, axis=1)
    return rows, True
