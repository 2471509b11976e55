"""Connections: through TLS, to hosts with several addresses, and what the system says when there are none."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.http.connection import Connection, breakage_of
from roseinfer.bench.http.exchange import Failure
from tests.bench.http.playing import bodies, last_tries, looped, played
from tests.bench.http.scripted_server import (
    DONE,
    STREAM_HEAD,
    TWO_TOKENS,
    Peer,
    ScriptedServer,
    chunk,
    text,
    usage,
)

CERTIFICATE = Path(__file__).with_name("certificate.pem")


def answer_all(peer: Peer) -> None:
    while True:
        peer.request()
        peer.send(TWO_TOKENS)


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts the client has its environment name the authority of a server of their own."""
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))


@pytest.fixture
def tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


# --- TLS


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_tls_carries_requests_and_reuses_connections(tls: ssl.SSLContext, host: str) -> None:
    with ScriptedServer(answer_all, tls=tls) as server:
        result = looped(server.endpoint(host=host), 2, bodies(6))
        assert result.connections == 2
    assert [attempt.failure for attempt in last_tries(result)] == [None] * 6
    assert {attempt.output_tokens for attempt in last_tries(result)} == {2}


@pytest.mark.usefixtures("trusted")
def test_tls_brings_all_of_a_long_answer(tls: ssl.SSLContext) -> None:
    n = 3000  # several records in a read, several reads

    def script(peer: Peer) -> None:
        peer.request()
        words = b"".join(chunk(text("word " * 10)) for _ in range(n))
        peer.send(STREAM_HEAD, words, chunk(usage(n)), chunk(DONE), b"0\r\n\r\n")

    with ScriptedServer(script, tls=tls) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    assert attempt.failure is None
    assert len(attempt.deliveries) == n


@pytest.mark.usefixtures("trusted")
def test_tls_sends_all_of_a_long_request(tls: ssl.SSLContext) -> None:
    seen: list[int] = []

    def script(peer: Peer) -> None:
        seen.append(len(peer.request()["prompt"]))
        peer.send(TWO_TOKENS)

    with ScriptedServer(script, tls=tls) as server:
        (attempt,) = last_tries(looped(server.endpoint(), 1, [b'{"prompt": "%b"}' % (b"x" * 8_000_000)]))
    assert attempt.failure is None
    assert seen == [8_000_000]


def test_a_certificate_that_nobody_trusts_is_refused(tls: ssl.SSLContext) -> None:
    with ScriptedServer(answer_all, tls=tls) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    assert attempt.failure is Failure.TLS
    assert "certificate" in str(attempt.error)


@pytest.mark.usefixtures("trusted")
def test_a_certificate_of_another_host_is_refused(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **kind: resolve("127.0.0.1", port, **kind))
    with ScriptedServer(answer_all, tls=tls) as server:
        (attempt,) = last_tries(played(server.endpoint(host="example.org"), [0.0]))
    assert attempt.failure is Failure.TLS


def test_a_server_without_tls_is_no_https_server() -> None:
    def script(peer: Peer) -> None:
        peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        (attempt,) = last_tries(played(server.endpoint()._replace(scheme="https"), [0.0]))
    assert attempt.failure is Failure.TLS


# --- addresses


def test_of_several_addresses_the_one_that_listens_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(answer_all) as server:
        port = server.port
        two = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: two)
        (attempt,) = last_tries(played(server.endpoint(host="two.example"), [0.0]))
    assert attempt.failure is None


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_a_name_that_cannot_be_one_is_not_found(host: str) -> None:
    with ScriptedServer(answer_all) as server:
        (attempt,) = last_tries(played(server.endpoint(host=host), [0.0]))
    assert attempt.failure is Failure.RESOLVE


# --- what the system says


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
def test_what_this_machine_lacks_is_not_the_servers_doing(  # cases K3, K7
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(self: Connection, route: Any) -> None:
        raise OSError(code, os.strerror(code))

    with ScriptedServer(answer_all) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "__init__", lacking)
        attempts = last_tries(played(server.endpoint(), [0.0, 0.0]))
    assert [attempt.failure for attempt in attempts] == [Failure.CLIENT_LIMIT] * 2
    assert attempts[0].error == os.strerror(code)


def test_connections_that_the_limit_allows_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, made = Connection.__init__, 0

    def two(self: Connection, route: Any) -> None:
        nonlocal made
        made += 1
        if made > 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        begin(self, route)

    monkeypatch.setattr(Connection, "__init__", two)
    with ScriptedServer(answer_all) as server:
        attempts = last_tries(played(server.endpoint(), [0.0] * 4))
    assert sorted(str(attempt.failure) for attempt in attempts) == ["None"] * 2 + ["client limit"] * 2


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), Failure.REFUSED),
        (ConnectionResetError(errno.ECONNRESET, "x"), Failure.RESET),
        (BrokenPipeError(errno.EPIPE, "x"), Failure.RESET),
        (OSError(errno.EMFILE, "x"), Failure.CLIENT_LIMIT),
        (OSError(errno.EHOSTUNREACH, "x"), Failure.OTHER),
        (OSError("x"), Failure.OTHER),
        (socket.gaierror(socket.EAI_NONAME, "x"), Failure.RESOLVE),
        (ssl.SSLCertVerificationError("x"), Failure.TLS),
        (ssl.SSLEOFError("x"), Failure.CLOSED),
    ],
)
def test_every_error_has_its_name_and_an_unknown_one_is_kept(  # case D12
    error: OSError, failure: Failure
) -> None:
    found = breakage_of(error)
    assert found.failure is failure
    assert "x" in found.error
