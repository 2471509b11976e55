"""Goodput: the share of the OFFERED requests that were served within every goal (`--goodput ttft:250`).

A goal bounds one latency of a single request, in milliseconds. What was refused, failed or never ended was not
served, so that load which is shed can never raise the share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from roseinfer.bench.records import Outcome
from roseinfer.errors import InputError

GOAL_METRICS: Final = ("ttft", "ttft_from_send", "queue_wait", "prefill", "tpot", "largest_itl", "e2el")

_FORM: Final = re.compile(r"([a-z0-9_]+):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Goal:
    """What one latency of a single request must not exceed: ttft:250."""

    metric: str
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric}:{self.limit_ms:g}"


def parse_goal(text: str) -> Goal:
    """`ttft:250` as a Goal. Raises InputError on another form, an unknown metric or a bound that is not above 0."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise InputError("--goodput", text, "must look like ttft:250 (metric, milliseconds)")
    metric, limit_ms = found[1], float(found[2])
    if metric not in GOAL_METRICS:
        raise InputError("--goodput", text, f"unknown metric {metric!r}, known are {', '.join(GOAL_METRICS)}")
    if not 0 < limit_ms < math.inf:
        raise InputError("--goodput", text, "the milliseconds must be a finite number above 0")
    return Goal(metric, limit_ms)


def met(derived: pd.DataFrame, goals: Sequence[Goal]) -> NDArray[np.bool_]:
    """Which requests (rows of `records.derive`) were served within all goals: bool[len(derived)].

    Served are the completed. A latency that a request does not have (tpot of a single token) breaks no goal.
    """
    served = np.array(derived["outcome"] == Outcome.COMPLETED)
    for goal in goals:
        served &= ~(1e3 * derived[f"{goal.metric}_s"].to_numpy(dtype=np.float64) > goal.limit_ms)
    return served
