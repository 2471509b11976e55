"""The command line before a model loads: what it refuses, and what needs none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from roseinfer.bench import session
from tests.bench.asking import Ask


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on to measure, and so to load a model, fails."""

    def measure(self: session.Session) -> None:
        raise AssertionError("went on to load a model")

    monkeypatch.setattr(session.Session, "measure", measure)


BAD_INPUT = [
    ("sweep --max-inflight -1", "--max-inflight '-1'"),
    ("sweep --max-inflight=", "--max-inflight ''"),
    ("sweep --max-inflight 0,sixteen", "--max-inflight '0,sixteen'"),
    ("run --max-inflight-requests x", "--max-inflight 'x'"),
    ("run --max-inflight 0,16", "--max-inflight '0,16'"),
    ("sweep --burst-size 0", "--burst-size '0'"),
    ("sweep --repeats many", "'--repeats' / '--repeat-runs': 'many'"),
    ("sweep --max-error-share much", "'--max-error-share': 'much'"),
    ("sweep --prompt-len 1021", "--prompt-len '1021': with --max-new-tokens 4 exceeds the context of 1024"),
    ("run --prompt Hello --prompt-repeats 1021", "--prompt '1021 tokens': with --max-new-tokens 4 exceeds"),
    ("sweep --kv-cache-tokens 32", "--kv-cache-tokens 32"),
    ("sweep --model builtin:gpt3", "--model 'builtin:gpt3'"),
    ("sweep --model no/such/model", "--model 'no/such/model'"),
    ("sweep --model weightless", "--model 'weightless': the folder has no weights"),
    ("sweep --model ~nobody-here/model", "--model '~nobody-here/model'"),
    ("sweep --output-dir file/below", "--output-dir 'file/below'"),
    ("sweep -o . --experiment-name file", "--output-dir '.'"),
    ("plot there -o file/below", "--output-dir 'file/below'"),
    ("sweep --experiment-name ../up", "--experiment-name '../up'"),
    ("sweep --run-id taken -o there", "--run-id 'taken'"),
    ("sweep --run-id a/b", "--run-id 'a/b'"),
    ("sweep --run-id=", "--run-id ''"),
    ("sweep --experiment-name=", "--experiment-name ''"),
    ("sweep --run-id " + "n" * 201, "--run-id 'n"),
    ("sweep --prompt-len 61 --max-model-len 64", "--prompt-len '61'"),
    ("sweep --prompt-len 4 --prompt Hello", "--prompt-len '4': contradicts --prompt"),
    ("sweep --pretok --tokenize-workers 2", "--tokenize-workers 2: has nothing to do with --pretok"),
    ("sweep --no-such-flag 1", "--no-such-flag"),
    ("sweep --max-inflight", "--max-inflight"),
    ("no-such-command", "no-such-command"),
    ("sweep --slo p99_ttft", "--slo 'p99_ttft'"),
    ("sweep --slo p99_speed:250", "--slo 'p99_speed:250'"),
    ("sweep --metadata gpu", "--metadata 'gpu'"),
    ("sweep --device tpu", "--device 'tpu'"),
    ("sweep --resume there", "--resume 'there'"),
    ("sweep --resume nowhere", "--resume 'nowhere'"),
    ("sweep --resume broken", "--resume 'broken'"),
    ("sweep missing.toml", "'missing.toml': No such file"),
    ("sweep bad.toml", "bad.toml: max-inflght [0, 64]"),
    ("sweep file", "'file': not valid TOML"),
    ("sweep good.toml --prompt-len 4", "--prompt-len '4': contradicts --prompt"),
    ("plot there", "RUN 'there'"),
]


@pytest.fixture
def surroundings(tmp_path: Path) -> Path:
    """What the commands above stumble over."""
    (tmp_path / "file").write_text("a regular file")
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    (tmp_path / "there" / "sweep" / "taken").mkdir(parents=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text('{"schema_version": 1}')
    (tmp_path / "broken" / "cells").mkdir()
    (tmp_path / "bad.toml").write_text("max-inflght = [0, 64]")
    (tmp_path / "good.toml").write_text(
        'prompt = "Hello"\nmax-inflight = [0, 64]\nrepeats = 3\nburst-size = 7\n'
    )
    return tmp_path


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("command", "names"), BAD_INPUT)
def test_bad_input_is_one_line_that_names_flag_and_value(
    ask: Ask, surroundings: Path, command: str, names: str
) -> None:  # case A10
    before = files_in(surroundings)
    answer = ask(*command.split(" "))
    assert answer.code == 2
    assert names in answer.complaint
    assert answer.out == ""
    assert files_in(surroundings) == before  # nothing is half-written


def test_bad_input_never_gets_as_far_as_importing_torch(surroundings: Path) -> None:
    script = """
import json, sys
from roseinfer.bench.cli import main
codes = []
for command in json.load(sys.stdin):
    sys.argv = ["roseinfer-bench", *command.split(" ")]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps([codes, sorted({"torch", "transformers", "matplotlib"} & sys.modules.keys())]))
"""
    commands = [command for command, _ in BAD_INPUT if not command.startswith("plot")]
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=surroundings,
    )
    assert json.loads(done.stdout) == [[2] * len(commands), []]
    assert "Traceback" not in done.stderr


def test_help_imports_nothing_that_is_slow() -> None:
    script = """
import sys
from roseinfer.bench.cli import app
app(["sweep", "--help"], standalone_mode=False)
slow = {"torch", "pandas", "numpy", "pyarrow", "rich", "asyncio", "tokenizers"}
print(sorted(slow & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "0 means no limit" in " ".join(done.stdout.split())
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.usefixtures("no_model")
def test_a_full_disk_is_found_before_a_model_loads(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("roseinfer.bench.store.tempfile.TemporaryFile", full)
    answer = ask("sweep", "-o", "out")
    assert (answer.code, answer.complaint) == (2, "--output-dir 'out': No space left on device")


def test_no_command_is_an_error_with_help(ask: Ask) -> None:
    answer = ask()
    assert answer.code == 2
    assert answer.err.startswith("Usage: ")
    assert answer.out == ""


def test_version(ask: Ask) -> None:
    answer = ask("--version")
    assert answer.code == 0
    assert answer.out.startswith("roseinfer-bench ")


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_prints_the_cells_and_measures_nothing(ask: Ask, surroundings: Path) -> None:
    answer = ask("sweep", "--max-inflight", "0,16", "--burst-size", "8,32", "--dry-run")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "inflight_none-burst_8-prompt_32-output_4: 8 requests, 8 repeats",
        "inflight_none-burst_32-prompt_32-output_4: 32 requests, 8 repeats",
        "inflight_16-burst_8-prompt_32-output_4: 8 requests, 8 repeats",
        "inflight_16-burst_32-prompt_32-output_4: 32 requests, 8 repeats",
    ]
    assert "results" not in files_in(surroundings)


@pytest.mark.usefixtures("no_model")
def test_flags_override_the_file(ask: Ask, surroundings: Path) -> None:
    answer = ask("sweep", "good.toml", "--repeats", "2", "--burst-size", "9", "--dry-run")
    assert answer.out.splitlines() == [
        "inflight_none-burst_9-output_4: 9 requests, 2 repeats",
        "inflight_64-burst_9-output_4: 9 requests, 2 repeats",
    ]
