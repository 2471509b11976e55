"""Random numbers of a workload: each of its parts has a stream of its own, drawn in blocks.

Whatever is drawn of one part, the others stay as they are, and the first requests of a longer run are those of a
shorter one.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Final

import numpy as np

BLOCK_ROWS: Final = 65_536


class Stream(IntEnum):
    """Never 0, and last in the seed: a seed of fewer words is one that ends in zeros."""

    GAPS = 1
    PROMPT_LENGTHS = 2
    OUTPUT_LENGTHS = 3
    TICKS = 4
    PRIORITIES = 5


def block_rngs(seed: int, repeat: int, stream: Stream) -> Iterator[np.random.Generator]:
    """A generator of its own for each block of BLOCK_ROWS rows, without end."""
    block = 0
    while True:
        yield np.random.default_rng([seed, repeat, block, stream])
        block += 1


def prompt_seed(seed: int, repeat: int, shape: int) -> int:
    """What the texts of a repeat follow from; `shape` counts the shapes of cells that one server meets, from 0.

    Texts of two shapes are not alike then: a server that has met the one must not know the other.
    """
    return int(np.random.SeedSequence([seed, repeat, shape]).generate_state(1)[0])
