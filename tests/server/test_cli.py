from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fastapi import FastAPI

from roseinfer.server import cli
from tests.scripted import ScriptedEngine
from tests.server.serving import ask, manager_of


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `roseinfer-serve`."""
    monkeypatch.setattr(sys, "argv", ["roseinfer-serve", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    assert code is None or isinstance(code, int)
    return code or 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have been served, instead of serving: a scripted engine takes the place of a model."""
    runs: list[dict[str, Any]] = []

    def serve(app: FastAPI, sock: Any, *, drain_timeout_s: float) -> None:
        runs.append({"app": app, "address": sock.getsockname(), "drain_timeout_s": drain_timeout_s})
        sock.close()
        manager_of(app).close()

    load: Callable[..., ScriptedEngine] = lambda *args, **kwargs: ScriptedEngine()  # noqa: E731
    engine = types.SimpleNamespace(InferenceEngine=types.SimpleNamespace(from_pretrained=load))
    monkeypatch.setitem(sys.modules, "roseinfer.engine", engine)
    monkeypatch.setattr(cli, "serve", serve)
    monkeypatch.setattr(cli, "spin_briefly", lambda: None)
    monkeypatch.delenv("ROSEINFER_API_KEY", raising=False)
    return runs


def test_help_needs_no_model_library() -> None:
    code = "import sys, roseinfer.server.cli; print(*{'torch', 'transformers', 'gguf'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


def test_importing_roseinfer_brings_no_server() -> None:
    code = "import sys, roseinfer, roseinfer.bench.cli; print(*{'fastapi', 'uvicorn'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", ["--max-inflight-requests", "--max-inflight"])
def test_the_limit_is_printed_and_said_to_be_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[dict[str, Any]],
    name: str,
) -> None:  # case A8
    assert run(monkeypatch, "--port", "0", name, "16") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "at most 16 requests in flight in this process (each process counts its own)" in line
    assert manager_of(started[0]["app"]).admission.limit == 16


@pytest.mark.parametrize(("flags", "is_on"), [((), True), (("--no-prefix-cache",), False)])
def test_the_prefix_cache_is_on_unless_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, started: list[dict[str, Any]], flags: tuple[str, ...], is_on: bool
) -> None:
    assert run(monkeypatch, "--port", "0", *flags) == 0
    assert manager_of(started[0]["app"])._core.scheduler.kv_cache.caches_prefixes == is_on


def test_ranges_where_torch_has_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], started: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert run(monkeypatch, "--port", "0", "--nvtx") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("roseinfer-serve: --nvtx True: this torch was built without CUDA")
    assert started == []


def test_without_a_limit_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], started: list[dict[str, Any]]
) -> None:  # case A10
    assert run(monkeypatch, "--port", "0", "--max-inflight", "0") == 0
    assert "no limit" in capsys.readouterr().err
    assert manager_of(started[0]["app"]).admission.limit is None
    assert started[0]["address"][0] == "127.0.0.1"


def test_a_token_budget_is_printed_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], started: list[dict[str, Any]]
) -> None:  # case A8
    assert run(monkeypatch, "--port", "0", "--admission", "inflight:16+tokens:4096") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "admission inflight:16+tokens:4096 in this process (each process counts its own)" in line
    admission = manager_of(started[0]["app"]).admission
    assert (admission.limit, admission.token_limit) == (16, 4096)


def test_both_forms_of_a_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], started: list[dict[str, Any]]
) -> None:
    assert run(monkeypatch, "--admission", "tokens:4096", "--max-inflight", "16") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "roseinfer-serve: --admission 'tokens:4096': contradicts --max-inflight-requests 16"
    )
    assert started == []


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_a_key_comes_as_a_flag_or_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, started: list[dict[str, Any]], way: str
) -> None:
    if way == "environment":
        monkeypatch.setenv("ROSEINFER_API_KEY", "secret")
    run(monkeypatch, "--port", "0", *(["--api-key", "secret"] if way == "flag" else []))
    app = started[0]["app"]
    assert ask(app, "GET", "/v1/models").status_code == 401
    assert ask(app, "GET", "/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


def test_a_key_is_never_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ROSEINFER_API_KEY", "secret")
    assert run(monkeypatch, "--help") == 0
    assert "secret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--max-inflight-requests", "-1"),
        ("--max-inflight-requests", "many"),
        ("--admission", "tokens:0"),
        ("--admission", "64"),
        ("--admission", "slo:ttft=1s"),
        ("--scheduling", "edf"),
        ("--cost-model", "results/reference/cost_models/gpt2-epyc2-float32.cost.json"),
        ("--max-batch-size", "0"),
        ("--max-num-batched-tokens", "3"),
        ("--tokenize-workers", "0"),
        ("--max-body-bytes", "0"),
        ("--max-output-tokens", "0"),
        ("--drain-timeout", "nan"),
        ("--write-timeout", "0"),
        ("--port", "70000"),
        ("--host", "no such host"),
        ("--device", "abacus"),
        ("--dtype", "int3"),
        ("--model", "builtin:gpt9"),
        ("--workers", "4"),
    ],
)
def test_a_value_that_cannot_work_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[dict[str, Any]],
    name: str,
    value: str,
) -> None:
    assert run(monkeypatch, *(["--port", "0"] if name != "--port" else []), name, value) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("roseinfer-serve: ")
    assert name.removesuffix("-requests") in line
    assert not started
