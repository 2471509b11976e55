from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.pacing import slots_freed_during_burst
from roseinfer.bench.records import derive
from roseinfer.bench.validity import CellFacts, check_cell
from tests.bench.rows import facts_of, measured


def change(
    requests: pd.DataFrame, request_index: int, column: str, value: float | str | None
) -> pd.DataFrame:
    """A copy of `requests` with one cell replaced."""
    changed = requests.copy()
    changed.loc[changed["request_index"] == request_index, column] = value
    return changed


def the_reason(requests: pd.DataFrame, facts: CellFacts) -> str:
    """The only sentence that the check has to say."""
    (reason,) = check_cell(requests, facts)
    return reason


@pytest.mark.parametrize("limit", [None, 1, 3, 8, 100])
def test_a_faultless_burst_is_valid(limit: int | None) -> None:
    burst = measured(limit=limit)
    assert check_cell(burst, facts_of(burst)) == []


def test_faultless_paced_arrivals_are_valid() -> None:
    paced = measured(burst_size=100, interval_s=0.02)
    assert check_cell(paced, facts_of(paced)) == []


def test_derived_columns_do_not_disturb_the_check() -> None:
    paced = derive(measured(burst_size=100, interval_s=0.02))
    assert check_cell(paced, facts_of(paced)) == []


def test_facts_survive_their_json() -> None:
    facts = facts_of(measured(limit=None))
    assert CellFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_facts_of_runs_before_the_clients_bound_was_known_can_be_read() -> None:
    facts = facts_of(measured(limit=3))
    fields = {name: value for name, value in facts.to_json().items() if "outstanding" not in name}
    del fields["max_concurrency"]
    assert CellFacts.from_json(fields) == facts


def test_more_tokens_than_the_budget_are_a_fault() -> None:
    burst = measured(limit=3)
    facts = replace(facts_of(burst), token_limit=100, peak_held_tokens=100)
    assert check_cell(burst, facts) == []
    reason = the_reason(burst, replace(facts, peak_held_tokens=101))
    assert reason == "101 tokens were in flight at once, the limit is 100"


def test_the_burst_law_is_of_a_limit_of_requests_alone() -> None:
    burst = measured(limit=3)  # a budget refused them, the limit would have let twice as many in
    facts = replace(facts_of(burst), limit=6)
    assert "2 refusals were due, 5 were counted" in the_reason(burst, facts)
    assert check_cell(burst, replace(facts, token_limit=100, peak_held_tokens=90)) == []


# --- loads of other shapes: each fault of the bookkeeping is found in all of them


def closed_loop() -> tuple[pd.DataFrame, CellFacts]:
    """Three users, who send one request after another."""
    rows = measured(burst_size=12, interval_s=0.012, service_s=0.001).assign(
        arrival="closed", burst_size=None
    )
    rows = rows.assign(scheduled_s=rows["sent_s"], permitted_s=rows["sent_s"])
    return rows, replace(facts_of(rows), max_concurrency=3, peak_outstanding=3)


def capped_schedule() -> tuple[pd.DataFrame, CellFacts]:
    """A cap that held back what came last until the end of the duration, and a request that timed out."""
    rows = measured(burst_size=200, interval_s=0.02)
    unsent = rows["request_index"] >= 199
    stamps = [name for name in rows.columns if name.endswith("_s") and name not in {"scheduled_s", "ended_s"}]
    rows[stamps] = rows[stamps].mask(unsent)
    rows["outcome"] = rows["outcome"].mask(unsent, "incomplete")
    rows["error"] = rows["error"].mask(
        unsent, "not sent: --max-concurrency 2 was reached until --duration ended"
    )
    rows = change(rows, 5, "outcome", "timeout")
    return rows, replace(facts_of(rows), max_concurrency=2, peak_outstanding=2)


def periodic_bursts() -> tuple[pd.DataFrame, CellFacts]:
    rows = measured(burst_size=8, limit=3)
    second = rows["request_index"] >= 4
    stamps = [name for name in rows.columns if name.endswith("_s") and name != "token_times_s"]
    rows.loc[second, stamps] += 1.0
    rows = rows.assign(burst_size=4)
    return rows, replace(facts_of(rows), inflight_at_start=1)  # the law is for other tests


SHAPES = [closed_loop, capped_schedule, periodic_bursts]
Shape = Callable[[], tuple[pd.DataFrame, CellFacts]]


@pytest.mark.parametrize("shape", SHAPES)
def test_faultless_loads_of_every_shape_are_valid(shape: Shape) -> None:
    assert check_cell(*shape()) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_lost_and_doubled_rows_are_found_in_every_shape(shape: Shape) -> None:  # case D8
    rows, facts = shape()
    (first, last) = rows["request_index"].iloc[[0, -1]]
    for index in (first, last):  # the last was never sent, of the shape with a cap
        assert f"1 offered request of {len(rows)} without a row (request_index {index})" in check_cell(
            rows[rows["request_index"] != index], facts
        )
        doubled = pd.concat([rows, rows[rows["request_index"] == index]], ignore_index=True)
        assert f"1 request with more than one row (request_index {index})" in check_cell(doubled, facts)


@pytest.mark.parametrize("shape", SHAPES)
def test_slots_and_stages_are_checked_in_every_shape(shape: Shape) -> None:
    rows, facts = shape()
    leaked = check_cell(change(rows, 2, "released_s", np.nan), facts)
    assert "1 slot taken and never released (request_index 2)" in leaked
    assert any("request-seconds in flight" in reason for reason in leaked)
    over = check_cell(rows, replace(facts, limit=2, peak_inflight=3))
    assert "3 requests were in flight at once, the limit is 2" in over
    early = check_cell(change(rows, 1, "first_token_s", 0.0), facts)
    assert any("stages out of order: first_token_s before" in reason for reason in early)


# --- the client's own bound


def test_more_outstanding_than_the_client_allows_is_found() -> None:  # cases C7, K7
    rows, facts = closed_loop()
    reason = the_reason(rows, replace(facts, peak_outstanding=4))
    assert reason == "4 requests were outstanding at once, the client's own limit is 3"


def test_a_closed_loop_that_never_reached_its_level_is_found() -> None:  # case K2
    rows, facts = closed_loop()
    reason = the_reason(rows, replace(facts, max_concurrency=6))
    assert reason == "at most 3 requests were outstanding at once, a closed loop of 6 users was asked for"


def test_a_closed_loop_that_ends_within_its_ramp_cannot_reach_its_level() -> None:
    rows, facts = closed_loop()
    last_s = float(rows["sent_s"].max())
    assert check_cell(rows, replace(facts, max_concurrency=6, ramp_s=last_s)) == []
    assert check_cell(rows, replace(facts, max_concurrency=6, ramp_s=0.0)) != []


def test_a_closed_loop_that_ran_out_of_requests_is_found() -> None:
    rows, facts = closed_loop()
    reason = the_reason(rows, replace(facts, ran_out_s=1.5))
    assert reason == "the closed loop had sent all its 12 requests at 1.5 s, before --duration ended"


def test_a_closed_loop_of_few_requests_cannot_reach_its_level() -> None:
    rows, facts = closed_loop()
    assert check_cell(rows, replace(facts, max_concurrency=7)) == []
    assert check_cell(rows, replace(facts, max_concurrency=50, peak_outstanding=12)) == []


def test_a_closed_loop_that_is_refused_cannot_reach_its_level() -> None:
    rows, facts = closed_loop()
    refused = change(rows, 11, "outcome", "rejected")
    assert check_cell(refused, replace(facts, max_concurrency=8)) == []


def test_a_cap_on_a_schedule_need_not_bind() -> None:
    rows, facts = capped_schedule()
    assert check_cell(rows, replace(facts, max_concurrency=8)) == []


# --- rows


def test_a_lost_row_is_found() -> None:  # case D8
    burst = measured(limit=3)
    lost = burst[burst["request_index"] != 5]
    assert check_cell(lost, facts_of(burst)) == [
        "1 offered request of 8 without a row (request_index 5)",
        "outcomes sum to 7, offered were 8",
    ]


def test_a_doubled_row_is_found() -> None:  # case D8
    burst = measured(limit=3)
    doubled = pd.concat([burst, burst[burst["request_index"] == 5]])
    assert check_cell(doubled, facts_of(burst)) == [
        "1 request with more than one row (request_index 5)",
        "outcomes sum to 9, offered were 8",
    ]


def test_a_lost_row_is_not_made_good_by_a_doubled_one() -> None:  # case D8
    burst = measured(limit=3)
    assert check_cell(change(burst, 5, "request_index", 6), facts_of(burst)) == [
        "1 offered request of 8 without a row (request_index 5)",
        "1 request with more than one row (request_index 6)",
    ]


def test_a_row_that_was_never_offered_is_found() -> None:
    burst = measured(limit=3)
    reasons = check_cell(change(burst, 7, "request_index", 8), facts_of(burst))
    assert "1 row of requests that were never offered (request_index 8)" in reasons


@pytest.mark.parametrize("outcome", [None, "lost"])
def test_a_row_without_a_known_outcome_is_found(outcome: str | None) -> None:
    burst = measured(limit=3)
    assert check_cell(change(burst, 2, "outcome", outcome), facts_of(burst)) == [
        "1 row without a known outcome (request_index 2)",
        "outcomes sum to 7, offered were 8",
    ]


# --- slots


def test_more_in_flight_than_the_limit_is_found() -> None:
    burst = measured(limit=3)
    facts = replace(facts_of(burst), peak_inflight=4)
    assert the_reason(burst, facts) == "4 requests were in flight at once, the limit is 3"


def test_a_leaked_slot_is_found() -> None:
    burst = measured(limit=3)
    leaked = change(burst, 1, "released_s", np.nan)
    assert the_reason(leaked, facts_of(leaked)) == "1 slot taken and never released (request_index 1)"


def test_a_slot_given_back_that_nobody_took_is_found() -> None:
    burst = change(measured(limit=3), 7, "released_s", 1.0)
    assert "1 slot released and never taken (request_index 7)" in check_cell(burst, facts_of(burst))


@pytest.mark.parametrize("error_s", [-0.001, 0.001, np.nan])
def test_an_integral_that_disagrees_with_the_stamps_is_found(error_s: float) -> None:
    burst = measured(limit=3)
    facts = facts_of(burst)
    assert facts.inflight_integral_s is not None
    wrong = replace(facts, inflight_integral_s=facts.inflight_integral_s + error_s)
    assert "request-seconds in flight" in the_reason(burst, wrong)


def test_the_integral_may_differ_by_the_clock_tolerance() -> None:
    burst = measured(limit=3)
    facts = facts_of(burst)
    assert facts.inflight_integral_s is not None
    assert check_cell(burst, replace(facts, inflight_integral_s=facts.inflight_integral_s + 140e-6)) == []


# --- stages


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("scheduled_s", "permitted_s"),
        ("permitted_s", "sent_s"),
        ("sent_s", "reserved_s"),
        ("reserved_s", "tokenized_s"),
        ("reserved_s", "admitted_s"),
        ("tokenized_s", "first_scheduled_s"),
        ("first_scheduled_s", "first_token_s"),
        ("first_token_s", "last_token_s"),
        ("first_token_s", "received_first_s"),
        ("last_token_s", "finished_s"),
        ("last_token_s", "received_last_s"),
        ("received_last_s", "ended_s"),
        ("reserved_s", "released_s"),
    ],
)
def test_each_stage_before_its_predecessor_is_found(earlier: str, later: str) -> None:
    burst = measured(limit=3)
    early = float(burst.loc[burst["request_index"] == 1, earlier].iloc[0]) - 1e-3
    reasons = check_cell(change(burst, 1, later, early), facts_of(burst))
    assert any(f"{later} before" in reason and "(request_index 1)" in reason for reason in reasons)


def test_a_refusal_known_before_it_was_asked_for_is_found() -> None:
    burst = change(measured(limit=3), 6, "rejected_s", -1.0)
    assert the_reason(burst, facts_of(burst)) == (
        "stages out of order: rejected_s before sent_s in 1 request (request_index 6)"
    )


def test_stages_are_compared_across_one_that_was_not_measured() -> None:
    burst = measured(limit=3)
    pretok = burst.assign(tokenized_s=np.nan)
    assert check_cell(pretok, facts_of(pretok)) == []
    early = change(pretok, 1, "first_scheduled_s", 0.0)
    assert "first_scheduled_s before reserved_s" in the_reason(early, facts_of(early))


# --- pacing


def test_a_burst_sent_too_slowly_is_found() -> None:
    burst = measured(limit=None)
    late = change(burst, 7, "sent_s", burst["sent_s"].min() + 5.1e-3)
    late = late.assign(reserved_s=late["sent_s"], admitted_s=late["sent_s"], tokenized_s=late["sent_s"])
    assert the_reason(late, facts_of(late)) == (
        "the burst of 8 due at 0.000 s took 5.1 ms to send, more than 5.0 ms"
    )


def test_a_large_burst_may_take_longer_to_send() -> None:
    burst = measured(burst_size=64, limit=None)
    late = burst.assign(sent_s=burst["sent_s"] + 8e-3 * (burst["request_index"] == 63))
    late = late.assign(reserved_s=late["sent_s"], admitted_s=late["sent_s"], tokenized_s=late["sent_s"])
    assert check_cell(late, facts_of(late)) == []


def test_two_bursts_are_judged_one_by_one() -> None:
    burst = measured(limit=None)
    second = burst["request_index"] >= 4
    stamps = [column for column in burst.columns if column.endswith("_s") and column != "token_times_s"]
    apart = burst.copy()
    apart.loc[second, stamps] = apart.loc[second, stamps] + 1.0
    assert check_cell(apart, facts_of(apart)) == []


def shifted(requests: pd.DataFrame, delay_s: pd.Series) -> pd.DataFrame:
    """`requests` sent later by `delay_s` each, everything after the send with it."""
    stamps = [
        column
        for column in requests.columns
        if column.endswith("_s") and column not in {"scheduled_s", "permitted_s", "token_times_s"}
    ]
    return requests.assign(**{column: requests[column] + delay_s for column in stamps})


def test_a_sender_that_falls_behind_is_found() -> None:
    paced = measured(burst_size=100, interval_s=0.02, service_s=0.001)
    late = shifted(paced, 0.01 + 0 * paced["sent_s"])
    assert the_reason(late, facts_of(late)).startswith("p99 send lag 10.0 ms, more than")


def test_one_late_send_of_a_hundred_is_no_fault() -> None:
    paced = measured(burst_size=101, interval_s=0.02, service_s=0.001)
    late = shifted(paced, 0.015 * (paced["request_index"] == 50))
    assert check_cell(late, facts_of(late)) == []


def test_a_schedule_that_was_stretched_is_found() -> None:
    paced = measured(burst_size=100, interval_s=0.02, service_s=0.1)  # a slow server: much lag is allowed
    late = shifted(paced, 0.03 * paced["scheduled_s"] / paced["scheduled_s"].max())
    assert "requests were sent over 2010.0 ms, the schedule spans 1980.0 ms" in the_reason(
        late, facts_of(late)
    )


def test_a_span_is_not_judged_while_a_cap_binds() -> None:
    paced = measured(burst_size=100, interval_s=0.02, service_s=0.1)
    late = shifted(paced, 0.03 * paced["scheduled_s"] / paced["scheduled_s"].max())
    capped = late.assign(permitted_s=late["sent_s"])
    assert check_cell(capped, facts_of(capped)) == []


def test_a_short_span_may_differ_by_the_lag_that_is_allowed() -> None:
    paced = measured(burst_size=10, interval_s=0.001)
    late = shifted(paced, 0.0015 * (paced["request_index"] == 9))
    assert check_cell(late, facts_of(late)) == []


# --- failures


def test_what_was_never_sent_says_why_in_the_verdict() -> None:  # case K7
    rows, facts = capped_schedule()
    reason = the_reason(change(change(rows, 7, "outcome", "error"), 8, "outcome", "error"), facts)
    assert reason == (
        "2 of 200 requests ended in error and 1 stayed incomplete (1 not sent: --max-concurrency 2 was reached until"
        " --duration ended), more than 1 % together"
    )


@pytest.mark.parametrize("outcome", ["error", "incomplete"])
def test_too_many_failures_make_a_run_invalid(outcome: str) -> None:  # case D1
    burst = measured(burst_size=100)
    failed = change(change(burst, 3, "outcome", outcome), 4, "outcome", outcome)
    assert "more than 1 % together" in the_reason(failed, facts_of(failed))


def test_one_percent_of_failures_is_allowed() -> None:
    burst = change(measured(burst_size=100), 3, "outcome", "error")
    assert check_cell(burst, facts_of(burst)) == []


def test_the_allowed_share_of_failures_can_be_set() -> None:
    burst = measured(burst_size=100).assign(outcome="error")
    assert check_cell(burst, facts_of(burst), max_error_share=1.0) == []


# --- the burst law


@pytest.mark.parametrize("limit", [None, 4])
def test_a_wrong_number_of_refusals_is_found(limit: int | None) -> None:
    burst = measured(limit=3)
    facts = replace(facts_of(burst), limit=limit)
    assert f"{0 if limit is None else 4} refusals were due, 5 were counted" in the_reason(burst, facts)


def test_the_burst_law_needs_an_idle_server() -> None:
    burst = measured(limit=3)
    assert check_cell(burst, replace(facts_of(burst), limit=4, inflight_at_start=1)) == []


def test_the_burst_law_needs_that_no_slot_came_free_meanwhile() -> None:
    burst = measured(limit=3)
    early = burst.assign(released_s=burst["released_s"].where(burst["request_index"] != 0, 30e-6))
    early = early.assign(**dict.fromkeys(("last_token_s", "finished_s"), np.nan))
    late_index = early["request_index"] == 0
    for column in ("first_scheduled_s", "first_token_s", "received_first_s", "received_last_s"):
        early[column] = early[column].mask(late_index)
    assert slots_freed_during_burst(early) == 1
    assert check_cell(early, replace(facts_of(early), limit=4)) == []


def test_no_slot_comes_free_in_a_short_burst() -> None:
    assert slots_freed_during_burst(measured(limit=3)) == 0


def test_slots_freed_while_sending_have_no_meaning_for_paced_arrivals() -> None:
    assert slots_freed_during_burst(measured(interval_s=0.02)) is None


def test_slots_freed_while_sending_have_no_meaning_without_an_attempt() -> None:
    unsent = measured().assign(reserved_s=np.nan, rejected_s=np.nan, released_s=np.nan)
    assert slots_freed_during_burst(unsent) is None


# --- the prefix cache


def test_hits_of_prompts_that_share_nothing_are_found() -> None:  # cases I5, I7
    burst = change(measured(limit=None), 2, "cached_tokens", 16)
    facts = replace(facts_of(burst), may_be_cached=False)
    assert "16 prompt tokens of 1 request (request_index 2) came from a prefix cache" in the_reason(
        burst, facts
    )


def test_hits_that_were_asked_for_are_none_of_its_business() -> None:
    burst = change(measured(limit=None), 2, "cached_tokens", 16)
    assert check_cell(burst, replace(facts_of(burst), may_be_cached=True)) == []


def test_who_tries_again_may_find_what_its_own_earlier_try_left() -> None:  # --per-try-timeout
    burst = change(measured(limit=None), 2, "cached_tokens", 16)
    facts = replace(facts_of(burst), may_be_cached=False)
    assert check_cell(change(burst, 2, "attempts", 2), facts) == []
    assert check_cell(change(burst, 3, "attempts", 2), facts) != []


@pytest.mark.parametrize("cached_tokens", [None, 0, 15])
def test_fewer_equal_tokens_than_a_block_may_be_chance(cached_tokens: int | None) -> None:
    burst = measured(limit=None).assign(cached_tokens=cached_tokens)
    assert check_cell(burst, replace(facts_of(burst), may_be_cached=False)) == []
