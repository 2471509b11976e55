"""Where along an axis something ends to hold: strides until it is between two values, then bisection.

PASS, FAIL or UNKNOWN is what a value can be. What is found is the last PASS and the first FAIL; values that are
UNKNOWN stay between them, and are never taken for either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from roseinfer.bench.judgement import Verdict


class Edge(NamedTuple):
    """Where something ends to hold: the last value that was seen to, the first that was seen not to; None: none was."""

    holds: float | None
    fails: float | None


@dataclass(frozen=True)
class Axis:
    """The values that may be tried, and how close is close enough. On a `is_whole` axis they are whole numbers."""

    low: float
    high: float
    tolerance: float
    is_whole: bool

    def moved(self, x: float, ratio: float) -> float | None:
        """`x` times the ratio, within the axis; None at its end."""
        further = self._tidy(x * ratio)
        if self.is_whole and further == x:
            further = x + (1 if ratio > 1 else -1)
        further = min(max(further, self.low), self.high)
        return None if further == x else further

    def middle(self, a: float, b: float) -> float | None:
        """Between the two, on a scale of ratios; None where they are close enough."""
        low, high = sorted((a, b))
        if high - low <= (1 if self.is_whole else 0) or high <= low * (1 + self.tolerance):
            return None
        middle = self._tidy(math.sqrt(low * high))
        return middle if low < middle < high else None

    def _tidy(self, x: float) -> float:
        return float(round(x)) if self.is_whole else float(f"{x:.4g}")


def find_edge(
    verdict_at: Callable[[float], Verdict], axis: Axis, start: float, *, better: int, ratio: float = 2.0
) -> Edge:
    """From `start` in strides that grow from `ratio` to 2 until a PASS and a FAIL are met, then by bisection.

    `better` is the side on which PASS is expected: -1 below, 1 above. UNKNOWN is neither: what lies between the PASS
    and it, and between it and the FAIL, is narrowed apart.
    """
    seen: dict[float, Verdict] = {}

    def is_at(x: float, wanted: Verdict) -> bool:
        if x not in seen:
            seen[x] = verdict_at(x)
        return seen[x] is wanted

    ends = ((Verdict.PASS, better), (Verdict.FAIL, -better))
    for wanted, side in ends:
        tried: float | None = start
        stride = ratio
        while tried is not None and not is_at(tried, wanted):
            tried = axis.moved(tried, stride**side)
            stride = min(2.0, stride**2)
    for wanted, side in ends:
        edge = edge_of(seen, better)
        end = edge.holds if wanted is Verdict.PASS else edge.fails
        if end is None:
            continue
        beyond = [x for x in seen if seen[x] is not wanted and (end - x) * side > 0]
        if not beyond:
            continue
        other = max(beyond) if side > 0 else min(beyond)  # the nearest
        while (middle := axis.middle(end, other)) is not None:
            if is_at(middle, wanted):
                end = middle
            else:
                other = middle
    return edge_of(seen, better)


def edge_of(seen: Mapping[float, Verdict], better: int) -> Edge:
    """The first FAIL, coming from the better side, and the last PASS before it."""
    ordered = sorted(seen, reverse=better > 0)
    fails = next((x for x in ordered if seen[x] is Verdict.FAIL), None)
    before = ordered if fails is None else ordered[: ordered.index(fails)]
    return Edge(next((x for x in reversed(before) if seen[x] is Verdict.PASS), None), fails)
