"""Bytes that are no request, or never become one, on real sockets."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from roseinfer.server import connection as connection_module
from roseinfer.server.connection import HEAD_BYTES
from tests.scripted import ScriptedEngine
from tests.server.serving import PacedSteps, Served, read_until, request_bytes, served, until

ASKED = {"prompt": "x", "max_tokens": 4, "temperature": 0}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"


def whole(connection: socket.socket) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and JSON of the one answer on a connection that the server ends."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    assert int(headers["content-length"]) == len(body), data
    return int(first.split()[1]), headers, json.loads(body)["error"]


def refused(one: Served, sent: bytes) -> tuple[int, str]:
    """Status and code of the answer to what is no request; afterwards the server is as it was."""
    with one.connect() as connection:
        connection.sendall(sent)
        status, headers, error = whole(connection)
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert len(headers["x-request-id"]) == 24
    assert error["type"] == "invalid_request_error"
    assert {"message", "param"} <= error.keys()
    serves(one)
    return status, error["code"]


def serves(one: Served) -> None:
    until(lambda: one.manager.inflight == 0)
    with one.send(ASKED) as connection:
        assert b'"text": "abcd"' in read_until(connection, b"}}")


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS at a plain port
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: test\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: one\r\nHost: two\r\n\r\n",
        b"GET health HTTP/1.1\r\nHost: test\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: test\r\n\r\n",
        b"CONNECT test:443 HTTP/1.1\r\nHost: test\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: test\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: test\r\nb\x00d: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: test\r\nx: a\x00b\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 2x\r\n\r\n{}",
        POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: nonsense\r\n\r\n{}",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_400_of_the_same_shape(sent: bytes) -> None:
    with served(max_inflight_requests=1) as one:
        assert refused(one, sent) == (400, "invalid_http")


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /health HTTP/1.1\r\nHost: test\r\nx: %s",  # one header
        b"GET /%s",  # the path
        b"G%s",
    ],
)
def test_a_head_without_end_is_refused_before_it_is_kept(endless: bytes) -> None:
    with served() as one:
        status, _ = refused(one, endless % (b"A" * 4 * HEAD_BYTES))
        assert status == (400 if endless.startswith(b"G%") else 431)


def test_many_headers_are_refused() -> None:
    lines = b"".join(b"h%d: %s\r\n" % (i, b"v" * 100) for i in range(HEAD_BYTES // 100))
    with served() as one:
        for sent in (POST + lines, POST + lines + b"Content-Length: 2\r\n\r\n{}"):
            assert refused(one, sent) == (431, "headers_too_large")


def test_headers_up_to_the_bound_are_taken() -> None:
    value = b"v" * (HEAD_BYTES - 1000)
    with served() as one, one.connect() as connection:
        connection.sendall(request_bytes(ASKED).replace(b"Host: test", b"Host: test\r\nx: " + value))
        assert read_until(connection, b"}}").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("endless", [b"2;%s", b"2\r\n{}\r\n0\r\nx: %s"])
def test_what_is_no_content_of_a_body_in_chunks_has_the_same_bound(endless: bytes) -> None:
    sent = POST + b"Transfer-Encoding: chunked\r\n\r\n" + endless % (b"A" * 4 * HEAD_BYTES)
    with served() as one:
        assert refused(one, sent) == (431, "headers_too_large")


def test_a_body_in_many_small_chunks_is_taken() -> None:
    content = json.dumps({**ASKED, "prompt": "x" * 1000}).encode()
    chunks = b"".join(b"1;%s\r\n%c\r\n" % (b"e" * 100, byte) for byte in content)
    assert len(chunks) > HEAD_BYTES
    with served() as one, one.connect() as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert read_until(connection, b"}}").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"G",
        b"GET /health HTTP/1.1\r\nHost: test\r\nx: ",
        POST + b"Content-Length: 100\r\n\r\n",
        POST + b'Content-Length: 100\r\n\r\n{"prompt": ',
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
)
def test_a_request_that_does_not_end_is_a_408(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection_module, "REQUEST_TIMEOUT_S", 0.05)
    with served(max_inflight_requests=1) as one:
        assert refused(one, sent) == (408, "request_timeout")
        until(lambda: not one.server.server_state.tasks)


def test_a_request_that_trickles_has_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is in time, the whole is not."""
    monkeypatch.setattr(connection_module, "REQUEST_TIMEOUT_S", 0.2)
    with served() as one, one.connect() as connection:
        connection.setblocking(False)
        connection.send(POST)
        answer = b""

        def is_answered() -> bool:
            nonlocal answer
            try:
                connection.send(b"x")
                answer += connection.recv(1 << 16)
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                pass
            return b"request_timeout" in answer

        until(is_answered)


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"\r\n\r\n"])
def test_a_connection_on_which_nothing_is_asked_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection_module, "REQUEST_TIMEOUT_S", 0.05)
    monkeypatch.setattr("roseinfer.server.process.KEEP_ALIVE_S", 0.05)
    with served() as one, one.connect() as connection:
        connection.sendall(sent)
        assert connection.recv(1 << 16) == b""


def test_an_answer_that_takes_long_is_no_slow_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "REQUEST_TIMEOUT_S", 0.05)
    steps = PacedSteps()
    with served(ScriptedEngine(steps)) as one, steps, one.send(ASKED) as first, one.connect() as slow:
        slow.sendall(b"G")
        whole(slow)  # its time is over, and so is the first one's
        steps.run_free()
        assert b'"text": "abcd"' in read_until(first, b"}}")


def test_what_comes_behind_a_request_does_not_spoil_its_answer() -> None:
    steps = PacedSteps()
    with served(ScriptedEngine(steps)) as one, steps, one.send({**ASKED, "stream": True}) as connection:
        steps.permits.release()
        read_until(connection, b'"text": "a"')
        connection.sendall(b"nonsense\r\n\r\n")
        steps.run_free()
        rest = read_until(connection, b"0\r\n\r\n")
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert connection.recv(1) == b""


def test_a_body_that_breaks_behind_a_request_does_not_keep_the_connection() -> None:
    steps = PacedSteps()
    with served(ScriptedEngine(steps)) as one, steps, one.send({**ASKED, "stream": True}) as connection:
        steps.permits.release()
        read_until(connection, b'"text": "a"')
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n")
        steps.run_free()
        read_until(connection, b"0\r\n\r\n")
        assert connection.recv(1) == b""


def test_a_request_that_is_refused_unread_still_has_its_answer() -> None:
    """Nothing of its body had been read when the answer was written."""
    with served(api_key="secret") as one, one.connect() as connection:
        connection.sendall(POST + b"Content-Length: 10000000\r\n\r\n")
        head = read_until(connection, b"}}")
        connection.sendall(b"x" * 10_000_000)
        assert head.startswith(b"HTTP/1.1 401 ")
        connection.sendall(request_bytes(ASKED).replace(b"Host", b"Authorization: Bearer secret\r\nHost"))
        assert read_until(connection, b"}}").startswith(b"HTTP/1.1 200 ")


def test_an_upgrade_that_is_not_served_is_answered_as_what_it_is() -> None:
    """As curl --http2 and Java's client ask for."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nHost"
    with served() as one, one.connect() as connection:
        connection.sendall(request_bytes(ASKED).replace(b"Host", upgrade))
        assert b'"text": "abcd"' in read_until(connection, b"}}")
