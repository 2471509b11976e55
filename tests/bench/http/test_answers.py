"""What an answer says: which chunks hold text, how many tokens, how it ended, what went wrong."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from roseinfer.bench.http.answers import (
    MOST_ERROR_CHARACTERS,
    AnswerReader,
    count_single_tokens,
    retry_after_s,
)
from roseinfer.bench.http.exchange import Failure, HttpAttempt
from roseinfer.bench.http.rows import outcome_of
from roseinfer.bench.records import Outcome
from tests.bench.http.scripted_server import DONE, event, text, usage

EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}


def streamed(*reads: bytes) -> HttpAttempt:
    """An attempt whose answer came in these reads, at 1.0, 2.0 ... seconds."""
    attempt = HttpAttempt()
    reader = AnswerReader(attempt, 200, EVENTS)
    for at_s, body in enumerate(reads, start=1):
        reader.read(body, float(at_s))
    reader.end(float(len(reads)))
    return attempt


def answered(status_code: int, body: bytes | dict[str, Any], **headers: str) -> HttpAttempt:
    attempt = HttpAttempt()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    reader = AnswerReader(attempt, status_code, JSON | named)
    reader.read(body if isinstance(body, bytes) else json.dumps(body).encode(), 1.0)
    reader.end(1.0)
    return attempt


def chat(**delta: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


FINISH = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])


# --- deliveries


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"content": " "},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"function_call": {"name": "f"}},
        {"role": "assistant", "content": "a"},
    ],
)
def test_the_clock_stops_at_the_first_generated_text_of_any_kind(delta: dict[str, Any]) -> None:  # case E8
    attempt = streamed(
        b": keep-alive\n\n", chat(role="assistant", content=""), chat(**delta), FINISH, usage(1), DONE
    )
    assert attempt.deliveries == [(3.0, None)]


@pytest.mark.parametrize(
    "chunk",
    [
        chat(role="assistant"),
        chat(role="assistant", content=""),
        chat(role="assistant", content=None, reasoning_content=None, tool_calls=None),
        chat(tool_calls=[]),
        chat(tool_calls=[{"index": 0, "function": {"arguments": ""}}]),
        FINISH,
        text(""),
        usage(0),
        event(choices=[]),
        event(id="x"),
        event(choices=None),
        event(choices=["x"]),
        event(choices=[{"delta": None}]),
        b": ping\n\n",
    ],
)
def test_what_holds_no_generated_text_is_no_delivery(chunk: bytes) -> None:  # cases E2, E8
    assert streamed(chunk, text("a", "stop"), DONE).deliveries == [(2.0, None)]


def test_two_events_of_one_read_have_its_time() -> None:
    assert streamed(text("a") + text("b"), text("c", "length"), usage(3), DONE).deliveries == [
        (1.0, None),
        (1.0, None),
        (2.0, None),
    ]


def test_an_event_has_the_time_of_the_read_that_ends_it() -> None:  # case E13
    first = text("Grüße")
    assert streamed(first[:30], first[30:], DONE).deliveries == [(2.0, None)]


def test_a_usage_chunk_after_the_text_does_not_move_the_end() -> None:  # case E3
    assert streamed(text("a"), text("b", "stop"), usage(2), DONE).deliveries[-1] == (2.0, None)


def test_an_answer_that_was_not_streamed_is_one_delivery() -> None:
    body = {
        "choices": [{"message": {"content": "all of it"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 5},
    }
    attempt = answered(200, body)
    assert (attempt.failure, attempt.deliveries, attempt.output_tokens) == (None, [(1.0, 5)], 5)


# --- counts


def test_counts_come_from_usage() -> None:
    attempt = streamed(
        text("a"),
        event(
            choices=[],
            usage={
                "prompt_tokens": 9,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
        ),
        DONE,
    )
    assert (attempt.prompt_tokens, attempt.output_tokens, attempt.cached_tokens) == (9, 4, 2)


def test_what_a_server_does_not_say_is_null() -> None:
    attempt = streamed(text("a"), text("b", "stop"), DONE)
    assert (attempt.prompt_tokens, attempt.output_tokens, attempt.cached_tokens) == (None, None, None)
    assert attempt.deliveries == [(1.0, None), (2.0, None)]


def test_a_server_that_counts_nothing_says_nothing() -> None:  # case E6
    assert streamed(text("a", "stop"), usage(0), DONE).output_tokens is None


def test_no_tokens_at_all_is_an_answer() -> None:  # case E14
    attempt = streamed(event(choices=[{"text": "", "finish_reason": "stop"}]), usage(0), DONE)
    assert (attempt.failure, attempt.deliveries, attempt.output_tokens) == (None, [], 0)


@pytest.mark.parametrize("n", [2, 3])
def test_one_answer_alone_does_not_say_what_its_chunks_hold(n: int) -> None:  # case E11
    attempt = streamed(text("a"), text("b", "stop"), usage(n), DONE)
    assert [tokens for _, tokens in attempt.deliveries] == [None, None]


def test_usage_in_every_chunk_says_what_each_holds() -> None:  # case E2
    def counted(words: str, n: int) -> bytes:
        return event(choices=[{"text": words, "finish_reason": None}], usage={"completion_tokens": n})

    attempt = streamed(
        counted("", 0), counted("a", 3), counted("", 4), counted("b", 5), FINISH, usage(6), DONE
    )
    assert attempt.deliveries == [(2.0, 3), (4.0, 2)]
    assert attempt.output_tokens == 6


def test_usage_in_some_chunks_says_nothing_of_the_others() -> None:
    last = event(choices=[{"text": "c", "finish_reason": "stop"}], usage={"completion_tokens": 5})
    attempt = streamed(text("a"), text("b"), last, DONE)
    assert [tokens for _, tokens in attempt.deliveries] == [None, None, None]


def test_the_last_chunk_brings_the_servers_own_times() -> None:  # case E15
    timings = {"queue_s": 0.25, "prefill_s": 0.125}
    assert streamed(text("a", "stop"), usage(1, timings=timings), DONE).timings == timings


def complete(n_chunks: int, output_tokens: int | None) -> HttpAttempt:
    chunks: list[tuple[float, int | None]] = [(float(i), None) for i in range(n_chunks)]
    return HttpAttempt(deliveries=chunks, output_tokens=output_tokens)


def test_as_many_tokens_as_chunks_in_all_answers_are_one_each() -> None:
    attempts = [complete(50, 50), complete(1, 1), HttpAttempt(failure=Failure.STATUS)]
    count_single_tokens(attempts)
    assert [{tokens for _, tokens in attempt.deliveries} for attempt in attempts] == [{1}, {1}, set()]


@pytest.mark.parametrize(
    "other", [complete(10, 20), complete(10, 21), complete(3, None), complete(3, 2), complete(1, 5)]
)
def test_one_answer_that_differs_means_that_nobody_knows(other: HttpAttempt) -> None:
    attempts = [complete(50, 50), other]
    count_single_tokens(attempts)
    assert {tokens for attempt in attempts for _, tokens in attempt.deliveries} == {None}


def test_two_tokens_to_a_chunk_in_all_answers_are_a_guess() -> None:
    attempts = [complete(50, 100), complete(10, 20)]
    count_single_tokens(attempts)
    assert {tokens for attempt in attempts for _, tokens in attempt.deliveries} == {None}


def test_what_the_server_said_of_its_chunks_stays() -> None:
    said = HttpAttempt(deliveries=[(1.0, 3), (2.0, 1)], output_tokens=4)
    count_single_tokens([said, complete(2, 4)])
    assert said.deliveries == [(1.0, 3), (2.0, 1)]


# --- how it ended


@pytest.mark.parametrize("end", [(FINISH, DONE), (FINISH,), (DONE,), (DONE[:-1],)])
def test_a_stream_has_ended_that_says_so(end: tuple[bytes, ...]) -> None:
    assert streamed(text("a"), *end).failure is None


def test_a_stream_that_does_not_say_that_it_ended_was_cut() -> None:
    attempt = streamed(text("a"), text("b"))
    assert attempt.failure is Failure.CLOSED
    assert len(attempt.deliveries) == 2


@pytest.mark.parametrize(
    "reason", [None, "stop", "length", "tool_calls", "function_call", "content_filter", {"type": "stop"}]
)
def test_an_answer_is_whole_that_ended_as_answers_do(reason: object) -> None:
    end = event(choices=[{"index": 0, "text": "b", "finish_reason": reason}])
    assert streamed(text("a"), end, usage(2), DONE).failure is None


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled", {"type": "abort"}])
def test_an_answer_that_the_server_gave_up_is_none(reason: object) -> None:
    end = event(choices=[{"index": 0, "text": "", "finish_reason": reason}])
    attempt = streamed(text("a"), end, usage(1), DONE)
    assert attempt.failure is Failure.STREAM_ERROR
    assert attempt.error == f"finish_reason {attempt.finish_reason}"
    assert (len(attempt.deliveries), attempt.output_tokens) == (1, 1)
    assert outcome_of(attempt) is Outcome.ERROR


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "", "finish_reason": "error", "error": {"code": 503}},
        {"text": "", "finish_reason": {"type": "abort", "status_code": 429}},
    ],
)
def test_one_given_up_before_any_text_for_want_of_room_is_a_refusal(choice: dict[str, object]) -> None:
    assert outcome_of(streamed(event(choices=[choice]), DONE)) is Outcome.REJECTED
    assert outcome_of(streamed(text("a"), event(choices=[choice]), DONE)) is Outcome.ERROR


def test_nothing_counts_after_done() -> None:
    assert streamed(text("a", "stop") + DONE + text("b")).deliveries == [(1.0, None)]


@pytest.mark.parametrize(
    "error",
    [
        event(error={"message": "out of memory", "type": "server_error", "code": "oom"}),
        event(object="error", message="out of memory", code="oom"),
        b'event: error\ndata: {"message": "out of memory", "code": "oom"}\n\n',
    ],
)
def test_an_error_event_after_a_200_keeps_what_came_before(error: bytes) -> None:  # case D7
    attempt = streamed(text("a"), text("b"), error, DONE)
    assert (attempt.failure, attempt.error, attempt.error_code) == (
        Failure.STREAM_ERROR,
        "out of memory",
        "oom",
    )
    assert [at_s for at_s, _ in attempt.deliveries] == [1.0, 2.0]
    assert attempt.status_code == 200


def test_an_error_event_may_be_a_text() -> None:
    assert streamed(b"event: error\ndata: out of memory\n\n").error == "out of memory"


def test_the_first_failure_counts() -> None:
    attempt = streamed(event(error={"message": "first"}), b"data: {\n\n", DONE)
    assert (attempt.failure, attempt.error) == (Failure.STREAM_ERROR, "first")


@pytest.mark.parametrize("broken", [b"data: {\n\n", b"data: [1]\n\n", b"data: " + b"[" * 100_000 + b"\n\n"])
def test_an_event_that_is_no_json_object_is_a_bad_answer(broken: bytes) -> None:
    assert streamed(text("a"), broken, DONE).failure is Failure.BAD_ANSWER


def test_a_page_is_no_answer() -> None:
    attempt = HttpAttempt()
    reader = AnswerReader(attempt, 200, {"content-type": "text/html"})
    reader.read(b"<html>\n\nwelcome\n\n</html>\n\n", 1.0)
    reader.end(1.0)
    assert attempt.failure is Failure.BAD_ANSWER
    assert "text/html" in str(attempt.error)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'"choices"'])
def test_json_of_another_kind_is_no_answer(body: bytes) -> None:
    assert answered(200, body).failure is Failure.BAD_ANSWER


def test_a_whole_answer_may_be_an_error() -> None:
    assert answered(200, {"error": {"message": "no"}}).failure is Failure.STREAM_ERROR


def test_a_compressed_answer_was_not_asked_for() -> None:
    assert answered(200, b"\x1f\x8b", content_encoding="gzip").failure is Failure.BAD_ANSWER


# --- other statuses


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        (
            {"error": {"message": "full", "type": "overloaded", "code": "max_inflight"}},
            "full",
            "max_inflight",
        ),
        ({"object": "error", "message": "full", "type": "overloaded", "code": 429}, "full", "429"),
        ({"error": "full"}, "full", None),
        ({"detail": "full"}, "full", None),
        ({"message": "full", "code": None}, "full", None),
        (b"full", "full", None),
        (b"<h1>\n full</h1>", "<h1> full</h1>", None),
        (b"", None, None),
    ],
)
def test_an_error_body_has_a_message_and_a_code(  # cases D12, J10
    body: bytes | dict[str, Any], message: str | None, code: str | None
) -> None:
    attempt = answered(500, body)
    assert (attempt.failure, attempt.status_code) == (Failure.STATUS, 500)
    assert (attempt.error, attempt.error_code) == (message, code)


@pytest.mark.parametrize(
    ("error", "header", "reason"),
    [
        ({"code": "max_inflight", "type": "overloaded"}, "queue_timeout", "queue_timeout"),
        ({"code": "max_inflight", "type": "overloaded"}, None, "max_inflight"),
        ({"code": 429, "type": "TooManyRequests"}, None, "TooManyRequests"),
        ({"code": None, "type": "overloaded"}, None, "overloaded"),
        ({"message": "busy"}, None, None),
    ],
)
@pytest.mark.parametrize("status_code", [429, 503])
def test_a_refusal_has_the_reason_that_the_server_names(
    status_code: int, error: dict[str, Any], header: str | None, reason: str | None
) -> None:
    headers = {} if header is None else {"x_roseinfer_reason": header}
    assert answered(status_code, {"error": error}, **headers).reject_reason == reason


def test_a_failure_is_no_refusal() -> None:
    assert answered(500, {"error": {"code": "internal"}}).reject_reason is None


def test_a_long_error_is_cut() -> None:
    error = answered(500, b"x" * 1_000_000).error
    assert error is not None
    assert len(error) == MOST_ERROR_CHARACTERS


def test_a_redirect_says_where_to() -> None:
    assert answered(307, b"", location="/v2").error == "Location: /v2"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "3", "retry-after-ms": "1250"}, 1.25),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({}, None),
    ],
)
def test_retry_after_is_seconds_or_a_date(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers) == expected


def test_a_date_to_retry_after_is_so_far_off() -> None:
    seconds = retry_after_s(
        {"retry-after": format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)}
    )
    assert seconds is not None
    assert 3000 < seconds <= 3600
