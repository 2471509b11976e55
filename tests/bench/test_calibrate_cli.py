"""`roseinfer-bench calibrate`: what it prints, which file it leaves, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from roseinfer.bench.calibrate_cli import default_name
from roseinfer.bench.records import HTTP
from roseinfer.sim.cost_model import CostModel, SubmitCost
from tests.bench.asking import Answer, Ask, ask_in
from tests.bench.made_runs import FLAGS, IDENTITY, TRUTH, made_run, relabel

FILE = Path("results/cost_models/cpu-builtin-gpt2-float32.cost.json")


@pytest.fixture(scope="module")
def run_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of 8 cells at the speed of TRUTH, to be read alone."""
    return made_run(tmp_path_factory.mktemp("made"), "a")


@pytest.fixture
def copy_of_a(run_a: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(run_a, tmp_path / "a"))


class Calibrated(NamedTuple):
    """What `calibrate RUN --json` left in its folder, twice with one seed."""

    folder: Path
    answers: list[Answer]
    files: list[bytes]


@pytest.fixture(scope="module")
def calibrated(run_a: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    folder = tmp_path_factory.mktemp("calibrated")
    answers, files = [], []
    for words in ((), ("--json",)):
        answers.append(ask_in(folder, "calibrate", str(run_a), *words))
        files.append((folder / FILE).read_bytes())
    return Calibrated(folder, answers, files)


def test_a_run_becomes_a_file_that_simulates(ask: Ask, calibrated: Calibrated) -> None:
    answer = calibrated.answers[0]
    assert (answer.code, answer.err) == (0, "")
    assert "Held out, and predicted from the other cells" in answer.out
    assert "prefill only" in answer.out
    assert answer.out.splitlines()[-1] == f"Wrote {FILE}, fitted to all cells."
    file = calibrated.folder / FILE
    model = CostModel.read(file)
    assert model.step.constant_s == pytest.approx(TRUTH.step.constant_s, rel=0.01)
    assert model.name == "builtin:gpt2 float32 cpu, calibrated"
    assert model.fitted is not None
    assert model.fitted.held_out is not None
    assert model.fitted.held_out["model_fitted_on"] == "all cells"
    assert len(model.fitted.held_out["cells"]) == 4
    words = f"run --target sim --cost-model {file} --burst-size 4 --prompt-len 16 --output-len 4 --quiet"
    assert ask(*words.split()).code == 0


def test_nothing_held_out_is_said(ask: Ask, run_a: Path) -> None:
    answer = ask("calibrate", str(run_a), "--hold-out", "none", "--out", "x.json", "--name", "mine")
    assert answer.code == 0
    assert "No cell was held out: how far predictions are off is not known." in answer.out
    model = CostModel.read(Path("x.json"))
    assert model.name == "mine"
    assert model.fitted is not None
    assert model.fitted.held_out is None


def test_a_file_that_is_replaced_is_named(ask: Ask, run_a: Path) -> None:
    path = str(run_a)
    Path("x.json").write_text("{}")
    words = ("calibrate", path, "--hold-out", "none", "--out", "x.json")
    assert ask(*words).out.splitlines()[-1] == "Overwrote x.json, fitted to all cells."


def test_json_holds_the_model_and_the_trial(calibrated: Calibrated) -> None:
    answer = calibrated.answers[1]
    found = json.loads(answer.out)
    assert found["file"] == str(FILE)
    assert found["model"] == json.loads(calibrated.files[1])
    assert found["held_out"]["errors"]["verdict"]["cells"] == 4
    assert {row["composition"] for row in found["held_out"]["by_composition"]} >= {"prefill only"}
    assert "Overwrote" in answer.err


def test_the_same_seed_gives_the_same_file(calibrated: Calibrated) -> None:
    assert calibrated.files[0] == calibrated.files[1]


def test_the_default_name_tells_the_kind_of_device_and_not_the_machine() -> None:
    assert default_name(IDENTITY) == FILE.name
    gpu = IDENTITY | {
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "dtype": "bfloat16",
        "model": "org/Model-1B",
    }
    assert default_name(gpu) == "nvidia-h200-org-model-1b-bfloat16.cost.json"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--hold-out 0", "--hold-out '0': must be a share of the cells between 0 and 1, or none"),
        ("--hold-out 1", "--hold-out '1': must be"),
        ("--hold-out half", "--hold-out 'half': must be"),
        ("--hold-out nan", "--hold-out 'nan': must be"),
        ("--max-batch-size 8 --hold-out none", "--max-batch-size 8: is for predicting what is held out"),
        ("--max-batch-size 0", "--max-batch-size 0: must be a whole number from 1"),
        ("--kv-cache-tokens 9", "--kv-cache-tokens 9: needs --max-batch-size"),
        ("--out missing/x.json", "--out 'missing/x.json': no such folder"),
        ("--out .", "--out '.': is a folder"),
        ("--name \t", "--name '\\t': must be a line of text"),
    ],
)
def test_bad_flags_are_one_line_before_anything_is_read(ask: Ask, words: str, complaint: str) -> None:
    answer = ask("calibrate", "nowhere", *words.split(" "))
    assert answer.code == 2
    assert answer.complaint.startswith(complaint)


def test_a_folder_that_is_no_run_is_bad_input(ask: Ask) -> None:
    answer = ask("calibrate", "nowhere")
    assert (answer.code, answer.complaint.partition(":")[0]) == (2, "RUN 'nowhere'")


@pytest.fixture
def server_run(tmp_path: Path) -> str:
    """Such a sweep as a client over HTTP has it, of a server that computes every prompt in one step."""
    path = made_run(tmp_path, "a", **FLAGS | {"max_num_batched_tokens": 4096})
    relabel(path, target=HTTP, model={"model": "m", "device": "this machine's", "server": "other 1.0"})
    run = json.loads((path / "run.json").read_text())
    run["configuration"] |= {"api": "completions", "tokenizer": "builtin"}
    for size in ("max-batch-size", "max-active-requests", "max-num-batched-tokens"):
        del run["configuration"][size]
    for entry in run["facts"]:
        for size in ("max_num_batched_tokens", "kv_cache_tokens"):
            del entry["facts"][size]
    (path / "run.json").write_text(json.dumps(run))
    return str(path)


def test_a_server_is_fitted_to_by_its_deliveries(ask: Ask, server_run: str) -> None:
    assert ask("calibrate", server_run, "--hold-out", "none").code == 0
    model = CostModel.read(FILE.with_name("other-1.0-m.cost.json"))
    # What lies between steps cannot be told apart from them.
    truth_s = TRUTH.step.constant_s + TRUTH.between_steps.constant_s
    assert model.step.constant_s == pytest.approx(truth_s, rel=0.05)
    # Its client sent one after another, and knows no more of what that cost.
    assert model.submit.request_s == pytest.approx(TRUTH.submit.request_s, rel=0.01)
    assert model.submit == SubmitCost(model.submit.request_s, 0.0, model.submit.request_s)


def test_a_server_is_predicted_with_the_sizes_that_its_user_says(ask: Ask, server_run: str) -> None:
    answer = ask("calibrate", server_run)
    assert answer.code == 2
    assert "--max-batch-size N does, and --hold-out none fits to all" in answer.complaint

    sizes = ("--max-batch-size", "8", "--max-num-batched-tokens", "4096")
    answer = ask("calibrate", server_run, *sizes, "--json")
    found = json.loads(answer.out)["held_out"]["errors"]["verdict"]
    assert (answer.code, found["cells"], found["reject_difference"]) == (0, 4, 0)
    assert found["median_error"]["p50_ttft_ms"] < 0.05


def test_sizes_are_refused_of_an_engine_which_says_its_own(ask: Ask, run_a: Path) -> None:
    answer = ask("calibrate", str(run_a), "--max-batch-size", "8")
    assert (answer.code, "--max-batch-size 8: a was measured on an engine" in answer.complaint) == (2, True)


def test_a_simulated_run_is_bad_input(ask: Ask, copy_of_a: Path) -> None:
    path = copy_of_a
    relabel(path, target="sim")
    answer = ask("calibrate", str(path))
    assert (answer.code, "is a simulated run" in answer.complaint) == (2, True)
    assert not FILE.parent.exists()
