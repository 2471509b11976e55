"""What keeps a run from going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.store import RunFolder, differences


def manifest(**changes: object) -> dict[str, Any]:
    environment = {
        "cpu_model": "A CPU",
        "cores_usable": 2,
        "load_average": [0.5, 0.5, 0.5],
        "gpus": None,
        "versions": {"roseinfer": "0.1", "torch": "2.13"},
        "git": {"commit": "aaaa", "dirty": False},
        "source_sha256": "1111",
        "thread_env": {"OMP_NUM_THREADS": "2"},
    }
    return {
        "configuration": {"burst_size": 128, "max_inflight": [None, 16], "slo": ("p99_ttft:250",)},
        "workload_sha256": "abcd",
        "model": {"name": "builtin:gpt2", "dtype": "float32"},
        "environment": environment | changes.pop("environment", {}),  # type: ignore[operator]
    } | changes


def test_a_run_may_go_on_as_it_began(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "burst", "run1", manifest())
    assert differences(RunFolder.open(run.path).manifest, manifest()) == []


def test_a_busier_machine_does_not_keep_a_run_from_going_on() -> None:
    busier = {"load_average": [9.0, 9.0, 9.0], "gpus": ["A GPU"]}
    assert differences(manifest(), manifest(environment=busier)) == []


def test_a_simulation_may_go_on_on_another_machine() -> None:
    another = {"cpu_model": "B CPU", "cores_usable": 64}
    assert differences(manifest(target="sim"), manifest(target="sim", environment=another)) == []
    assert len(differences(manifest(target="engine"), manifest(target="engine", environment=another))) == 2


def test_a_commit_that_left_the_sources_alone_does_not_keep_a_run_from_going_on() -> None:
    assert differences(manifest(), manifest(environment={"git": {"commit": "bbbb", "dirty": True}})) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"configuration": {"burst_size": 64, "max_inflight": [None, 16], "slo": ["p99_ttft:250"]}},
            "--burst-size was 128, now 64",
        ),
        (
            {"configuration": {"burst_size": 128, "max_inflight": [16], "slo": ["p99_ttft:250"]}},
            "--max-inflight was not set,16, now 16",
        ),
        (
            {"configuration": {"burst_size": 128, "max_inflight": [None, 16]}},
            "--slo was p99_ttft:250, now not set",
        ),
        ({"workload_sha256": "ffff"}, "the workload is another one (other arrivals, lengths or prompts)"),
        (
            {"model": {"name": "builtin:gpt2", "dtype": "bfloat16"}},
            "model dtype was float32, now bfloat16",
        ),
        ({"environment": {"source_sha256": "2222"}}, "the code of roseinfer changed"),
        (
            {"environment": {"source_sha256": "2222", "git": {"commit": "bbbb", "dirty": False}}},
            "the code of roseinfer changed (git commit aaaa, now bbbb)",
        ),
        (
            {"environment": {"versions": {"roseinfer": "0.2", "torch": "2.13"}}},
            "version of roseinfer was 0.1, now 0.2",
        ),
        ({"environment": {"cores_usable": 1}}, "machine's cores-usable was 2, now 1"),
        ({"environment": {"thread_env": {}}}, "machine's thread-env was OMP_NUM_THREADS=2, now not set"),
    ],
)
def test_a_difference_is_said_in_plain_words(changes: dict[str, Any], said: str) -> None:
    assert differences(manifest(), manifest(**changes)) == [said]


def test_all_differences_are_said_at_once() -> None:
    other = manifest(workload_sha256="ffff", model={"name": "elsewhere", "dtype": "float32"})
    assert len(differences(manifest(), other)) == 2
