"""Summaries of loads that are more than one burst: warm-up, the start of a closed loop, recovery."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.summary import (
    pooled,
    summarise,
)
from tests.bench.load_shapes import bursts_over_background, closed_loop, served
from tests.bench.rows import facts_by_cell, measured, only, summary_of

# --- warm-up, start-up, recovery


def settling(repeat: int = 0, late: int = 40, **factors: Any) -> pd.DataFrame:
    """TTFT is 1 s for the first `late` of 200 requests and 10 ms from there on."""
    rows = served(np.linspace(0, 19.9, 200), arrival="poisson", request_rate=10.0, repeat=repeat, **factors)
    first_s = rows["scheduled_s"] + np.where(rows["request_index"] < late, 1.0, 0.01)
    return rows.assign(received_first_s=first_s)


def test_latencies_of_an_open_loop_leave_the_warm_up_out() -> None:
    row = only(settling(), goals=("ttft:500",))
    assert (row["warmup_cut"], row["steady"]) == (40, True)
    assert (row["n_ttft"], row["n_e2el"], row["n_add_request"], row["n_itl"]) == (160, 160, 160, 160)
    assert row["max_ttft_ms"] == pytest.approx(10.0)


def test_outcomes_and_goodput_count_the_warm_up() -> None:
    row = only(settling(), goals=("ttft:500",))
    assert (row["offered"], row["completed"], row["good"], row["good_share"]) == (200, 200, 160, 0.8)


def test_each_repeat_is_cut_on_its_own_and_the_pooled_row_has_the_sum() -> None:
    found = summary_of(settling(), settling(repeat=1, late=10))
    assert found["warmup_cut"].tolist() == [40, 10, 50]
    assert found["n_ttft"].tolist() == [160, 190, 350]


def test_a_run_without_a_steady_part_is_not_cut_and_says_so() -> None:
    rows = settling()
    growing = rows.assign(received_first_s=rows["scheduled_s"] * 1.5 + 0.01)
    found = summary_of(growing, settling(repeat=1))
    assert found["steady"].tolist() == [False, True, False]
    assert found["warmup_cut"].tolist() == [0, 40, 40]


@pytest.mark.parametrize("rows", [measured, closed_loop, bursts_over_background])
def test_other_loads_have_no_warm_up(rows: Any) -> None:
    assert summary_of(rows())[["warmup_cut", "steady"]].isna().all(axis=None)


def test_recovery_is_the_median_over_all_bursts() -> None:
    found = summary_of(bursts_over_background([None]))
    assert found["recovery_s"].between(0.05, 0.5).all()
    assert (found["n_recovery"] == 2).all()
    nothing = summary_of(measured())
    assert nothing["recovery_s"].isna().all()
    assert (nothing["n_recovery"] == 0).all()


def test_bursts_that_are_never_over_take_for_ever_to_recover() -> None:
    rows = bursts_over_background([None])
    after = rows["scheduled_s"] >= 0.99
    stuck = rows.assign(first_scheduled_s=rows["first_scheduled_s"] + 10 * after)
    row = only(stuck)
    assert (row["recovery_s"], row["n_recovery"]) == (np.inf, 2)


def test_p99_after_the_start_leaves_the_first_request_of_each_user_out() -> None:  # case C12
    rows = closed_loop(users=3, n=60)
    rows.loc[rows["request_index"] < 3, "received_first_s"] += 5.0
    facts = {key: replace(known, max_concurrency=3) for key, known in facts_by_cell(rows).items()}
    row = pooled(summarise(rows, facts)).iloc[0]
    assert row["p99_ttft_ms"] > 5_000
    assert row["p99_ttft_after_start_ms"] == pytest.approx(1e3 * (3 * 0.02 - 0.01))
    assert row["n_ttft_after_start"] == 57


def test_only_a_closed_loop_has_a_start() -> None:
    assert summary_of(measured())["p99_ttft_after_start_ms"].isna().all()
