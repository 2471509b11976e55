"""HTTP/1.1 on the wire: requests out, answers in, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.bench.http.exchange import Endpoint
from roseinfer.bench.http.wire import MOST_HEAD_BYTES, AnswerParser, request_bytes, request_head
from roseinfer.errors import RunError

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world",
    "chunked": CHUNKED + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n",
    "chunk extensions": CHUNKED + b'5 ;a=b;c="d;e"\r\nhello\r\n06;x\r\n world\r\n000;last\r\n\r\n',
    "trailers": CHUNKED + b"B\r\nhello world\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n",
    "after interim answers": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ncontent-length:11\r\n\r\nhello world",
}


def read_whole(pieces: list[bytes]) -> tuple[AnswerParser, bytes]:
    parser = AnswerParser()
    return parser, b"".join([parser.feed(piece) for piece in pieces])


def head_of(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_reads_the_same_cut_anywhere(answer: bytes) -> None:  # case E10
    for cut in range(len(answer) + 1):
        parser, body = read_whole([answer[:cut], answer[cut:]])
        assert (parser.status_code, body, parser.is_complete) == (200, b"hello world", True)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_reads_the_same_byte_by_byte(answer: bytes) -> None:
    parser, body = read_whole([answer[i : i + 1] for i in range(len(answer))])
    assert (parser.status_code, body, parser.is_complete) == (200, b"hello world", True)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_not_complete_before_its_last_byte(answer: bytes) -> None:
    parser, _ = read_whole([answer[:-1]])
    assert not parser.is_complete
    assert not parser.end()


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_a_chunked_body_comes_out_whole(chunks: list[bytes], data: st.DataObject) -> None:
    answer = CHUNKED + b"".join(b"%X\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    parser, body = read_whole(pieces)
    assert body == b"".join(chunks)
    assert parser.is_reusable


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    parser, body = read_whole([head_of("HTTP/1.1 200 OK"), b"hello ", b"world"])
    assert body == b"hello world"
    assert not parser.is_complete
    assert parser.end()
    assert not parser.is_reusable


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_ends_with_its_head(status: int) -> None:
    parser, body = read_whole([head_of(f"HTTP/1.1 {status} x", "Content-Length: 5")])
    assert parser.is_complete
    assert body == b""


def test_a_body_of_no_bytes_ends_with_its_head() -> None:
    parser, _ = read_whole([head_of("HTTP/1.1 500 x", "Content-Length: 0")])
    assert parser.is_reusable


@pytest.mark.parametrize(
    ("version", "connection", "is_reusable"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "Upgrade, Close", False),
        ("1.0", None, False),
        ("1.0", "keep-alive", True),
    ],
)
def test_a_connection_is_reused_as_the_server_says(
    version: str, connection: str | None, is_reusable: bool
) -> None:
    more = [] if connection is None else [f"Connection: {connection}"]
    parser, _ = read_whole([head_of(f"HTTP/{version} 200 OK", "Content-Length: 0", *more)])
    assert parser.is_reusable == is_reusable


def test_a_connection_with_bytes_after_the_answer_is_not_reused() -> None:
    parser, body = read_whole([ANSWERS["length"] + b"x"])
    assert body == b"hello world"
    assert not parser.is_reusable


def test_headers_are_by_lower_case_name() -> None:
    parser, _ = read_whole(
        [head_of("HTTP/1.1 200", "Retry-After:  3 ", "X-A: 1", "x-a: 2", "Content-Length: 0")]
    )
    assert parser.headers == {"retry-after": "3", "x-a": "1, 2", "content-length": "0"}


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH",
        b"HTTP/2 200",
        b"<html>",
        head_of("HTTP/1.1 20 OK"),
        head_of("HTTP/1.1 099 x"),
        head_of("HTTP/1.1 200 OK", "no colon"),
        head_of("HTTP/1.1 200 OK", " folded: x"),
        head_of("HTTP/1.1 101 Switching Protocols"),
        head_of("HTTP/1.1 200 OK", "Content-Length: -1"),
        head_of("HTTP/1.1 200 OK", "Content-Length: 1_0"),
        head_of("HTTP/1.1 200 OK", "Content-Length: 1", "Content-Length: 2"),
        head_of("HTTP/1.1 200 OK", "Transfer-Encoding: gzip, chunked"),
        CHUNKED + b"x\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"0x5\r\n",
        CHUNKED + b"5\n",
        CHUNKED + b"5\r\nhelloX",
        CHUNKED + b"f" * 17,
    ],
)
def test_what_is_no_answer_is_refused_wherever_it_is_cut(answer: bytes) -> None:
    for cut in range(len(answer)):
        parser, _ = read_whole([answer[:cut], answer[cut:]])
        assert parser.error
        assert not parser.is_complete


@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\n",
        CHUNKED + b"5;",
        CHUNKED + b"0\r\nX-Trailer: ",
    ],
)
def test_what_does_not_end_is_given_up(begun: bytes) -> None:
    parser = AnswerParser()
    parser.feed(begun)
    for _ in range(MOST_HEAD_BYTES // 1024 + 2):
        if parser.error is None:
            parser.feed(b"x" * 1024)
    assert str(MOST_HEAD_BYTES) in str(parser.error)


def test_what_came_before_an_error_holds() -> None:
    answer = CHUNKED + b"5\r\nhello\r\n5\r\nworldX"
    for cut in range(len(answer) + 1):
        parser, body = read_whole([answer[:cut], answer[cut:]])
        assert (parser.status_code, body, bool(parser.error)) == (200, b"helloworld", True)


def test_a_request_holds_its_body_behind_its_headers() -> None:
    endpoint = Endpoint("http", "example.org", 8000, "/v1/completions", (("Authorization", "Bearer key"),))
    head, _, body = request_bytes(request_head(endpoint), b'{"a": 1}').partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    assert first == "POST /v1/completions HTTP/1.1"
    assert {"Host: example.org:8000", "Authorization: Bearer key", "Content-Length: 8"} <= set(headers)
    assert body == b'{"a": 1}'


@pytest.mark.parametrize(
    ("scheme", "host", "port", "expected"),
    [
        ("http", "a.b", 80, "a.b"),
        ("https", "a.b", 443, "a.b"),
        ("https", "a.b", 80, "a.b:80"),
        ("http", "::1", 8000, "[::1]:8000"),
    ],
)
def test_the_host_names_a_port_that_is_not_the_usual(
    scheme: str, host: str, port: int, expected: str
) -> None:
    assert f"Host: {expected}\r\n".encode() in request_head(Endpoint(scheme, host, port, "/"))


@pytest.mark.parametrize("key", ["secret\n", "secret\r\nX: y", "sécret"])
def test_a_header_that_cannot_be_sent_is_refused_without_its_value(key: str) -> None:
    with pytest.raises(RunError, match="Authorization") as raised:
        request_head(Endpoint("http", "a", 80, "/", (("Authorization", key),)))
    assert "cret" not in str(raised.value)
