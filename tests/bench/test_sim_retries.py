"""Clients of the simulated target that come back: their rows, and what holds of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.records import ATTEMPT_SCHEMA, REQUEST_SCHEMA, TTFT_PARTS, derive
from roseinfer.bench.retries import MOST_TRIES
from roseinfer.bench.rows import CellResult
from roseinfer.bench.sim_target import SimTarget
from roseinfer.bench.validity import check_cell
from roseinfer.bench.workload import Workload
from roseinfer.sim.cost_model import CostModel, StepCost
from tests.bench.experiments import experiment

COST = CostModel("tenth of a second a step", StepCost(0.1, 0.0, 0.0, 0.0, 0.0))


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenth.json"
    COST.write(path)
    return path


def played(cost_file: Path, scheduled_s: list[float], *, seed: int = 0, **flags: Any) -> CellResult:
    """One cell of requests of 8 prompt and 3 output tokens, 0.3 s each, one at a time."""
    n = len(scheduled_s)
    sizes = {"prompt_len": "8", "max_new_tokens": "3", "max_batch_size": 1}
    made = experiment(target="sim", cost_model=cost_file, burst_size=str(n), **sizes, **flags)
    load = Workload(np.array(scheduled_s), [], np.full(n, 8), np.full(n, 3), seed, "burst")
    (cell,) = made.cells
    result = SimTarget(COST, made).run(cell, load)
    return result._replace(requests=result.requests.reindex(columns=REQUEST_SCHEMA.names))


def test_every_try_has_a_row_and_the_request_has_its_first_and_last(cost_file: Path) -> None:  # cases J3, J4
    result = played(cost_file, [0.0] * 3, max_inflight="1", retry="exponential")
    rows, tries = result.requests, result.attempts
    assert tries is not None
    assert set(tries.columns) <= set(ATTEMPT_SCHEMA.names)
    assert len(tries) == rows["attempts"].sum() > 3
    assert tries["request_index"].is_monotonic_increasing
    by_request = tries.groupby("request_index")
    assert by_request["attempt"].apply(list).tolist() == [list(range(1, n + 1)) for n in rows["attempts"]]
    assert by_request["sent_s"].first().tolist() == rows["sent_s"].tolist() == [0.0] * 3
    again = rows["attempts"] > 1
    assert by_request["sent_s"].last()[again].tolist() == rows["last_sent_s"][again].tolist()
    assert rows["last_sent_s"].isna().tolist() == (~again).tolist()
    assert by_request["outcome"].last().tolist() == rows["outcome"].tolist()
    refused = tries[tries["outcome"] == "rejected"]
    assert refused["reject_reason"].unique().tolist() == ["inflight"]
    assert (refused["ended_s"] == refused["sent_s"]).all()


def test_latency_counts_from_the_first_try(cost_file: Path) -> None:  # case J3
    result = played(cost_file, [0.0] * 3, max_inflight="1", retry="exponential")
    derived = derive(result.requests)
    done = derived[(derived["outcome"] == "completed") & (derived["attempts"] > 1)]
    assert len(done)
    assert np.allclose(done["retry_wait_s"], done["last_sent_s"])
    assert np.allclose(done["time_to_success_s"], done["last_sent_s"] + 0.3)
    parts = done[list(TTFT_PARTS)].fillna(0).sum(axis=1)
    assert np.allclose(parts, done["ttft_s"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("retry", ["immediate", "exponential", "retry-after"])
def test_the_slots_of_all_tries_add_up(cost_file: Path, retry: str) -> None:
    result = played(cost_file, [0.0] * 12, max_inflight="4", retry=retry, per_try_timeout=0.45)
    assert result.facts.earlier_slots > 0
    assert result.facts.earlier_held_s > 0
    assert check_cell(result.requests, result.facts) == []
    assert result.requests["attempts"].max() <= MOST_TRIES
    (fault,) = check_cell(result.requests, replace(result.facts, earlier_held_s=0.0))
    assert "request-seconds in flight" in fault


def test_a_try_that_took_too_long_is_a_timeout(cost_file: Path) -> None:
    result = played(cost_file, [0.0] * 2, retry="immediate", per_try_timeout=0.35)
    tries = result.attempts
    assert tries is not None
    assert tries["outcome"].tolist() == ["completed", "timeout", "completed"]
    assert tries["output_tokens"].tolist() == [3, 0, 3]
    assert tries["ended_s"].tolist() == pytest.approx([0.3, 0.35, 0.7])


def test_steps_name_requests_whichever_try_they_work_for(cost_file: Path) -> None:
    result = played(cost_file, [0.0] * 2, retry="immediate", per_try_timeout=0.35)
    members = [member["request_index"] for step in result.steps["members"] for member in step]
    assert members == [0, 0, 0, 1, 1, 1, 1]


def test_two_runs_of_the_same_flags_are_the_same(cost_file: Path) -> None:
    flags: dict[str, Any] = {"max_inflight": "2", "retry": "exponential", "retry_budget": 0.5}
    first, second = (played(cost_file, [0.0] * 30, **flags) for _ in range(2))
    assert first.attempts is not None
    assert second.attempts is not None
    pd.testing.assert_frame_equal(first.attempts, second.attempts)
    other = played(cost_file, [0.0] * 30, seed=1, **flags)
    assert other.attempts is not None
    assert not first.attempts["sent_s"].equals(other.attempts["sent_s"])


def test_without_retries_there_are_no_attempts(cost_file: Path) -> None:
    result = played(cost_file, [0.0] * 3, max_inflight="1")
    assert result.attempts is None
    assert result.requests["attempts"].tolist() == [1, 1, 1]
