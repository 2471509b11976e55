"""Servers that a run starts, waits for and stops."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from pathlib import Path

import pytest

from roseinfer.admission_spec import AdmissionSpec, parse_admission
from roseinfer.bench.http import server_process
from roseinfer.bench.http.address import Address
from roseinfer.bench.http.server_process import ServerProcess, check_command, check_place, command_for
from roseinfer.errors import InputError, RunError
from tests.bench.http.openai_server import OpenAiServer

SERVER = """
import json, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path == "/health" else 200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "mock"}]}')
    def log_message(self, *_): pass
print("it serves", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return Address("http", "127.0.0.1", probe.getsockname()[1], "/v1")


def python(code: str, *words: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, words)]


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (64, ("serve", "M", "--port", "8000", "--seqs", "64", "--json", '{"a": 1}')),
        (None, ("serve", "M", "--port", "8000", "--json", '{"a": 1}')),
    ],
)
def test_a_limit_is_set_or_left_out(limit: int | None, words: tuple[str, ...]) -> None:
    command = """serve M --port {port} [[--seqs {max_inflight}]] --json '{"a": 1}'"""
    assert command_for(command, AdmissionSpec(limit), 8000) == words


def test_a_limit_of_any_kind_is_set_in_full() -> None:
    command = "serve [[--admission {admission}]]"
    assert command_for(command, AdmissionSpec(4, 512), 1) == ("serve", "--admission", "inflight:4+tokens:512")
    assert command_for(command, AdmissionSpec(), 1) == ("serve",)
    check_command(command, (AdmissionSpec(), AdmissionSpec(4), AdmissionSpec(None, 512)))


@pytest.mark.parametrize(
    "command", ["serve", "serve --seqs {max_inflight}", "serve {admission} {max_inflight}"]
)
def test_a_command_that_cannot_set_a_budget_is_refused(command: str) -> None:
    with pytest.raises(InputError, match=r"--admission 'inflight:4,tokens:512'.*needs {admission}"):
        check_command(command, (AdmissionSpec(4), AdmissionSpec(None, 512)))


@pytest.mark.parametrize("admission", ["inflight:4+queue-timeout:2s", "codel", "slo:ttft=2s"])
def test_a_command_that_sets_part_of_a_policy_is_refused(admission: str) -> None:
    with pytest.raises(InputError, match=r"needs {admission}"):
        check_command("serve [[--limit {max_inflight}]]", (parse_admission(admission),))


@pytest.mark.parametrize(
    ("command", "limits", "name"),
    [
        ("serve 'M", (None,), "--target-cmd"),
        ("serve [['M {max_inflight}]]", (None,), "--target-cmd"),
        ("", (None,), "--target-cmd"),
        ("[[serve {max_inflight}]]", (None, 4), "--target-cmd"),
        ("serve --seqs {max_inflight}", (None, 4), "--target-cmd"),
        ("serve M", (4,), "--max-inflight"),
    ],
)
def test_a_command_that_cannot_set_the_limits_is_refused(
    command: str, limits: tuple[int | None, ...], name: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_command(command, [AdmissionSpec(limit) for limit in limits])
    assert caught.value.name == name


def test_a_command_without_a_limit_serves_a_run_without_one() -> None:
    check_command("serve M", (AdmissionSpec(),))
    check_command("serve --seqs {max_inflight}", (AdmissionSpec(4), AdmissionSpec(8)))


def test_it_is_ready_once_it_is_made_and_gone_once_it_is_stopped(address: Address) -> None:
    server = ServerProcess(python(SERVER, address.port), address)
    server.check_alive()
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port))


def test_one_that_ends_early_is_told_with_its_last_words(address: Address) -> None:
    code = "print('loading /home/alice/model\\n' * 30 + 'out of memory'); raise SystemExit(3)"
    with pytest.raises(RunError) as caught:
        ServerProcess(python(code), address)
    said = str(caught.value)
    assert "ended with exit code 3" in said
    assert said.endswith("loading model | out of memory")
    assert said.count("loading") == server_process.LAST_LINES - 1


def test_one_that_is_killed_is_told(address: Address) -> None:
    server = ServerProcess(python(SERVER, address.port), address)
    os.kill(server._process.pid, 9)
    server._process.wait()
    with pytest.raises(RunError, match=r"ended by signal 9; it said last: it serves"):
        server.check_alive()
    server.stop()


def test_one_that_is_never_ready_is_stopped(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "READY_S", 0.0)
    with pytest.raises(RunError, match="was not ready after 0 s; it said nothing"):
        ServerProcess(python("import signal; signal.pause()"), address)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("key", "told"), [(None, "add --api-key-env"), ("sk-1", "it is not the key of --api-key-env")]
)
def test_one_that_asks_for_a_key_is_not_waited_for(
    address: Address, status: int, key: str | None, told: str
) -> None:
    code = SERVER.replace("else 200", f"else {status}")
    with pytest.raises(RunError) as caught:
        ServerProcess(python(code, address.port), address, key)
    assert str(caught.value) == f"the server of --target-cmd asks for a key (status {status}): {told}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0"])
def test_a_command_serves_this_machine(host: str) -> None:
    check_place(Address("http", host, 8000, "/v1"))


@pytest.mark.parametrize("host", ["192.0.2.1", "gpu7.invalid"])
def test_a_command_for_another_machine_is_refused(host: str) -> None:
    with pytest.raises(InputError) as caught:
        check_place(Address("http", host, 8000, "/v1"))
    assert caught.value.name == "--target"
    assert host not in str(caught.value)


def test_what_it_started_is_stopped_too(address: Address, tmp_path: Path) -> None:
    """A worker that ignores SIGTERM does not outlive the group."""
    worker = "import os, signal; signal.signal(15, signal.SIG_IGN); os.write(1, b'!'); signal.pause()"
    code = (
        "import subprocess, sys\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}], stdout=subprocess.PIPE)\n"
        "worker.stdout.read(1)\n"
        "open(sys.argv[2], 'w').write(str(worker.pid))\n" + SERVER
    )
    pid_file = tmp_path / "pid"
    server = ServerProcess(python(code, address.port, pid_file), address)
    server.stop()
    state, until_s = Path(f"/proc/{pid_file.read_text()}/stat"), time.monotonic() + 10
    while is_alive(state):
        assert time.monotonic() < until_s


def is_alive(state: Path) -> bool:
    """Neither gone, nor dead and not fetched by its parent."""
    try:
        return ") Z " not in state.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_address_that_is_taken_is_refused() -> None:
    """Else the server that is there already would be measured."""
    with OpenAiServer() as there, pytest.raises(RunError, match="something listens"):
        ServerProcess(python("raise SystemExit"), Address.parse(there.url))


def test_a_program_that_is_not_there_is_told(address: Address) -> None:
    with pytest.raises(RunError, match=r"could not be started: nowhere: No such file"):
        ServerProcess(shlex.split("/home/alice/nowhere --port 1"), address)
