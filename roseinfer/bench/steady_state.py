"""Where an open-loop run is steady, and how long a burst on top of it is felt."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from roseinfer.bench.load import AT_A_RATE
from roseinfer.bench.records import Outcome
from roseinfer.bench.stats import percentile

OPEN_LOOP: Final = (*AT_A_RATE, "trace")
"""Arrivals that follow a schedule and are no bursts; with a `burst_size` bursts come on top of them."""

BATCH: Final = 5
"""Values in one mean of MSER-5."""

WINDOW: Final = 5
"""Background requests in a row whose median must be back at the level before a burst."""

LEVEL_PERCENTILE: Final = 90


class WarmUp(NamedTuple):
    """The first `cut` values are warm-up; where `steady` is False no steady part was found, and nothing is cut."""

    cut: int
    steady: bool


def mser5(values: ArrayLike) -> WarmUp:
    """The warm-up of a series by MSER-5 (White, Cobb & Spratt 2000): float64[n], in order of time.

    z holds the means of batches of 5. The cut d, at most half of the m batches, is where the variance of the mean
    of what is left, sum over i > d of (z_i - mean)^2 / (m - d)^2, is smallest, and the earliest such. An optimum
    at the last d allowed means that the series was still changing. Fewer than 5 values have no steady part.
    """
    series = np.asarray(values, dtype=np.float64)
    m = series.size // BATCH
    if m == 0:
        return WarmUp(0, False)
    z = series[: m * BATCH].reshape(m, BATCH).mean(axis=1)
    z -= z.mean()
    left = m - np.arange(m // 2 + 1)
    # Sums over what is left, for every d: those of the reversed series.
    sums, squares = (np.cumsum(part[::-1])[::-1][: left.size] for part in (z, z * z))
    spread = squares - sums**2 / left
    noise = 1e-12 * (squares[0] + m * float(np.mean(series)) ** 2)
    d = int(np.argmin(np.where(spread <= noise, 0, spread) / left**2))
    return WarmUp(0, False) if 0 < d == m // 2 or m == 1 else WarmUp(BATCH * d, True)


def has_warm_up(requests: pd.DataFrame) -> bool:
    """Whether warm-up is cut from these rows of one cell: an open loop without bursts, which are all transient."""
    return _is_open_loop(requests) and bool(pd.isna(requests["burst_size"].iloc[0]))


def warm_up(derived: pd.DataFrame) -> tuple[WarmUp, NDArray[np.bool_]] | None:
    """MSER-5 on the TTFTs of one repeat in order of schedule; None for arrivals that have no warm-up to cut.

    Second is which rows (of `records.derive`) latencies count: those due no earlier than the first that is kept.
    """
    if not has_warm_up(derived):
        return None
    completed = (derived["outcome"] == Outcome.COMPLETED).to_numpy(dtype=bool)
    ttft_s = derived["ttft_s"].to_numpy(dtype=np.float64)
    order = np.lexsort((derived["request_index"], derived["scheduled_s"]))
    series = order[(completed & ~np.isnan(ttft_s))[order]]
    found = mser5(ttft_s[series])
    kept = np.ones(len(derived), dtype=bool)
    if found.cut:
        kept[order[: np.flatnonzero(order == series[found.cut])[0]]] = False
    return found, kept


def steady_rows(derived: pd.DataFrame) -> pd.DataFrame:
    """The rows of one cell (of `records.derive`) that latencies count: without the warm-up of each repeat."""
    if not has_warm_up(derived):
        return derived
    repeats = [(repeat, warm_up(repeat)) for _, repeat in derived.groupby("repeat", sort=True)]
    return pd.concat([repeat if cut is None else repeat[cut[1]] for repeat, cut in repeats])


def recoveries_s(derived: pd.DataFrame) -> NDArray[np.float64]:
    """Seconds after which each burst over background load was over: float64[bursts], inf where it never was.

    Requests due at the same instant are a burst, all others (of `records.derive`, one repeat) are background. The
    level before a burst is the 90th percentile of the waits of the background due since the burst before was
    over (since the start, for the first); where that are fewer than 5 requests, it is the level before that burst.
    A burst is over when a background request due after it waits no longer than that level, and so does the median
    of it and the 4 after it, all due before the next burst: the time from the burst to when that request was due.
    Waits are those in the queue, and, of who came back, those between the first try and the last as well. A request
    that was not served counts as an endless wait. Empty for other arrivals, and where no burst has a finite level
    before it, or nobody says how long requests were queued.
    """
    if not _is_open_loop(derived) or has_warm_up(derived) or derived["queue_wait_s"].isna().all():
        return np.empty(0)
    ordered = derived.sort_values(["scheduled_s", "request_index"])
    due_s = ordered["scheduled_s"].to_numpy(dtype=np.float64)
    instants_s, place, size = np.unique(due_s, return_inverse=True, return_counts=True)
    bursts_s = instants_s[size > 1]
    alone = size[place] == 1
    background_s = due_s[alone]
    waited_s = ordered["retry_wait_s"] + ordered["queue_wait_s"]
    is_served = ordered["outcome"] == Outcome.COMPLETED
    waits_s = waited_s.where(is_served).fillna(np.inf).to_numpy(dtype=np.float64)[alone]
    edges = np.searchsorted(background_s, [*bursts_s, np.inf])

    found: list[float] = []
    level_s, over = np.inf, 0  # `over`: the first background request that the burst before does not touch
    for burst_s, begin, end in zip(bursts_s, edges[:-1], edges[1:], strict=True):
        if begin - over >= WINDOW:
            level_s = percentile(waits_s[over:begin], LEVEL_PERCENTILE)
        over = end
        if not np.isfinite(level_s):
            continue
        back = _first_back(waits_s[begin:end], level_s)
        if back is not None:
            over = begin + back
        found.append(np.inf if back is None else background_s[over] - burst_s)
    return np.array(found)


def _is_open_loop(requests: pd.DataFrame) -> bool:
    return requests["arrival"].iloc[0] in OPEN_LOOP


def _first_back(waits_s: NDArray[np.float64], level_s: float) -> int | None:
    if waits_s.size < WINDOW:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(waits_s, WINDOW)
    back = np.flatnonzero((windows[:, 0] <= level_s) & (np.median(windows, axis=1) <= level_s))
    return int(back[0]) if back.size else None
