"""`roseinfer-bench` on a tiny GPT-2 with random weights: everything real, but small."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from matplotlib.figure import Figure
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from roseinfer.bench.cli import main
from roseinfer.bench.records import REQUEST_SCHEMA, STEP_SCHEMA
from roseinfer.bench.store import RunFolder
from roseinfer.engine import EngineDescription
from roseinfer.openmp import WAITING
from roseinfer.tokenization import BUILTIN_EOS_ID, BUILTIN_EOS_TOKEN, BUILTIN_VOCAB_SIZE, builtin_tokenizer
from tests.bench.experiments import ScriptedDescription

CONTEXT = 64
SWEEP = (
    "sweep --max-inflight 0,4 --burst-size 12 --repeats 4 --prompt-len 8 --max-new-tokens 3 --max-batch-size 4"
    " --num-threads 1"  # more would wait for each other in every operator, and these are tiny
)


@pytest.fixture(scope="module", autouse=True)
def _slow_senders_are_fine() -> Iterator[None]:
    """How fast a loaded machine sends is not what these tests ask."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S", 60.0)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=BUILTIN_VOCAB_SIZE,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=CONTEXT,
        bos_token_id=BUILTIN_EOS_ID,
        eos_token_id=BUILTIN_EOS_ID,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=builtin_tokenizer().tokenizer,
        bos_token=BUILTIN_EOS_TOKEN,
        eos_token=BUILTIN_EOS_TOKEN,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds."""
    monkeypatch.setattr(
        "roseinfer.bench.session.draw_figures", lambda folder, place: [folder.path / "figures" / "a.png"]
    )


def ask(words: list[str]) -> int:
    """`roseinfer-bench` with these words; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["roseinfer-bench", *words])
        with pytest.raises(SystemExit) as exit_:
            main()
    code = exit_.value.code
    assert code is None or isinstance(code, int)
    return code or 0


# ---- run ----


@pytest.mark.usefixtures("no_figures")
def test_run_prints_the_seeds_report(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --prompt Hello --prompt-repeats 20 --num-requests 12 --max-new-tokens 2 --tokenize-workers 2"
    words += f" --max-inflight-requests 4 --max-batch-size 4 --repeat-runs 1 --num-threads 1 -o {tmp_path}"
    code = ask([*words.split(), "--hf-model-id", str(model)])
    printed = capsys.readouterr().out.splitlines()
    assert code == 0
    assert printed[:6] == [
        "=== warmup 1/1 ===",
        "=== streaming benchmark ===",
        "Model: tiny-gpt2",
        "Device: cpu",
        "Pretok: False",
        "Tokenize workers: 2",
    ]
    counted = {line.split(": ")[0]: int(line.split(": ")[1]) for line in printed[9:13]}
    assert 4 <= counted["Requests"] == 12 - counted["Rejected"]  # more than 4 where slots came free meanwhile
    assert counted["Prompt tokens (total)"] == 20 * counted["Requests"]
    assert counted["Completion tokens (total)"] == 2 * counted["Requests"]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("flags", "says"), [("", ["53.3 %"]), ("--paged-attn", ["53.3 %"]), ("--no-prefix-cache", [])]
)
def test_what_the_prefix_cache_knew_is_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, says: list[str]
) -> None:  # case I7
    """Three times the same 20 tokens, one after the other: the second and the third find 16 of them."""
    words = "run --prompt Hello --prompt-repeats 20 --num-requests 3 --max-new-tokens 1 --max-batch-size 1"
    words += f" --warmup-runs 0 --repeat-runs 1 --num-threads 1 -o {tmp_path} {flags}"
    assert ask([*words.split(), "--model", str(model)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Prefix cache: ")]
    assert [line.partition(" of the prompt")[0].split(": ")[-1] for line in lines] == says


def test_a_prompt_longer_than_the_context_leaves_no_run_behind(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"run --prompt Hello --prompt-repeats 63 --max-new-tokens 2 --quiet -o {tmp_path / 'out'}".split()
    assert ask([*words, "--model", str(model)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "roseinfer-bench: --prompt '63 tokens': with --max-new-tokens 2 exceeds the context of 64 tokens"
    )
    assert not (tmp_path / "out").exists()


# ---- sweep ----


@pytest.fixture(scope="module")
def swept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, dict[str, Any]]:
    """A finished sweep, and what it printed on stdout as JSON."""
    results = tmp_path_factory.mktemp("results")
    words = [*SWEEP.split(), "--model", str(model), "--json", "-o", str(results), "--slo", "p99_ttft:60000"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert ask(words) == 0
    printed = json.loads(out.getvalue())
    return RunFolder.open(Path(printed["run"])), printed


def test_a_sweep_prints_its_summary_as_json(swept: tuple[RunFolder, dict[str, Any]]) -> None:
    _, printed = swept
    pooled = {row["max_inflight"]: row for row in printed["summary"] if row["repeat"] is None}
    assert printed["valid"] is True
    assert pooled.keys() == {4, None}
    assert pooled[None]["completed"] == pooled[None]["offered"] == 48
    assert pooled[4]["completed"] + pooled[4]["rejected"] == 48
    assert pooled[4]["rejected"] > 0
    assert printed["model"]["model"] == "tiny-gpt2"


def test_a_sweep_leaves_the_files_of_a_run(swept: tuple[RunFolder, dict[str, Any]]) -> None:
    folder, _ = swept
    names = {path.name for path in folder.path.iterdir()}
    tables = {f"{name}.parquet" for name in ("requests", "steps", "summary", "workload")}
    assert names == {"run.json", "figures", *tables}
    assert folder.is_done
    assert pq.read_schema(folder.path / "requests.parquet").names == REQUEST_SCHEMA.names
    assert pq.read_schema(folder.path / "steps.parquet").names == STEP_SCHEMA.names
    figures = {path.suffix for path in (folder.path / "figures").iterdir()}
    assert figures == {".png", ".svg", ".csv"}


def test_both_limits_computed_the_same_prompts(swept: tuple[RunFolder, dict[str, Any]]) -> None:  # case C5
    folder, _ = swept
    workload = pd.read_parquet(folder.path / "workload.parquet")
    assert len(workload) == 4 * 12
    assert workload["prompt_seed"].nunique() == 4
    requests = folder.read_requests()
    completed = requests[requests["outcome"] == "completed"]
    assert (completed["prompt_tokens"] == 8).all()
    assert (completed["output_tokens"] == 3).all()


def test_no_result_tells_where_it_was_measured(model: Path, swept: tuple[RunFolder, dict[str, Any]]) -> None:
    folder, _ = swept
    assert folder.manifest["configuration"]["model"] == folder.manifest["model"]["model"] == "tiny-gpt2"
    assert set(folder.read_requests()["model"]) == {"tiny-gpt2"}
    texts = [path for path in folder.path.rglob("*") if path.suffix in (".json", ".svg", ".csv")]
    assert len(texts) > 3
    for path in texts:
        for place in (str(model.parent), str(folder.path.parents[1])):
            assert place not in path.read_text(), path.name


def test_plot_draws_a_run_again(
    swept: tuple[RunFolder, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def touch(figure: Figure, folder: Path, name: str) -> list[Path]:
        """They were drawn for real when the run was made."""
        files = [folder / f"{name}.png", folder / f"{name}.svg"]
        for file in files:
            file.touch()
        return files

    monkeypatch.setattr("roseinfer.bench.plots.save", touch)
    folder, _ = swept
    assert ask(["plot", str(folder.path), "-o", str(tmp_path / "drawn")]) == 0
    drawn = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert drawn == {path.name for path in (folder.path / "figures").iterdir()}
    assert drawn == {path.name for path in (tmp_path / "drawn").iterdir()}


# ---- a sweep that is stopped by Ctrl-C ----

INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell that puts us into the background ignores
from roseinfer.bench.cli import main
main()
"""


@pytest.fixture(scope="module")
def stopped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The folder of a sweep that got Ctrl-C in its third cell or a little later, its exit code and stderr.

    In a process as a user starts it: nothing is set that this one set for itself.
    """
    results = tmp_path_factory.mktemp("stopped")
    env = {name: value for name, value in os.environ.items() if name not in WAITING}
    words = [*SWEEP.split(), "--repeats", "6", "--model", str(model), "-o", str(results), "--run-id", "run"]
    command, told = [sys.executable, "-c", INTERRUPTIBLE, *words], ""
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            told += line
            if "cell 3 of 12" in line:
                process.send_signal(signal.SIGINT)
    return results / "sweep" / "run", process.returncode, told


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(stopped: tuple[Path, int, str], model: Path) -> None:
    path, code, told = stopped
    last = told.splitlines()[-1]
    assert code == 130
    assert "Traceback" not in told
    assert last.startswith("roseinfer-bench: interrupted; ")
    assert last.endswith(f"To go on: roseinfer-bench sweep --resume {path} --model {model}")


def test_a_local_model_must_be_named_again(
    stopped: tuple[Path, int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(["sweep", "--resume", str(stopped[0])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "was made with --model tiny-gpt2" in line
    assert "add --model PATH" in line


@pytest.mark.usefixtures("no_figures")
def test_after_ctrl_c_the_finished_cells_are_whole_and_the_sweep_goes_on(
    stopped: tuple[Path, int, str], model: Path
) -> None:
    path, _, _ = stopped
    folder = RunFolder.open(path)
    before = folder.read_requests()
    assert not folder.is_done
    assert 2 <= len(folder.finished_cells()) < 12
    assert set(before.groupby(["cell_id", "repeat"]).size()) == {12}

    assert ask(["sweep", "--resume", str(path), "--model", str(model), "--quiet"]) == 0
    after = RunFolder.open(path).read_requests()
    assert len(after) == 12 * 12
    pd.testing.assert_frame_equal(after.merge(before[["cell_id", "repeat", "request_index"]]), before)


def test_the_scripted_engine_describes_itself_as_a_real_one_does() -> None:
    assert [field.name for field in fields(ScriptedDescription)] == [
        field.name for field in fields(EngineDescription)
    ]
