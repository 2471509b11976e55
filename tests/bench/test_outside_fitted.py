"""Simulated steps that are like nothing the cost model was fitted to: told, or refused before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roseinfer.bench.sim_target import SimTarget
from roseinfer.bench.store import RunFolder
from roseinfer.bench.workload import Workload
from roseinfer.sim.cost_model import COMPOSITION, CostModel, Fitted, StepCost
from tests.bench.asking import Ask
from tests.bench.experiments import experiment

COST = CostModel("tenth of a second a step", StepCost(0.1, 0.0, 0.0, 0.0, 0.0))


def fitted_to(path: Path, *, prefill_tokens: float, decode_requests: float = 1e6) -> Path:
    """A cost model file that was fitted to so many of these, and to any number of the rest."""
    bounds = dict.fromkeys(COMPOSITION, (0.0, 1e9))
    bounds |= {"prefill_tokens": (0.0, prefill_tokens), "decode_requests": (0.0, decode_requests)}
    replace(COST, fitted=Fitted((), 1, bounds, None, None, None)).write(path)
    return path


OF_8_TOKENS = "--prompt-len 8 --max-new-tokens 3 --burst-size 2 --max-inflight 0 --repeats 1"


def test_steps_unlike_all_that_was_fitted_are_told(ask: Ask, tmp_path: Path) -> None:
    """Two requests together: a step of 16 prefill tokens, and then two of 2 decodes."""
    file = fitted_to(tmp_path / "fitted.json", prefill_tokens=8, decode_requests=2)
    words = f"sweep --target sim --cost-model {file} {OF_8_TOKENS} -o out --run-id a --quiet".split()
    answer = ask(*words)
    assert answer.code == 0, answer.err
    assert (
        "Warning: 33.3 % of the simulated steps lie outside of what the cost model was fitted to, in prefill_tokens"
    ) in " ".join(answer.out.split())
    (facts,) = RunFolder.open(Path("out/sweep/a")).read_facts().values()
    assert facts["outside_fitted"] == {
        "steps": 3,
        "share": pytest.approx(1 / 3),
        "by_column": {"prefill_tokens": pytest.approx(1 / 3)},
    }


def test_a_step_outside_in_two_columns_counts_once(tmp_path: Path) -> None:
    file = fitted_to(tmp_path / "fitted.json", prefill_tokens=8, decode_requests=1)
    made = experiment(
        target="sim", cost_model=file, prompt_len="8", max_new_tokens="3", burst_size="2", max_inflight="0"
    )
    workload = Workload(np.zeros(2), [], np.full(2, 8), np.full(2, 3), 0, "burst")
    facts = SimTarget(CostModel.read(file), made).run(made.cells[0], workload).notes["outside_fitted"]
    assert facts["share"] == 1
    assert list(facts["by_column"]) == ["prefill_tokens", "decode_requests"]


def test_nothing_is_told_of_steps_that_are_like_what_was_fitted(ask: Ask, tmp_path: Path) -> None:
    file = fitted_to(tmp_path / "fitted.json", prefill_tokens=16)
    answer = ask("run", "--target", "sim", "--cost-model", str(file), *OF_8_TOKENS.split(), "--quiet")
    assert answer.code == 0, answer.err
    assert "fitted" not in answer.out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            "--prompt-len 8,4096",
            "--prompt-len '4096': makes steps of 512 prefill tokens; --cost-model {} was",
        ),
        ("--prompt-len 65", "--prompt-len '65': makes steps of 65 prefill tokens; --cost-model {} was"),
    ],
)
def test_prompts_that_can_never_be_like_what_was_fitted_are_refused(
    ask: Ask, tmp_path: Path, words: str, why: str
) -> None:
    file = fitted_to(tmp_path / "fitted.json", prefill_tokens=64)
    answer = ask("sweep", "--target", "sim", "--cost-model", str(file), *words.split(), "-o", "out")
    assert answer.code == 2
    assert answer.complaint == why.format(file) + " fitted to at most 64"
    assert not Path("out").exists()


def test_a_budget_keeps_steps_within_what_was_fitted(ask: Ask, tmp_path: Path) -> None:
    file = fitted_to(tmp_path / "fitted.json", prefill_tokens=64)
    words = "--prompt-len 256 --max-num-batched-tokens 64 --burst-size 2 --repeats 1 --quiet".split()
    assert ask("sweep", "--target", "sim", "--cost-model", str(file), *words).code == 0
