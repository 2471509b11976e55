"""What must be true of every measured cell, whatever it measured: a cell that breaks a rule is invalid.

The rules compare figures that were taken independently: the rows against the number offered, the stamps of
the requests against admission's own count and its own integral of in-flight over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from roseinfer.bench.records import Outcome, derive
from roseinfer.bench.stats import percentile

DEFAULT_MAX_ERROR_SHARE: Final = 0.01

STAGES: Final = (
    (
        "scheduled_s",
        "permitted_s",
        "sent_s",
        "reserved_s",
        "tokenized_s",
        "first_scheduled_s",
        "first_token_s",
        "last_token_s",
        "finished_s",
    ),
    ("sent_s", "rejected_s", "ended_s"),
    ("reserved_s", "admitted_s"),
    ("first_token_s", "received_first_s", "received_last_s", "ended_s"),
    ("last_token_s", "received_last_s"),
    ("reserved_s", "last_token_s", "released_s"),
)
"""Chains of stamps, each of which may not lie before any earlier one of its chain; a null stamp is skipped.

`admitted_s` is outside the long chain: with tokenise workers add_request returns before its text is encoded.
"""

# Stamps are differences from the cell's zero, and the schedule is arithmetic: equal moments may differ by
# rounding (a clock that counts a year of uptime resolves 4 ns).
_ROUNDING_S: Final = 1e-6

# Admission reads the clock inside its lock, the record outside of it.
_INTEGRAL_RELATIVE: Final = 1e-6
_INTEGRAL_S_PER_ATTEMPT: Final = 50e-6

_BURST_SPREAD_S: Final = 5e-3
_BURST_SPREAD_S_PER_REQUEST: Final = 150e-6
_SEND_LAG_S: Final = 2e-3
_SEND_LAG_SHARE_OF_TTFT: Final = 0.05
_SENT_SPAN_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class CellFacts:
    """What is known about one cell and repeat from elsewhere than its rows.

    `offered` is the number of requests of the workload. The in-flight figures are admission's own: the
    highest count, the count when the first request was sent, and the integral over time in
    request-seconds. `limit` is None for no limit; `started_utc` is the cell's time zero in ISO 8601.
    """

    offered: int
    limit: int | None
    peak_inflight: int
    inflight_integral_s: float
    inflight_at_start: int
    started_utc: str

    def to_json(self) -> dict[str, Any]:
        """The fields as a dictionary that `json` can write."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CellFacts:
        """The facts that `to_json` wrote. Raises TypeError on a missing or unknown field."""
        return cls(**fields)


def check_cell(
    requests: pd.DataFrame, facts: CellFacts, *, max_error_share: float = DEFAULT_MAX_ERROR_SHARE
) -> list[str]:
    """One sentence for every rule that the rows of one cell and repeat break; empty when it is valid."""
    return [
        *_rows(requests, facts),
        *_inflight(requests, facts),
        *_stages(requests),
        *_pacing(requests),
        *_failures(requests, facts, max_error_share),
        *_burst_law(requests, facts),
    ]


def slots_freed_during_burst(requests: pd.DataFrame) -> int | None:
    """How many slots came free before the last request of a burst had asked for one.

    None where that question has no meaning: arrivals that are no burst, or nothing that asked for a slot.
    Only where it is 0 does the number of refusals follow from the limit alone.
    """
    asked = requests[["reserved_s", "rejected_s"]].max(axis=1)
    if not _is_burst(requests) or asked.isna().all():
        return None
    return int((requests["released_s"] <= asked.max()).sum())


def _rows(requests: pd.DataFrame, facts: CellFacts) -> list[str]:
    """Exactly one row, with exactly one known outcome, per offered request."""
    index = requests["request_index"].to_numpy(dtype=np.int64)
    offered = np.arange(facts.offered)
    lost = np.setdiff1d(offered, index)
    stray = np.setdiff1d(index, offered)
    values, times = np.unique(index, return_counts=True)
    doubled = values[times > 1]
    known = requests["outcome"].isin([str(outcome) for outcome in Outcome])
    outcomes = int(known.sum())

    found = []
    if lost.size:
        found.append(f"{_count(lost.size, 'offered request')} of {facts.offered} without a row{_which(lost)}")
    if doubled.size:
        found.append(f"{_count(doubled.size, 'request')} with more than one row{_which(doubled)}")
    if stray.size:
        found.append(f"{_count(stray.size, 'row')} of requests that were never offered{_which(stray)}")
    if not known.all():
        found.append(f"{_count(len(known) - outcomes, 'row')} without a known outcome{_which(index[~known])}")
    if outcomes != facts.offered:
        found.append(f"outcomes sum to {outcomes}, offered were {facts.offered}")
    return found


def _inflight(requests: pd.DataFrame, facts: CellFacts) -> list[str]:
    """Slots: never more than the limit, each given back once, and as long in use as admission says."""
    found = []
    if facts.limit is not None and facts.peak_inflight > facts.limit:
        found.append(f"{facts.peak_inflight} requests were in flight at once, the limit is {facts.limit}")
    taken, freed = requests["reserved_s"].notna(), requests["released_s"].notna()
    leaked = requests.loc[taken & ~freed, "request_index"]
    if len(leaked):
        found.append(f"{_count(len(leaked), 'slot')} taken and never released{_which(leaked)}")
    unearned = requests.loc[freed & ~taken, "request_index"]
    if len(unearned):
        found.append(f"{_count(len(unearned), 'slot')} released and never taken{_which(unearned)}")
    held_s = float((requests["released_s"] - requests["reserved_s"]).sum())
    tolerance_s = _INTEGRAL_RELATIVE * facts.inflight_integral_s + _INTEGRAL_S_PER_ATTEMPT * int(taken.sum())
    # Written so that a NaN integral is a failure too.
    if not abs(facts.inflight_integral_s - held_s) <= tolerance_s:
        found.append(
            f"admission counted {facts.inflight_integral_s:.6f} request-seconds in flight, the requests held"
            f" their slots for {held_s:.6f} (tolerance {tolerance_s:.6f})"
        )
    return found


def _stages(requests: pd.DataFrame) -> list[str]:
    found = []
    index = requests["request_index"].to_numpy()
    measured = {
        name: requests[name].to_numpy(dtype=np.float64) for name in sorted({*chain.from_iterable(STAGES)})
    }
    for names in STAGES:
        stamps = np.column_stack([measured[name] for name in names])
        latest = np.fmax.accumulate(stamps, axis=1)
        for place in range(1, len(names)):
            early = np.flatnonzero(stamps[:, place] < latest[:, place - 1] - _ROUNDING_S)
            if early.size:
                before = names[int(np.nanargmax(stamps[early[0], :place]))]
                found.append(
                    f"stages out of order: {names[place]} before {before}"
                    f" in {_count(early.size, 'request')}{_which(index[early])}"
                )
    return list(dict.fromkeys(found))  # chains share stamps


def _pacing(requests: pd.DataFrame) -> list[str]:
    """The load was offered as it was drawn."""
    sent = requests.loc[requests["sent_s"].notna()]
    return _burst_spread(sent) if _is_burst(requests) else _schedule_kept(sent)


def _burst_spread(sent: pd.DataFrame) -> list[str]:
    found = []
    for scheduled_s, sent_s in sent.groupby("scheduled_s")["sent_s"]:
        spread_s = float(sent_s.max() - sent_s.min())
        allowed_s = max(_BURST_SPREAD_S, _BURST_SPREAD_S_PER_REQUEST * len(sent_s))
        if spread_s > allowed_s:
            found.append(
                f"the burst of {len(sent_s)} due at {scheduled_s:.3f} s took {_ms(spread_s)} to send,"
                f" more than {_ms(allowed_s)}"
            )
    return found


def _schedule_kept(sent: pd.DataFrame) -> list[str]:
    found = []
    derived = derive(sent)
    lag_s = percentile(derived["send_lag_s"], 99)
    ttft_s = percentile(derived["ttft_s"], 99)
    allowed_s = float(np.fmax(_SEND_LAG_S, _SEND_LAG_SHARE_OF_TTFT * ttft_s))
    if lag_s > allowed_s:
        found.append(f"p99 send lag {_ms(lag_s)}, more than {_ms(allowed_s)}: the sender fell behind")

    capped = bool((derived["cap_wait_s"] > _ROUNDING_S).any())
    drawn_s = float(sent["scheduled_s"].max() - sent["scheduled_s"].min())
    sent_s = float(sent["sent_s"].max() - sent["sent_s"].min())
    # A lag that the rule above accepts is no difference: in a short run it would be over 1 %.
    if not capped and abs(sent_s - drawn_s) > max(_SEND_LAG_S, _SENT_SPAN_SHARE * drawn_s):
        found.append(
            f"requests were sent over {_ms(sent_s)}, the schedule spans {_ms(drawn_s)}: more than 1 % apart"
        )
    return found


def _failures(requests: pd.DataFrame, facts: CellFacts, max_error_share: float) -> list[str]:
    count = requests["outcome"].value_counts()
    errors, incomplete = int(count.get(Outcome.ERROR, 0)), int(count.get(Outcome.INCOMPLETE, 0))
    if errors + incomplete <= max_error_share * facts.offered:
        return []
    counts = f"{errors} of {facts.offered} requests ended in error and {incomplete} stayed incomplete"
    return [f"{counts}, more than {100 * max_error_share:g} % together"]


def _burst_law(requests: pd.DataFrame, facts: CellFacts) -> list[str]:
    """A burst of B on an idle server, with no slot freed meanwhile, is refused max(0, B - M) times."""
    if facts.inflight_at_start != 0 or slots_freed_during_burst(requests) != 0:
        return []
    rejects = int(requests["rejected_s"].notna().sum())
    burst = rejects + int(requests["reserved_s"].notna().sum())
    expected = 0 if facts.limit is None else max(0, burst - facts.limit)
    if rejects == expected:
        return []
    limit = "no limit" if facts.limit is None else f"limit {facts.limit}"
    return [f"a burst of {burst} met {limit}: {expected} refusals were due, {rejects} were counted"]


def _is_burst(requests: pd.DataFrame) -> bool:
    return bool((requests["arrival"] == "burst").all())


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _which(request_indexes: Iterable[int] | NDArray[np.int64]) -> str:
    """Names the first few, so that a reader can look at them."""
    indexes = [str(int(index)) for index in request_indexes]
    more = f" and {len(indexes) - 3} more" if len(indexes) > 3 else ""
    return f" (request_index {', '.join(indexes[:3])}{more})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
