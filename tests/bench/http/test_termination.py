"""A benchmark that is told to end, or is killed, and the server that it had started."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roseinfer.bench.store import RunFolder

SERVER = """
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
left = threading.Semaphore(3)
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def say(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.say(json.dumps({"data": [{"id": "mock"}]}).encode())
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if not left.acquire(blocking=False):
            own = f"hangs.{threading.get_ident()}"  # others write theirs meanwhile
            with open(own, "w") as file:
                file.write(str(os.getpid()))
            os.replace(own, "hangs")
            threading.Event().wait()
        self.say(b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}\\n\\ndata: [DONE]\\n\\n')
    def log_message(self, *_): pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""Answers three requests and then none; the file `hangs` then has its process id."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep of two cells of three requests each, in the second of which its server hangs."""
    (tmp_path / "server.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = f"{shlex.quote(sys.executable)} server.py {port}"
    words = "--prompt-len 4,5 --num-requests 3 --arrival burst --run-id r -o out --quiet --repeats 1".split()
    code = "from roseinfer.bench.cli import main; main()"
    target = ("--target", f"http://127.0.0.1:{port}/v1", "--target-cmd", command)
    with subprocess.Popen(
        [sys.executable, "-c", code, "sweep", *target, *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until((tmp_path / "hangs").exists)
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], bool]) -> None:
    """Processes of processes tell nobody what became of them."""
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s, "did not come about"
        time.sleep(0.01)


def server_is_gone(folder: Path) -> bool:
    """Or dead, and not yet fetched by whoever has it now."""
    try:
        return ") Z " in Path("/proc", (folder / "hangs").read_text(), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_sigterm_ends_as_an_interrupt_does(bench: subprocess.Popen[str], tmp_path: Path) -> None:
    assert not server_is_gone(tmp_path)
    bench.send_signal(signal.SIGTERM)
    out, err = bench.communicate(timeout=60)
    assert bench.returncode == 143
    assert "when 0 of 3 requests had ended" in out
    in_part = "and what there is of another, which is to be measured anew"
    assert err.startswith(f"roseinfer-bench: interrupted; 1 of 2 cells are on disk, {in_part}. To go on: ")
    assert server_is_gone(tmp_path)
    run = RunFolder.open(tmp_path / "out/sweep/r")
    assert len(run.finished_cells()) == 1
    assert sorted(run.read_requests()["outcome"]) == ["completed"] * 3 + ["incomplete"] * 3


def test_a_server_does_not_outlive_a_benchmark_that_is_killed(
    bench: subprocess.Popen[str], tmp_path: Path
) -> None:
    bench.kill()
    bench.wait()
    until(lambda: server_is_gone(tmp_path))
