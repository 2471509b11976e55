"""The cost model: its arithmetic, and the files that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.rows import step_row
from roseinfer.errors import InputError
from roseinfer.sim.cost_model import CostModel
from roseinfer.sim.virtual import Arrival, SimLimits, simulate

COEFFICIENTS = {
    "name": "made up",
    "constant_s": 1.0,
    "prefill_token_s": 2**-10,
    "attention_pair_s": 2**-20,
    "decode_request_s": 2**-5,
    "context_token_s": 2**-15,
}


def file(folder: Path, **changes: Any) -> Path:
    path = folder / "cost.json"
    values = {name: value for name, value in (COEFFICIENTS | changes).items() if value is not None}
    path.write_text(json.dumps(values))
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


def test_whole_numbers_are_numbers(tmp_path: Path) -> None:
    assert CostModel.read(file(tmp_path, constant_s=2)).constant_s == 2.0


def test_the_shipped_example_is_readable() -> None:
    example = CostModel.read(Path(__file__).parents[2] / "experiments" / "gpt2_cpu.cost.json")
    assert "by hand" in example.name


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"constant_s": None}, "lacks constant_s"),
        ({"constnt_s": 1.0}, "holds unknown keys: constnt_s"),
        ({"constant_s": -0.1}, "constant_s -0.1 must be a number from 0"),
        ({"constant_s": float("nan")}, "constant_s nan"),
        ({"constant_s": float("inf")}, "constant_s inf"),
        ({"constant_s": 10**400}, "constant_s 1000"),
        ({"constant_s": "0.1"}, "constant_s '0.1'"),
        ({"constant_s": True}, "constant_s True"),
        ({"constant_s": 3601}, "constant_s 3601"),
        ({"name": ""}, "name ''"),
        ({"name": 7}, "name 7"),
        ({name: 0 for name in COEFFICIENTS if name != "name"}, "takes no time at all"),
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
