"""Was the load offered as it was drawn? What is due at once must be sent at once, the rest on schedule.

Requests are "at once" that share their due time exactly: bursts, also on top of other arrivals. Those that the
client's own cap held back were due when their permit came. A closed loop has no schedule to keep.

One request in a hundred may be late. Of 20 to 99 that are not at once one may, the latest: their p99 would be their
maximum, and a single send that the machine held up would make the run invalid. It is in no rule here. Its latency
counts from the schedule all the same. Of fewer than 20 one is too large a part of what was measured: all count.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from roseinfer.bench.load import CLOSED
from roseinfer.bench.records import derive
from roseinfer.bench.stats import percentile

ROUNDING_S: Final = 1e-6
"""Stamps are differences from the cell's zero, and the schedule is arithmetic: equal moments may differ by rounding (a
clock that counts a year of uptime resolves 4 ns).
"""

_BURST_SPREAD_S: Final = 5e-3
_BURST_SPREAD_S_PER_REQUEST: Final = 150e-6
_FEWEST_EXCUSED: Final = 20
_FEWEST_WITH_P99: Final = 100
_SEND_LAG_S: Final = 2e-3
_SEND_LAG_SHARE_OF_TTFT: Final = 0.05
_SENT_SPAN_SHARE: Final = 0.01
_CONSTANT_GAP_CV: Final = 0.05
_GAP_SHARE_OF_LAG: Final = 0.25
"""Gaps that differ by less than this share of a lag that is no fault are no fault either, however short they are."""


def check_pacing(requests: pd.DataFrame) -> list[str]:
    """One sentence for every way in which the requests of one cell and repeat were not sent as drawn."""
    if requests.empty or _arrival(requests) == CLOSED:
        return []
    derived = requests if "send_lag_s" in requests else derive(requests)
    due_s, sent_s, cap_wait_s, lag_s, ttft_s = (
        derived[name].to_numpy(dtype=np.float64)
        for name in ("scheduled_s", "sent_s", "cap_wait_s", "send_lag_s", "ttft_s")
    )
    was_sent = ~np.isnan(sent_s)
    was_held = cap_wait_s > ROUNDING_S
    in_burst = _are_at_once(derived) & was_sent & ~was_held
    apart = was_sent & ~in_burst
    latest = _latest_of_few(lag_s, apart)
    apart &= ~latest
    found = [*_burst_spread(due_s[in_burst], sent_s[in_burst]), *_lag(lag_s[apart], ttft_s[apart])]
    if was_sent.all() and not was_held.any():
        found += _span(due_s[~latest], sent_s[~latest])
    on_time = apart & ~was_held
    return found + (
        _constant_gaps(due_s[on_time], sent_s[on_time]) if _arrival(derived) == "constant" else []
    )


def check_reading(requests: pd.DataFrame, p99_read_lag_s: float | None) -> list[str]:
    """Was what came read in time? As late as a send may be, a read may be: both are in every latency.

    `p99_read_lag_s` is a bound on what a client knows, which None is where it knows nothing.
    """
    if p99_read_lag_s is None:
        return []
    ttft_s = (requests["received_first_s"] - requests["scheduled_s"]).to_numpy(dtype=np.float64)
    allowed_s = _allowed_lag_s(ttft_s)
    if not p99_read_lag_s > allowed_s:
        return []
    late = f"p99 of what came was read up to {_ms(p99_read_lag_s)} late, more than {_ms(allowed_s)}"
    return [f"{late}: the client was the bottleneck (--client-workers)"]


def check_burst_law(requests: pd.DataFrame, limit: int | None) -> list[str]:
    """A burst of B on an idle server, with no slot freed meanwhile, is refused max(0, B - limit) times.

    Judged burst by burst, where that holds and where nobody else asked for a slot at the same time.
    """
    bursts = _bursts(requests)
    rejects, asked = bursts.rejects, bursts.asked
    due = np.zeros_like(asked) if limit is None else np.maximum(0, asked - limit)
    applies = (bursts.inflight_before == 0) & (bursts.freed_during == 0) & (bursts.strangers == 0)
    wrong = np.flatnonzero(applies & (rejects != due))
    if not wrong.size:
        return []
    first = wrong[0]
    more = f" ({wrong.size - 1} more bursts like this)" if wrong.size > 1 else ""
    met = "no limit" if limit is None else f"limit {limit}"
    return [
        f"a burst of {asked[first]} met {met}: {due[first]} refusals were due, {rejects[first]} were counted{more}"
    ]


def slots_freed_during_burst(requests: pd.DataFrame) -> int | None:
    """How many slots came free before the last request of a burst had asked for one, summed over the bursts.

    None where that question has no meaning: arrivals that are no burst, nothing that asked for a slot, or some that
    asked again.
    Only where it is 0 does the number of refusals follow from the limit alone.
    """
    if (requests["attempts"] > 1).any():
        return None
    bursts = _bursts(requests)
    return int(bursts.freed_during.sum()) if bursts.asked.size else None


class _Bursts(NamedTuple):
    """One element per burst of which somebody asked for a slot.

    `asked` and `rejects` are of its own requests. The others count what was in flight at its first send, and, until
    its last request had its answer, the slots that came free and the requests of others that asked.
    """

    asked: NDArray[np.int64]
    rejects: NDArray[np.int64]
    inflight_before: NDArray[np.int64]
    freed_during: NDArray[np.int64]
    strangers: NDArray[np.int64]


def _bursts(requests: pd.DataFrame) -> _Bursts:
    due_s, sent_s, reserved_s, admitted_s, rejected_s, released_s = (
        requests[f"{stage}_s"].to_numpy(dtype=np.float64)
        for stage in ("scheduled", "sent", "reserved", "admitted", "rejected", "released")
    )
    is_refused = np.isnan(reserved_s)  # not what was dropped later, from the queue
    asked_s = np.where(is_refused, rejected_s, reserved_s)
    # The stamp of a reservation lies before it, what came of it after: a release between the two may have come first.
    answered_s = np.fmax(asked_s, admitted_s)
    members = _are_at_once(requests) & ~np.isnan(asked_s)
    due_s, which, asked = np.unique(due_s[members], return_inverse=True, return_counts=True)
    start_s, end_s = np.full(due_s.size, np.inf), np.full(due_s.size, -np.inf)
    np.fmin.at(start_s, which, sent_s[members])
    np.fmax.at(end_s, which, answered_s[members])
    taken, freed, asks = (_sorted(stamps) for stamps in (reserved_s, released_s, asked_s))
    freed_before = np.searchsorted(freed, start_s, "left")
    asked_before = np.searchsorted(asks, start_s, "left")
    return _Bursts(
        asked,
        rejects=np.bincount(which[is_refused[members]], minlength=due_s.size),
        inflight_before=np.searchsorted(taken, start_s, "left") - freed_before,
        freed_during=np.searchsorted(freed, end_s, "right") - freed_before,
        strangers=np.searchsorted(asks, end_s, "right") - asked_before - asked,
    )


def _are_at_once(requests: pd.DataFrame) -> NDArray[np.bool_]:
    arrival = _arrival(requests)
    if arrival in ("burst", CLOSED):
        return np.full(len(requests), arrival == "burst")
    _, which, sizes = np.unique(requests["scheduled_s"].to_numpy(), return_inverse=True, return_counts=True)
    return np.asarray(sizes[which] > 1)


def _arrival(requests: pd.DataFrame) -> object:
    """The same in all rows of a cell; None where there are none."""
    return None if requests.empty else requests["arrival"].iloc[0]


def _burst_spread(due_s: NDArray[np.float64], sent_s: NDArray[np.float64]) -> list[str]:
    instant_s, which, size = np.unique(due_s, return_inverse=True, return_counts=True)
    first_s, last_s = np.full(instant_s.size, np.inf), np.full(instant_s.size, -np.inf)
    np.minimum.at(first_s, which, sent_s)
    np.maximum.at(last_s, which, sent_s)
    spread_s = last_s - first_s
    allowed_s = np.maximum(_BURST_SPREAD_S, _BURST_SPREAD_S_PER_REQUEST * size)
    slow = np.flatnonzero(spread_s > allowed_s)
    if not slow.size:
        return []
    worst = slow[np.argmax(spread_s[slow])]
    burst = f"the burst of {size[worst]} due at {instant_s[worst]:.3f} s"
    more = f" ({slow.size - 1} more bursts like this)" if slow.size > 1 else ""
    return [f"{burst} took {_ms(spread_s[worst])} to send, more than {_ms(allowed_s[worst])}{more}"]


def _latest_of_few(lag_s: NDArray[np.float64], apart: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The one that may be late; nobody where one is many, or where a p99 says how many may be."""
    latest = np.zeros_like(apart)
    if _FEWEST_EXCUSED <= np.count_nonzero(apart) < _FEWEST_WITH_P99:
        latest[np.argmax(np.where(apart, lag_s, -np.inf))] = True
    return latest


def _lag(lag_s: NDArray[np.float64], ttft_s: NDArray[np.float64]) -> list[str]:
    """Of few, the largest lag but that of the latest, which is not among them."""
    largest_s = percentile(lag_s, 99)
    allowed_s = _allowed_lag_s(ttft_s)
    if not largest_s > allowed_s:
        return []
    is_few = lag_s.size < _FEWEST_WITH_P99
    said = f"send lag up to {_ms(largest_s)} (n={lag_s.size})" if is_few else f"p99 send lag {_ms(largest_s)}"
    return [f"{said}, more than {_ms(allowed_s)}: the sender fell behind"]


def _allowed_lag_s(ttft_s: NDArray[np.float64]) -> float:
    return float(np.fmax(_SEND_LAG_S, _SEND_LAG_SHARE_OF_TTFT * percentile(ttft_s, 99)))


def _span(due_s: NDArray[np.float64], sent_s: NDArray[np.float64]) -> list[str]:
    """From the first to the last moment at which something was due, of a burst its first send."""
    first_s, last_s = due_s.min(), due_s.max()
    drawn_s = float(last_s - first_s)
    span_s = float(sent_s[due_s == last_s].min() - sent_s[due_s == first_s].min())
    # A lag that is no fault is no difference: in a short run it would be over 1 %.
    if abs(span_s - drawn_s) <= max(_SEND_LAG_S, _SENT_SPAN_SHARE * drawn_s):
        return []
    return [f"requests were sent over {_ms(span_s)}, the schedule spans {_ms(drawn_s)}: more than 1 % apart"]


def _constant_gaps(due_s: NDArray[np.float64], sent_s: NDArray[np.float64]) -> list[str]:
    """The coefficient of variation of the gaps, against the drawn ones: equal, but for a ramp.

    The latest 1 % of the sends are left out, as by the rule for the lag.
    """
    lag_s = sent_s - due_s
    kept = np.flatnonzero(lag_s <= percentile(lag_s, 99))
    if kept.size < 3:
        return []
    kept = kept[np.argsort(due_s[kept], kind="stable")]
    drawn_s = np.diff(due_s[kept])
    gap_s = float(np.median(drawn_s))
    deviation_s = float(np.std(np.diff(sent_s[kept]) - drawn_s))
    if deviation_s <= max(_CONSTANT_GAP_CV * gap_s, _GAP_SHARE_OF_LAG * _SEND_LAG_S):
        return []
    cv = f"{deviation_s / gap_s:.3f} of that as sent, more than {_CONSTANT_GAP_CV:g}"
    return [f"the gaps between constant arrivals of {_ms(gap_s)} vary by {cv}"]


def _sorted(stamps: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sort(stamps[~np.isnan(stamps)])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
