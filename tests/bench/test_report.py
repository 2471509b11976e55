"""What a run prints, word for word where its readers may parse it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench import report
from roseinfer.bench.burst_report import burst_report
from roseinfer.bench.summary import summarise
from tests.bench.experiments import experiment
from tests.bench.load_shapes import bursts_over_background, closed_loop, rates, served
from tests.bench.load_shapes import summary_of as shaped_summary
from tests.bench.rows import facts_by_cell, measured, with_goals
from tests.bench.simulated_sweep import sweep_summary

SEED_LABELS = [
    "=== streaming benchmark ===",
    *("Model", "Device", "Pretok", "Tokenize workers", "Paged attention", "CUDA Graph", "NVTX"),
    *("Requests", "Rejected", "Prompt tokens (total)", "Completion tokens (total)", "Submit wall"),
    *("add_request latency", "reject latency", "Tokenize", "Queue wait (post-tok)", "Prefill->first token"),
    *("TTFT", "TPOT", "ITL", "Latency", "Throughput (completion,total)"),
]
"""The lines of the streaming benchmark that this project grew from, in its order."""


def burst_lines(rows: pd.DataFrame, **flags: Any) -> dict[str, str]:
    """Label to the rest of the line."""
    made = experiment(**flags)
    text = burst_report(rows, made, made.model_name, "cpu")
    return dict(re.match(r"(.*?)(?: p50/\S*)?: (.*)", line).groups() for line in text.splitlines()[1:])  # type: ignore[union-attr, misc]


def burst_labels(rows: pd.DataFrame) -> list[str]:
    lines = burst_report(rows, experiment(), "builtin:gpt2", "cpu").splitlines()
    return [re.sub(r"( p50/[^:]*)?: .*", "", line) for line in lines]


@pytest.mark.parametrize("limit", [None, 3])
def test_the_report_has_the_seeds_labels_in_the_seeds_order(limit: int | None) -> None:
    assert burst_labels(measured(limit=limit)) == SEED_LABELS


def test_requests_and_tokens_count_the_accepted_only() -> None:
    lines = burst_lines(
        measured(burst_size=8, limit=3).assign(prompt_tokens=lambda rows: [32] * 3 + [np.nan] * 5)
    )
    assert lines["Requests"] == "3"
    assert lines["Rejected"] == "5"
    assert lines["Prompt tokens (total)"] == "96"
    assert lines["Completion tokens (total)"] == "9"


def test_submitting_latencies_have_four_decimals_and_the_others_two() -> None:
    lines = burst_lines(measured(burst_size=400, limit=150))
    assert lines["add_request latency"] == "0.0100/0.0100/0.0100 ms"
    assert lines["reject latency"] == "0.0040/0.0040/0.0040 ms"
    for label in ("Tokenize", "Queue wait (post-tok)", "Prefill->first token", "TTFT", "ITL", "Latency"):
        assert re.fullmatch(r"\d+\.\d\d/\d+\.\d\d/\d+\.\d\d ms", lines[label]), label
    assert re.fullmatch(r"\d+\.\d\d/\d+\.\d\d/\d+\.\d\d ms/token", lines["TPOT"])
    assert re.fullmatch(r"\d+\.\d\d tokens/s", lines["Throughput (completion,total)"])
    assert re.fullmatch(r"\d+\.\d{6} s", lines["Submit wall"])


def test_figures_are_those_of_the_rows() -> None:
    lines = burst_lines(measured(burst_size=200, service_s=0.010, output_tokens=3, token_gap_s=0.001))
    assert lines["TTFT"] == "1010.10/1910.10/1990.10 ms"  # 10 + 0.1 ms and ten per request before
    assert lines["Prefill->first token"] == "10.00/10.00/10.00 ms"
    assert lines["ITL"] == "1.00/1.00/1.00 ms"
    assert lines["Throughput (completion,total)"] == f"{600 / 2.0121:.2f} tokens/s"


def test_an_empty_sample_is_not_available() -> None:  # case F7
    no_refusal, one_token = burst_lines(measured()), burst_lines(measured(output_tokens=1))
    assert no_refusal["reject latency"] == one_token["TPOT"] == one_token["ITL"] == "n/a"


def test_nothing_completed_is_no_figure_and_no_crash() -> None:  # case D2
    failed = measured(burst_size=4).assign(outcome="error")
    lines = burst_lines(failed)
    assert lines["TTFT"] == lines["Latency"] == "n/a"
    assert lines["Throughput (completion,total)"] == "n/a tokens/s"


@pytest.mark.parametrize(
    ("n", "label"),
    [
        (100, "TTFT p50/p95/p99:"),
        (99, "TTFT p50/p95/max (n=99):"),
        (19, "TTFT p50/max (n=19)/max (n=19):"),
        (1, "TTFT max (n=1)/max (n=1)/max (n=1):"),
    ],
)
def test_a_percentile_that_its_sample_cannot_carry_says_so(n: int, label: str) -> None:  # case F3
    assert f"\n{label} " in burst_report(measured(burst_size=n), experiment(), "a model", "cpu")


def test_goodput_stands_below_the_report_where_there_are_goals() -> None:  # case D4
    lines = burst_lines(measured(burst_size=100, limit=60), goodput=["ttft:205", "tpot:50"])
    assert lines["Goodput (ttft:205 tpot:50)"] == "19 requests, 19.0 % of 100 offered"


def test_the_report_leaves_the_warm_up_out_as_the_summary_does() -> None:
    rows = served(np.linspace(0, 19.9, 200), arrival="poisson", request_rate=10.0)
    first_s = rows["scheduled_s"] + np.where(rows["request_index"] < 40, 1.0, 0.01)
    lines = burst_lines(rows.assign(received_first_s=first_s))
    assert lines["Warm-up cut (MSER-5)"] == "40 of 200"
    assert lines["TTFT"] == "10.00/10.00/10.00 ms"
    assert lines["Completion tokens (total)"] == "400"
    settled = burst_lines(rows.assign(received_first_s=rows["scheduled_s"] * 1.5 + 0.01))
    assert settled["Warm-up cut (MSER-5)"] == "0 of 200, no steady part found"


def test_what_was_set_is_printed(tmp_path: Any) -> None:
    (tmp_path / "mine").mkdir()
    lines = burst_lines(measured(), model=str(tmp_path / "mine"), pretok=True)
    assert (lines["Model"], lines["Device"]) == ("mine", "cpu")
    assert (lines["Pretok"], lines["Tokenize workers"]) == ("True", "0")


# ---- the table of a sweep ----


def table_rows(summary: pd.DataFrame, width: int = 100) -> dict[str, list[str]]:
    """Label (after its heading, if it has one) to figures."""
    (table,) = report.tables(summary, width)
    rows, heading = {}, ""
    for line in table.splitlines():
        label, *figures = (
            re.split(r"  +", line.rstrip())
            if not line.startswith("  ")
            else ["", *re.split(r"  +", line.strip())]
        )
        if label:
            heading = label
            rows[label] = figures
        else:
            rows[f"{heading} {figures[0]}"] = figures[1:]
    return rows


def test_the_table_has_every_figure_that_was_asked_for() -> None:
    rows = table_rows(sweep_summary())
    assert rows["max inflight"] == ["16", "64", "no limit"]  # case A10: no limit is last and never 0
    assert rows["offered"] == ["1024"] * 3
    assert rows["completed (n)"] == ["128", "512", "1024"]
    assert rows["rejected"] == ["896", "512", "0"]
    assert rows["reject rate"] == ["87.5 %", "50.0 %", "0.0 %"]
    for metric in ("queue wait (ms)", "TTFT (ms)", "TPOT (ms)", "E2EL (ms)"):
        for figure in ("p50", "p95", "p99"):
            assert all(re.fullmatch(r"\d+\.\d\d", text) for text in rows[f"{metric} {figure}"]), (
                metric,
                figure,
            )
        assert all(
            re.fullmatch(r"\[\d+\.\d\d, \d+\.\d\d\]", text) for text in rows[f"{metric} p99, interval"]
        )
    assert all(re.fullmatch(r"\[.*\]", text) for text in rows["TTFT (ms) p99 of a repeat, interval"])
    assert rows["reject p99 (ms)"][2] == "n/a"
    assert all(float(text) > 0 for name in ("tokens", "requests") for text in rows[f"throughput ({name}/s)"])


def test_figures_of_the_table_are_the_pooled_ones() -> None:
    summary = sweep_summary()
    rows = table_rows(summary)
    pooled = summary[summary["repeat"].isna()]
    assert rows["TTFT (ms) p99"] == [f"{figure:.2f}" for figure in pooled["p99_ttft_ms"]]
    assert rows["queue wait (ms) p50"] == [f"{figure:.2f}" for figure in pooled["p50_queue_wait_ms"]]
    assert rows["reject p99 (ms)"][:2] == [f"{figure:.4f}" for figure in pooled["p99_reject_ms"][:2]]


def test_no_two_rows_of_the_table_have_the_same_name() -> None:
    (table,) = report.tables(sweep_summary())
    assert len(table_rows(sweep_summary())) == len([line for line in table.splitlines() if line])


def test_small_samples_are_labelled_in_the_table() -> None:  # case F3
    rows = table_rows(sweep_summary((16,), bursts=(32,), repeats=2))
    assert re.fullmatch(r"max \(n=32\) \d+\.\d\d", rows["TTFT (ms) p99"][0])
    assert re.fullmatch(r"\d+\.\d\d", rows["TTFT (ms) p95"][0])


def test_intervals_that_the_repeats_cannot_give_are_unbounded() -> None:  # case F9
    rows = table_rows(sweep_summary((16,), repeats=1))
    assert rows["TTFT (ms) p99, interval"] == ["unbounded"]


def test_a_latency_that_nobody_has_is_one_line() -> None:
    one_token = measured(burst_size=8, output_tokens=1)
    rows = table_rows(summarise(one_token, facts_by_cell(one_token)))
    assert rows["TPOT (ms)"] == ["n/a"]
    assert "TPOT (ms) p99" not in rows


def test_refusing_everything_is_no_crash() -> None:  # case D2
    rows = table_rows(sweep_summary((16,), refuse_all=True))
    assert rows["completed (n)"] == ["0"]
    assert rows["TTFT (ms)"] == rows["throughput (tokens/s)"] == ["n/a"]


def test_other_outcomes_have_a_row_when_there_are_some() -> None:  # case D1
    rows = measured(burst_size=8)
    rows.loc[0, "outcome"] = "error"
    counted = table_rows(summarise(rows, facts_by_cell(rows)))
    assert counted["error"] == ["1"]
    assert "timeout" not in counted
    assert "error" not in table_rows(sweep_summary())


@pytest.mark.parametrize("width", [80, 100])
def test_lines_keep_to_the_width_and_every_limit_is_shown(width: int) -> None:
    limits = (None, 1, 2, 4, 8, 16, 32, 64)
    (table,) = report.tables(sweep_summary(limits, repeats=2), width)
    lines = table.splitlines()
    assert max(map(len, lines)) <= width
    shown = [
        label for line in lines if line.startswith("max inflight") for label in re.split(r"  +", line)[1:]
    ]
    assert shown == ["1", "2", "4", "8", "16", "32", "64", "no limit"]


def test_three_limits_stand_side_by_side_in_100_columns() -> None:
    (table,) = report.tables(sweep_summary(repeats=2), 100)  # few repeats: the widest labels
    assert table.count("max inflight") == 1


def test_a_column_wider_than_the_terminal_is_shown_all_the_same() -> None:
    (table,) = report.tables(sweep_summary(), 20)
    assert table.count("max inflight") == 3


def test_there_is_a_table_for_each_combination_of_the_other_factors() -> None:
    titles = [
        table.splitlines()[0]
        for table in report.tables(sweep_summary((16,), bursts=(64, 128), prompt_lens=(16, 32), repeats=2))
    ]
    assert titles == [
        f"burst {burst}, prompt tokens {length}, new tokens 4" for burst in (64, 128) for length in (16, 32)
    ]


# ---- beside the percentiles ----


@pytest.mark.parametrize("metric", ["queue wait", "TTFT", "TPOT", "E2EL"])
def test_beside_every_percentile_stand_what_was_refused_and_what_was_served(metric: str) -> None:  # case D3
    rows = measured(burst_size=100, limit=60)
    assert table_rows(with_goals(rows))[f"{metric} (ms) refused, served"] == ["40.0 %, 60.0 %"]
    found = table_rows(with_goals(rows, "ttft:205"))
    assert found[f"{metric} (ms) refused, good"] == ["40.0 %, 19.0 %"]


def test_goodput_is_of_the_offered() -> None:  # case D4
    found = table_rows(with_goals(measured(burst_size=100, limit=60), "ttft:1000"))
    assert found["good (within the goals)"] == ["60"]
    assert found["goodput, share of offered"] == ["60.0 %"]
    assert "good (within the goals)" not in table_rows(sweep_summary())


def test_n_and_repeats_stand_beside_both_tails() -> None:
    assert table_rows(sweep_summary((16,)))["TTFT (ms) n, repeats"] == ["128, 8"]


def test_fewer_than_six_repeats_leave_the_typical_p99_unbounded() -> None:
    assert table_rows(sweep_summary((16,), repeats=5))["TTFT (ms) p99 of a repeat, interval"] == ["unbounded"]
    (bounded,) = table_rows(sweep_summary((16,), repeats=6))["TTFT (ms) p99 of a repeat, interval"]
    assert re.fullmatch(r"\[\d+\.\d\d, \d+\.\d\d\]", bounded)


def test_the_largest_of_a_small_repeat_is_not_called_its_p99() -> None:  # case F3
    def median_p99(*sizes: int) -> str:
        rows = pd.concat([measured(burst_size=n, repeat=r) for r, n in enumerate(sizes)], ignore_index=True)
        (text,) = table_rows(with_goals(rows))["TTFT (ms) p99 of a repeat, median"]
        return text

    assert re.fullmatch(r"max \(n=16\) \d+\.\d\d", median_p99(16, 16))
    assert re.fullmatch(r"max \(n=16 to 20\) \d+\.\d\d", median_p99(20, 16))
    assert re.fullmatch(r"max or p99 \(n=99 to 100\) \d+\.\d\d", median_p99(99, 100))
    assert re.fullmatch(r"\d+\.\d\d", median_p99(100, 100))


def test_the_table_says_what_its_intervals_are_and_are_not() -> None:
    few, enough = text_of(sweep_summary()), text_of(sweep_summary((16,), repeats=10))
    never_above = "It never ends above the slowest request seen, so it covers less than 95 %"
    assert (
        f"\np99, interval: 95 % by resampling whole repeats. {never_above}, under 10 repeats far less." in few
    )
    assert f"{never_above}." in enough
    assert "p99, interval:" not in text_of(sweep_summary((16,), repeats=1))


def test_the_table_says_how_many_repeats_a_comparison_needs() -> None:
    summary = sweep_summary()
    needed = summary.loc[summary["repeat"].isna(), "repeats_needed"]
    assert table_rows(summary)["TTFT (ms) repeats to compare"] == [f"{n:.0f}" for n in needed]
    assert "TTFT (ms) repeats to compare" not in table_rows(sweep_summary(repeats=1))
    simulated = pd.concat([measured(repeat=r).assign(target="sim") for r in range(2)], ignore_index=True)
    assert "epeats to compare" not in text_of(with_goals(simulated))


def text_of(summary: pd.DataFrame, width: int = 100) -> str:
    """The one table, with its notes unwrapped."""
    (table,) = report.tables(summary, width)
    return re.sub(r"\n  (?=\S)", " ", table)


def test_fewer_than_299_requests_behind_a_p99_are_warned_about() -> None:  # case F10
    warning = "Warning: under 299 requests behind p99 TTFT at limit 16:"
    assert warning in text_of(sweep_summary())
    assert "Warning" not in text_of(sweep_summary((64,)))


@pytest.mark.parametrize(("n", "warns"), [(298, True), (299, False)])
def test_the_warning_starts_below_299(n: int, warns: bool) -> None:  # case F10
    rows = measured(burst_size=n)
    assert ("under 299 requests" in text_of(with_goals(rows))) == warns


def test_when_nothing_completed_the_table_says_so_without_figures() -> None:  # case D2
    rows = measured(burst_size=8, limit=3).assign(outcome="error")
    text = text_of(with_goals(rows, "ttft:250"))
    assert "NOTHING COMPLETED at limit 3: there is no latency and no throughput." in text
    assert not re.search(r"\b0\.00\b", text)
    assert table_rows(with_goals(rows, "ttft:250"))["goodput (requests/s)"] == ["n/a"]
    assert "NOTHING" not in text_of(sweep_summary())


def test_the_largest_gap_of_all_is_in_the_table() -> None:  # case E7
    rows = measured(burst_size=20, output_tokens=5, token_gap_s=0.010)
    stalled = list(rows["token_times_s"])
    stalled[7] = stalled[7] + np.array([0, 0, 1.0, 1.0, 1.0])
    found = table_rows(with_goals(rows.assign(token_times_s=stalled)))
    assert found["largest gap of tokens (ms)"] == ["1010.00 (n=80)"]


def test_times_of_failures_have_lines_of_their_own() -> None:  # case D6, D11
    rows = measured(burst_size=200, limit=100)
    late = rows["request_index"] < 2
    rows.loc[late, "outcome"], rows.loc[late, "ended_s"] = "timeout", 30.0
    found = table_rows(with_goals(rows))
    assert found["time to timeout p99 (ms)"] == ["max (n=2) 30000.00"]
    assert found["reject p99 (ms)"] == ["0.0040"]
    assert "time to error p99 (ms)" not in found


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.0 %"), (0.0001, "< 0.1 %"), (0.5, "50.0 %"), (0.9999, "> 99.9 %"), (1.0, "100.0 %")],
)
def test_only_all_and_none_read_so(share: float, text: str) -> None:
    summary = sweep_summary((16,))
    summary["reject_rate"] = share
    assert table_rows(summary)["reject rate"] == [text]


# ---- other arrivals ----


def test_the_heading_names_arrivals_and_rate() -> None:
    headings = [
        table.splitlines()[0]
        for table in report.tables(shaped_summary(rates((0.5, 25.0), limits=(None,), repeats=1, n=40)))
    ]
    assert headings == [
        "poisson arrivals, prompt tokens 32, new tokens 2, requests/s 0.5",  # case H1
        "poisson arrivals, prompt tokens 32, new tokens 2, requests/s 25",
    ]


def test_bursts_over_background_and_their_recovery_are_in_the_table() -> None:
    summary = shaped_summary(bursts_over_background([None]))
    (table,) = report.tables(summary)
    assert table.splitlines()[0].startswith("constant arrivals, burst 12, ")
    assert table_rows(summary)["recovery from a burst (s)"] == [f"{summary['recovery_s'].iloc[-1]:.2f} (n=2)"]
    assert "recovery from a burst (s)" not in table_rows(sweep_summary())


@pytest.mark.parametrize(
    ("late_from_s", "text"),
    [(0.99, "never (n=2)"), (0.0, "n/a")],  # after a level of waiting was known, and before
)
def test_a_recovery_that_never_came_is_not_left_out(late_from_s: float, text: str) -> None:
    rows = bursts_over_background([None])
    if late_from_s:
        late_s = 10.0 * (rows["scheduled_s"] >= late_from_s)
        rows = rows.assign(first_scheduled_s=rows["first_scheduled_s"] + late_s)
    else:
        rows = rows.assign(first_scheduled_s=np.nan)
    assert table_rows(shaped_summary(rows))["recovery from a burst (s)"] == [text]


def test_a_closed_loop_is_called_so() -> None:  # case C12
    rows = closed_loop(users=3)
    facts = {key: replace(known, max_concurrency=3) for key, known in facts_by_cell(rows).items()}
    summary = summarise(rows, facts)
    (table,) = report.tables(summary)
    assert table.splitlines()[0] == "closed loop, prompt tokens 32, new tokens 2"
    rows_of_table = table_rows(summary)
    assert rows_of_table["TTFT (ms) n after the start"] == ["57"]
    assert rows_of_table["TTFT (ms) p99 after the start"] == ["max (n=57) 50.00"]


def test_the_warm_up_cut_is_in_the_table() -> None:
    rows = served(np.linspace(0, 19.9, 200), arrival="poisson", request_rate=10.0)
    late = rows["request_index"] < 40
    settling = rows.assign(received_first_s=rows["scheduled_s"] + np.where(late, 1.0, 0.01))
    assert table_rows(with_goals(settling))["warm-up cut (MSER-5)"] == ["40"]
    growing = rows.assign(received_first_s=rows["scheduled_s"] * 1.5 + 0.01)
    assert table_rows(with_goals(growing))["warm-up cut (MSER-5)"] == ["0, not steady"]
    assert "warm-up cut (MSER-5)" not in table_rows(sweep_summary())


def test_rates_are_compared_each_on_its_own() -> None:
    sentences = report.conclusions(shaped_summary(rates((25.0, 100.0), repeats=1, n=40)))
    assert [sentence.partition(":")[0] for sentence in sentences] == ["At requests/s 25", "At requests/s 100"]


def test_latency_from_sending_has_a_line_where_the_client_held_requests_back() -> None:  # case C13
    rows = measured(interval_s=0.001)
    held = rows.assign(permitted_s=rows["permitted_s"] + 0.02, sent_s=rows["sent_s"] + 0.02)
    for frame, shown in ((rows, False), (held.assign(reserved_s=held["sent_s"]), True)):
        (table,) = report.tables(summarise(frame, facts_by_cell(frame)))
        assert ("  p99 from sending" in table) == shown
        assert ("TTFT counts from the schedule" in table) == shown
