"""What a run says in sentences: conclusions, notes, warnings, names."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench import report
from roseinfer.bench.summary import summarise
from tests.bench.rows import facts_by_cell, measured, with_goals
from tests.bench.simulated_sweep import sweep_summary

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
    sentences = report.conclusions(sweep_summary((None, 16), bursts=(64, 128), repeats=2))
    assert [sentence[:29] for sentence in sentences] == [
        "At burst 64: with max infligh",
        "At burst 128: with max inflig",
    ]


def test_a_maximum_is_not_called_a_p99_without_saying_so() -> None:  # case F3
    (sentence,) = report.conclusions(sweep_summary((None, 16), bursts=(64,), repeats=2))
    assert re.search(r"p99 TTFT from \d+\.\d\d to \d+\.\d\d \(max of 32\) ms", sentence)


def test_the_conclusion_tells_the_share_served_within_the_goals() -> None:  # case D3
    rows = pd.concat([measured(burst_size=40, limit=limit) for limit in (None, 10)], ignore_index=True)
    (sentence,) = report.conclusions(with_goals(rows, "ttft:205"))
    assert sentence.endswith("; served within the goals: 47.5 % to 25.0 % of the offered.")


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


def test_the_load_of_the_machine_means_nothing_to_a_simulation() -> None:
    manifest = {"target": "sim", "environment": {"load_average": [9.0, 9.0, 9.0], "cores_usable": 2}}
    assert report.load_lines(manifest) == []


MODEL = {
    "model": "builtin:gpt2",
    "weights": "random",
    "parameters": 124e6,
    "dtype": "float32",
    "device": "cpu",
    "device_name": "EPYC",
    "num_threads": 2,
}


def test_model_and_machine_are_named_in_a_few_words() -> None:
    manifest = {"model": MODEL, "environment": {"cores_usable": 2}}
    assert report.model_name(manifest) == "builtin:gpt2 (124 M, random, float32)"
    assert report.machine_name(manifest) == "EPYC, 2 threads on 2 cores"


def test_what_a_simulation_does_not_have_is_left_out() -> None:
    simulated = {"model": "gpt2_cpu", "weights": "none", "parameters": None, "dtype": None}
    manifest = {"model": {**simulated, "device": "virtual clock"}, "environment": {"cores_usable": 2}}
    assert report.model_name(manifest) == "gpt2_cpu (no weights)"
    assert report.machine_name(manifest) == "virtual clock"


def test_the_share_of_prompt_tokens_from_a_prefix_cache_is_told_where_there_is_one() -> None:  # case I7
    cold = measured(burst_size=2, limit=4).assign(prompt_tokens=32, cached_tokens=0)
    warm = measured(burst_size=3).assign(prompt_tokens=32, cached_tokens=[16.0, 32.0, np.nan])
    unknown = measured(burst_size=2, limit=9).assign(prompt_tokens=32)
    assert report.cached_lines(pd.concat([cold, warm, unknown])) == [
        f"Prefix cache: {warm['cell_id'].iloc[0]}: 75.0 % of the prompt tokens were in it."
    ]
