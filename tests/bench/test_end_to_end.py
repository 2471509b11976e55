"""`roseinfer-bench` on a tiny GPT-2 with random weights: everything real, but small."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from roseinfer.bench.cli import main
from roseinfer.bench.records import REQUEST_SCHEMA, STEP_SCHEMA
from roseinfer.bench.store import RunFolder
from roseinfer.tokenization import BUILTIN_EOS_ID, BUILTIN_EOS_TOKEN, BUILTIN_VOCAB_SIZE, builtin_tokenizer

CONTEXT = 64
SWEEP = "sweep --max-inflight 0,4 --burst-size 12 --repeats 4 --prompt-len 8 --max-new-tokens 3 --max-batch-size 4"


@pytest.fixture(scope="module", autouse=True)
def _slow_senders_are_fine() -> Iterator[None]:
    """How fast a loaded machine sends is not what these tests ask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roseinfer.bench.validity._BURST_SPREAD_S", 60.0)
        yield


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


def ask(words: list[str]) -> int:
    """`roseinfer-bench` with these words; its exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_:
        patch.setattr(sys, "argv", ["roseinfer-bench", *words])
        main()
    code = exit_.value.code
    assert code is None or isinstance(code, int)
    return code or 0


# ---- run ----


def test_run_prints_the_seeds_report(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --prompt Hello --prompt-repeats 20 --num-requests 12 --max-new-tokens 2 --tokenize-workers 2"
    words += f" --max-inflight-requests 4 --max-batch-size 4 --warmup-runs 1 --repeat-runs 1 -o {tmp_path}"
    code = ask([*words.split(), "--hf-model-id", str(model)])
    printed = capsys.readouterr().out.splitlines()
    assert code == 0
    assert printed[:5] == [
        "=== streaming benchmark ===",
        "Model: tiny-gpt2",
        "Device: cpu",
        "Pretok: False",
        "Tokenize workers: 2",
    ]
    counted = {line.split(": ")[0]: int(line.split(": ")[1]) for line in printed[8:12]}
    assert 4 <= counted["Requests"] == 12 - counted["Rejected"]  # more than 4 where slots came free meanwhile
    assert counted["Prompt tokens (total)"] == 20 * counted["Requests"]
    assert counted["Completion tokens (total)"] == 2 * counted["Requests"]


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
    script = "from roseinfer.bench import validity; validity._BURST_SPREAD_S = 60; from roseinfer.bench.cli import main; main()"
    words = [*SWEEP.split(), "--model", str(model), "--json", "-o", str(results), "--slo", "p99_ttft:60000"]
    done = subprocess.run([sys.executable, "-c", script, *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
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
    swept: tuple[RunFolder, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = swept
    assert ask(["plot", str(folder.path), "-o", str(tmp_path / "drawn")]) == 0
    drawn = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert drawn == {path.name for path in (folder.path / "figures").iterdir()}
    assert drawn == {path.name for path in (tmp_path / "drawn").iterdir()}


# ---- a sweep that is stopped twice: by Ctrl-C, then by kill -9 ----


def sitting(words: list[str], *, stop_at: str, by: signal.Signals) -> tuple[int, str]:
    """A sweep in a process of its own that gets a signal once its progress says `stop_at`. Exit code and stderr."""
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & ignores it
    )
    script += "from roseinfer.bench.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", script, *words], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        told = ""
        for line in process.stderr:
            told += line
            if stop_at in line:
                process.send_signal(by)
        return process.wait(), told


@pytest.fixture(scope="module")
def stopped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The folder of a sweep that got Ctrl-C in its third cell, its exit code and stderr."""
    results = tmp_path_factory.mktemp("stopped")
    words = [*SWEEP.split(), "--model", str(model), "-o", str(results), "--run-id", "run"]
    code, told = sitting(words, stop_at="cell 3 of 8", by=signal.SIGINT)
    return results / "sweep" / "run", code, told


def whole_cells(path: Path) -> int:
    """Cells on disk, each of them with all its rows."""
    folder = RunFolder.resume(path)
    assert not folder.is_done
    requests = folder.read_requests()
    assert set(requests.groupby(["cell_id", "repeat"]).size()) == {12}
    assert len(folder.read_facts()) == len(folder.finished_cells()) == len(requests) // 12
    return len(folder.finished_cells())


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(stopped: tuple[Path, int, str], model: Path) -> None:
    path, code, told = stopped
    last = told.splitlines()[-1]
    assert code == 130
    assert "Traceback" not in told
    assert last.startswith("roseinfer-bench: interrupted; ")
    assert last.endswith(f"To go on: roseinfer-bench sweep --resume {path} --model {model}")


def test_ctrl_c_keeps_the_finished_cells(stopped: tuple[Path, int, str]) -> None:
    assert 2 <= whole_cells(stopped[0]) < 8


def test_a_local_model_must_be_named_again(
    stopped: tuple[Path, int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(["sweep", "--resume", str(stopped[0])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "measured the local model 'tiny-gpt2'" in line
    assert "add --model PATH" in line


def test_a_killed_sweep_goes_on_and_loses_no_finished_cell(
    stopped: tuple[Path, int, str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _, _ = stopped
    before = RunFolder.open(path).read_requests()
    code, _ = sitting(
        ["sweep", "--resume", str(path), "--model", str(model)], stop_at="cell 6 of 8", by=signal.SIGKILL
    )
    assert code == -signal.SIGKILL
    assert 5 <= whole_cells(path) < 8

    assert ask(["sweep", "--resume", str(path), "--model", str(model)]) == 0
    folder = RunFolder.open(path)
    assert folder.is_done
    after = folder.read_requests()
    assert len(after) == 8 * 12
    kept = after.merge(before[["cell_id", "repeat", "request_index"]])
    pd.testing.assert_frame_equal(kept, before)
    assert "max inflight" in capsys.readouterr().out
