"""`rb.sweep`: the flags and checks of the command line, without its output and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import roseinfer.bench as rb
from roseinfer.bench.store import RunFolder
from roseinfer.errors import InputError

COST_MODEL = Path(__file__).parents[2] / "experiments" / "gpt2_cpu.cost.json"


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    """A sweep of two cells on the virtual clock."""
    return {
        "target": "sim",
        "cost_model": COST_MODEL,
        "max_inflight": [0, 2],
        "burst_size": 4,
        "repeats": 2,
        "output_dir": tmp_path,
        "run_id": "run",
    }


def test_it_returns_the_folder_of_a_finished_run(flags: dict[str, Any], tmp_path: Path) -> None:
    run = rb.sweep(**flags)

    assert run == tmp_path / "sweep" / "run"
    assert RunFolder.open(run).is_done
    assert rb.load_summary(run).groupby("limit", observed=False)["rejected"].max().to_dict() == {
        "2": 4,
        "no limit": 0,
    }


def test_it_prints_nothing(flags: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    rb.sweep(**flags)

    assert capfd.readouterr() == ("", "")


def test_the_run_says_the_command_line_that_measures_the_same(flags: dict[str, Any]) -> None:
    manifest = RunFolder.open(
        rb.sweep(**flags, pretok=False, goodput="ttft:250", metadata=["a=b", "c=d"])
    ).manifest

    words = "roseinfer-bench sweep --quiet --target sim --cost-model gpt2_cpu.cost.json --max-inflight 0,2"
    assert manifest["command"].startswith(words)
    assert manifest["command"].endswith("--goodput ttft:250 --metadata a=b --metadata c=d")
    assert "--pretok" not in manifest["command"]


def test_lists_tuples_and_none_are_what_the_command_line_has_as_comma_lists(flags: dict[str, Any]) -> None:
    configuration = RunFolder.open(rb.sweep(**{**flags, "max_inflight": (None, 2)})).manifest["configuration"]

    assert configuration["max-inflight"] == "0,2"
    assert configuration["burst-size"] == "4"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_inflght": 3}, "max_inflght 3: is no flag that a sweep takes from Python"),
        ({"dry_run": True}, "dry_run True: is no flag that a sweep takes from Python"),
        ({"repeats": "many"}, "repeats 'many': is not what --repeats takes"),
        ({"repeats": 0}, "--repeats 0: must be"),
        ({"max_inflight": [4, 4]}, "--max-inflight '4,4': names 4 twice"),
        ({"max_inflight": [True]}, "is not what --max-inflight takes"),
        ({"run_id": "a/b"}, "--run-id 'a/b': not a plain folder name"),
        ({"slo": "p99_speed:3"}, "--slo 'p99_speed:3'"),
    ],
)
def test_what_the_command_line_refuses_is_raised_before_anything_is_measured(
    flags: dict[str, Any], tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        rb.sweep(**{**flags, **wrong})

    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_sweep_on_the_virtual_clock_needs_no_torch(flags: dict[str, Any]) -> None:
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    code = f"import sys, roseinfer.bench as rb; rb.sweep(**{plain!r}); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False"]
    assert json.loads((flags["output_dir"] / "sweep" / "run" / "run.json").read_text())["status"] == "done"
