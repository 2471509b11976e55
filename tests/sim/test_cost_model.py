"""The cost model: its arithmetic, and the files that it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from roseinfer.bench.rows import step_row
from roseinfer.errors import InputError
from roseinfer.executor import Span, StepPlan
from roseinfer.sim.cost_model import COMPOSITION, BetweenStepsCost, CostModel, Fitted, StepCost, SubmitCost
from roseinfer.sim.noise import Noise
from roseinfer.sim.virtual import Arrival, SimLimits, simulate

STEP = {
    "constant_s": 1.0,
    "prefill_token_s": 2**-10,
    "attention_pair_s": 2**-20,
    "decode_request_s": 2**-5,
    "context_token_s": 2**-15,
}
NOISE = {"ratios": [0.5, 1.0, 2.0], "stall_probability": 0.1, "stalls_s": [0.5, 1.5]}
FITTED = {
    "runs": ["a", "b"],
    "steps": 7,
    "range": {column: [0, 10] for column in COMPOSITION},
    "device": "cpu",
    "model": "builtin:gpt2",
    "dtype": None,
}
MODEL = CostModel(
    "made up",
    StepCost(1.0, 2**-10, 2**-20, 2**-5, 2**-15),
    BetweenStepsCost(0.25, 0.5),
    SubmitCost(0.125, 2**-6, 2**-8),
    Noise((0.5, 1.0, 2.0), 0.1, (0.5, 1.5)),
    Fitted(("a", "b"), 7, dict.fromkeys(COMPOSITION, (0.0, 10.0)), "cpu", "builtin:gpt2", None),
)


def file(folder: Path, **changes: Any) -> Path:
    """A file of the least that a model needs, changed; None leaves a key out."""
    path = folder / "cost.json"
    values = {"schema_version": 1, "name": "made up", "step": STEP} | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return path


def test_a_step_costs_what_its_row_in_the_record_says(tmp_path: Path) -> None:
    """The units are the columns of steps.parquet, chunks of prompts and decodes in one step included."""
    model = CostModel.read(file(tmp_path))
    arrivals = [Arrival(0.3 * n, 30 + n, 5) for n in range(12)]
    run = simulate(arrivals, SimLimits(max_batch_size=4, max_num_batched_tokens=16), model.step_seconds)
    rows = [step_row(n, step, 0.0, {i: i for i in range(12)}) for n, step in enumerate(run.steps)]
    assert any(row["prefill_requests"] and row["decode_requests"] for row in rows)
    assert any(row["prefill_requests"] > 1 for row in rows)
    for row in rows:
        # Powers of two: exact in any order.
        cost_s = (
            1.0
            + row["prefill_tokens"] * 2**-10
            + row["prefill_attention_pairs"] * 2**-20
            + row["decode_requests"] * 2**-5
            + row["context_tokens"] * 2**-15
        )
        assert row["exec_end_s"] - row["exec_start_s"] == pytest.approx(cost_s, rel=1e-12)


# ---- the costs of a run ----


class AnyRequest:
    prompt_ids = range(4)


def plan(n_spans: int = 3) -> StepPlan:
    return StepPlan([Span(AnyRequest(), 0, 4, True)] * n_spans)  # type: ignore[arg-type]


def test_without_noise_a_run_costs_what_the_model_says() -> None:
    costs = replace(MODEL, noise=None).costs(0, as_text=False)
    assert costs.step_seconds(plan()) == MODEL.step_seconds(plan())


def test_noise_is_that_of_the_seed_step_by_step() -> None:
    first, again, other = (MODEL.costs(seed, as_text=False) for seed in (1, 1, 2))
    steps_s = [first.step_seconds(plan()) for _ in range(5)]
    assert [again.step_seconds(plan()) for _ in range(5)] == steps_s
    assert [other.step_seconds(plan()) for _ in range(5)] != steps_s
    assert len(set(steps_s)) == 5


def test_between_steps_costs_a_constant_and_so_much_a_request() -> None:
    assert MODEL.costs(0, as_text=False).between_seconds(plan(3)) == 0.25 + 3 * 0.5


def test_between_steps_there_is_noise_of_its_own() -> None:
    stalling = replace(MODEL, between_noise=Noise((1.0,), 0.5, (7.0,)))
    costs, again = (stalling.costs(1, as_text=False) for _ in range(2))
    between_s = [costs.between_seconds(plan(3)) for _ in range(20)]
    assert set(between_s) == {1.75, 8.75}
    # A step's noise is the same with it and without.
    assert again.step_seconds(plan()) == MODEL.costs(1, as_text=False).step_seconds(plan())


def test_in_the_mean_all_noise_is_in_the_coefficients() -> None:
    stalling = replace(MODEL, between_noise=Noise((2.0,), 0.5, (7.0,)))
    mean = stalling.in_the_mean()
    assert mean.between_steps == BetweenStepsCost(2 * 0.25 + 3.5, 1.0)
    assert (mean.noise, mean.between_noise) == (None, None)
    assert mean.step.constant_s == pytest.approx(1.125 + 0.1 * 1.0)


@pytest.mark.parametrize(
    ("as_text", "workers", "submit_s", "tokenize_s"),
    [
        (False, 0, 0.125, 0.0),
        (True, 0, 0.125 + 64 * 2**-6, 0.0),
        (True, 1, 0.125, 64 * 2**-6),
        (False, 1, 0.125, 0.0),
    ],
)
def test_text_is_tokenised_by_the_caller_or_by_a_worker(
    as_text: bool, workers: int, submit_s: float, tokenize_s: float
) -> None:
    costs = MODEL.costs(0, as_text=as_text, tokenize_workers=workers)
    assert (costs.submit_seconds(64), costs.tokenize_seconds(64)) == (submit_s, tokenize_s)
    assert costs.refuse_seconds == 2**-8


# ---- what was fitted ----


def test_steps_outside_of_the_fitted_range_are_counted_by_column() -> None:
    steps = pd.DataFrame({column: [0, 5, 10, 10] for column in COMPOSITION})
    assert MODEL.outside(steps) == {}
    steps["decode_requests"] = [0, 10, 11, 12]
    assert MODEL.outside(steps) == {"decode_requests": 0.5}


@pytest.mark.parametrize(
    ("fitted", "engine", "is_told"),
    [("float32", "float16", True), ("float32", "float32", False), (None, "float16", False)],
)
def test_another_dtype_than_it_was_fitted_to_is_told(fitted: str | None, engine: str, is_told: bool) -> None:
    assert MODEL.fitted is not None
    notes = replace(MODEL, fitted=replace(MODEL.fitted, dtype=fitted)).told_of_fit(engine)
    assert bool(notes) is is_told
    assert all("float32" in note and "float16" in note for note in notes)


def test_a_model_that_was_not_fitted_is_told_of_nothing() -> None:
    assert replace(MODEL, fitted=None).told_of_fit("float16") == []


def test_a_model_that_was_not_fitted_has_no_outside() -> None:
    steps = pd.DataFrame({column: [10**9] for column in COMPOSITION})
    assert replace(MODEL, fitted=None).outside(steps) == {}


# ---- files ----


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    model = replace(MODEL, between_noise=Noise((1.0,), 0.5, (7.0,)))
    model.write(tmp_path / "cost.json")
    assert CostModel.read(tmp_path / "cost.json") == model
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


def test_what_is_left_out_costs_nothing(tmp_path: Path) -> None:
    assert CostModel.read(file(tmp_path)) == CostModel("made up", MODEL.step)
    part = CostModel.read(file(tmp_path, submit={"token_s": 1}, noise=NOISE, fitted=FITTED))
    assert (part.submit, part.noise, part.fitted) == (SubmitCost(token_s=1.0), MODEL.noise, MODEL.fitted)


def test_whole_numbers_are_numbers(tmp_path: Path) -> None:
    assert CostModel.read(file(tmp_path, step=STEP | {"constant_s": 2})).step.constant_s == 2.0


def test_the_shipped_example_is_readable() -> None:
    example = CostModel.read(Path(__file__).parents[2] / "experiments" / "gpt2_cpu.cost.json")
    assert "by hand" in example.name


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(tmp_path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        MODEL.write(path)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema_version": None}, "schema version None; this roseinfer reads 1"),
        ({"schema_version": 2}, "schema version 2; this roseinfer reads 1"),
        ({"schema_version": True}, "schema version True"),
        ({"step": None}, "lacks step"),
        ({"stepp": {}}, "holds unknown keys: stepp"),
        ({"step": 7}, "step 7 must be an object"),
        ({"step": {"constant_s": 1.0}}, "lacks step.prefill_token_s, step.attention_pair_s"),
        ({"step": STEP | {"constnt_s": 1.0}}, "holds unknown keys: step.constnt_s"),
        ({"step": STEP | {"constant_s": -0.1}}, "step.constant_s -0.1 must be a number from 0"),
        ({"step": STEP | {"constant_s": float("nan")}}, "step.constant_s nan"),
        ({"step": STEP | {"constant_s": float("inf")}}, "step.constant_s inf"),
        ({"step": STEP | {"constant_s": 10**400}}, "step.constant_s 1000"),
        ({"step": STEP | {"constant_s": "0.1"}}, "step.constant_s '0.1'"),
        ({"step": STEP | {"constant_s": True}}, "step.constant_s True"),
        ({"step": STEP | {"constant_s": 3601}}, "step.constant_s 3601"),
        ({"step": dict.fromkeys(STEP, 0)}, "takes no time at all"),
        ({"name": ""}, "name ''"),
        ({"name": 7}, "name 7"),
        ({"between_steps": {"request_s": -1}}, "between_steps.request_s -1"),
        ({"submit": {"tokens_s": 1}}, "holds unknown keys: submit.tokens_s"),
        ({"noise": {"ratios": [1.0]}}, "lacks noise.stall_probability, noise.stalls_s"),
        ({"noise": NOISE | {"ratios": [1.0, 0.9]}}, "noise.ratios must be numbers above 0, ascending"),
        ({"noise": NOISE | {"ratios": [0.0, 1.0]}}, "noise.ratios must be numbers above 0"),
        ({"noise": NOISE | {"ratios": []}}, "noise.ratios must be numbers above 0"),
        ({"noise": NOISE | {"ratios": "1"}}, "noise.ratios '1' must be a list"),
        ({"noise": NOISE | {"ratios": [1.0, float("inf")]}}, "noise.ratios[1] inf must be a number"),
        ({"noise": NOISE | {"stall_probability": 1.5}}, "noise.stall_probability 1.5 must be a number"),
        ({"noise": NOISE | {"stalls_s": []}}, "noise.stall_probability 0.1 needs noise.stalls_s"),
        ({"noise": NOISE | {"stalls_s": [-1]}}, "noise.stalls_s[0] -1"),
        (
            {"between_noise": NOISE | {"stalls_s": []}},
            "between_noise.stall_probability 0.1 needs between_noise.s",
        ),
        ({"fitted": FITTED | {"runs": [1]}}, "fitted.runs[0] 1 must be a line of text"),
        ({"fitted": FITTED | {"steps": -1}}, "fitted.steps -1"),
        ({"fitted": FITTED | {"device": 7}}, "fitted.device 7"),
        ({"fitted": FITTED | {"range": {}}}, "lacks fitted.range.prefill_tokens"),
        (
            {"fitted": FITTED | {"range": FITTED["range"] | {"context_tokens": [2, 1]}}},  # type: ignore[operator]
            "fitted.range.context_tokens must be the least and the largest",
        ),
    ],
)
def test_a_file_that_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=r"^--cost-model ") as error:
        CostModel.read(file(tmp_path, **changes))
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"constant_s = 1", "not valid JSON"), (b"[1]", "no JSON object"), (b"\xff{}", "not valid JSON")],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=why):
        CostModel.read(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        CostModel.read(tmp_path / "missing.json")
    with pytest.raises(InputError, match="directory"):
        CostModel.read(tmp_path)
