"""Limits on what is in flight that find themselves, fed by how much waiting slows a first token down.

    slowdown = (queue wait + own predicted prefill) / own predicted prefill

It is 1 without load, whatever the prompt, and holds no decode. A limit does move with output lengths all the same: it
counts those that decode as well, and the same wait comes with more in flight where they decode for longer.

A window is SAMPLES of them, judged by their median, which a few requests behind a long prompt do not move:

    Aimd      above tolerance: L = int(0.9 L), else L + 1.  Fixed point: none, it saws between 0.9 and 1 of the
              largest limit that keeps the slowdown within tolerance, the lower the noisier.
    Gradient  g = clamp(tolerance / slowdown, 0.5, 1); L moves by 0.2 (L g - L) above tolerance, by 0.2 sqrt(L) within.
              Fixed point: the limit at which the slowdown equals the tolerance; held above, it falls to its floor.

The headroom sqrt(L) comes within tolerance only: where it is added always, L settles at headroom / (1 - g), which is
without bound as g nears 1, so mild overload makes a limit creep up (Netflix/concurrency-limits#134).
Neither grows in a window in which less than half of the limit was in flight: nothing has tested it then.

Every change begins an epoch. A sample carries the epoch in which its request got in; older ones are ignored, so
that a limit is judged by what it let in, and a burst of late samples lowers it once.

Formulas, names and defaults: Netflix/concurrency-limits (`AIMDLimit`, `GradientLimit`, `WindowedLimit`) and Envoy's
adaptive concurrency (median, square root as headroom). Their floors of 20 would never limit a small server: it is 1.

Pure: no clock, no lock. Whoever reserves guards it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from statistics import median
from typing import ClassVar, Final

from roseinfer.errors import InputError, check_whole

SAMPLES: Final = 10
"""Of one epoch that it takes for a judgement."""

BACKOFF: Final = 0.9
LEAST_GRADIENT: Final = 0.5
SMOOTHING: Final = 0.2


class _AdaptiveLimit(ABC):
    """A limit from `floor` to `most`, `init` at first.

    Raises InputError for a tolerance that is not above 1, and unless 1 <= floor <= init <= most.
    """

    name: ClassVar[str]

    def __init__(self, *, slowdown: float = 3.0, floor: int = 1, init: int = 20, most: int = 1000) -> None:
        if not 1.0 < slowdown < math.inf:
            raise InputError("slowdown", slowdown, "must be a finite number > 1, the slowdown without load")
        check_whole("floor", floor, 1)
        check_whole("init", init, floor)
        check_whole("most", most, init)
        self.tolerance = slowdown
        self.floor = floor
        self.most = most
        self.limit = init
        self.epoch = 0
        self._exact = float(init)  # in between whole limits
        self._slowdowns: list[float] = []
        self._peak_inflight = 0

    def sample(self, slowdown: float, epoch: int, inflight: int) -> None:
        """Of one request that has its seat: its slowdown, the epoch in which it got in, and what is in flight.

        One that was dropped because it waited too long counts with infinity.
        """
        if epoch != self.epoch:
            return
        self._slowdowns.append(slowdown)
        self._peak_inflight = max(self._peak_inflight, inflight)
        if len(self._slowdowns) < SAMPLES:
            return
        typical, is_tested = median(self._slowdowns), self._peak_inflight >= self.limit // 2
        self._slowdowns.clear()
        self._peak_inflight = 0
        if typical <= self.tolerance and not is_tested:
            return
        self._exact = min(max(self._next(self._exact, typical), float(self.floor)), float(self.most))
        if int(self._exact) != self.limit:
            self.limit = int(self._exact)
            self.epoch += 1

    @abstractmethod
    def _next(self, limit: float, slowdown: float) -> float:
        """The limit after a window, before it is clamped."""


class Aimd(_AdaptiveLimit):
    """Additive increase, multiplicative decrease."""

    name = "aimd"

    def _next(self, limit: float, slowdown: float) -> float:
        return int(limit * BACKOFF) if slowdown > self.tolerance else limit + 1


class Gradient(_AdaptiveLimit):
    """Shrinks by the share by which the slowdown exceeds its tolerance."""

    name = "gradient"

    def _next(self, limit: float, slowdown: float) -> float:
        if slowdown <= self.tolerance:
            return limit + SMOOTHING * math.sqrt(limit)
        gradient = max(self.tolerance / slowdown, LEAST_GRADIENT)
        return limit - SMOOTHING * (1 - gradient) * limit
