"""Do two sides differ in distribution, also where their typical values agree?

The statistic is Kolmogorov and Smirnov's largest distance between the two distribution functions. Its textbook
p-value takes values for independent, and the requests of one burst are places in one queue; so p is found by
giving whole repeats to the sides anew (within blocks, where the sides share them) and counting how often the
distance is as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MOST: Final = 10_000
"""Ways to share out the repeats: up to so many are all tried, of more so many are drawn."""
_GRID: Final = 1000
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
    for some in labelings:
        hits += int(np.count_nonzero(distances(some) >= found - 1e-12))
        total += len(some)
    return Distance(found, hits / total if is_all else (1 + hits) / (1 + total))


def _labelings(
    a: int, b: int, paired: bool, rng: np.random.Generator
) -> tuple[Iterator[NDArray[np.float64]], bool]:
    """Which repeats are of side a: float64[some, a + b] each, and whether these are all ways."""
    if paired:
        all_of_them = 2**a <= _MOST
        rows = (
            np.array([*swapped, *(1 - x for x in swapped)], dtype=np.float64)
            for swapped in (product((1, 0), repeat=a) if all_of_them else rng.integers(0, 2, size=(_MOST, a)))
        )
    else:
        all_of_them = math.comb(a + b, a) <= _MOST
        places = (
            combinations(range(a + b), a)
            if all_of_them
            else (rng.permutation(a + b)[:a] for _ in range(_MOST))
        )
        rows = (np.bincount(np.array(chosen), minlength=a + b).astype(np.float64) for chosen in places)
    return _in_batches(rows), all_of_them


def _in_batches(rows: Iterator[NDArray[np.float64]]) -> Iterator[NDArray[np.float64]]:
    batch: list[NDArray[np.float64]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _AT_ONCE:
            yield np.array(batch)
            batch = []
    if batch:
        yield np.array(batch)
