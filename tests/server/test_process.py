"""How a server ends, and what it says of itself before."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import httpx
import pytest

from roseinfer.errors import InputError
from roseinfer.executor import StepPlan
from roseinfer.server import service as service_module
from roseinfer.server.process import listen
from tests.scripted import ScriptedEngine, StepGate
from tests.server.serving import an_app, ask, complete, error_of, manager_of, request_bytes, served, until

SERVER = """
import sys
from roseinfer.server.app import create_app
from roseinfer.server.process import listen, serve
from tests.scripted import ScriptedEngine

sock = listen("127.0.0.1", 0, 30.0)
app = create_app(ScriptedEngine(lambda plan: sys.stdin.readline()), max_inflight_requests=4)
print(sock.getsockname()[1], flush=True)
serve(app, sock, drain_timeout_s=60.0)
"""
"""A step for each line of its input."""


def test_sigterm_lets_accepted_requests_finish_and_refuses_others() -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with (
        process,
        httpx.Client(base_url=f"http://127.0.0.1:{int(process.stdout.readline())}", timeout=60) as client,
    ):
        until_it_listens(client)
        assert client.get("/ready").status_code == 200
        body = {"prompt": "x", "max_new_tokens": 5, "stream": True}
        process.stdin.write("\n")
        process.stdin.flush()
        with client.stream("POST", "/generate", json=body) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            process.send_signal(signal.SIGTERM)
            while (ready := client.get("/ready")).status_code == 200:
                pass
            late = client.post("/v1/completions", json={"prompt": "x"})
            assert client.get("/health").status_code == 200
            process.stdin.write("\n" * 10)
            process.stdin.flush()
            text += "".join(pieces)
        assert process.wait(60) == 0
    assert text == "abcde"
    assert ready.status_code == late.status_code == 503
    assert error_of(late)["reason"] == late.headers["x-roseinfer-reason"] == "draining"
    assert int(late.headers["retry-after"]) >= 1


def until_it_listens(client: httpx.Client) -> None:
    """Its port is known before it answers."""
    while True:
        try:
            client.get("/health")
        except httpx.ConnectError:
            continue
        return


def test_what_a_drain_leaves_unfinished_is_ended_with_an_error() -> None:
    gate = StepGate()
    with served(ScriptedEngine(gate), drain_timeout_s=0.01) as one:
        connection = one.send({"prompt": "x", "max_tokens": 4000})
        gate.entered.wait()
        one.end()
        try:
            until(lambda: one.manager._inbox.qsize() == 2)  # to drain, and then to abort
        finally:
            gate.opened.set()
        received = connection.makefile("rb").read()
        connection.close()
        one.thread.join()
    assert received.startswith(b"HTTP/1.1 503")
    assert b"x-roseinfer-reason: draining" in received


def test_what_is_computed_may_be_read_for_the_rest_of_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.server.process.LAST_WRITES_S", 1)
    engine = ScriptedEngine(script="\U0001f600")  # in few events or many: more bytes than the sockets hold
    with served(engine, send_buffer=4096) as one, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(one.address)
        reader.sendall(request_bytes({"prompt": "x", "max_tokens": 3000, "stream": True}))
        until(lambda: one.manager.inflight == 1 and len(engine.plans) == 3000)
        one.end()
        until(lambda: (one.server.config.timeout_graceful_shutdown or 0) > 1)
        data = reader.makefile("rb").read()
        one.thread.join()
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert data.count("\U0001f600".encode()) + data.count(b"\\ud83d\\ude00") == 3000


def test_an_engine_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LONGEST_STEP_S", 0.01)
    monkeypatch.setattr("roseinfer.server.process.LAST_WRITES_S", 1)
    gate = StepGate()
    with served(ScriptedEngine(gate), drain_timeout_s=0.01) as one:
        connection = one.send({"prompt": "x", "stream": True})
        gate.entered.wait()
        one.end()
        one.thread.join(60)
        assert not one.thread.is_alive()
        connection.close()
        gate.opened.set()


def test_a_dead_engine_is_unhealthy_and_refuses() -> None:  # case A16
    def compute(plan: StepPlan) -> None:
        raise SystemExit

    with an_app(ScriptedEngine(compute), max_inflight_requests=4) as app:
        assert complete(app).status_code == 500
        for path in ("/health", "/ready"):
            response = ask(app, "GET", path)
            assert response.status_code == 503
            assert error_of(response)["reason"] == "engine_dead"
        late = complete(app, stream=True)
        assert late.status_code == 503
        assert error_of(late)["code"] == "engine_dead"
        assert manager_of(app).inflight == 0


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0, 1.0) as taken:
        taken.listen()
        with pytest.raises(InputError) as caught:
            listen("127.0.0.1", taken.getsockname()[1], 1.0)
    assert caught.value.name == "--port"


def test_an_address_of_nobody_here_is_named() -> None:
    with pytest.raises(InputError) as caught:
        listen("no such host", 0, 1.0)
    assert (caught.value.name, caught.value.value) == ("--host", "no such host")


def test_a_stalled_peer_is_the_kernels_matter_too() -> None:
    with listen("127.0.0.1", 0, 3.0) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000
