"""The class of each request, drawn ahead like all else of a workload."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roseinfer.bench.priorities import PriorityMix
from roseinfer.bench.seeds import BLOCK_ROWS, Stream, block_rngs


class Classes(NamedTuple):
    """The class of each of n requests: `places` (int64[n]) in `names`, which is its priority, 0 the highest."""

    names: tuple[str, ...]
    places: NDArray[np.int64]

    def rows(self, which: slice) -> Classes:
        """Those of some of the requests."""
        return Classes(self.names, self.places[which])

    def name(self, index: int) -> str:
        """That of one request."""
        return self.names[int(self.places[index])]


def class_blocks(mix: PriorityMix, *, seed: int, repeat: int) -> Iterator[Classes]:
    """Those of request after request, in blocks of BLOCK_ROWS, without end."""
    bounds = np.cumsum(mix.shares)[:-1]
    for rng in block_rngs(seed, repeat, Stream.PRIORITIES):
        places = np.searchsorted(bounds, rng.random(BLOCK_ROWS), side="right")
        yield Classes(mix.names, places.astype(np.int64))


def draw_classes(mix: PriorityMix, n: int, *, seed: int, repeat: int) -> Classes:
    """Those of the first `n` requests."""
    blocks = islice(class_blocks(mix, seed=seed, repeat=repeat), -(-n // BLOCK_ROWS))
    places = np.concatenate([*(block.places for block in blocks), np.empty(0, np.int64)])[:n]
    return Classes(mix.names, places)
