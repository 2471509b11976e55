"""What a run prints, word for word where its readers may parse it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench import report
from roseinfer.bench.summary import summarise
from tests.bench.experiments import experiment
from tests.bench.rows import facts_by_cell, measured
from tests.bench.simulated_sweep import simulate

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
    text = report.burst_report(rows, experiment(**flags), "cpu")
    return dict(re.match(r"(.*?)(?: p50/\S*)?: (.*)", line).groups() for line in text.splitlines()[1:])  # type: ignore[union-attr, misc]


def burst_labels(rows: pd.DataFrame) -> list[str]:
    lines = report.burst_report(rows, experiment(), "cpu").splitlines()
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
    assert f"\n{label} " in report.burst_report(measured(burst_size=n), experiment(), "cpu")


def test_what_was_set_is_printed(tmp_path: Any) -> None:
    (tmp_path / "mine").mkdir()
    lines = burst_lines(measured(), model=str(tmp_path / "mine"), pretok=True)
    assert (lines["Model"], lines["Device"]) == ("mine", "cpu")
    assert (lines["Pretok"], lines["Tokenize workers"]) == ("True", "0")


# ---- the table of a sweep ----


@cache
def simulated(limits: tuple[int | None, ...], flags: frozenset[tuple[str, Any]]) -> pd.DataFrame:
    return simulate(limits, **dict(flags))[1]


def sweep_summary(limits: tuple[int | None, ...] = (None, 16, 64), **flags: Any) -> pd.DataFrame:
    return simulated(limits, frozenset(flags.items())).copy()


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
        for table in report.tables(sweep_summary(bursts=(64, 128), prompt_lens=(16, 32)))
    ]
    assert titles == [
        f"burst {burst}, prompt tokens {length}, new tokens 4" for burst in (64, 128) for length in (16, 32)
    ]


# ---- what it says ----


def test_the_conclusion_says_what_the_limit_did_and_cost() -> None:
    summary = sweep_summary()
    sentences = report.conclusions(summary)
    assert len(sentences) == 2
    strict, _, free = (row for _, row in summary[summary["repeat"].isna()].iterrows())
    ratio = r"\(x\d\.\d{3}, 95 % \[\d\.\d{3}, \d\.\d{3}\] over 8 paired repeats\)"
    expected = (
        "With max inflight 16 instead of no limit, throughput went from"
        f" {free['output_throughput']:.2f} to {strict['output_throughput']:.2f} tokens/s RATIO,"
        f" p99 queue wait from {free['p99_queue_wait_ms']:.2f} to {strict['p99_queue_wait_ms']:.2f} ms,"
        f" p99 TTFT from {free['p99_ttft_ms']:.2f} to {strict['p99_ttft_ms']:.2f} ms;"
        f" the price: 896 of 1024 requests refused, p99 of a refusal {strict['p99_reject_ms']:.4f} ms."
    )
    assert re.sub(ratio, "RATIO", sentences[0]) == expected


def test_the_loosest_limit_is_compared_with_where_there_is_no_unlimited_cell() -> None:
    (sentence,) = report.conclusions(sweep_summary((16, 64)))
    assert sentence.startswith("With max inflight 16 instead of 64, ")


def test_one_limit_alone_concludes_nothing() -> None:
    assert report.conclusions(sweep_summary((16,))) == []


def test_other_factors_are_named_only_where_they_vary() -> None:
    sentences = report.conclusions(sweep_summary((None, 16), bursts=(64, 128)))
    assert [sentence[:29] for sentence in sentences] == [
        "At burst 64: with max infligh",
        "At burst 128: with max inflig",
    ]


def test_a_maximum_is_not_called_a_p99_without_saying_so() -> None:  # case F3
    (sentence,) = report.conclusions(sweep_summary((None, 16), bursts=(64,), repeats=2))
    assert re.search(r"p99 TTFT from \d+\.\d\d to \d+\.\d\d \(max of 32\) ms", sentence)


def test_a_limit_that_lets_nobody_through_is_said_without_figures() -> None:
    rows = pd.concat([measured(limit=None), measured(limit=3).assign(outcome="error")])
    (sentence,) = report.conclusions(summarise(rows, facts_by_cell(rows)))
    assert " to n/a tokens/s, p99 queue wait from " in sentence


def test_invalid_cells_are_named_once_with_the_first_reason() -> None:
    summary = sweep_summary()
    bad = summary["repeat"].isin([2, 5]) & (summary["max_inflight"] == 64)
    summary.loc[bad, "valid"] = False
    summary.loc[bad, "invalid_reasons"] = "it broke"
    (line,) = report.invalid_lines(summary)
    cell_id = summary.loc[bad, "cell_id"].iloc[0]
    assert line == f"INVALID: {cell_id}: 2 of 8 repeats, the first is repeat 3: it broke"
    assert report.invalid_lines(sweep_summary()) == []


def test_slots_that_came_free_during_a_burst_are_told_once_per_cell() -> None:
    quick = [measured(burst_size=40, limit=4, repeat=repeat) for repeat in range(3)]
    rows = pd.concat(quick, ignore_index=True)
    assert report.slots_freed_lines(rows) == []
    first = rows["request_index"] == 0
    rows.loc[first & (rows["repeat"] > 0), "released_s"] = 1e-4  # before the last of the burst is sent
    (line,) = report.slots_freed_lines(rows)
    assert line.startswith("Note: limit=4,prompt=32: 0 to 1 slots came free while a burst was being sent")


@pytest.mark.parametrize("limit", [None, 40])
def test_slots_that_came_free_matter_only_where_a_limit_could_refuse(limit: int | None) -> None:
    rows = measured(burst_size=40, limit=limit)
    rows.loc[0, "released_s"] = 1e-4
    assert report.slots_freed_lines(rows) == []


@pytest.mark.parametrize(("load", "warns"), [(3.0, False), (3.1, True)])
def test_a_busy_machine_is_warned_about(load: float, warns: bool) -> None:
    manifest = {"environment": {"load_average": [load, 9.0, 9.0], "cores_usable": 2}}
    lines = report.load_lines(manifest)
    assert bool(lines) == warns
    assert not warns or lines[0].startswith("Warning: load average 3.1 at the start on 2 usable cores")
