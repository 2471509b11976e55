"""Rows of loads of every shape at a made-up server: slots by the limit, one request served at a time, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.summary import sort_cells, summarise
from tests.bench.rows import as_read, facts_by_cell

SERVICE_S = 0.02


def served(
    scheduled_s: Sequence[float] | NDArray[np.float64],
    *,
    arrival: str,
    limit: int | None = None,
    burst_size: int | None = None,
    request_rate: float | None = None,
    repeat: int = 0,
    service_s: float = SERVICE_S,
) -> pd.DataFrame:
    """One cell and repeat. A request is refused when `limit` others hold a slot; each takes `service_s`."""
    rows: list[dict[str, Any]] = []
    released: list[float] = []
    free_s = 0.0
    for index, due_s in enumerate(map(float, scheduled_s)):
        row: dict[str, Any] = {
            "run_id": "run",
            "cell_id": f"{limit}-{burst_size}-{request_rate}",
            "repeat": repeat,
            "request_index": index,
            "target": "sim",
            "arrival": arrival,
            "admission": str(AdmissionSpec(limit)),
            "max_inflight": limit,
            "burst_size": burst_size,
            "prompt_len": 32,
            "output_len": 2,
            "request_rate": request_rate,
            "attempts": 1,
        }
        row |= dict.fromkeys(("scheduled_s", "permitted_s", "sent_s"), due_s)
        if limit is not None and sum(end > due_s for end in released) >= limit:
            row |= {"rejected_s": due_s, "ended_s": due_s, "outcome": "rejected", "reject_stage": "submit"}
        else:
            start_s = max(free_s, due_s)
            first_s, free_s = start_s + service_s / 2, start_s + service_s
            released.append(free_s)
            row |= dict.fromkeys(("reserved_s", "admitted_s"), due_s)
            row |= dict.fromkeys(("first_token_s", "received_first_s"), first_s)
            row |= dict.fromkeys(
                ("last_token_s", "received_last_s", "finished_s", "ended_s", "released_s"), free_s
            )
            row |= {"first_scheduled_s": start_s, "token_times_s": [first_s, free_s]}
            row |= {"outcome": "completed", "output_tokens": 2}
        rows.append(row)
    return as_read(rows)


def summary_of(requests: pd.DataFrame) -> pd.DataFrame:
    return sort_cells(summarise(requests, facts_by_cell(requests)))


def poisson(rate: float, n: int, repeat: int) -> NDArray[np.float64]:
    gaps = np.random.default_rng(repeat).exponential(1 / rate, n)
    scheduled_s: NDArray[np.float64] = np.cumsum(gaps) - gaps[0]
    return scheduled_s


def rates(
    values: Sequence[float] = (10, 25, 40, 60, 100),
    limits: Sequence[int | None] = (None, 4),
    repeats: int = 6,
    n: int = 120,
) -> pd.DataFrame:
    """A sweep of Poisson arrivals; the server takes 50 requests/s."""
    return pd.concat(
        [
            served(poisson(rate, n, repeat), arrival="poisson", limit=limit, request_rate=rate, repeat=repeat)
            for rate, limit, repeat in product(values, limits, range(repeats))
        ],
        ignore_index=True,
    )


def bursts_over_background(limits: Sequence[int | None] = (None, 8)) -> pd.DataFrame:
    """20 requests/s without end, and on top of them bursts of 12 at 1 s and at 2 s."""
    scheduled_s = np.sort([*np.arange(60) / 20 + 0.003, *[1.0] * 12, *[2.0] * 12])
    return pd.concat(
        [
            served(
                scheduled_s - scheduled_s[0],
                arrival="constant",
                limit=limit,
                burst_size=12,
                request_rate=20.0,
            )
            for limit in limits
        ],
        ignore_index=True,
    )


def periodic_bursts(limits: Sequence[int | None] = (None, 4)) -> pd.DataFrame:
    """Three bursts of 10, half a second apart."""
    scheduled_s = np.repeat([0.0, 0.5, 1.0], 10)
    return pd.concat(
        [served(scheduled_s, arrival="burst", limit=limit, burst_size=10) for limit in limits],
        ignore_index=True,
    )


def closed_loop(users: int = 3, n: int = 60) -> pd.DataFrame:
    """Each user sends when the last answer has come; one request that was never sent ends it."""
    ends_s = [0.0]
    for _ in range(n):
        ends_s.append(ends_s[-1] + SERVICE_S)
    rows = served([0.0] * users + ends_s[1 : n - users + 1], arrival="closed")
    unsent = rows.iloc[[-1]].copy()
    unsent.loc[:, "scheduled_s":"received_last_s"] = np.nan
    unsent = unsent.assign(request_index=n, outcome="incomplete", token_times_s=None, output_tokens=np.nan)
    return pd.concat([rows, unsent], ignore_index=True)


SHAPES: dict[str, Callable[[], pd.DataFrame]] = {
    "poisson": lambda: rates((30.0,), repeats=2, n=300),
    "rates": lambda: rates((10, 100), repeats=2, n=12),
    "bursts over background": bursts_over_background,
    "periodic bursts": periodic_bursts,
    "closed loop": closed_loop,
    "trace": lambda: served(np.arange(40) ** 1.5 / 40, arrival="trace"),
    "all refused": lambda: served([0.0] * 8, arrival="burst", burst_size=8, limit=4).pipe(_refused),
}


def _refused(requests: pd.DataFrame) -> pd.DataFrame:
    nothing = requests.assign(token_times_s=None, output_tokens=np.nan, outcome="rejected")
    nothing.loc[:, "reserved_s":"received_last_s"] = np.nan
    return nothing.assign(rejected_s=0.001, ended_s=0.001, reject_stage="submit")
