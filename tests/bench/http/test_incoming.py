"""One answer as it comes in: understood at once or later, cut anywhere, the same comes out."""

from __future__ import annotations

import pytest

from roseinfer.bench.http import incoming
from roseinfer.bench.http.exchange import Failure, HttpAttempt
from roseinfer.bench.http.incoming import Incoming
from tests.bench.http.scripted_server import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    TWO_TOKENS,
    chunk,
    event,
    stream,
    text,
    usage,
    whole,
)

STREAM = stream(text("one"), text(" zwölf"), text(" 世界", "length"), usage(3), DONE)


def taken(reads: list[bytes], *, may_wait: bool = True) -> tuple[HttpAttempt, list[bool], Incoming]:
    """The attempt, what each read was said to be, and the answer; the reads came at 1.0, 2.0 ... seconds."""
    attempt = HttpAttempt()
    answer = Incoming(attempt, may_wait=may_wait)
    ends = [answer.read(data, float(at_s)) for at_s, data in enumerate(reads, start=1) if data]
    if answer.waits:
        answer.understand()
    return attempt, ends, answer


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_stream_reads_the_same_cut_anywhere(may_wait: bool) -> None:  # case E10
    for cut in range(1, len(STREAM)):
        attempt, ends, answer = taken([STREAM[:cut], STREAM[cut:]], may_wait=may_wait)
        assert ends == [False, True]
        assert answer.is_reusable
        assert (attempt.failure, attempt.output_tokens, attempt.finish_reason) == (None, 3, "length")
        assert len(attempt.deliveries) == 3


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("events_a_read", [1, 2, 3])
def test_what_waits_is_what_is_understood_at_once(line_end: bytes, events_a_read: int) -> None:
    events = [text("one"), text(" two"), text(" three", "stop"), usage(3), DONE]
    chunks = [chunk(one.replace(b"\n", line_end)) for one in events] + [LAST_CHUNK]
    reads = [b"".join(chunks[i : i + events_a_read]) for i in range(0, len(chunks), events_a_read)]
    reads[0] = STREAM_HEAD + reads[0]
    late, ends, _ = taken(reads)
    at_once, ends_at_once, _ = taken(reads, may_wait=False)
    assert late == at_once
    assert ends == ends_at_once == [False] * (len(reads) - 1) + [True]
    assert late.failure is None


@pytest.mark.parametrize("cut", range(1, len(LAST_CHUNK)))
def test_an_end_in_two_reads_is_an_end(cut: int) -> None:
    whole_reads = [STREAM_HEAD + chunk(text("one", "stop")), chunk(usage(1)) + chunk(DONE)]
    _, ends, _ = taken([*whole_reads, LAST_CHUNK[:cut], LAST_CHUNK[cut:]])
    assert ends == [False, False, False, True]


def test_one_that_was_given_up_does_not_wait() -> None:
    """Whoever sent it in a closed loop pauses, as after any refusal."""
    attempt = HttpAttempt()
    answer = Incoming(attempt, may_wait=True)
    assert answer.read(STREAM_HEAD + chunk(text("", "abort")) + chunk(DONE) + LAST_CHUNK, 1.0)
    assert not answer.waits
    assert attempt.failure is Failure.STREAM_ERROR


def test_a_stream_that_looks_like_most_waits() -> None:
    attempt = HttpAttempt()
    answer = Incoming(attempt, may_wait=True)
    assert not answer.read(STREAM_HEAD + chunk(text("one")), 1.0)
    assert answer.read(chunk(text(" two", "length")) + chunk(usage(2)) + chunk(DONE) + LAST_CHUNK, 2.0)
    assert answer.waits
    assert attempt == HttpAttempt()
    answer.understand()
    assert attempt.deliveries == [(1.0, None), (2.0, None)]
    assert attempt.head_s == 1.0


@pytest.mark.parametrize(
    "reads",
    [
        [whole("429 Too Many Requests", {"error": {"message": "full"}})],
        [whole("200 OK", {"choices": [{"text": "a", "finish_reason": "stop"}]})],
        [STREAM_HEAD + chunk(event(error={"message": "x"}))],
        [STREAM_HEAD + chunk(b"event: error\ndata: x\n\n")],
        [STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunk(text("one"))],
        [STREAM_HEAD[:30], STREAM_HEAD[30:] + chunk(text("one"))],
        [stream(text("one", "stop"))],
        [STREAM_HEAD + chunk(text("one"))[:-1]],
    ],
)
def test_what_may_be_something_else_does_not_wait(reads: list[bytes]) -> None:
    answer = Incoming(HttpAttempt(), may_wait=True)
    for at_s, data in enumerate(reads):
        answer.read(data, float(at_s))
    assert not answer.waits


def test_a_connection_that_the_server_closes_is_not_reused() -> None:
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    _, ends, answer = taken([head + chunk(text("one", "stop")) + chunk(DONE) + LAST_CHUNK])
    assert ends == [True]
    assert not answer.is_reusable


def test_an_answer_longer_than_any_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "MOST_HELD_BYTES", 500)
    answer = Incoming(HttpAttempt(), may_wait=True)
    answer.read(STREAM_HEAD + chunk(text("one")), 1.0)
    assert answer.waits
    answer.read(chunk(text("x" * 500)), 2.0)
    assert not answer.waits


@pytest.fixture
def short_reads(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(incoming, "READ_BYTES", 40)
    return 40


def full(answer: bytes, size: int) -> list[bytes]:
    return [answer[at : at + size] for at in range(0, len(answer), size)]


def test_a_client_that_is_behind_does_not_begin_to_understand(short_reads: int) -> None:
    """A read that brings all that it can ends anywhere in an event, and there is more."""
    head = STREAM_HEAD + chunk(text("one"))
    rest = b"".join(map(chunk, (text(" two"), text(" three", "stop"), usage(3), DONE))) + LAST_CHUNK
    reads = [head, *full(rest, short_reads)]
    attempt = HttpAttempt()
    answer = Incoming(attempt, may_wait=True)
    ends = [answer.read(data, float(at_s)) for at_s, data in enumerate(reads)]
    assert ends == [False] * (len(reads) - 1) + [True]
    assert answer.waits
    answer.understand()
    at_once = taken(reads, may_wait=False)[0]
    assert [tokens for _, tokens in attempt.deliveries] == [tokens for _, tokens in at_once.deliveries]
    assert (attempt.failure, attempt.output_tokens) == (None, 3)


@pytest.mark.parametrize(
    "sign", [event(error={"message": "x"}), b"event: error\ndata: x\n\n", text("", "abort")]
)
def test_a_sign_that_lies_across_two_reads_is_seen(short_reads: int, sign: bytes) -> None:
    for padding in range(short_reads):
        body = chunk(text("x" * padding)) + chunk(sign)
        answer = Incoming(HttpAttempt(), may_wait=True)
        for data in [STREAM_HEAD + chunk(text("one")), *full(body, short_reads)]:
            answer.read(data, 1.0)
        assert not answer.waits, padding


def test_a_full_read_that_may_be_the_end_is_understood(short_reads: int) -> None:
    head = STREAM_HEAD + chunk(text("one", "stop"))
    answer = Incoming(HttpAttempt(), may_wait=True)
    answer.read(head, 1.0)
    last = chunk(b": %b\n\n" % (b"x" * 25)) + LAST_CHUNK
    assert len(last) == short_reads
    assert answer.read(last, 2.0)


def test_an_attempt_that_was_given_up_keeps_what_came_and_its_failure() -> None:  # case D9
    attempt = HttpAttempt()
    answer = Incoming(attempt, may_wait=True)
    answer.read(STREAM_HEAD + chunk(text("one")), 1.0)
    answer.read(chunk(text(" two")), 2.0)
    attempt.failure = Failure.TIMEOUT
    answer.understand()
    assert attempt.failure is Failure.TIMEOUT
    assert attempt.deliveries == [(1.0, None), (2.0, None)]
    assert attempt.status_code == 200


@pytest.mark.parametrize(
    ("reads", "is_clean", "is_whole"),
    [
        ([b"HTTP/1.1 200 OK\r\n\r\n" + text("a", "stop")], True, True),
        ([b"HTTP/1.1 200 OK\r\n\r\n" + text("a", "stop")], False, False),
        ([STREAM_HEAD + chunk(text("a", "stop")) + chunk(DONE)], True, True),
        ([STREAM_HEAD + chunk(text("a", "stop")) + chunk(DONE)], False, True),
        ([STREAM_HEAD + chunk(text("a", "stop"))], True, False),
        ([], True, False),
    ],
)
def test_an_answer_whose_connection_is_gone_may_be_whole(
    reads: list[bytes], is_clean: bool, is_whole: bool
) -> None:
    attempt = HttpAttempt()
    answer = Incoming(attempt, may_wait=True)
    for data in reads:
        assert not answer.read(data, 1.0)
    assert answer.close(2.0, is_clean=is_clean) == is_whole


def test_an_event_that_is_no_json_is_found_later_too() -> None:
    reads = [STREAM_HEAD + chunk(b"data: {\n\n"), chunk(DONE) + LAST_CHUNK]
    late, at_once = taken(reads)[0], taken(reads, may_wait=False)[0]
    assert late.failure is at_once.failure is Failure.BAD_ANSWER


def test_what_goes_on_behind_its_end_is_a_bad_answer() -> None:
    odd = STREAM_HEAD + chunk(text("a", "stop")) + b"fff\r\n" + DONE + LAST_CHUNK
    attempt, ends, _ = taken([odd])
    assert ends == [True]
    assert attempt.failure is Failure.BAD_ANSWER


def test_both_ways_agree_on_a_whole_answer_in_one_read() -> None:
    late, at_once = taken([TWO_TOKENS])[0], taken([TWO_TOKENS], may_wait=False)[0]
    assert late == at_once
