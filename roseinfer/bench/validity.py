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

from roseinfer.admission_spec import parse_admission
from roseinfer.bench.load import CLOSED
from roseinfer.bench.pacing import ROUNDING_S, check_burst_law, check_pacing, check_reading
from roseinfer.bench.records import Outcome
from roseinfer.executor import KV_BLOCK_TOKENS

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

# Admission reads the clock inside its lock, the record outside of it.
_INTEGRAL_RELATIVE: Final = 1e-6
_INTEGRAL_S_PER_ATTEMPT: Final = 50e-6

_TURNS_TO_FILL: Final = 2
"""Requests a user that a closed loop must have sent, with all its users there, to be blamed for not being full."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """What is known about one cell and repeat from elsewhere than its rows.

    `offered` is the number of requests of the workload. The in-flight figures are admission's own: the
    highest count, the count when the first request was sent, and the integral over time in
    request-seconds; all None where admission is in a server that does not say. `limit` is None for no limit of
    requests, `token_limit` for no limit of tokens, of which `peak_held_tokens` were held at most;
    `started_utc` is the cell's time zero in ISO 8601.
    `earlier_slots` were taken by tries that others followed, which held them for `earlier_held_s` together.
    `interrupted_s` is when a user stopped it, in seconds from time zero; a closed loop has then offered what it sent.
    Of a client of a server, `client_busy_share_max_100ms` is the share of its busiest 100 ms in which it did not wait,
    `client_longest_turn_s` the longest that it did not look for what came, and `client_p99_read_lag_s` how long what it
    read may have lain there at most; None where nobody says.
    `max_concurrency` is the client's own bound on what it has outstanding, None where it has none, and
    `peak_outstanding` the most that it counted. Of a closed loop, `ramp_s` is the time in which its users start, and
    `ran_out_s` when it had sent all requests that there were, where only its duration should have ended it.
    `may_be_cached` is False where no prompt is meant to begin like another.
    """

    offered: int
    limit: int | None
    peak_inflight: int | None
    inflight_integral_s: float | None
    inflight_at_start: int | None
    started_utc: str
    max_concurrency: int | None = None
    peak_outstanding: int | None = None
    ramp_s: float | None = None
    ran_out_s: float | None = None
    may_be_cached: bool = True
    token_limit: int | None = None
    peak_held_tokens: int | None = None
    earlier_slots: int = 0
    earlier_held_s: float = 0.0
    interrupted_s: float | None = None
    client_busy_share_max_100ms: float | None = None
    client_longest_turn_s: float | None = None
    client_p99_read_lag_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as a dictionary that `json` can write."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CellFacts:
        """The facts that `to_json` wrote, now or before it knew of the client's bound.

        Raises TypeError on a missing or unknown field.
        """
        return cls(**fields)


def check_cell(
    requests: pd.DataFrame, facts: CellFacts, *, max_error_share: float = DEFAULT_MAX_ERROR_SHARE
) -> list[str]:
    """One sentence for every rule that the rows of one cell and repeat break; empty when it is valid."""
    return [
        *_interruption(requests, facts),
        *_rows(requests, facts),
        *_inflight(requests, facts),
        *_stages(requests),
        *check_pacing(requests),
        *check_reading(requests, facts.client_p99_read_lag_s),
        *_outstanding(requests, facts),
        *_failures(requests, facts, max_error_share),
        *_cached(requests, facts),
        # By the law of an idle engine whose slots are on record, and are all that is limited; nobody came back.
        *(
            check_burst_law(requests, facts.limit)
            if facts.inflight_at_start == 0 and facts.token_limit is None and _counts_alone(requests)
            else []
        ),
    ]


def _counts_alone(requests: pd.DataFrame) -> bool:
    if (requests["attempts"] > 1).any():
        return False
    admission = requests["admission"].iloc[0]
    return pd.isna(admission) or parse_admission(admission).is_count_alone


def _rows(requests: pd.DataFrame, facts: CellFacts) -> list[str]:
    """Exactly one row, with exactly one known outcome, per offered request."""
    index = requests["request_index"].to_numpy(dtype=np.int64)
    offered = np.arange(facts.offered)
    lost = stray = doubled = index[:0]
    if not np.array_equal(index, offered):
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
    if facts.peak_inflight is None or facts.inflight_integral_s is None:
        return []
    found = []
    if facts.limit is not None and facts.peak_inflight > facts.limit:
        found.append(f"{facts.peak_inflight} requests were in flight at once, the limit is {facts.limit}")
    tokens, budget = facts.peak_held_tokens, facts.token_limit
    if budget is not None and (tokens is None or tokens > budget):
        found.append(f"{tokens} tokens were in flight at once, the limit is {budget}")
    index, reserved_s, released_s = (
        requests[name].to_numpy() for name in ("request_index", "reserved_s", "released_s")
    )
    taken, freed = ~np.isnan(reserved_s), ~np.isnan(released_s)
    leaked = index[taken & ~freed]
    if leaked.size:
        found.append(f"{_count(leaked.size, 'slot')} taken and never released{_which(leaked)}")
    unearned = index[freed & ~taken]
    if unearned.size:
        found.append(f"{_count(unearned.size, 'slot')} released and never taken{_which(unearned)}")
    held_s = float(np.nansum(released_s - reserved_s)) + facts.earlier_held_s
    slots = int(taken.sum()) + facts.earlier_slots
    tolerance_s = _INTEGRAL_RELATIVE * facts.inflight_integral_s + _INTEGRAL_S_PER_ATTEMPT * slots
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
        latest = measured[names[0]]
        for place, name in enumerate(names[1:], start=1):
            early = np.flatnonzero(measured[name] < latest - ROUNDING_S)
            if early.size:
                before = max(
                    names[:place], key=lambda other: np.nan_to_num(measured[other][early[0]], nan=-np.inf)
                )
                found.append(
                    f"stages out of order: {name} before {before}"
                    f" in {_count(early.size, 'request')}{_which(index[early])}"
                )
            latest = np.fmax(latest, measured[name])
    return list(dict.fromkeys(found))  # chains share stamps


def _outstanding(requests: pd.DataFrame, facts: CellFacts) -> list[str]:
    """The client's own bound: never exceeded, and reached by a closed loop that could, which never lacked a request."""
    most, peak = facts.max_concurrency, facts.peak_outstanding
    if most is None or peak is None:
        return []
    if peak > most:
        return [f"{peak} requests were outstanding at once, the client's own limit is {most}"]
    found = []
    if facts.ran_out_s is not None:
        found.append(
            f"the closed loop had sent all its {facts.offered} requests at {facts.ran_out_s:.3g} s, before --duration"
            " ended"
        )
    # A refused user does not wait for an answer: with a limit below its users a loop cannot be full.
    is_free = not (requests["outcome"] == Outcome.REJECTED).any()
    with_all_users = int((requests["sent_s"] >= (facts.ramp_s or 0.0)).sum())
    is_long = with_all_users >= _TURNS_TO_FILL * most
    if (requests["arrival"] == CLOSED).any() and peak < most and is_free and is_long:
        found.append(
            f"at most {peak} requests were outstanding at once, a closed loop of {most} users was asked for"
        )
    return found


def _interruption(requests: pd.DataFrame, facts: CellFacts) -> list[str]:
    if facts.interrupted_s is None:
        return []
    ended = int((requests["outcome"] != Outcome.INCOMPLETE).sum())
    return [f"interrupted at {facts.interrupted_s:.3g} s, when {ended} of {facts.offered} requests had ended"]


def _failures(requests: pd.DataFrame, facts: CellFacts, max_error_share: float) -> list[str]:
    if facts.interrupted_s is not None:
        return []  # what is incomplete is so because of that
    errors, incomplete = (
        int((requests["outcome"] == outcome).sum()) for outcome in (Outcome.ERROR, Outcome.INCOMPLETE)
    )
    if errors + incomplete <= max_error_share * facts.offered:
        return []
    counts = f"{errors} of {facts.offered} requests ended in error and {incomplete} stayed incomplete"
    unsent = requests.loc[requests["sent_s"].isna(), "error"].dropna()
    why = f" ({len(unsent)} {unsent.iloc[0]})" if len(unsent) else ""
    return [f"{counts}{why}, more than {100 * max_error_share:g} % together"]


def _cached(requests: pd.DataFrame, facts: CellFacts) -> list[str]:
    """Prompts that share nothing find nothing in a cold prefix cache. A few equal tokens may be chance.

    Who tries again may find what an earlier try of the same prompt left, which its client gave up while it ran.
    """
    if facts.may_be_cached:
        return []
    requests = requests[requests["attempts"] == 1]
    cached_tokens = requests["cached_tokens"].fillna(0).to_numpy(dtype=np.float64)
    hits = requests["request_index"].to_numpy()[cached_tokens >= KV_BLOCK_TOKENS]
    if not hits.size:
        return []
    count = f"{int(cached_tokens.sum())} prompt tokens of {_count(hits.size, 'request')}{_which(hits)}"
    why = "a server that has met them before must be started anew, or be asked with another --seed"
    return [f"{count} came from a prefix cache, though no prompt was to begin like another: {why}"]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _which(request_indexes: Iterable[int] | NDArray[np.int64]) -> str:
    """Names the first few, so that a reader can look at them."""
    indexes = [str(int(index)) for index in request_indexes]
    more = f" and {len(indexes) - 3} more" if len(indexes) > 3 else ""
    return f" (request_index {', '.join(indexes[:3])}{more})"
