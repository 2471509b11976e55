"""What a summary says of the client of a server: how busy it was, and whether somebody stopped it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from roseinfer.bench.summary import summarise
from roseinfer.bench.validity import CellFacts, check_cell
from tests.bench.rows import facts_by_cell, facts_of, measured

COLUMNS = ["client_busy_share_max_100ms", "client_longest_turn_ms", "client_p99_read_lag_ms"]


def told(facts: CellFacts, share: float, turn_s: float, lag_s: float | None) -> CellFacts:
    return replace(
        facts,
        client_busy_share_max_100ms=share,
        client_longest_turn_s=turn_s,
        client_p99_read_lag_s=lag_s,
    )


def test_of_several_repeats_the_worst_is_kept() -> None:
    requests = pd.concat([measured(repeat=0), measured(repeat=1)])
    first, second = facts_by_cell(requests).items()
    facts = {
        first[0]: told(first[1], 0.5, 0.004, 0.001),
        second[0]: told(second[1], 0.25, 0.008, None),
    }
    summary = summarise(requests, facts)
    assert summary[COLUMNS].iloc[0].tolist() == [0.5, 4.0, 1.0]
    assert summary[COLUMNS].iloc[-1].tolist() == [0.5, 8.0, 1.0]


def test_a_target_without_such_a_client_says_nothing() -> None:
    requests = measured()
    summary = summarise(requests, facts_by_cell(requests))
    assert summary[COLUMNS].isna().all(axis=None)


def test_a_cell_whose_client_read_late_is_invalid() -> None:
    requests = measured()
    (reason,) = check_cell(requests, told(facts_of(requests), 1.0, 0.2, 0.1))
    assert reason.startswith("p99 of what came was read up to 100.0 ms late")


def test_a_cell_that_was_interrupted_is_invalid_for_that_alone() -> None:
    requests = measured().assign(outcome="incomplete", error="interrupted")
    requests.loc[:2, "outcome"] = "completed"
    requests = requests.assign(rejected_s=np.nan, reject_stage=None)
    facts = replace(facts_of(requests), interrupted_s=1.25)
    (reason,) = check_cell(requests, facts)
    assert reason == f"interrupted at 1.25 s, when 3 of {len(requests)} requests had ended"
