"""The rules for loads of every shape: bursts at once, the rest on schedule, the burst law where it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.pacing import (
    check_burst_law,
    check_pacing,
    check_reading,
    slots_freed_during_burst,
)
from roseinfer.bench.records import derive
from roseinfer.bench.validity import check_cell
from tests.bench.rows import facts_of, measured

STAMPS = [
    *("scheduled_s", "permitted_s", "sent_s", "reserved_s", "admitted_s", "rejected_s", "tokenized_s"),
    *(
        "first_scheduled_s",
        "first_token_s",
        "last_token_s",
        "finished_s",
        "received_first_s",
        "received_last_s",
    ),
    *("released_s", "ended_s"),
]
AFTER_THE_SCHEDULE = [name for name in STAMPS if name not in {"scheduled_s", "permitted_s"}]


def later(rows: pd.DataFrame, by_s: Any, names: list[str] = STAMPS) -> pd.DataFrame:
    return rows.assign(**{name: rows[name] + by_s for name in names})


def one_after_another(*parts: pd.DataFrame) -> pd.DataFrame:
    """One cell of all these rows, in order of sending."""
    rows = pd.concat(parts).sort_values("sent_s", kind="stable", ignore_index=True)
    return rows.assign(request_index=np.arange(len(rows)))


def periodic(bursts: int = 3, *, every_s: float = 1.0, **sizes: Any) -> pd.DataFrame:
    return one_after_another(*(later(measured(**sizes), i * every_s) for i in range(bursts)))


def on_background(interval_s: float = 0.02, **sizes: Any) -> pd.DataFrame:
    """A burst at 1 s on top of 100 constant arrivals."""
    background = measured(burst_size=100, interval_s=interval_s, service_s=0.0001)
    return one_after_another(background, later(measured(**sizes), 1.005)).assign(
        arrival="constant", burst_size=8
    )


@pytest.mark.parametrize("limit", [None, 3, 8])
def test_faultless_loads_of_bursts_are_valid(limit: int | None) -> None:
    for rows in (periodic(limit=limit), on_background(limit=limit)):
        facts = replace(facts_of(rows), limit=limit, peak_inflight=limit or 8)
        assert check_cell(rows, facts) == []
        assert check_cell(derive(rows), facts) == []


def test_each_burst_of_many_must_be_sent_at_once() -> None:
    rows = periodic(4)
    slow = later(rows, 0.006 * rows["request_index"].isin([15, 31]), AFTER_THE_SCHEDULE)
    assert check_pacing(slow) == [
        "the burst of 8 due at 1.000 s took 6.1 ms to send, more than 5.0 ms (1 more bursts like this)"
    ]


def test_a_burst_on_background_is_no_fault_of_the_background() -> None:
    """Its last request leaves after 4 ms: late for one that is spaced, not for one of a burst."""
    rows = on_background()
    in_burst = rows["scheduled_s"] == 1.005
    assert (
        check_pacing(
            later(rows, 0.004 * (in_burst & ~in_burst.shift(-1, fill_value=False)), AFTER_THE_SCHEDULE)
        )
        == []
    )
    slow = later(rows, 0.006 * (in_burst & ~in_burst.shift(-1, fill_value=False)), AFTER_THE_SCHEDULE)
    assert "the burst of 8 due at 1.005 s took" in check_pacing(slow)[0]


def test_background_that_is_late_is_found_beside_a_burst() -> None:
    rows = on_background()
    late = later(rows, 0.003 * (rows["scheduled_s"] != 1.005), AFTER_THE_SCHEDULE)
    assert check_pacing(late)[0].startswith("p99 send lag 3.0 ms")


def test_a_burst_that_starts_late_stretches_the_schedule() -> None:
    rows = periodic(3)
    assert check_pacing(later(rows, 0.05 * (rows["scheduled_s"] == 2.0), AFTER_THE_SCHEDULE)) == [
        "requests were sent over 2050.0 ms, the schedule spans 2000.0 ms: more than 1 % apart"
    ]


# --- rates


def sent_with_sleeps_of_a_millisecond(rate: float) -> pd.DataFrame:
    n = round(rate)
    rows = measured(burst_size=n, interval_s=1 / rate, service_s=0.0)
    gap_s = np.ceil(1e3 / rate) / 1e3
    return later(rows, np.arange(n) * (gap_s - 1 / rate), AFTER_THE_SCHEDULE)


def test_a_rate_that_was_not_reached_is_never_silent() -> None:  # cases C2, C8
    assert any(
        "requests were sent over" in reason
        for reason in check_pacing(sent_with_sleeps_of_a_millisecond(5000.0))
    )
    assert check_pacing(sent_with_sleeps_of_a_millisecond(100.0)) == []


def test_a_slow_server_is_no_excuse_for_a_rate_that_was_not_reached() -> None:  # case C2
    """Reported: 183.5 instead of 200 requests a second."""
    rows = measured(burst_size=200, interval_s=1 / 200, service_s=0.05)  # p99 TTFT 10 s: much lag is no fault
    late = later(rows, rows["scheduled_s"] * (200 / 183.5 - 1), AFTER_THE_SCHEDULE)
    (reason,) = check_pacing(late)
    assert reason == "requests were sent over 1084.5 ms, the schedule spans 995.0 ms: more than 1 % apart"


@pytest.mark.parametrize(("jitter_s", "faults"), [(0.0009, 0), (0.002, 1)])
def test_constant_arrivals_must_be_constant_as_sent(jitter_s: float, faults: int) -> None:  # case C6
    rows = measured(burst_size=200, interval_s=0.02, service_s=0.05)
    uneven = later(rows, jitter_s * (rows["request_index"] % 2), AFTER_THE_SCHEDULE)
    reasons = check_pacing(uneven)
    assert len(reasons) == faults
    assert all(r.startswith("the gaps between constant arrivals of 20.0 ms vary by 0.1") for r in reasons)
    assert check_pacing(uneven.assign(arrival="poisson")) == []


def test_gaps_that_the_clients_cap_made_are_no_jitter() -> None:
    rows = measured(burst_size=200, interval_s=0.02, service_s=0.05)
    assert check_pacing(capped(rows, 0.015 * (rows["request_index"] % 3 == 0))) == []


def test_a_ramp_is_no_jitter() -> None:
    rows = measured(burst_size=200, interval_s=0.02, service_s=0.05)
    ramp_s = np.sqrt(np.arange(200)) - rows["scheduled_s"]
    assert check_pacing(later(rows, ramp_s)) == []


# --- few requests, whose p99 would be their maximum


def few(n: int, late_s: dict[int, float]) -> list[str]:
    """What is said of `n` arrivals of which some, by number, were sent so late."""
    rows = measured(burst_size=n, interval_s=0.05, service_s=0.001)
    return check_pacing(later(rows, rows["request_index"].map(late_s).fillna(0.0), AFTER_THE_SCHEDULE))


@pytest.mark.parametrize("n", [20, 99])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_one_late_send_of_few_is_no_fault(n: int, place: int) -> None:
    """Also where it is the first or the last."""
    assert few(n, {place % n: 0.03}) == []


@pytest.mark.parametrize("n", [20, 99])
def test_two_late_sends_of_few_are_one_too_many(n: int) -> None:
    reasons = few(n, {0: 0.03, 1: 0.02})
    assert reasons[0].startswith(f"send lag up to 20.0 ms (n={n - 1}), more than")


@pytest.mark.parametrize("n", [1, 2, 3, 19])
@pytest.mark.parametrize("place", [0, -1])
def test_of_very_few_every_send_counts(n: int, place: int) -> None:
    assert few(n, {}) == []
    assert few(n, {place % n: 0.03})[0].startswith(f"send lag up to 30.0 ms (n={n}), more than")


def test_the_rule_for_few_meets_the_rule_for_the_p99() -> None:
    """Of 99 as of 100 one may be late, and two may not."""
    for n in (99, 100, 101):
        assert few(n, {50: 0.03}) == []
        assert few(n, {50: 0.03, 51: 0.03}) != []


def test_few_that_are_all_late_are_found() -> None:
    assert few(20, dict.fromkeys(range(20), 0.004))[0].startswith("send lag up to 4.0 ms (n=19), more than")


# --- the client's own bound


def capped(rows: pd.DataFrame, wait_s: Any) -> pd.DataFrame:
    """Held back by the client's cap for so long."""
    return later(rows, wait_s, [name for name in STAMPS if name != "scheduled_s"])


def test_what_the_cap_held_back_was_due_when_its_permit_came() -> None:
    rows = measured(burst_size=100, service_s=0.0)
    is_held = rows["request_index"] > 9
    held = capped(rows, 0.01 * np.maximum(0, rows["request_index"] - 9))
    assert check_pacing(held) == []
    (reason,) = check_pacing(later(held, 0.08 * is_held, AFTER_THE_SCHEDULE))
    assert reason.startswith("send lag up to 82.0 ms (n=89)")


def test_a_closed_loop_keeps_no_schedule() -> None:
    rows = measured(burst_size=8, limit=None).assign(arrival="closed")
    assert check_pacing(later(rows, 0.5 * rows["request_index"], AFTER_THE_SCHEDULE)) == []


def test_rows_that_were_never_sent_are_no_late_ones() -> None:
    rows = measured(burst_size=100, interval_s=0.02)
    unsent = rows["request_index"] >= 99
    rows[STAMPS[1:]] = rows[STAMPS[1:]].mask(unsent)
    assert check_pacing(rows) == []


# --- the burst law


def test_the_law_is_judged_burst_by_burst() -> None:
    rows = periodic(3, limit=3)
    assert check_burst_law(rows, 3) == []
    (reason,) = check_burst_law(rows, 4)
    assert reason == "a burst of 8 met limit 4: 4 refusals were due, 5 were counted (2 more bursts like this)"


def test_one_wrong_burst_of_many_is_found() -> None:
    rows = one_after_another(measured(limit=3), later(measured(limit=2), 1.0))
    assert check_burst_law(rows, 3) == ["a burst of 8 met limit 3: 5 refusals were due, 6 were counted"]


def test_a_burst_on_a_busy_server_is_not_judged() -> None:
    """The second comes while the first is served: its slots are taken."""
    rows = one_after_another(measured(limit=3), later(measured(limit=2), 0.005))
    assert check_burst_law(rows, 3) == []
    assert slots_freed_during_burst(rows) == 0


def test_a_burst_that_others_ask_between_is_not_judged() -> None:
    burst = measured(limit=3)
    other = later(measured(burst_size=1, limit=0), 0.00005).assign(scheduled_s=0.00005, arrival="constant")
    rows = one_after_another(burst.assign(arrival="constant"), other)
    assert check_burst_law(rows, 4) == []
    assert check_burst_law(rows[rows["scheduled_s"] == 0], 4) != []


def test_a_slot_that_came_free_before_the_last_answer_may_have_been_taken_again() -> None:
    rows = measured(limit=3)
    rows.loc[0, "released_s"] = rows["rejected_s"].max()
    assert check_burst_law(rows, 4) == []
    assert slots_freed_during_burst(rows) == 1


def test_a_slot_that_came_free_while_the_last_reservation_returned_may_have_come_first() -> None:
    rows = measured(limit=None)
    last = rows.iloc[-1]
    rows.loc[0, "released_s"] = (last["reserved_s"] + last["admitted_s"]) / 2
    assert check_burst_law(rows, 7) == []
    assert check_burst_law(measured(limit=None), 7) != []


def test_slots_freed_are_counted_over_all_bursts() -> None:
    rows = periodic(3, limit=3)
    rows.loc[[0, 8], "released_s"] = [50e-6, 1.0 + 50e-6]
    assert slots_freed_during_burst(rows) == 2


def test_ticks_of_a_trace_are_bursts_too() -> None:
    rows = periodic(2, limit=3).assign(arrival="trace")
    assert len(check_burst_law(rows, 4)) == 1


def test_users_of_a_closed_loop_that_start_together_are_no_burst() -> None:
    rows = measured(limit=3).assign(arrival="closed")
    assert check_burst_law(rows, 4) == []
    assert slots_freed_during_burst(rows) is None


# --- reading


def read(p99_read_lag_s: float | None, ttft_s: float = 0.02) -> list[str]:
    rows = pd.DataFrame({"scheduled_s": [0.0] * 200, "received_first_s": [ttft_s] * 200})
    return check_reading(rows, p99_read_lag_s)


def test_a_client_that_reads_late_is_told_apart_from_a_slow_server() -> None:
    (reason,) = read(0.005)
    late, who = reason.split(": ")
    assert late == "p99 of what came was read up to 5.0 ms late, more than 2.0 ms"
    assert who == "the client was the bottleneck (--client-workers)"


def test_a_read_may_be_as_late_as_a_send() -> None:
    assert read(0.002) == []
    assert read(0.005, ttft_s=0.1) == []
    assert read(0.0051, ttft_s=0.1) != []


def test_who_does_not_know_how_late_it_reads_is_not_judged() -> None:
    assert read(None) == []


def test_a_cell_that_received_nothing_is_judged_all_the_same() -> None:
    assert read(0.005, ttft_s=np.nan) != []
