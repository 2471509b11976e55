"""Calibration against a known truth, and what it does not take for a cost."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.calibration import MeasuredRun, calibrate, predicted_step_s, submit_cost
from roseinfer.bench.store import RunFolder
from roseinfer.errors import InputError
from roseinfer.sim.cost_model import COMPOSITION
from roseinfer.sim.noise import Noise
from tests.bench.made_runs import FLAGS, IDENTITY, TRUTH, made_run, relabel


@pytest.fixture(scope="module")
def run_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of 8 cells at the speed of TRUTH, to be read alone."""
    return made_run(tmp_path_factory.mktemp("made"), "a")


@pytest.fixture
def copy_of_a(run_a: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(run_a, tmp_path / "a"))


def test_the_truth_is_found_where_there_is_no_noise(run_a: Path) -> None:
    model = calibrate([MeasuredRun.open(run_a)])
    for group in ("step", "between_steps", "submit"):
        found, truth = getattr(model, group), getattr(TRUTH, group)
        for name in truth.__dataclass_fields__:
            assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.01), name
    assert model.noise is not None
    assert model.noise.ratios == pytest.approx([1.0] * 101, rel=1e-3)
    assert (model.noise.stall_probability, model.noise.stalls_s) == (0.0, ())


def test_the_truth_is_nearly_found_under_noise_and_stalls(tmp_path: Path) -> None:
    noise = Noise((0.9, 0.97, 1.0, 1.03, 1.1), 0.01, (0.5,))
    run = MeasuredRun.open(
        made_run(
            tmp_path,
            "n",
            replace(TRUTH, noise=noise),
            **FLAGS | {"max_inflight": "0", "burst_size": "24", "repeats": 6},
        )
    )
    model = calibrate([run])
    noiseless_s = predicted_step_s(TRUTH, run.steps)
    assert predicted_step_s(model, run.steps) == pytest.approx(noiseless_s, rel=0.03)
    assert model.step.constant_s == pytest.approx(TRUTH.step.constant_s, rel=0.05)
    assert model.noise is not None
    assert model.noise.ratios[50] == pytest.approx(1, abs=0.01)
    assert model.noise.ratios[25] == pytest.approx(0.97, abs=0.01)
    stalls = (run.steps["step_s"] > 0.3 + noiseless_s).mean()
    assert model.noise.stall_probability == pytest.approx(stalls, abs=1e-6)
    assert model.noise.stalls_s == pytest.approx([0.5] * len(model.noise.stalls_s), rel=0.02)


def test_stalls_between_steps_are_found_too(tmp_path: Path) -> None:
    stalling = replace(TRUTH, between_noise=Noise((1.0,), 0.1, (0.05,)))
    flags = FLAGS | {"max_inflight": "0", "burst_size": "24", "repeats": 4}
    run = MeasuredRun.open(made_run(tmp_path, "n", stalling, **flags))
    model = calibrate([run])
    assert model.between_steps.constant_s == pytest.approx(TRUTH.between_steps.constant_s, rel=0.01)
    assert model.between_noise is not None
    stalls = (run.steps["between_s"].dropna() > 0.05).mean()
    assert model.between_noise.stall_probability == pytest.approx(stalls, abs=1e-5)
    assert model.between_noise.stalls_s == pytest.approx([0.05] * len(model.between_noise.stalls_s), rel=0.01)


def test_it_says_what_it_was_fitted_to(run_a: Path) -> None:
    run = MeasuredRun.open(run_a)
    fitted = calibrate([run]).fitted
    assert fitted is not None
    assert (fitted.runs, fitted.steps) == (("a",), len(run.steps))
    assert (fitted.device, fitted.model, fitted.dtype) == (
        "cpu (Abacus, 2 threads)",
        "builtin:gpt2",
        "float32",
    )
    assert fitted.range == {name: (run.steps[name].min(), run.steps[name].max()) for name in COMPOSITION}
    assert calibrate([run]).outside(run.steps) == {}


def test_two_runs_are_fitted_together(tmp_path: Path) -> None:
    """Neither alone tells prefill tokens from attention pairs."""
    flags: dict[str, Any] = {"max_new_tokens": "4", "burst_size": "4", "repeats": 1}
    paths = [made_run(tmp_path, name, prompt_len=n, **flags) for name, n in (("a", "16"), ("b", "300"))]
    model = calibrate([MeasuredRun.open(path) for path in paths])
    assert model.step.attention_pair_s == pytest.approx(TRUTH.step.attention_pair_s, rel=0.01)
    assert model.fitted is not None
    assert model.fitted.runs == ("a", "b")


def test_one_length_of_prompt_does_not_tell_attention_from_the_rest(tmp_path: Path) -> None:
    run = MeasuredRun.open(
        made_run(tmp_path, "a", prompt_len="32", max_new_tokens="4", burst_size="8", repeats=1)
    )
    model = calibrate([run])
    assert (model.step.attention_pair_s, model.step.context_token_s) == (0.0, 0.0)
    assert predicted_step_s(model, run.steps) == pytest.approx(run.steps["step_s"], rel=0.01)


def test_waiting_for_work_is_no_cost_between_steps(tmp_path: Path) -> None:
    """Requests come one at a time, each after the engine has been idle."""
    flags: dict[str, Any] = {
        "arrival": "constant",
        "request_rate": "1",
        "num_requests": 8,
        "prompt_len": "16",
    }
    run = MeasuredRun.open(made_run(tmp_path, "a", **flags, max_new_tokens="3", repeats=1))
    assert len(run.steps) == 8 * 3
    assert run.steps["between_s"].notna().sum() == 8 * 2
    assert run.steps["between_s"].max() < 1e-3


def steps_and_requests(requests: pd.DataFrame, **configuration: object) -> MeasuredRun:
    folder = RunFolder(Path("r"), {"run_id": "r", "configuration": configuration, "model": IDENTITY})
    columns = ("cell_id", "repeat", "sent_s", "admitted_s", "rejected_s", "reject_stage", "reserved_s")
    names = [*columns, "tokenized_s", "prompt_tokens"]
    return MeasuredRun(folder, requests.assign(cell_id="c", repeat=0).reindex(columns=names), pd.DataFrame())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_is_not_billed_for_the_queue_before_it(workers: int) -> None:
    """Six texts at once: each worker takes the next as it comes free, 10 ms a text of 10 tokens."""
    done_s = 0.010 * np.ceil(np.arange(1, 7) / workers)
    requests = pd.DataFrame({"sent_s": np.arange(6) * 1e-9, "tokenized_s": done_s, "prompt_tokens": 10})
    requests = requests.assign(reserved_s=requests["sent_s"], admitted_s=requests["sent_s"] + 2e-5)
    run = steps_and_requests(requests, pretok=False, **{"tokenize-workers": workers})
    cost = submit_cost([run])
    assert cost.token_s == pytest.approx(1e-3, rel=1e-4)
    assert cost.request_s == pytest.approx(2e-5, rel=1e-3)


def test_a_caller_that_tokenises_pays_by_the_token() -> None:
    requests = pd.DataFrame({"sent_s": 0.0, "prompt_tokens": [10, 100, 1000] * 5, "tokenized_s": 0.5})
    requests["admitted_s"] = 1e-4 + 1e-6 * requests["prompt_tokens"]
    run = steps_and_requests(requests, **{"pretok": False, "tokenize-workers": 0})
    cost = submit_cost([run])
    assert (cost.request_s, cost.token_s) == pytest.approx((1e-4, 1e-6), rel=1e-3)


def test_a_refusal_costs_what_the_median_one_did() -> None:
    requests = pd.DataFrame({"sent_s": 0.0, "rejected_s": [1e-6, 3e-6, 1.0], "reject_stage": "submit"})
    cost = submit_cost([steps_and_requests(requests, pretok=True)])
    assert (cost.refusal_s, cost.request_s, cost.token_s) == (3e-6, 0.0, 0.0)


# ---- runs that cannot be fitted to ----


def test_a_simulated_run_is_refused(copy_of_a: Path) -> None:
    path = copy_of_a
    relabel(path, target="sim")
    with pytest.raises(InputError, match="simulated"):
        MeasuredRun.open(path)


def test_a_run_without_steps_is_refused(copy_of_a: Path) -> None:
    path = copy_of_a
    folder = RunFolder.open(path)
    no_steps = folder.read_steps().iloc[:0]
    no_steps.to_parquet(path / "steps.parquet")
    with pytest.raises(InputError, match="has no steps"):
        MeasuredRun.open(path)


def test_a_run_without_rows_is_refused(copy_of_a: Path) -> None:
    path = copy_of_a
    folder = RunFolder.open(path)
    folder.read_requests().iloc[:0].to_parquet(path / "requests.parquet")
    with pytest.raises(InputError, match="nothing was measured"):
        MeasuredRun.open(path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run to read here"):
        MeasuredRun.open(tmp_path)


def test_runs_of_two_engines_are_refused(copy_of_a: Path) -> None:
    path = copy_of_a
    other = path.with_name("b")
    shutil.copytree(path, other)
    relabel(other, run_id="b", model=IDENTITY | {"num_threads": 1})
    with pytest.raises(InputError, match="has num_threads 1, unlike a"):
        calibrate([MeasuredRun.open(path), MeasuredRun.open(other)])
