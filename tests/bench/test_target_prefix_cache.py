"""What the in-process target says of the prefix cache, through the real SchedulerManager."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.records import derive
from roseinfer.bench.rows import CellResult
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.validity import check_cell
from roseinfer.prompt import Prompt
from tests.bench.experiments import experiment, workload
from tests.bench.test_target import _slow_senders_are_fine, measured  # noqa: F401 (a fixture)
from tests.scripted import ScriptedEngine


def alike(made: Experiment, n: int = 4) -> CellResult:
    """One after the other, prompts of 40 tokens that begin with the same 35."""
    prompts: list[Prompt] = ["s" * 35 + letter * 5 for letter in "abcdefgh"[:n]]
    return measured(ScriptedEngine(), made, workload(prompts, output_tokens=1))


def test_what_the_cache_knew_is_in_the_rows_and_in_the_steps() -> None:
    result = alike(experiment(num_requests=4, max_batch_size=1, prefix_len=3, prompt_len="40"))
    assert result.requests["cached_tokens"].tolist() == [0, 32, 32, 32]
    assert result.steps["cached_tokens"].tolist() == [0, 32, 32, 32]
    assert result.steps["prefill_tokens"].tolist() == [40, 8, 8, 8]
    assert check_cell(derive(result.requests), result.facts) == []


def test_every_cell_starts_with_a_cold_cache() -> None:  # cases I5, I6
    made = experiment(num_requests=2, max_batch_size=1, prefix_len=3, prompt_len="40")
    target, load = InProcessTarget(ScriptedEngine(), made), workload(["s" * 40], output_tokens=1)
    cached = [target.run(made.cells[0], load).requests["cached_tokens"].tolist() for _ in range(2)]
    assert cached == [[0], [0]]


def test_hits_that_nobody_asked_for_make_a_cell_invalid() -> None:  # cases I5, I7
    result = alike(experiment(num_requests=4, max_batch_size=1, prompt_len="40"))
    (reason,) = check_cell(derive(result.requests), result.facts)
    assert "96 prompt tokens of 3 requests" in reason


@pytest.mark.parametrize("flags", [{"prompt": "hello"}, {"prefix_len": 3, "prompt_len": "40"}])
def test_prompts_may_be_alike_where_that_is_asked_for(flags: dict[str, Any]) -> None:
    assert experiment(**flags).prompts_may_be_alike


def test_prompts_are_not_alike_by_themselves() -> None:  # case I7
    assert not experiment().prompts_may_be_alike


def test_without_the_cache_every_token_is_computed() -> None:
    result = alike(experiment(num_requests=4, max_batch_size=1, prefix_cache=False))
    assert result.requests["cached_tokens"].tolist() == [0] * 4
    assert result.steps["prefill_tokens"].tolist() == [40] * 4
