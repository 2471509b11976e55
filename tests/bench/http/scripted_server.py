"""A server on 127.0.0.1 that answers as a test's script says, one thread a connection."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from roseinfer.bench.http.exchange import Endpoint

PATIENCE_S = 20.0
"""After this long a test that hangs fails instead."""


class Peer:
    """The server's end of one connection. `number` counts connections from 0 in the order of acceptance."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.number = number
        self.head = ""  # of the last request
        self._socket = sock
        self._got = bytearray()

    def request(self) -> Any:
        """The JSON body of the next request; ends the script where the client has closed."""
        while (end := self._got.find(b"\r\n\r\n")) < 0:
            self._receive()
        self.head = self._got[:end].decode()
        fields = dict(line.split(": ", 1) for line in self.head.split("\r\n")[1:])
        begin = end + 4
        end = begin + int(fields["Content-Length"])
        while len(self._got) < end:
            self._receive()
        body = bytes(self._got[begin:end])
        del self._got[:end]
        return json.loads(body)

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._socket.sendall(piece)

    def reset(self) -> None:
        """Closes in a way that the client gets as a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        """In order."""
        self._socket.close()

    def wait_for_close(self) -> None:
        """Until the client has closed."""
        while True:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        self._got += data


Script = Callable[[Peer], None]


class ScriptedServer:
    """Runs `script` for every connection, which it closes after it. In a `with`, whose end no thread outlives.

    A failure of a script is raised there.
    """

    def __init__(self, script: Script, *, tls: ssl.SSLContext | None = None) -> None:
        self._script = script
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._peers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self._lock = threading.Lock()
        self._acceptor = threading.Thread(target=self._accept)
        self.accepted = 0

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def endpoint(self, *headers: tuple[str, str], host: str = "127.0.0.1") -> Endpoint:
        scheme = "http" if self._tls is None else "https"
        return Endpoint(scheme, host, self.port, "/v1/completions", headers)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._acceptor.join(PATIENCE_S)
        self._listener.close()
        with self._lock:
            for sock in self._peers:
                try:
                    sock.shutdown(socket.SHUT_RDWR)  # wakes a script that waits
                except OSError:
                    pass
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in (self._acceptor, *self._threads))
        if self._failures and error is None:
            raise self._failures[0]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(PATIENCE_S)
            with self._lock:
                self._peers.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock, self.accepted))
            self.accepted += 1
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        try:
            if self._tls is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._tls.wrap_socket(sock, server_side=True) as wrapped:
                    self._script(Peer(wrapped, number))
            else:
                self._script(Peer(sock, number))
        except (EOFError, BrokenPipeError, ConnectionResetError, ssl.SSLError):
            pass  # the client has closed
        except BaseException as failure:
            self._failures.append(failure)
        finally:
            with self._lock:
                if sock in self._peers:
                    self._peers.remove(sock)
                sock.close()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(words: str, finish_reason: str | None = None) -> bytes:
    """A chunk of completions."""
    return event(choices=[{"index": 0, "text": words, "finish_reason": finish_reason}])


def usage(completion_tokens: int, prompt_tokens: int = 8, **more: Any) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event(choices=[], usage=counts, **more)


DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def stream(*events: bytes) -> bytes:
    """A whole streamed answer, an event a chunk."""
    return STREAM_HEAD + b"".join(chunk(piece) for piece in events) + LAST_CHUNK


def whole(status: str, body: bytes | dict[str, Any], headers: Iterable[str] = ()) -> bytes:
    """An answer of a known length."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {status}",
        "Content-Type: application/json",
        *headers,
        f"Content-Length: {len(content)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


TWO_TOKENS = stream(text("one"), text(" two", "length"), usage(2), DONE)

FULL = whole(
    "429 Too Many Requests", {"error": {"message": "full", "code": "max_inflight"}}, ["Retry-After: 2"]
)


def answering(answer: bytes) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        while True:
            peer.request()
            peer.send(answer)

    return script
