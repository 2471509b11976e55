"""How far predictions are to be trusted: the factor by which times exceed what was predicted, once in fifty.

Where demand stands above capacity, everybody who gets in is predicted to arrive just in time: with a forecast that is
right on average, half of them are late. So a goal is held against an upper quantile of what a prediction turned out to
mean. The factor follows that quantile online: it rises by STEP x QUANTILE (in its logarithm) with every time above it
and falls by STEP x (1 - QUANTILE) with every other, so that in the long run a share of QUANTILE lies below (Robbins and
Monro's stochastic approximation of a quantile).

Pure: no clock, no lock.
"""

from __future__ import annotations

import math
from typing import Final

QUANTILE: Final = 0.98
STEP: Final = 0.05
LARGEST: Final = 4.0


class Margin:
    """`factor` lies between 1 / LARGEST and LARGEST."""

    def __init__(self) -> None:
        self.factor = 1.0

    def saw(self, predicted_s: float, actual_s: float) -> None:
        """What was predicted, without the factor, and what it came to."""
        is_above = actual_s > predicted_s * self.factor
        step = STEP * QUANTILE if is_above else -STEP * (1 - QUANTILE)
        self.factor = min(max(self.factor * math.exp(step), 1 / LARGEST), LARGEST)
