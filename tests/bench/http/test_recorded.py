"""Answers of real servers, byte for byte as they came, cut in every way: the same comes out.

`recorded/` holds what roseinfer-serve with a tiny model and vLLM 0.32 on the CPU said to requests of six tokens.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.http.exchange import Failure, HttpAttempt
from roseinfer.bench.http.incoming import Incoming
from roseinfer.bench.http.sse import EventParser
from roseinfer.bench.http.wire import AnswerParser

RECORDED = Path(__file__).with_name("recorded")
STREAMS = ["roseinfer_chat", "roseinfer_completions", "vllm_completions"]
REFUSALS = ["roseinfer_not_found", "vllm_bad_request"]


def bytes_of(name: str) -> bytes:
    return (RECORDED / f"{name}.http").read_bytes()


def cut(answer: bytes, size: int) -> list[bytes]:
    return [answer[at : at + size] for at in range(0, len(answer), size)]


def understood(reads: list[bytes], *, may_wait: bool) -> dict[str, Any]:
    """The attempt without its times, which are those of the reads; the answer ended with the last."""
    attempt = HttpAttempt()
    answer = Incoming(attempt, may_wait=may_wait)
    ends = [answer.read(data, float(at_s)) for at_s, data in enumerate(reads)]
    assert ends == [False] * (len(reads) - 1) + [True]
    if answer.waits:
        answer.understand()
    assert answer.is_reusable
    found = asdict(attempt)
    found["head_s"] = None
    found["deliveries"] = [tokens for _, tokens in attempt.deliveries]
    return found


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_has_its_six_tokens(name: str) -> None:
    found = understood([bytes_of(name)], may_wait=True)
    assert (found["failure"], found["finish_reason"], found["output_tokens"]) == (None, "length", 6)
    assert len(found["deliveries"]) == 6
    assert found["prompt_tokens"] > 0


@pytest.mark.parametrize("name", REFUSALS)
def test_an_error_says_why(name: str) -> None:
    found = understood([bytes_of(name)], may_wait=True)
    assert found["failure"] is Failure.STATUS
    assert found["error"]


@pytest.mark.parametrize("name", STREAMS + REFUSALS)
@pytest.mark.parametrize("may_wait", [True, False])
def test_cut_in_two_anywhere_the_same_comes_out(name: str, may_wait: bool) -> None:  # case E10
    answer = bytes_of(name)
    whole = understood([answer], may_wait=may_wait)
    for at in range(1, len(answer)):
        assert understood([answer[:at], answer[at:]], may_wait=may_wait) == whole, at


@pytest.mark.parametrize("name", STREAMS + REFUSALS)
def test_in_pieces_of_every_size_the_same_comes_out(name: str) -> None:  # case E10
    answer = bytes_of(name)
    whole = understood([answer], may_wait=True)
    for size in range(1, len(answer)):
        assert understood(cut(answer, size), may_wait=True) == whole, size


@pytest.mark.parametrize("name", STREAMS)
def test_the_events_alone_are_the_same_in_pieces_of_every_size(name: str) -> None:  # case E10
    body = AnswerParser().feed(bytes_of(name))
    events = EventParser().feed(body)
    assert events[-1].data == "[DONE]"
    for size in range(1, len(body)):
        parser = EventParser()
        assert [event for piece in cut(body, size) for event in parser.feed(piece)] == events, size
