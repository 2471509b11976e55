"""HTTP/1.1 on the wire: the bytes of a request, and a parser of an answer that takes what the network gives.

However the bytes of an answer are cut, the parser finds the same in them.
"""

from __future__ import annotations

import re
from typing import Final

from roseinfer.bench.http.exchange import Endpoint
from roseinfer.errors import RunError

MOST_HEAD_BYTES: Final = 64 * 1024
"""Of a status line with its headers; also of the trailers after a chunked body, and of one chunk's size line."""

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?\Z")
_HEADER: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\0]*?)[ \t]*\Z")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_PART_OF_CHUNK: Final = re.compile(rb"(?:[0-9A-Fa-f]{1,15}[ \t]*(?:;[^\r\n]*)?\r?)?\Z")
_LENGTH_VALUE: Final = re.compile(r"[0-9]{1,18}[ \t]*(?:,[ \t]*[0-9]{1,18}[ \t]*)*\Z")
_SENDABLE: Final = re.compile(r"[^\r\n\0]*\Z")
_NO_BODY: Final = (204, 304)


class _WireError(ValueError):
    """A head that is none of an HTTP/1.1 answer."""


def request_head(endpoint: Endpoint) -> bytes:
    """All of a POST of JSON up to the value of Content-Length, the last header.

    Raises RunError where a header cannot be sent. It does not quote its value, which may be a key.
    """
    headers = {
        "Host": _host(endpoint),
        "User-Agent": "roseinfer-bench",
        "Accept": "text/event-stream, application/json",
        "Accept-Encoding": "identity",  # a compressor would hold tokens back
        "Content-Type": "application/json",
        **dict(endpoint.headers),
    }
    lines = [f"POST {endpoint.path} HTTP/1.1"]
    for name, value in headers.items():
        line = f"{name}: {value}"
        if not _SENDABLE.match(line) or not line.isascii():
            raise RunError(f"the header {name!r} holds a line end or a character that is not ASCII")
        lines.append(line)
    return "\r\n".join([*lines, "Content-Length: "]).encode("ascii")


def request_bytes(head: bytes, body: bytes) -> bytes:
    """A whole request; `head` is of `request_head`."""
    return b"%b%d\r\n\r\n%b" % (head, len(body), body)


def _host(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    usual = {"http": 80, "https": 443}[endpoint.scheme]
    return host if endpoint.port == usual else f"{host}:{endpoint.port}"


# What the parser is in, or before. Plain numbers: it looks at them for every read of every stream.
_HEAD: Final = 0
_CHUNK_SIZE: Final = 1
_CHUNK_DATA: Final = 2
_CHUNK_END: Final = 3
_TRAILERS: Final = 4
_LENGTH: Final = 5
_UNTIL_CLOSE: Final = 6
_DONE: Final = 7


class AnswerParser:
    """Takes one answer from the bytes of a connection; interim answers (1xx) before it are passed over.

    `status_code` is None until its head was there; `headers` are by lower-case name, those that repeat joined
    with commas. `is_reusable` is known once it `is_complete`: the connection may carry another exchange. `error` says
    what is no HTTP/1.1 in what came; nothing after it can be trusted, what came before it holds.
    """

    def __init__(self) -> None:
        self.status_code: int | None = None
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.error: str | None = None
        self._keeps_alive = False
        self._state = _HEAD
        self._rest = b""  # not understood yet: part of a line or of a head, or what follows the answer
        self._left = 0  # bytes missing of a chunk, or of a body of known length

    @property
    def is_reusable(self) -> bool:
        return self.is_complete and self._keeps_alive and not self._rest

    def feed(self, data: bytes) -> bytes:
        """Returns what of the body is in `data`."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        if self._state == _HEAD:
            try:
                at = self._head(data)
            except _WireError as error:
                self.error = str(error)
                return b""
            if at < 0:
                return b""
        if (
            self._state == _CHUNK_SIZE
        ):  # first, as nearly every server writes nearly every read: one whole chunk
            line = _CHUNK.match(data, at)
            if line is not None:
                begin, end = line.end(), len(data) - 2
                if 0 < int(line[1], 16) == end - begin and data[end:] == b"\r\n":
                    return data[begin:end]
            return self._chunks(data, at)
        if self._state == _LENGTH:
            return self._of_length(data, at)
        if self._state == _UNTIL_CLOSE:
            return data[at:]
        if self._state == _DONE:
            self._rest = data[at:]
            return b""
        return self._chunks(data, at)

    def end(self) -> bool:
        """The server has closed the connection: whether its answer was whole."""
        if self._state == _UNTIL_CLOSE:
            self._done()
        return self.is_complete

    def _done(self) -> None:
        self._state = _DONE
        self.is_complete = True

    def _head(self, data: bytes) -> int:
        """Returns where the body begins, -1 while the head is not there."""
        at = 0
        while True:
            end = data.find(b"\r\n\r\n", at)
            if (len(data) if end < 0 else end) - at > MOST_HEAD_BYTES:
                raise _WireError(f"a head of more than {MOST_HEAD_BYTES} bytes")
            if end < 0:
                if not b"HTTP/1."[: len(data) - at] == data[at : at + 7]:
                    raise _WireError(f"not an HTTP/1.1 answer: it begins with {data[at : at + 20]!r}")
                self._rest = data[at:]
                return -1
            status_code, version, headers = _parse_head(data[at:end])
            at = end + 4
            if status_code == 101:
                raise _WireError("the server switches to another protocol")
            if status_code >= 200:
                break
        self.status_code, self.headers = status_code, headers
        tokens = [token.strip() for token in headers.get("connection", "").lower().split(",")]
        self._keeps_alive = "close" not in tokens if version else "keep-alive" in tokens
        self._frame()
        return at

    def _frame(self) -> None:
        """How the end of the body is known."""
        encoding, length = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        if self.status_code in _NO_BODY:
            self._done()
        elif encoding is not None:
            if encoding.lower() != "chunked":
                raise _WireError(f"Transfer-Encoding {encoding[:40]!r} was not asked for")
            self._state = _CHUNK_SIZE
        elif length is not None:
            lengths = {part.strip() for part in length.split(",")}
            if len(lengths) > 1 or not _LENGTH_VALUE.match(length):
                raise _WireError(f"Content-Length {length[:40]!r}")
            self._left = int(lengths.pop())
            self._state = _LENGTH
            if not self._left:
                self._done()
        else:
            self._keeps_alive = False
            self._state = _UNTIL_CLOSE

    def _of_length(self, data: bytes, at: int) -> bytes:
        body = data[at : at + self._left]
        self._left -= len(body)
        if not self._left:
            self._rest = data[at + len(body) :]
            self._done()
        return body

    def _chunks(self, data: bytes, at: int) -> bytes:
        body: list[bytes] = []
        while True:
            if self._state == _CHUNK_SIZE:
                line = _CHUNK.match(data, at)
                if line is None:
                    self._keep(
                        data, at, "size of a chunk", is_possible=_PART_OF_CHUNK.match(data, at) is not None
                    )
                    break
                at = line.end()
                self._left = int(line[1], 16)
                self._state = _CHUNK_DATA if self._left else _TRAILERS
            elif self._state == _CHUNK_DATA:
                piece = data[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._state = _CHUNK_END
            elif self._state == _CHUNK_END:
                if len(data) - at < 2:
                    self._keep(data, at, "end of a chunk", is_possible=b"\r\n".startswith(data[at:]))
                    break
                if data[at : at + 2] != b"\r\n":
                    self.error = f"a chunk goes on after its end with {data[at : at + 20]!r}"
                    break
                at += 2
                self._state = _CHUNK_SIZE
            elif self._state == _TRAILERS:
                end = data.find(b"\r\n", at)
                if end < 0:
                    self._keep(data, at, "trailer", is_possible=True)
                    break
                if end == at:
                    self._rest = data[end + 2 :]
                    self._done()
                    break
                at = end + 2
            else:
                raise AssertionError(self._state)
        return body[0] if len(body) == 1 else b"".join(body)

    def _keep(self, data: bytes, at: int, what: str, *, is_possible: bool) -> None:
        """What begins at `at` goes on in the next bytes, if it can be what it has to be."""
        if not is_possible:
            self.error = f"no {what}: {data[at : at + 20]!r}"
        elif len(data) - at > MOST_HEAD_BYTES:
            self.error = f"a {what} of more than {MOST_HEAD_BYTES} bytes"
        else:
            self._rest = data[at:]


def _parse_head(head: bytes) -> tuple[int, int, dict[str, str]]:
    """Status code, whether it is HTTP/1.1 (else 1.0), headers."""
    first, *lines = head.split(b"\r\n")
    status = _STATUS_LINE.match(first)
    if status is None:
        raise _WireError(f"not an HTTP/1.1 answer: it begins with {first[:20]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.match(line)
        if header is None:
            raise _WireError(f"not a header: {line[:40]!r}")
        name, value = header[1].decode("ascii").lower(), header[2].decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return int(status[2]), int(status[1]), headers
