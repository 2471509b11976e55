from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from roseinfer.bench.records import Outcome
from roseinfer.bench.stats import percentile
from roseinfer.bench.summary import (
    COMPLETED_METRICS,
    SUMMARY_SCHEMA,
    factor_text,
    limit_label,
    pooled,
    sort_cells,
    summarise,
)
from roseinfer.errors import RunError
from tests.bench.rows import SERVER_START_S, facts_by_cell, measured, only, summary_of


def with_outcome(requests: pd.DataFrame, indexes: range, outcome: str) -> pd.DataFrame:
    changed = requests.copy()
    changed.loc[changed["request_index"].isin(indexes), "outcome"] = outcome
    return changed


# --- rows and columns


def test_a_row_per_cell_and_repeat_and_one_pooled() -> None:
    found = summary_of(*[measured(limit=limit, repeat=r) for limit in (None, 3) for r in (0, 1)])
    assert found["cell_id"].tolist() == ["limit=None,prompt=32"] * 3 + ["limit=3,prompt=32"] * 3
    assert found["repeat"].fillna(-1).tolist() == [0, 1, -1] * 2
    assert found["repeats"].fillna(-1).tolist() == [-1, -1, 2] * 2


def test_summary_has_the_columns_of_its_schema() -> None:
    assert summary_of(measured()).columns.tolist() == SUMMARY_SCHEMA.names


def test_summary_is_the_frame_that_its_file_gives_back() -> None:
    found = summary_of(measured(limit=3), measured(limit=3, repeat=1))
    table = pa.Table.from_pandas(found, schema=SUMMARY_SCHEMA, preserve_index=False)
    pd.testing.assert_frame_equal(table.to_pandas(), found)


def test_cells_are_sorted_with_no_limit_last() -> None:
    found = sort_cells(
        summary_of(*[measured(limit=limit, prompt_len=n) for limit in (None, 16, 3) for n in (64, 32)])
    )
    order = pooled(found)[["prompt_len", "max_inflight"]].fillna(0).astype(int)
    assert order.to_numpy().tolist() == [[32, 3], [32, 16], [32, 0], [64, 3], [64, 16], [64, 0]]


def test_the_pooled_row_follows_its_repeats_when_sorted() -> None:
    found = sort_cells(summary_of(measured(limit=3, repeat=1), measured(limit=3, repeat=0)))
    assert found["repeat"].fillna(-1).tolist() == [0, 1, -1]


@pytest.mark.parametrize(
    ("admission", "label"),
    [
        ("none", "no limit"),
        ("inflight:64", "64"),
        ("tokens:4096", "tokens 4096"),
        ("inflight:64+tokens:4096", "inflight 64, tokens 4096"),
    ],
)
def test_no_limit_is_called_so_and_a_limit_by_what_it_bounds(admission: str, label: str) -> None:  # case A10
    assert limit_label(admission) == label


def test_no_limit_stays_null_in_the_summary() -> None:  # case A10
    assert summary_of(measured(limit=None))["max_inflight"].isna().all()


def test_rows_without_facts_are_refused() -> None:
    requests = measured()
    with pytest.raises(RunError, match="limit=None,prompt=32 repeat 0"):
        summarise(requests, {})


def test_facts_without_rows_are_refused() -> None:  # case D8
    requests = measured()
    facts = facts_by_cell(requests)
    (known,) = facts.values()
    with pytest.raises(RunError, match="other repeat 4"):
        summarise(requests, facts | {("other", 4): known})


# --- outcomes


def test_counts_of_every_outcome_sum_to_offered() -> None:  # case D8
    row = only(with_outcome(measured(limit=5), range(1, 3), "timeout"))
    assert (row["completed"], row["timeout"], row["rejected"], row["admitted"]) == (3, 2, 3, 5)
    assert sum(row[str(outcome)] for outcome in Outcome) == row["offered"] == 8


def test_reject_rate_divides_by_offered() -> None:  # case D3, D4
    row = only(measured(burst_size=100, limit=60))
    assert (row["offered"], row["reject_rate"]) == (100, 0.4)


@pytest.mark.parametrize("outcome", ["error", "timeout", "cancelled", "incomplete"])
def test_what_did_not_complete_adds_to_no_latency(outcome: str) -> None:  # case D1, D5
    row = only(with_outcome(measured(burst_size=8), range(1, 8), outcome))
    assert (row["completed"], row[outcome]) == (1, 7)
    assert row["n_ttft"] == row["n_e2el"] == row["n_queue_wait"] == 1
    assert row["max_ttft_ms"] == pytest.approx(1e3 * SERVER_START_S + 10 + 0.1)


def test_refusals_do_not_pull_the_latencies_down() -> None:  # case D10
    alone, beside_refusals = only(measured(burst_size=4)), only(measured(burst_size=8, limit=4))
    assert beside_refusals["p50_ttft_ms"] == alone["p50_ttft_ms"]
    assert beside_refusals["n_reject"] == 4
    assert beside_refusals["p99_reject_ms"] == pytest.approx(0.004)


def test_refusals_after_queueing_are_not_refusals_at_submission() -> None:
    burst = measured(limit=3).assign(reject_stage="queued")
    assert only(burst)["n_reject"] == 0


def test_admitted_requests_that_failed_count_for_add_request() -> None:
    row = only(with_outcome(measured(limit=5), range(5), "error"))
    assert (row["n_add_request"], row["n_ttft"]) == (5, 0)


def test_when_nothing_completed_figures_are_null() -> None:  # case D2, F7
    failed = with_outcome(measured(), range(8), "error")
    found = summary_of(failed.assign(reserved_s=np.nan, admitted_s=np.nan, released_s=np.nan))
    metrics = [*COMPLETED_METRICS, "add_request", "reject", "time_to_timeout"]
    figures = [
        f"{figure}_{metric}_ms" for metric in metrics for figure in ("p50", "p95", "p99", "max", "mean")
    ]
    assert found[figures].isna().all(axis=None)
    assert (found[[f"n_{metric}" for metric in metrics]] == 0).all(axis=None)
    assert found[["request_throughput", "output_throughput"]].isna().all(axis=None)


@pytest.mark.parametrize("outcome", ["error", "timeout"])
def test_times_of_failures_are_a_statistic_of_their_own(outcome: str) -> None:  # case D6
    row = only(with_outcome(measured(burst_size=8, service_s=0.010), range(7, 8), outcome))
    assert (row[f"n_time_to_{outcome}"], row["n_e2el"]) == (1, 7)
    ended_s, sent_s = 0.010 + 8 * 0.010 + 0.002 + 0.0002, 7 * 20e-6
    assert row[f"p99_time_to_{outcome}_ms"] == pytest.approx(1e3 * (ended_s - sent_s))


def test_refusals_and_timeouts_are_two_distributions() -> None:  # case D11
    burst = measured(burst_size=200, limit=100)
    late = burst["request_index"] < 50
    burst.loc[late, "outcome"], burst.loc[late, "ended_s"] = "timeout", 30.0
    row = only(burst)
    assert (row["n_reject"], row["n_time_to_timeout"], row["n_ttft"]) == (100, 50, 50)
    assert row["p99_reject_ms"] == pytest.approx(0.004)
    assert row["p50_time_to_timeout_ms"] == pytest.approx(30_000, rel=1e-3)


def test_errors_do_not_enter_a_percentile_as_infinity() -> None:  # case D13
    row = only(with_outcome(measured(burst_size=200), range(4), "error"))
    assert row["n_ttft"] == 196
    assert np.isfinite(row["p99_ttft_ms"])
    assert row["error_rate"] == 0.02


def test_what_was_still_running_at_the_end_is_neither_completed_nor_error() -> None:  # case D9
    row = only(with_outcome(measured(burst_size=8), range(2), "incomplete"))
    assert (row["completed"], row["error"], row["incomplete"], row["offered"]) == (6, 0, 2, 8)
    assert row["error_rate"] == 0.25
    assert row["request_throughput"] == pytest.approx(6 / row["duration_s"])


def test_the_error_rate_counts_errors_timeouts_and_the_incomplete_of_the_offered() -> None:  # case D1
    burst = measured(burst_size=8, limit=4).assign(
        outcome=["error", "timeout", "incomplete", "completed"] + ["rejected"] * 4
    )
    assert only(burst)["error_rate"] == 3 / 8


# --- goodput


def test_goodput_divides_by_offered() -> None:  # case D4
    row = only(measured(burst_size=100, limit=60), goals=("ttft:1000",))
    assert (row["offered"], row["rejected"], row["good"], row["good_share"]) == (100, 40, 60, 0.6)
    assert row["request_goodput"] == pytest.approx(60 / row["duration_s"])


def test_refusing_more_never_raises_the_share_served() -> None:  # case D3, D4
    rows = [only(measured(burst_size=100, limit=limit), goals=("ttft:205",)) for limit in (10, 20, 60, None)]
    assert [row["p99_ttft_ms"] for row in rows] == sorted(row["p99_ttft_ms"] for row in rows)
    assert [row["good"] for row in rows] == [10, 19, 19, 19]


def test_goodput_of_repeats_adds_up() -> None:
    found = summary_of(measured(), measured(repeat=1, service_s=0.02), goals=("ttft:95",))
    assert found["good"].tolist() == [8, 4, 12]
    assert found["good_share"].tolist() == [1.0, 0.5, 0.75]


def test_without_goals_there_is_no_goodput() -> None:
    assert summary_of(measured())[["good", "good_share", "request_goodput"]].isna().all(axis=None)


def test_when_nothing_completed_there_is_no_goodput() -> None:  # case D2
    row = only(with_outcome(measured(), range(8), "error"), goals=("ttft:95",))
    assert (row["good"], row["good_share"]) == (0, 0.0)
    assert np.isnan(row["request_goodput"])


# --- figures


def test_stages_come_back_as_they_were_made() -> None:
    row = only(measured(burst_size=4))
    assert row["p50_prefill_ms"] == pytest.approx(10.0)
    assert row["p50_tokenize_ms"] == pytest.approx(0.001)
    assert row["p50_add_request_ms"] == pytest.approx(0.010)
    assert row["max_ttft_ms"] == pytest.approx(10 + 40 + 0.1)
    assert row["max_ttft_from_send_ms"] == pytest.approx(10 + 40 + 0.1 - 0.06)
    assert row["max_e2el_ms"] == pytest.approx(10 + 40 + 0.1 + 2)


def test_pooled_percentiles_come_from_all_rows() -> None:  # case F4
    fast, slow = measured(burst_size=9, service_s=0.001), measured(burst_size=9, repeat=1, service_s=0.1)
    row = only(fast, slow)
    ttft_ms = 1e3 * pd.concat([fast, slow])["received_first_s"]
    assert row["p95_ttft_ms"] == percentile(ttft_ms, 95)
    assert row["p50_ttft_ms"] == percentile(ttft_ms, 50)


def test_percentiles_never_decrease_and_never_exceed_the_maximum() -> None:  # case F5
    row = only(measured(burst_size=50, limit=40))
    assert row["p50_ttft_ms"] <= row["p95_ttft_ms"] <= row["p99_ttft_ms"] <= row["max_ttft_ms"]


def test_first_token_is_in_no_gap() -> None:  # case E1
    row = only(measured(burst_size=1, output_tokens=5))
    assert row["n_itl"] == 4
    assert row["max_itl_ms"] == pytest.approx(1.0)


def test_one_token_has_no_tpot() -> None:  # case E5
    row = only(measured(output_tokens=1))
    assert (row["n_tpot"], row["n_itl"], row["n_ttft"]) == (0, 0, 8)
    assert np.isnan(row["p50_tpot_ms"])


def test_tpot_divides_by_the_tokens_that_came() -> None:  # case E5
    row = only(measured(output_tokens=10, token_gap_s=0.002).assign(output_len=128))
    assert row["p50_tpot_ms"] == pytest.approx(2.0)


def test_unmeasured_latencies_are_left_out_and_n_says_so() -> None:  # case E6
    requests = measured(burst_size=10)
    unmeasured = requests.assign(
        received_first_s=requests["received_first_s"].where(requests["request_index"] < 7)
    )
    row = only(unmeasured)
    assert (row["completed"], row["n_ttft"]) == (10, 7)
    assert row["p50_ttft_ms"] == pytest.approx(10 + 40 + 0.1)


def test_a_single_stall_shows_as_the_largest_gap() -> None:  # case E7
    requests = measured(burst_size=1, output_tokens=1002, token_gap_s=0.010)
    stalled = requests.copy()
    times_s = np.array(requests["token_times_s"].iloc[0])
    times_s[500:] += 0.990
    stalled["token_times_s"] = pd.Series([times_s])
    row = only(stalled)
    assert row["max_itl_ms"] == pytest.approx(1000.0)
    assert row["p99_itl_ms"] == pytest.approx(10.0)


def test_the_largest_gap_of_every_request_counts_once() -> None:  # case E7
    burst = measured(burst_size=20, output_tokens=5, token_gap_s=0.010)
    stalled = list(burst["token_times_s"])
    stalled[7] = stalled[7] + np.array([0, 0, 1.0, 1.0, 1.0])
    row = only(burst.assign(token_times_s=stalled))
    assert (row["n_itl"], row["n_largest_itl"]) == (80, 20)
    assert row["p50_largest_itl_ms"] == pytest.approx(10.0)
    assert row["max_largest_itl_ms"] == row["max_itl_ms"] == pytest.approx(1010.0)


def test_gaps_of_tokens_and_of_deliveries_are_two_metrics() -> None:  # case E2, E11
    # Six tokens 10 ms apart, three to a delivery.
    tokens_s = np.array([0.10, 0.11, 0.12, 0.13, 0.14, 0.15])
    burst = measured(burst_size=1, output_tokens=6).assign(received_first_s=0.12, received_last_s=0.15)
    burst["token_times_s"], burst["chunk_times_s"] = pd.Series([tokens_s]), pd.Series([tokens_s[[2, 5]]])
    row = only(burst)
    assert (row["n_itl"], row["n_chunk_gap"]) == (5, 1)
    assert row["p50_itl_ms"] == pytest.approx(10.0)
    assert row["p50_chunk_gap_ms"] == pytest.approx(30.0)
    assert row["p50_tpot_ms"] == pytest.approx(30.0 / 5)


def test_an_answer_without_tokens_has_no_latency() -> None:  # case E14
    silent = {
        "output_tokens": 0,
        "received_first_s": np.nan,
        "received_last_s": np.nan,
        "token_times_s": None,
    }
    row = only(measured(burst_size=1).assign(**silent))
    assert (row["completed"], row["n_ttft"], row["n_tpot"], row["n_itl"]) == (1, 0, 0, 0)


def test_the_latencies_of_a_burst_are_left_as_they_are() -> None:  # case F11
    # A correction for a fixed interval would add values below the slow ones.
    row = only(measured(burst_size=64))
    assert row["n_ttft"] == 64
    assert row["mean_ttft_ms"] == pytest.approx(10.1 + 10 * 65 / 2)


def test_throughput_runs_from_first_send_to_last_received() -> None:
    row = only(measured(burst_size=8, limit=4, output_tokens=3))
    assert row["duration_s"] == pytest.approx(0.010 + 4 * 0.010 + 0.002 + 0.0001)
    assert row["request_throughput"] == pytest.approx(4 / row["duration_s"])
    assert row["output_throughput"] == pytest.approx(12 / row["duration_s"])


def test_pooled_duration_is_the_sum_over_repeats() -> None:
    found = summary_of(measured(), measured(repeat=1, service_s=0.02))
    assert found["duration_s"].iloc[2] == pytest.approx(found["duration_s"].iloc[:2].sum())


def test_pooled_figures_of_the_facts() -> None:
    requests = pd.concat([measured(), measured(repeat=1)], ignore_index=True)
    facts = facts_by_cell(requests)
    first, second = sorted(facts)
    facts[second] = replace(facts[second], peak_inflight=5)
    row = pooled(summarise(requests, facts)).iloc[0]
    assert (row["peak_inflight"], row["started_utc"]) == (8, "2026-01-01T00:00:00+00:00")
    held_s = sum(facts[key].inflight_integral_s or np.nan for key in (first, second))
    assert row["mean_inflight"] == pytest.approx(held_s / row["duration_s"])


# --- validity


def test_an_invalid_repeat_makes_the_cell_invalid() -> None:
    requests = pd.concat([measured(limit=3), measured(limit=3, repeat=1)], ignore_index=True)
    facts = facts_by_cell(requests)
    _, second = sorted(facts)
    found = summarise(requests, facts | {second: replace(facts[second], peak_inflight=4)})
    assert found["valid"].tolist() == [True, False, False]
    reason = "4 requests were in flight at once, the limit is 3"
    assert found["invalid_reasons"].tolist()[1:] == [reason, f"repeat 1: {reason}"]


def test_a_valid_cell_has_no_reasons() -> None:
    assert summary_of(measured())["invalid_reasons"].isna().all()


def test_the_allowed_share_of_errors_is_passed_on() -> None:
    requests = with_outcome(measured(), range(4), "error")
    found = summarise(requests, facts_by_cell(requests), max_error_share=0.5)
    assert found["valid"].all()


# --- intervals


def test_the_median_over_repeats_is_unbounded_below_six() -> None:
    row = only(*[measured(repeat=r, service_s=0.01 + 0.001 * r) for r in range(5)])
    assert (row["median_p99_ttft_ms_lo"], row["median_p99_ttft_ms_hi"]) == (-np.inf, np.inf)


def test_the_median_over_repeats_is_of_their_p99s() -> None:
    repeats = [measured(repeat=r, service_s=0.01 + 0.001 * r) for r in range(6)]
    found = summary_of(*repeats)
    p99s, row = found["p99_ttft_ms"].iloc[:6], found.iloc[6]
    bounds = [row[f"median_p99_ttft_ms{bound}"] for bound in ("_lo", "", "_hi")]
    assert bounds == [p99s.iloc[0], p99s.iloc[2], p99s.iloc[5]]


def test_the_pooled_p99_lies_in_its_interval() -> None:
    row = only(*[measured(repeat=r, service_s=0.01 + 0.001 * r) for r in range(8)])
    assert row["p99_ttft_ms_lo"] < row["p99_ttft_ms"] <= row["p99_ttft_ms_hi"]


def test_one_repeat_leaves_the_pooled_p99_unbounded() -> None:
    row = only(measured())
    assert (row["p99_ttft_ms_lo"], row["p99_ttft_ms_hi"]) == (-np.inf, np.inf)


def test_rows_of_single_repeats_have_no_intervals() -> None:
    found = summary_of(measured(), measured(repeat=1))
    assert found.iloc[:2].filter(regex="median|_lo$|_hi$").isna().all(axis=None)


# --- how many repeats


def test_repeats_needed_follow_from_the_spread_of_the_p99s() -> None:
    repeats = [measured(repeat=r, service_s=s) for r, s in enumerate([0.010, 0.012, 0.014, 0.016])]
    found = summary_of(*repeats)
    s = np.std(np.log(found["p99_ttft_ms"].iloc[:4]), ddof=1)
    needed = found["repeats_needed"].iloc[4]
    assert needed == np.ceil(2 * s**2 / (np.log(1.15 / 1.10) / 1.28) ** 2)
    assert needed > 6


def test_no_comparison_takes_fewer_repeats_than_an_interval() -> None:
    assert only(measured(), measured(repeat=1))["repeats_needed"] == 6


def test_one_repeat_does_not_say_how_many_are_needed() -> None:
    assert np.isnan(only(measured())["repeats_needed"])
    assert summary_of(measured(), measured(repeat=1))["repeats_needed"].iloc[:2].isna().all()


def test_a_simulation_needs_no_repeats_to_be_compared() -> None:
    rows = [measured(repeat=r, service_s=0.010 + 0.002 * r).assign(target="sim") for r in range(3)]
    assert np.isnan(only(*rows)["repeats_needed"])


# --- names


@pytest.mark.parametrize(
    ("factor", "value", "text"),
    [
        ("request_rate", 0.3, "requests/s 0.3"),  # case H1
        ("request_rate", 12.0, "requests/s 12"),
        ("burst_size", 1_000_000, "burst 1000000"),
        ("prompt_len", 32.0, "prompt tokens 32"),
    ],
)
def test_factors_are_named_with_their_values(factor: str, value: float, text: str) -> None:
    assert factor_text(factor, value) == text


@pytest.mark.parametrize(("token_gap_s", "known"), [(0.0, False), (0.001, True)])
def test_a_run_that_the_clock_cannot_tell_has_no_rates(token_gap_s: float, known: bool) -> None:  # case C9
    rows = measured(burst_size=1, service_s=0.0, token_gap_s=token_gap_s)
    rows["sent_s"] = rows["received_first_s"] - 1e-4
    summary = summarise(rows, facts_by_cell(rows))
    for rate in ("request_throughput", "output_throughput"):
        assert summary[rate].notna().all() == known
        assert not np.isinf(summary[rate]).any()
