from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.goals import Goal, met, parse_goal
from roseinfer.bench.records import derive
from roseinfer.errors import InputError
from tests.bench.rows import measured


def good(requests: pd.DataFrame, *goals: str) -> int:
    return int(np.count_nonzero(met(derive(requests), [parse_goal(goal) for goal in goals])))


@pytest.mark.parametrize(
    ("text", "goal"),
    [("ttft:250", Goal("ttft", 250.0)), ("tpot:0.5", Goal("tpot", 0.5)), ("e2el:3000", Goal("e2el", 3000.0))],
)
def test_a_goal_is_parsed_and_printed_as_written(text: str, goal: Goal) -> None:
    assert parse_goal(text) == goal
    assert str(goal) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must look like"),
        ("p99_ttft:250", "unknown metric"),
        ("ttft", "must look like"),
        ("ttft:fast", "must look like"),
        ("ttft:-1", "must look like"),
        ("speed:250", "unknown metric 'speed', known are ttft, .*e2el"),
        ("ttft:0", "above 0"),
    ],
)
def test_a_bad_goal_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        parse_goal(text)
    assert "--goodput" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_requests_within_the_goal_are_good() -> None:
    # TTFT of the i-th is 10.1 + 10 (i + 1) ms.
    assert good(measured(burst_size=8), "ttft:50.2") == 4


def test_a_request_at_the_bound_is_within_it() -> None:
    ttft_ms = 1e3 * float(derive(measured(burst_size=1))["ttft_s"].iloc[0])
    assert met(derive(measured(burst_size=1)), [Goal("ttft", ttft_ms)]).all()


def test_every_goal_must_be_met() -> None:  # case H4
    burst = measured(burst_size=8, token_gap_s=0.001)
    assert good(burst, "ttft:50.2", "tpot:2") == 4
    assert good(burst, "ttft:50.2", "tpot:0.5") == 0
    assert good(burst, "ttft:1000", "tpot:2") == 8


def test_what_was_refused_is_not_good() -> None:  # case D4
    assert good(measured(burst_size=8, limit=3), "ttft:1000") == 3


@pytest.mark.parametrize("outcome", ["error", "timeout", "cancelled", "incomplete"])
def test_what_did_not_complete_is_not_good(outcome: str) -> None:  # case D1, D9
    assert good(measured(burst_size=8).assign(outcome=outcome), "ttft:1000") == 0


def test_a_latency_that_a_request_does_not_have_breaks_no_goal() -> None:
    assert good(measured(burst_size=8, output_tokens=1), "ttft:1000", "tpot:1") == 8


def test_without_goals_the_completed_are_good() -> None:
    assert good(measured(burst_size=8, limit=3)) == 3
