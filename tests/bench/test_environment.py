"""What is said about machine and command may be published, and never fails."""

from __future__ import annotations

import gc
import getpass
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from roseinfer.bench import environment
from roseinfer.bench.environment import (
    GC_THRESHOLD,
    GcPause,
    GcPauses,
    describe_environment,
    public_command,
    public_words,
)


@pytest.fixture(autouse=True, scope="module")
def known_code() -> None:
    """Here it changes."""


def test_the_environment_is_json() -> None:
    described = describe_environment()
    assert json.loads(json.dumps(described, allow_nan=False)) == described


@pytest.mark.parametrize("key", ["cpu_model", "cores_logical", "cores_usable", "memory_gib", "os", "python"])
def test_the_machine_is_described(key: str) -> None:
    assert describe_environment()[key]


def test_cores_usable_follow_the_affinity_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert describe_environment()["cores_usable"] == 3


def test_the_environment_names_no_host_no_user_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_CPU_AFFINITY", str(Path.home() / "cores"))
    monkeypatch.setenv("USER", "somebody-in-particular")
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-in-particular")
    text = json.dumps(describe_environment())
    secrets = {
        socket.gethostname(),
        os.uname().nodename,
        str(Path.home()),
        getpass.getuser(),
        str(Path.cwd()),
    }
    assert [secret for secret in secrets if secret in text] == []
    assert '"/' not in text


def test_thread_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    thread_env = describe_environment()["thread_env"]
    assert isinstance(thread_env, dict)
    assert thread_env["OMP_NUM_THREADS"] == "3"


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_VERSIONS_OF", ("numpy", "no-such-package-anywhere"))
    versions = describe_environment()["versions"]
    assert isinstance(versions, dict)
    assert versions["numpy"]
    assert versions["no-such-package-anywhere"] is None


def test_gpus_are_unknown_until_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert describe_environment()["gpus"] is None
    assert "torch" not in sys.modules


def test_gpus_are_named_once_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_name=lambda index: f"GPU {index}")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert describe_environment()["gpus"] == ["GPU 0", "GPU 1"]


# --- code -------------------------------------------------------------------------------------------------


def commit_all(checkout: Path) -> str:
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=checkout, check=True, capture_output=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, check=True, capture_output=True)
    return head.stdout.decode().strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout, not committed yet, that the package seems to run from."""
    (tmp_path / "checkout" / "package").mkdir(parents=True)
    (tmp_path / "checkout" / "package" / "code.py").write_text("x = 1\n")
    monkeypatch.setattr(environment, "_PACKAGE", tmp_path / "checkout" / "package")
    return tmp_path / "checkout"


def test_a_clean_checkout_gives_its_commit(checkout: Path) -> None:
    commit = commit_all(checkout)
    assert describe_environment()["git"] == {"commit": commit, "dirty": False}


def test_an_edit_makes_a_checkout_dirty(checkout: Path) -> None:
    commit = commit_all(checkout)
    (checkout / "package" / "code.py").write_text("x = 2\n")
    assert describe_environment()["git"] == {"commit": commit, "dirty": True}


def test_a_git_hook_of_another_repository_does_not_mislead(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_all(checkout)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert describe_environment()["git"] == {"commit": commit, "dirty": False}


def test_a_package_installed_inside_another_repository_has_no_commit(checkout: Path) -> None:
    (checkout / "venv" / "package").mkdir(parents=True)
    commit_all(checkout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_PACKAGE", checkout / "venv" / "package")
        assert describe_environment()["git"] is None


@pytest.mark.parametrize(
    "failure", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 2), PermissionError("git")]
)
def test_git_that_does_not_answer_is_no_failure(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    commit_all(checkout)

    def run(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", run)
    assert describe_environment()["git"] is None


def test_the_source_hash_follows_the_sources_and_nothing_else(checkout: Path) -> None:
    before = describe_environment()["source_sha256"]
    (checkout / "README.md").write_text("words\n")
    (checkout / "package" / "code.pyc").write_bytes(b"compiled")
    assert describe_environment()["source_sha256"] == before
    (checkout / "package" / "code.py").write_text("x = 2\n")
    assert describe_environment()["source_sha256"] != before


# --- command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "public"),
    [
        ("/home/alice/venv/bin/roseinfer-bench", "roseinfer-bench"),
        ("--output-dir=/home/alice/results/", "--output-dir=results"),
        ("/home/alice b/my models/gpt2", "gpt2"),
        ("--model=/home/alice b/gpt2", "--model=gpt2"),
        ("~/models/gpt2", "gpt2"),
        ("~alice/gpt2", "gpt2"),
        ("../alice/gpt2", "gpt2"),
        ("home/alice/gpt2", "gpt2"),
        ("one,/home/alice/two", "one,two"),
        ("data=/home/alice/x", "data=x"),
        ("see /home/alice/x or (/home/alice/y", "see x or (y"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("0,16,64", "0,16,64"),
        ("p99_ttft:250", "p99_ttft:250"),
        ("and/or, either/or", "and/or, either/or"),
        ("http://alice:pw@example.org:8000/v1", "http://remote/v1"),
        ("--target=https://example.org/v1?key=k", "--target=https://remote/v1"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("http://[oops/v1", "http://remote"),
        ("serve /home/alice/m --api-key sk-1 --port 8", "serve m --api-key *** --port 8"),
        ("--api-key=sk-1", "--api-key=***"),
        ("env HF_TOKEN=hf_1 serve", "env HF_TOKEN=*** serve"),
        ("--api-key-env=OPENAI_KEY", "--api-key-env=OPENAI_KEY"),
        ("--max-num-batched-tokens 8192", "--max-num-batched-tokens 8192"),
        ("/", "/"),
        (".5", ".5"),
    ],
)
def test_paths_in_a_command_are_cut_to_their_last_part(word: str, public: str) -> None:
    assert shlex.split(public_command([word])) == [public]


def test_the_command_of_a_server_keeps_its_words() -> None:
    command = public_command(["run", "--target-cmd", "/home/alice/bin/serve /home/alice/m --api-key k -p 1"])
    assert shlex.split(command) == ["run", "--target-cmd", "serve m --api-key *** -p 1"]


@pytest.mark.parametrize(
    ("command", "public"),
    [
        ("serve --api_key sk-1 -p 8", "serve --api_key *** -p 8"),
        ("serve --API-KEY sk-1", "serve --API-KEY ***"),
        ("serve --apikey sk-1", "serve --apikey ***"),
        ("serve -api-key=sk-1 m", "serve -api-key=*** m"),
        ("serve --hf-token sk-1 --x", "serve --hf-token *** --x"),
        ("serve --hf_token=sk-1 --x", "serve --hf_token=*** --x"),
        ("serve --token sk-1", "serve --token ***"),
        ("serve --password sk-1", "serve --password ***"),
        ("serve --secret sk-1", "serve --secret ***"),
        ("serve --secret=sk-1", "serve --secret=***"),
        ("serve --api-key sk-1 sk-2   sk-3 --port 8", "serve --api-key *** --port 8"),
        ("serve --api-key 'sk-1 sk-2' --port 8", "serve --api-key *** --port 8"),
        ('serve --api-key "sk-1 \\"sk-2" --port 8', "serve --api-key *** --port 8"),
        ("serve --api-key='sk-1 sk-2' --port 8", "serve --api-key=*** --port 8"),
        ("serve --api-key sk-1\\ sk-2 --port 8", "serve --api-key *** --port 8"),
        ("serve --api-key 'sk-1 sk-2", "serve --api-key ***"),
        ("serve --api-key -sk-1 --port 8", "serve --api-key *** --port 8"),
        ("serve [[--api-key sk-1]] --port 8", "serve [[--api-key ***]] --port 8"),
        ("serve --api-key sk-1 [[--seqs 4]]", "serve --api-key *** [[--seqs 4]]"),
        ("serve --api-key /home/sk-1 --port 8", "serve --api-key *** --port 8"),
        ("env HF_TOKEN='sk-1 sk-2' serve m", "env HF_TOKEN=*** serve m"),
        ("env api_key=sk-1 serve m", "env api_key=*** serve m"),
        ("env MYTOKEN=sk-1 apikey=sk-2 serve m", "env MYTOKEN=*** apikey=*** serve m"),
        ("env KEY=sk-1 serve m", "env KEY=*** serve m"),
        ("x -H 'Authorization: Bearer sk-1' -p 8", "x -H 'Authorization: ***' -p 8"),
        ('x -H "authorization:Basic sk-1==" -p 8', 'x -H "authorization:***" -p 8'),
        ("x -H Authorization: Bearer sk-1 -p 8", "x -H Authorization: *** -p 8"),
        ("x -H 'X-API-Key: sk-1' -p 8", "x -H 'X-API-Key: ***' -p 8"),
        ("""x -j '{"api_key": "sk-1", "a": 1}'""", """x -j '{"api_key": "***", "a": 1}'"""),
        ("args: {'api_key': ['sk-1'], 'a': 1}", "args: {'api_key': ['***'], 'a': 1}"),
        ("x --say Bearer sk-1", "x --say Bearer ***"),
        # no secrets
        ("x --api-key-env VAR --tokenizer t", "x --api-key-env VAR --tokenizer t"),
        ("x --max-tokens 8 --token-budget 9", "x --max-tokens 8 --token-budget 9"),
        ("x --monkey 8 monkey=9", "x --monkey 8 monkey=9"),
        ("x unexpected token: 8", "x unexpected token: 8"),
    ],
)
def test_no_secret_of_a_server_s_command_is_kept(command: str, public: str) -> None:
    assert public_words(command) == public
    for words in (["run", "--target-cmd", command], ["run", f"--target-cmd={command}"]):
        assert "sk-" not in public_command(words)


def test_a_public_command_can_be_pasted_into_a_shell() -> None:
    argv = ["roseinfer-bench", "run", "--prompt", "it's\n$HOME", "--seed", "7"]
    assert shlex.split(public_command(argv)) == argv


def test_the_home_folder_does_not_leave_with_the_command() -> None:
    home = Path.home() / "deep"
    command = public_command([f"{home}/bin/x", f"-o={home}/r", f"--model={home}/m", f"tell me of {home}/y"])
    assert str(home) not in command


# --- garbage collector ------------------------------------------------------------------------------------


def test_a_collection_is_a_pause_on_the_given_clock() -> None:  # case B27
    ticks_s = count(10.0, 0.5)
    gc.disable()
    try:
        with GcPauses(lambda: next(ticks_s)) as watch:
            gc.collect(1)
            gc.collect(2)
    finally:
        gc.enable()
    assert watch.pauses == [GcPause(10.0, 0.5, 1), GcPause(11.0, 0.5, 2)]


def test_the_heap_is_frozen_within_and_thawed_after() -> None:  # case B27
    gc.unfreeze()
    with GcPauses(lambda: 0.0):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_collections_after_the_end_are_not_recorded() -> None:
    with GcPauses(lambda: 0.0) as watch:
        pass
    before = len(watch.pauses)
    gc.collect()
    assert len(watch.pauses) == before


def test_an_exception_thaws_the_heap_and_passes() -> None:
    callbacks = list(gc.callbacks)
    with pytest.raises(KeyError), GcPauses(lambda: 0.0):
        raise KeyError
    assert gc.get_freeze_count() == 0
    assert gc.callbacks == callbacks


def test_a_collection_that_had_begun_before_is_left_out() -> None:
    watch = GcPauses(lambda: 0.0)
    watch._on_collection("stop", {"generation": 2})
    assert watch.pauses == []


def test_collections_are_rare_within_and_as_before_after() -> None:
    before = gc.get_threshold()
    with GcPauses(time.perf_counter):
        assert gc.get_threshold()[0] == GC_THRESHOLD
    assert gc.get_threshold() == before
