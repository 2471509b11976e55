"""Servers that answer as none should: what becomes of the request, and that the next one is none the worse for it."""

from __future__ import annotations

import gzip
import json
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.bench.http.exchange import HttpAttempt, HttpRequest
from roseinfer.bench.http.incoming import Incoming
from roseinfer.bench.http.rows import attempt_rows, request_row
from roseinfer.bench.http.wire import AnswerParser
from roseinfer.bench.records import ATTEMPT_SCHEMA, REQUEST_SCHEMA, Outcome
from tests.bench.http.playing import last_tries, looped, played
from tests.bench.http.scripted_server import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    TWO_TOKENS,
    Peer,
    ScriptedServer,
    answering,
    chunk,
    event,
    stream,
    text,
    usage,
    whole,
)

HTML = b"<html><head><title>429 Too Many Requests</title></head><body>slow down</body></html>"
HTML_429 = b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%b"
CLOSED = "connection closed: the server closed the connection in the middle of its answer"
EVENT_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ONE = text("one", "stop")


def zipped(status: str) -> bytes:
    return whole(status, gzip.compress(b'{"error": {"message": "full"}}'), ["Content-Encoding: gzip"])


ODD: dict[str, tuple[bytes, Outcome, int | None, str | None]] = {
    # What came, and the outcome, status and error that it makes.
    "nothing": (b"", Outcome.ERROR, None, "connection closed: the server closed the connection before"),
    "garbage": (b"\x00\xff\x17garbage", Outcome.ERROR, None, "bad answer: not an HTTP/1.1 answer"),
    "TLS alert": (b"\x15\x03\x01\x00\x02\x02\x46", Outcome.ERROR, None, "bad answer: not an HTTP/1.1"),
    "HTTP/2": (b"HTTP/2 200 OK\r\n\r\n", Outcome.ERROR, None, "bad answer: not an HTTP/1.1 answer"),
    "half a status line": (b"HTTP/1.1 2", Outcome.ERROR, None, CLOSED),
    "bare line feeds": (b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}", Outcome.ERROR, None, CLOSED),
    "only an interim answer": (b"HTTP/1.1 100 Continue\r\n\r\n", Outcome.ERROR, None, CLOSED),
    "interim answers before": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + TWO_TOKENS,
        Outcome.COMPLETED,
        200,
        None,
    ),
    "another protocol": (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        Outcome.ERROR,
        None,
        "bad answer: the server switches to another protocol",
    ),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", Outcome.ERROR, 204, "bad answer: no event in an answer"),
    "redirect": (
        whole("307 Temporary Redirect", HTML, ["Location: /v2/completions?a=1"]),
        Outcome.ERROR,
        307,
        "status 307: Location: ",
    ),
    "429 in HTML": (HTML_429 % (len(HTML), HTML), Outcome.REJECTED, 429, "status 429: <html>"),
    "429 without a body": (
        b"HTTP/1.1 429 x\r\nContent-Length: 0\r\n\r\n",
        Outcome.REJECTED,
        429,
        "status 429",
    ),
    "429 that breaks off": (HTML_429 % (999, HTML), Outcome.REJECTED, 429, "status 429: <html>"),
    "503 in plain words": (
        whole("503 Service Unavailable", b"upstream connect error"),
        Outcome.REJECTED,
        503,
        "status 503: upstream connect error",
    ),
    "500": (whole("500 x", {"detail": "boom"}), Outcome.ERROR, 500, "status 500: boom"),
    "unknown status": (whole("799 x", b"?"), Outcome.ERROR, 799, "status 799: ?"),
    "200 zipped": (zipped("200 OK"), Outcome.ERROR, 200, "bad answer: Content-Encoding 'gzip' was not asked"),
    "429 zipped": (zipped("429 x"), Outcome.REJECTED, 429, "status 429"),
    "head and no more, of a length": (EVENT_HEAD + b"Content-Length: 99\r\n\r\n", Outcome.ERROR, 200, CLOSED),
    "head and no more, in chunks": (STREAM_HEAD, Outcome.ERROR, 200, CLOSED),
    "head and no more": (EVENT_HEAD + b"\r\n", Outcome.ERROR, 200, "bad answer: no event in an answer"),
    "shorter than said": (
        EVENT_HEAD + b"Content-Length: 999\r\n\r\n" + ONE,
        Outcome.ERROR,
        200,
        CLOSED,
    ),
    "shorter than said, but done": (
        EVENT_HEAD + b"Content-Length: 999\r\n\r\n" + ONE + DONE,
        Outcome.COMPLETED,
        200,
        None,
    ),
    "longer than said": (
        EVENT_HEAD + b"Content-Length: %d\r\n\r\n" % len(ONE) + ONE + b"and more",
        Outcome.COMPLETED,
        200,
        None,
    ),
    "a length of many digits": (
        EVENT_HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        Outcome.ERROR,
        200,
        "bad answer: Content-Length",
    ),
    "two lengths": (
        EVENT_HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        Outcome.ERROR,
        200,
        "bad answer: Content-Length",
    ),
    "a chunk of no size": (STREAM_HEAD + b"zz\r\n", Outcome.ERROR, 200, "bad answer: no size of a chunk"),
    "a chunk longer than said": (
        STREAM_HEAD + b"3\r\n" + ONE + b"\r\n",
        Outcome.ERROR,
        200,
        "bad answer: a chunk goes on after its end",
    ),
    "no last chunk": (STREAM_HEAD + chunk(ONE), Outcome.ERROR, 200, CLOSED),
    "no end of the stream": (
        STREAM_HEAD + chunk(text("one")) + LAST_CHUNK,
        Outcome.ERROR,
        200,
        "connection closed: the stream ended without a finish_reason or [DONE]",
    ),
    "a page of HTML": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%b" % (len(HTML), HTML),
        Outcome.ERROR,
        200,
        "bad answer: no event in an answer of Content-Type text/html",
    ),
    "an error with a 200": (
        whole("200 OK", {"error": {"message": "no", "code": 500}}),
        Outcome.ERROR,
        200,
        "stream error 500: no",
    ),
    "503 before the first text": (
        stream(event(choices=[{"delta": {"role": "assistant"}}]), event(error={"message": "x", "code": 503})),
        Outcome.REJECTED,
        200,
        "stream error 503: x",
    ),
    "503 after the first text": (
        stream(text("one"), event(error={"message": "x", "code": 503}), DONE),
        Outcome.ERROR,
        200,
        "stream error 503: x",
    ),
}


@pytest.mark.parametrize(("answer", "outcome", "status", "error"), ODD.values(), ids=ODD)
def test_an_odd_answer_has_the_outcome_that_it_says(
    answer: bytes, outcome: Outcome, status: int | None, error: str | None
) -> None:  # cases D7, D12
    parser = AnswerParser()
    parser.feed(answer)

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(answer if peer.number == 0 else TWO_TOKENS)
        if parser.is_reusable:
            peer.request()
            peer.send(TWO_TOKENS)

    with ScriptedServer(script) as server:
        result = looped(server.endpoint(), 1, [b"{}"] * 2, timeout_s=20.0)
    row, after = (request_row(request, result.t0) for request in result.requests)
    assert (row["outcome"], row["status_code"]) == (outcome, status)
    assert str(row["error"]).startswith(str(error))
    assert row["ended_s"] >= row["sent_s"]
    assert after["outcome"] is Outcome.COMPLETED
    if row["outcome"] is Outcome.REJECTED:
        assert row["rejected_s"] is not None


def test_what_was_read_before_an_error_stays_apart() -> None:  # case D7
    events = (text("one"), text(" two"), event(error={"message": "x", "code": 503}))
    with ScriptedServer(answering(stream(*events))) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    assert len(attempt.deliveries) == 2
    row = request_row(HttpRequest(0.0, tries=[attempt]), 0.0)
    assert row["received_first_s"] is not None
    assert row["rejected_s"] is None


@pytest.mark.parametrize("error", [event(error={"message": "x", "code": 429}), b"event: error\ndata: x\n\n"])
def test_after_an_error_event_nobody_waits_for_the_end(error: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(STREAM_HEAD + chunk(error))
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0], timeout_s=20.0))
    assert attempt.failure == "stream error"


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_stream_that_is_done_is_whole_though_its_message_does_not_end(n_before: int) -> None:
    def script(peer: Peer) -> None:
        for _ in range(n_before):
            peer.request()
            peer.send(TWO_TOKENS)
        peer.request()
        peer.send(STREAM_HEAD + chunk(ONE) + chunk(usage(1)) + chunk(DONE))
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        result = looped(server.endpoint(), 1, [b"{}"] * (n_before + 1), timeout_s=0.2)
    attempt = last_tries(result)[-1]
    assert (attempt.failure, attempt.output_tokens) == (None, 1)


# --- whatever it says


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, 10**400, -1, 2**63, "\ud800", "x" * 500, "429", "503", 503])
    | st.floats()
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["message", "code", "type", "function",
        "content", "cached_tokens", "queue_s", "index"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "text": ANYTHING,
        "finish_reason": ANYTHING,
        "message": ANYTHING,
        "delta": ANYTHING
        | st.fixed_dictionaries(
            {}, optional={"content": ANYTHING, "tool_calls": ANYTHING, "function_call": ANYTHING}
        ),
    },
)
CHUNK = ANYTHING | st.fixed_dictionaries(
    {},
    optional={
        "choices": ANYTHING | st.lists(CHOICE | ANYTHING, max_size=3),
        "usage": ANYTHING
        | st.fixed_dictionaries(
            {},
            optional={
                "prompt_tokens": ANYTHING,
                "completion_tokens": ANYTHING,
                "prompt_tokens_details": ANYTHING,
            },
        ),
        "timings": ANYTHING | st.fixed_dictionaries({"queue_s": ANYTHING, "prefill_s": ANYTHING}),
        "error": ANYTHING,
        "object": st.sampled_from(["error", "chat.completion"]),
        "detail": ANYTHING,
    },
)
HEADER = st.sampled_from(
    [
        "Retry-After: " + value
        for value in (
            "1e400",
            "-1",
            "nan",
            "1_0",
            "Wed, 21 Oct 99999 07:28:00 GMT",
            "Wed, 21 Oct 2015 07:28:00 +99999999",
        )
    ]
    + ["Retry-After-Ms: soon", "X-Roseinfer-Reason: \xff\xfe", "Location: http://gpu7.example.org/v1", "X: y"]
)


def row_of(data: bytes, cut: int, *, may_wait: bool) -> HttpAttempt:
    attempt = HttpAttempt(sent_s=0.0, ended_s=9.0)
    answer = Incoming(attempt, may_wait=may_wait)
    for at_s, part in enumerate((data[:cut], data[cut:]), start=1):
        if part and answer.read(part, float(at_s)):
            break
    else:
        answer.close(3.0, is_clean=True)
    if answer.waits:
        answer.understand()
    request = HttpRequest(0.0, tries=[attempt])
    pa.Table.from_pylist([request_row(request, 0.0)], schema=REQUEST_SCHEMA)
    pa.Table.from_pylist(list(attempt_rows(0, request, 0.0)), schema=ATTEMPT_SCHEMA)
    return attempt


@settings(max_examples=300)
@given(st.lists(CHUNK, max_size=3), st.booleans(), st.randoms(use_true_random=False))
def test_whatever_a_stream_says_makes_a_row(chunks: list[Any], may_wait: bool, rng: Random) -> None:
    data = stream(*(b"data: %b\n\n" % json.dumps(one).encode() for one in chunks), DONE)
    cut = rng.randrange(len(data))
    assert row_of(data, cut, may_wait=may_wait) == row_of(data, cut, may_wait=False)


@settings(max_examples=200)
@given(CHUNK, st.sampled_from(["200 OK", "429 x", "503 x", "500 x", "302 x"]), st.lists(HEADER, max_size=2))
def test_whatever_a_whole_answer_says_makes_a_row(said: Any, status: str, headers: list[str]) -> None:
    content = json.dumps(said).encode()
    head = "\r\n".join([f"HTTP/1.1 {status}", "Content-Type: application/json", *headers])
    data = head.encode("latin-1") + b"\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    attempt = row_of(data, 20, may_wait=True)
    assert "example.org" not in str(request_row(HttpRequest(0.0, tries=[attempt]), 0.0)["error"])


@settings(max_examples=300)
@given(st.data())
def test_whatever_is_done_to_its_bytes_makes_a_row(data: st.DataObject) -> None:
    wire = bytearray(data.draw(st.sampled_from([TWO_TOKENS, whole("429 x", {"error": {"message": "full"}})])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(wire) - 1))
        wire[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not wire:
            return
    cut = data.draw(st.integers(0, len(wire)))
    row_of(bytes(wire), cut, may_wait=data.draw(st.booleans()))
