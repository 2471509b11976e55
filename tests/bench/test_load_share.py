"""--load: rates as shares of what a cost model can take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roseinfer.bench as rb
from roseinfer.bench.load_share import told_of_load
from roseinfer.bench.store import RunFolder
from roseinfer.errors import InputError
from roseinfer.sim.cost_model import CostModel, StepCost
from roseinfer.sim.noise import Noise
from tests.bench.asking import Ask
from tests.bench.experiments import experiment

STEP = StepCost(0.1, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenth.json"
    CostModel("tenth of a second a step", STEP).write(path)
    return path


def rates(cost_file: Path, **flags: Any) -> list[float | None]:
    sizes = {"num_requests": 50, "max_batch_size": 4, "prompt_len": "8", "max_new_tokens": "5"}
    made = experiment(target="sim", cost_model=cost_file, **(sizes | flags))
    return [cell.request_rate for cell in made.cells]


def test_a_rate_is_a_share_of_the_capacity(cost_file: Path) -> None:
    assert rates(cost_file, load="0.5,0.8,1.2") == pytest.approx([4.0, 6.4, 9.6])  # 4 requests in 5 steps


def test_every_shape_has_a_capacity_of_its_own(cost_file: Path) -> None:
    assert rates(cost_file, load="0.5", max_new_tokens="5,10") == pytest.approx([4.0, 2.0])


def test_it_does_not_depend_on_the_seed_nor_on_the_limit(cost_file: Path) -> None:
    drawn = {"load": "0.8", "output_len_dist": "lognormal:0.5"}
    one, two = (rates(cost_file, max_inflight="0,5", seed=seed, **drawn) for seed in (0, 1))
    assert one == two
    assert one[0] == one[1]


def test_lengths_that_vary_count_by_what_they_ask_for(cost_file: Path) -> None:
    drawn = {"load": "1", "max_new_tokens": "20", "output_len_dist": "lognormal:0.5"}
    mean_steps = 20 * np.exp(0.5**2 / 2)
    assert rates(cost_file, **drawn) == pytest.approx([4 / (0.1 * mean_steps)], rel=0.02)


@pytest.mark.parametrize(
    ("noise", "mean_step_s"),
    [
        (Noise((0.5, 1.0, 4.0), 0.0, ()), 0.1 * (0.75 + 2.5) / 2),
        (Noise((1.0,), 0.1, (0.2, 0.6)), 0.1 + 0.1 * 0.4),
        (Noise((0.5, 1.0, 1.5), 0.0, ()), 0.1),
    ],
    ids=["ratios", "stalls", "a mean of 1"],
)
def test_noise_counts_by_its_mean(tmp_path: Path, noise: Noise, mean_step_s: float) -> None:
    noisy = tmp_path / "noisy.json"
    CostModel("noisy", STEP, noise=noise).write(noisy)
    assert rates(noisy, load="0.8") == pytest.approx([0.8 * 4 / (5 * mean_step_s)], rel=1e-5)


def test_records_and_notes_say_what_the_rate_is(cost_file: Path, tmp_path: Path) -> None:
    run = rb.sweep(
        target="sim",
        cost_model=cost_file,
        load=0.8,
        num_requests=50,
        max_batch_size=4,
        prompt_len=8,
        max_new_tokens=5,
        repeats=1,
        output_dir=tmp_path,
    )
    assert set(rb.load_requests(run)["request_rate"]) == {6.4}
    manifest = RunFolder.open(run).manifest
    assert manifest["configuration"]["load"] == "0.8"
    assert (
        "--load 0.8 is a rate of 6.4 requests/s with prompts of 8 and outputs of 5 tokens, of which the cost model"
        " implies a capacity of 8 requests/s."
    ) in manifest["workload_notes"]


def test_without_it_nothing_is_told(cost_file: Path) -> None:
    made = experiment(target="sim", cost_model=cost_file, request_rate="3", num_requests=5)
    assert told_of_load(made) == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"request_rate": "3"}, "--request-rate '3': contradicts --load"),
        ({"load": "0"}, "--load '0': '0' is no number of parts of the capacity > 0"),
        ({"load": "0.8,0.8"}, "--load '0.8,0.8': names 0.8 twice (six digits count)"),
        ({"arrival": "burst"}, "--load '0.8': contradicts --arrival burst"),
        ({"burst_size": "4"}, "--burst-size '4': on top of --request-rate needs --burst-interval"),
        ({"num_requests": None}, "--load '0.8': needs --num-requests or --duration"),
        (
            {"num_requests": None, "duration": 1e8},
            "--load '0.8': makes more than 10000000 requests in 1e+08 s",
        ),
        (
            {"max_model_len": 9},
            "--prompt-len '8': with --max-new-tokens 5 exceeds the context of 9 tokens",
        ),
    ],
)
def test_what_it_contradicts(cost_file: Path, flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError) as raised:
        rates(cost_file, **({"load": "0.8"} | flags))
    assert str(raised.value) == complaint


@pytest.mark.parametrize("target", ["engine", "http://localhost:1/v1"])
def test_only_a_cost_model_implies_a_capacity(ask: Ask, target: str) -> None:
    answer = ask("sweep", "--target", target, "--load", "0.8", "--num-requests", "5")
    assert answer.code == 2
    assert answer.complaint == "--load '0.8': needs --target sim: a capacity is implied by a cost model only"


def test_a_run_that_was_made_with_it_is_gone_on_with(cost_file: Path, tmp_path: Path, ask: Ask) -> None:
    words = f"sweep --target sim --cost-model {cost_file} --load 0.8 --num-requests 20 --repeats 1"
    assert ask(*words.split(), "-o", "results", "--run-id", "run").code == 0
    answer = ask("sweep", "--resume", "results/sweep/run", "--cost-model", str(cost_file), "--quiet")
    assert answer.code == 0
