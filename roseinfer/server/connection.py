"""One HTTP connection: what is no request is answered in the shape of the API, and nobody sends for ever."""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from roseinfer.server.refusals import Refusal

HEAD_BYTES: Final = 64 * 1024
"""Of a request line with its headers; as many again of what is no content between and behind the chunks of a body."""

REQUEST_TIMEOUT_S: Final = 60.0
"""From the first byte of a request to its last."""

LINGER_S: Final = 2.0
"""What a client still sends after it was refused is read so long: else the kernel would drop the answer with it."""

MOST_QUEUED: Final = 8
"""Requests sent behind the one that is being answered, until no more are read."""

_NO_HTTP: Final = Refusal(400, "this is no valid HTTP request", "invalid_http")
_NO_HOST: Final = Refusal(400, "a request has one Host header", "invalid_http")
_LARGE_HEAD: Final = Refusal(431, f"the headers have over {HEAD_BYTES} bytes", "headers_too_large")
_TOO_SLOW: Final = Refusal(408, f"the request took over {REQUEST_TIMEOUT_S:g} s to come", "request_timeout")


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds, and with errors that have the shape of all others."""

    _answered: RequestResponseCycle | None = None
    _in_head = False
    _in_body = False
    _n_head_bytes = 0  # that came since the last piece of a body, or since the request began
    _data = b""  # what the parser is fed with
    _found: Refusal | None = None  # why a callback of the parser raised
    _refused = False  # nothing that comes is looked at any more
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Until its first byte it is as idle as one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(False)
        # uvicorn tells the newest request on the connection, which still waits if it was sent behind another.
        if self._answered is not None and self._is_answering:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        self._n_head_bytes += len(data)
        self._data = data
        super().data_received(data)
        if self._refused:
            return
        is_incomplete = self._in_head or self._in_body
        if is_incomplete and self._n_head_bytes > HEAD_BYTES:
            self._refuse(_LARGE_HEAD)
        else:  # empty lines before a request are no request, and no rest either
            self._set_deadline(is_incomplete or not self._is_answering)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._found or _NO_HTTP)

    # ---- what the parser calls ----

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            self._found = _NO_HTTP
        elif len(self.url) + sum(map(len, names)) + sum(len(value) for _, value in self.headers) > HEAD_BYTES:
            self._found = _LARGE_HEAD
        elif names.count(b"host") != 1 and version == "1.1":
            self._found = _NO_HOST
        if self._found is not None:
            raise ValueError(self._found.message)
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._n_head_bytes = 0
        # Else nobody would notice that a client leaves while it waits for the whole of an answer.
        if 0 < len(self.pipeline) <= MOST_QUEUED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._n_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._n_head_bytes = 0
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """The parser stops behind a head that asks for an upgrade. It begins again, at the same head without that."""
        error = sys.exception()
        method = self.parser.get_method()
        if method == b"CONNECT" or not isinstance(error, httptools.HttpParserUpgrade):
            self._refuse(_NO_HTTP)
            return
        rest = self._data[error.args[0] :]
        headers = [header for header in self.headers if header[0] not in (b"connection", b"upgrade")]
        head = b"%s %s HTTP/1.1\r\n" % (method, self.url) + _lines(headers) + b"\r\n"
        self.parser = httptools.HttpRequestParser(self)
        super().data_received(head + rest)

    # ---- ends ----

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    @property
    def _is_behind(self) -> bool:
        """What is being received comes behind a request that is being answered."""
        return self._is_answering and not (self._in_body and self.cycle is self._answered)

    def _set_deadline(self, is_set: bool) -> None:
        if not is_set and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif is_set and self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._is_behind:  # it is not read while the other is answered
            self._set_deadline(True)
        elif self._in_head or (self._in_body and not self.cycle.response_started):
            self._refuse(_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        self._refused = True
        self._set_deadline(False)
        if self._is_behind:
            # Those before it are answered, and then the connection is closed. One whose body broke would wait for it.
            if self._in_body and self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else self._answered
            assert last is not None
            last.keep_alive = False
            return
        if self._in_body:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        self.transport.write(self._bytes_of(refusal))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _bytes_of(self, refusal: Refusal) -> bytes:
        response = refusal.response({"connection": "close", "x-request-id": secrets.token_hex(12)})
        lines = _lines([*self.server_state.default_headers, *response.raw_headers])
        return STATUS_LINE[refusal.status] + lines + b"\r\n" + bytes(response.body)


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%s: %s\r\n" % header for header in headers)
