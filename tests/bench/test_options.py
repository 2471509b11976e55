"""Flags and files: names, kinds, and what contradicts what. Nothing here needs a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roseinfer.bench.options import DTYPES, NOT_IN_FILES, SWEPT, SweepOptions, flag, read_toml
from roseinfer.engine.device import resolve_dtype
from roseinfer.errors import InputError


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def written(text: str) -> Path:
        path = tmp_path / "question.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def names_on_the_command_line() -> set[str]:
    from typer.main import get_command

    from roseinfer.bench.cli import app

    sweep: Any = get_command(app)
    return {name for parameter in sweep.commands["sweep"].params for name in parameter.opts} - {
        "-h",
        "--help",
    }


def test_every_long_flag_but_those_about_the_run_itself_is_a_key(toml: Any) -> None:
    flags = {name.removeprefix("--") for name in names_on_the_command_line() if name.startswith("--")}
    for key in flags - {flag(field).removeprefix("--") for field in NOT_IN_FILES}:
        with pytest.raises(InputError) as caught:
            read_toml(toml(f"{key} = {{}}"))  # no flag takes a table
        assert "takes" in caught.value.why, key


def test_a_file_sets_fields_and_lists_become_comma_lists(toml: Any) -> None:
    path = toml(
        'prompt = "Hello"\nprompt-repeats = 259\nmax-new-tokens = 1\ntokenize-workers = 4\n'
        'max-inflight = [0, 64]\nburst-size = 256\nrepeats = 10\nslo = "p99_ttft:250"\nsubmit-interval-ms = 2\n'
        'pretok = true\noutput-dir = "elsewhere"\n'
    )
    assert read_toml(path) == {
        "prompt": "Hello",
        "prompt_repeats": 259,
        "max_new_tokens": "1",
        "tokenize_workers": 4,
        "max_inflight": "0,64",
        "burst_size": "256",
        "repeats": 10,
        "slo": ["p99_ttft:250"],
        "submit_interval_ms": 2.0,
        "pretok": True,
        "output_dir": Path("elsewhere"),
    }


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("max_inflight = 4", "max_inflight", 4),  # flags have dashes
        ("max-inflght = 4", "max-inflght", 4),
        ('resume = "x"', "resume", "x"),
        ("dry-run = true", "dry-run", True),
        ('file = "x"', "file", "x"),
        ("repeats = 8.0", "repeats", 8.0),
        ('repeats = "8"', "repeats", "8"),
        ("repeats = true", "repeats", True),
        ("pretok = 1", "pretok", 1),
        ("prompt = 5", "prompt", 5),
        ('prompt = ["a", "b"]', "prompt", ["a", "b"]),  # not a comma list: its commas are text
        ("max-inflight = [0, 1.5]", "max-inflight", [0, 1.5]),
        ("max-inflight = [true]", "max-inflight", [True]),
        ("slo = [250]", "slo", [250]),
        ("output-dir = 3", "output-dir", 3),
        ("burst-size = 2026-01-01", "burst-size", None),
        ("[sweep]\nrepeats = 3", "sweep", {"repeats": 3}),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_file(toml: Any, text: str, key: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        read_toml(toml(text))
    assert caught.value.name == f"question.toml: {key}"
    assert value is None or caught.value.value == value


def test_one_flag_under_two_names_in_a_file_is_refused(toml: Any) -> None:
    with pytest.raises(InputError, match="repeat-runs 4: sets --repeats, which the file sets already"):
        read_toml(toml("repeats = 3\nrepeat-runs = 4"))


@pytest.mark.parametrize("content", [b"repeats = ", b"prompt = '\xff'"])
def test_a_file_that_is_no_toml_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "question.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not valid TOML") as caught:
        read_toml(path)
    assert caught.value.value == str(path)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_toml(tmp_path / "question.toml")


def test_swept_fields_are_fields() -> None:
    assert set(SWEPT) <= set(SweepOptions.__dataclass_fields__)


def test_every_dtype_that_the_flag_takes_is_known_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.engine.device.halving_works", lambda: True)
    resolved = {resolve_dtype(name, torch.device("cpu")) for name in DTYPES if name != "auto"}
    assert resolved == {torch.float32, torch.bfloat16, torch.float16}
