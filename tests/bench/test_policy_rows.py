"""What the policies of admission leave in the record: dropped requests, classes, predictions, limits that move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.classes import Classes
from roseinfer.bench.http.exchange import Failure
from roseinfer.bench.http.target import HttpTarget
from roseinfer.bench.records import REQUEST_SCHEMA, STEP_SCHEMA, Outcome, derive
from roseinfer.bench.row_files import record_table
from roseinfer.bench.rows import CellResult
from roseinfer.bench.sim_target import SimTarget
from roseinfer.bench.summary import summarise
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.validity import check_cell
from roseinfer.bench.workload import Workload, WorkloadSource
from roseinfer.sim.cost_model import CostModel, StepCost
from tests.bench.experiments import burst as burst_of
from tests.bench.experiments import experiment
from tests.bench.http.test_rows import derived, failed, row_of
from tests.scripted import ScriptedEngine

COST = CostModel("tenth of a second a step", StepCost(0.1, 0.0, 0.0, 0.0, 0.0))


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenth.json"
    COST.write(path)
    return path


def simulated(cost_file: Path, **flags: Any) -> CellResult:
    """A burst of requests of 8 prompt and 3 output tokens, one of which runs at a time, for 0.3 s."""
    usual = {"prompt_len": "8", "max_new_tokens": "3", "max_batch_size": 1, "burst_size": "8"}
    made = experiment(**({"target": "sim", "cost_model": cost_file} | usual | flags))
    source = WorkloadSource(made, None, vocab_size=0, max_model_len=1 << 20)
    (cell,) = made.cells
    result = SimTarget(COST, made).run(cell, source.draw(cell, 0))
    requests: pd.DataFrame = record_table(result.requests, REQUEST_SCHEMA).to_pandas()
    steps: pd.DataFrame = record_table(result.steps, STEP_SCHEMA).to_pandas()
    return result._replace(requests=requests, steps=steps)


def test_what_waited_too_long_is_a_timeout_with_its_reason(cost_file: Path) -> None:
    rows = simulated(cost_file, admission="queue-timeout:700ms").requests
    dropped = rows[rows["outcome"] == "timeout"]
    assert rows["outcome"].tolist() == ["completed"] * 3 + ["timeout"] * 5
    assert set(dropped["reject_reason"]) == {"queue-timeout"}
    assert set(dropped["reject_stage"]) == {"queued"}
    assert dropped["first_scheduled_s"].isna().all()  # it cost no prefill
    assert dropped["error"].isna().all()
    figures = derive(rows)
    assert figures["reject_s"].isna().all()
    assert (figures["time_to_drop_s"].notna() == (rows["outcome"] == "timeout")).all()
    assert figures["time_to_drop_s"].max() == pytest.approx(0.8)  # found at the next step


def test_a_deadline_of_its_own_ends_a_request_the_same_way(cost_file: Path) -> None:
    rows = simulated(
        cost_file, priority_mix="high:0.5,low:0.5", ttft_deadline="low:100ms", burst_size="20"
    ).requests
    late = rows[rows["outcome"] == "timeout"]
    assert set(late["priority"]) == {"low"}
    assert set(late["reject_reason"]) == {"queue-timeout"}
    assert (rows[rows["priority"] == "high"]["outcome"] == "completed").all()


def test_a_higher_class_evicts_and_goes_first(cost_file: Path) -> None:
    rows = simulated(
        cost_file,
        admission="inflight:4+priority:age=1000s",
        priority_mix="high:0.3,low:0.7",
        burst_size="20",
    ).requests
    assert set(rows["priority"]) == {"high", "low"}
    evicted = rows[rows["reject_reason"] == "evicted"]
    assert len(evicted)
    assert set(evicted["priority"]) == {"low"}
    assert set(evicted["outcome"]) == {"rejected"}
    assert set(evicted["reject_stage"]) == {"queued"}
    assert evicted["reserved_s"].notna().all()
    assert set(rows[rows["reject_reason"] == "inflight"]["reject_stage"]) == {"submit"}


def test_codel_sheds_as_a_refusal_from_the_queue(cost_file: Path) -> None:
    rows = simulated(cost_file, admission="codel:target=50ms:interval=1s", burst_size="30").requests
    shed = rows[rows["outcome"] == "rejected"]
    assert len(shed)
    assert set(shed["reject_reason"]) == {"codel"}
    assert set(shed["reject_stage"]) == {"queued"}


def test_without_classes_and_forecast_the_new_columns_are_null(cost_file: Path) -> None:
    result = simulated(cost_file, max_inflight="4")
    assert result.requests[["priority", "predicted_ttft_s"]].isna().all(axis=None)
    assert result.steps["inflight_limit"].isna().all()


def test_what_was_predicted_and_where_the_limit_stood_is_on_record(cost_file: Path) -> None:
    result = simulated(cost_file, admission="aimd:init=5+slo:ttft=600s", burst_size="12")
    admitted = result.requests["reserved_s"].notna()
    assert (result.requests["predicted_ttft_s"].notna() == admitted).all()
    assert result.requests["predicted_ttft_s"].iloc[0] == pytest.approx(0.1)
    assert set(result.requests["reject_reason"].dropna()) == {"aimd"}
    assert result.steps["inflight_limit"].iloc[0] == 5
    assert result.steps["inflight_limit"].notna().all()


@pytest.mark.parametrize(
    "admission",
    [
        "slo:ttft=300ms",
        "aimd:init=5",
        "queue-timeout:700ms",
        "inflight:4+priority",
        "tokens:50",
        "inflight:4",
    ],
)
def test_the_law_of_a_count_judges_no_other_policy(cost_file: Path, admission: str) -> None:
    result = simulated(
        cost_file, admission=admission, burst_size="12", priority_mix="high:0.3,low:0.7", ttft_deadline="9s"
    )
    refused = result.requests["rejected_s"].notna()
    assert refused.any()
    assert check_cell(result.requests, result.facts) == []


def test_the_law_of_a_count_counts_no_deadline_that_was_missed(cost_file: Path) -> None:
    result = simulated(cost_file, max_inflight="10", burst_size="12", ttft_deadline="700ms")
    assert set(result.requests["reject_reason"].dropna()) == {"inflight", "queue-timeout"}
    assert check_cell(result.requests, result.facts) == []


def test_the_summary_of_a_mix_is_of_no_class(cost_file: Path) -> None:
    for mix, names in [("high:0.5,low:0.5", []), ("only:1", ["only"] * 2)]:
        result = simulated(cost_file, priority_mix=mix, burst_size="10")
        rows = result.requests.assign(run_id="run", cell_id="cell", repeat=0)
        assert summarise(rows, {("cell", 0): result.facts})["priority"].dropna().tolist() == names


def test_the_summary_says_how_long_the_dropped_waited(cost_file: Path) -> None:
    result = simulated(cost_file, admission="queue-timeout:700ms")
    rows = result.requests.assign(run_id="run", cell_id="cell", repeat=0)
    row = summarise(rows, {("cell", 0): result.facts}).iloc[0]
    assert (row["n_time_to_drop"], row["n_reject"]) == (5, 0)
    assert 700 <= row["p50_time_to_drop_ms"] <= row["p99_time_to_drop_ms"] <= 901


def test_the_engine_in_this_process_gets_classes_and_deadlines() -> None:
    engine = ScriptedEngine()
    made = experiment(
        num_requests=6,
        max_batch_size=1,
        admission="inflight:3+priority",
        priority_mix="high:0.5,low:0.5",
        ttft_deadline="high:90s",
    )
    load = burst_of(engine, 6)._replace(classes=Classes(("high", "low"), np.array([1, 1, 1, 1, 0, 0])))
    rows = InProcessTarget(engine, made).run(made.cells[0], load).requests
    assert rows["priority"].tolist() == ["low"] * 4 + ["high"] * 2
    assert rows["outcome"].tolist() == ["completed", *["rejected"] * 3, *["completed"] * 2]
    assert rows["reject_reason"].tolist()[1:4] == ["evicted", "evicted", "inflight"]
    assert rows["reject_stage"].tolist()[1:4] == ["queued", "queued", "submit"]


def test_the_engine_in_this_process_drops_what_is_late() -> None:
    engine = ScriptedEngine()
    made = experiment(num_requests=3, max_batch_size=1, ttft_deadline="0.001ms")
    rows = InProcessTarget(engine, made).run(made.cells[0], burst_of(engine, 3)).requests
    late = rows[rows["outcome"] == "timeout"]
    assert len(late)
    assert set(late["reject_reason"]) == {"queue-timeout"}


@pytest.mark.parametrize(
    ("reason", "outcome", "stage"),
    [
        ("queue-timeout", Outcome.TIMEOUT, "queued"),
        ("codel", Outcome.REJECTED, "queued"),
        ("evicted", Outcome.REJECTED, "queued"),
        ("slo", Outcome.REJECTED, "submit"),
        ("aimd", Outcome.REJECTED, "submit"),
        ("max_inflight", Outcome.REJECTED, "submit"),
    ],
)
def test_a_server_s_reasons_are_read_as_the_engine_s_own(reason: str, outcome: Outcome, stage: str) -> None:
    attempt = failed(Failure.STATUS, 429, reject_reason=reason)
    row = row_of(attempt)
    assert (row["outcome"], row["reject_reason"], row["reject_stage"]) == (outcome, reason, stage)
    figures = derived(attempt)
    assert figures["time_to_drop_s" if stage == "queued" else "reject_s"] == pytest.approx(0.25)


def test_a_client_s_own_deadline_has_no_reason() -> None:
    row = row_of(failed(Failure.TIMEOUT))
    assert (row["outcome"], row["reject_reason"], row["reject_stage"], row["rejected_s"]) == (
        Outcome.TIMEOUT,
        None,
        None,
        None,
    )


def test_a_server_gets_the_class_as_a_whole_number() -> None:
    made = experiment(target="http://127.0.0.1:9/v1", model="m", priority_mix="high:0.5,low:0.5")
    load = Workload(np.zeros(2), ["a", "b"], np.ones(2, int), np.ones(2, int), 0, "burst")
    target = HttpTarget(made)
    classes = Classes(("high", "low"), np.array([1, 0]))
    assert [
        json.loads(target._bodies(load._replace(classes=classes))[index])["priority"] for index in (0, 1)
    ] == [1, 0]
    assert "priority" not in json.loads(target._bodies(load)[0])


def test_a_class_costs_the_simulator_no_request_of_another(cost_file: Path) -> None:
    plain, mixed = (
        simulated(cost_file, max_inflight="4", burst_size="12", **flags)
        for flags in ({}, {"priority_mix": "high:0.5,low:0.5"})
    )
    pd.testing.assert_frame_equal(
        plain.requests.drop(columns="priority"), mixed.requests.drop(columns="priority")
    )
    assert replace(plain.facts) == mixed.facts
