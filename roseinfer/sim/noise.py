"""How far measured steps lie from what their composition says: ratios as they were seen, and rare stalls.

Without it every simulated tail would be too clean.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

BLOCK_STEPS: Final = 4096


@dataclass(frozen=True, slots=True)
class Noise:
    """`ratios`: quantiles of measured / predicted seconds, ascending, evenly spaced from the 0th to the 100th.

    Apart from them, a step stalls with `stall_probability`: one of `stalls_s` is added to it.
    """

    ratios: tuple[float, ...]
    stall_probability: float
    stalls_s: tuple[float, ...]

    def mean(self) -> tuple[float, float]:
        """The ratio, and the seconds that stalls add to a step: both in the mean of many steps."""
        # Between two quantiles a ratio is drawn evenly, so that the outermost two count half.
        between = [(low + high) / 2 for low, high in pairwise(self.ratios)] or self.ratios
        stall_s = sum(self.stalls_s) / len(self.stalls_s) if self.stalls_s else 0.0
        return sum(between) / len(between), self.stall_probability * stall_s


class NoiseOfRun:
    """The noise of the steps of one simulated run: a function of the seed, the stream and the number of the step."""

    def __init__(self, noise: Noise, seed: int, stream: int = 0) -> None:
        self._noise = noise
        self._seed = seed
        self._stream = stream
        self._ratios: list[float] = []
        self._stalls_s: list[float] = []
        self._first = self._end = 0

    def seconds(self, step: int, noiseless_s: float) -> float:
        """What step number `step` (from 0) lasts that would last `noiseless_s`. Fast for steps in their order."""
        if not self._first <= step < self._end:
            self._draw(step // BLOCK_STEPS)
        place = step - self._first
        return noiseless_s * self._ratios[place] + self._stalls_s[place]

    def _draw(self, block: int) -> None:
        noise = self._noise
        # One array for all three: whatever the tables hold, a step takes the same numbers out of the stream.
        uniform = np.random.default_rng([self._seed, block, self._stream]).random((3, BLOCK_STEPS))
        quantiles = np.linspace(0, 1, len(noise.ratios))
        self._ratios = np.interp(uniform[0], quantiles, noise.ratios).tolist()
        stalls_s = np.zeros(BLOCK_STEPS)
        if noise.stalls_s:
            drawn = np.array(noise.stalls_s)[(uniform[2] * len(noise.stalls_s)).astype(int)]
            stalls_s = np.where(uniform[1] < noise.stall_probability, drawn, 0.0)
        self._stalls_s = stalls_s.tolist()
        self._first = block * BLOCK_STEPS
        self._end = self._first + BLOCK_STEPS
