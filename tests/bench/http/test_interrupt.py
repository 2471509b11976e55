"""Ctrl-C in the middle of a cell: what has ended is kept, what has not is incomplete."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from roseinfer.bench.http.exchange import Failure, HttpPlayed
from roseinfer.bench.http.rows import request_row
from roseinfer.bench.records import Outcome
from roseinfer.bench.termination import Interruption, held
from tests.bench.http.playing import UpTo, bodies, looped, played
from tests.bench.http.scripted_server import (
    DONE,
    FULL,
    STREAM_HEAD,
    TWO_TOKENS,
    Peer,
    ScriptedServer,
    chunk,
    stream,
    text,
    usage,
)


@pytest.fixture(autouse=True)
def _a_foreground_process() -> Iterator[None]:
    """A shell that puts us into the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Sequel:
    """Answers as long as there are `answers`; then interrupts the client, once, and says no more."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self._lock = threading.Lock()
        self._is_over = False

    def __call__(self, peer: Peer) -> None:
        while True:
            peer.request()
            with self._lock:
                answer = self._answers.pop(0) if self._answers else None
                if answer is None and not self._is_over:
                    self._is_over = True
                    interrupt()
            if answer is None:
                peer.wait_for_close()
                return
            peer.send(answer)


def outcomes(result: HttpPlayed) -> list[tuple[str, str | None]]:
    rows = [request_row(request, result.t0) for request in result.requests]
    return [(row["outcome"], row["error"]) for row in rows]


INCOMPLETE = (Outcome.INCOMPLETE, "interrupted")


def test_what_had_ended_is_kept_and_the_rest_is_incomplete() -> None:
    with ScriptedServer(Sequel(TWO_TOKENS)) as server:
        result = played(server.endpoint(), [0.0, 0.05, 60.0])
    assert outcomes(result) == [(Outcome.COMPLETED, None), INCOMPLETE, INCOMPLETE]
    done, cut, unsent = [request_row(request, result.t0) for request in result.requests]
    assert done["received_last_s"] is not None
    assert done["output_tokens"] == 2
    assert cut["sent_s"] >= 0.05
    assert (cut["received_first_s"], cut["rejected_s"]) == (None, None)
    assert result.interrupted_s is not None
    assert cut["ended_s"] == unsent["ended_s"] == result.interrupted_s - result.t0
    assert (unsent["scheduled_s"], unsent.get("sent_s"), unsent["attempts"]) == (60.0, None, 0)


def test_what_came_of_an_answer_is_kept_with_it() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(STREAM_HEAD + chunk(text("one")))
        interrupt()
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        result = played(server.endpoint(), [0.0])
    (attempt,) = result.requests[0].tries
    assert (attempt.failure, attempt.status_code) == (Failure.INTERRUPTED, 200)
    assert len(attempt.deliveries) == 1


def test_a_refusal_whose_head_had_come_is_one() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 9\r\n\r\n{")
        interrupt()
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        result = played(server.endpoint(), [0.0])
    assert [outcome for outcome, _ in outcomes(result)] == [Outcome.REJECTED]


def test_an_answer_that_lacks_nothing_but_its_last_chunk_is_complete() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(STREAM_HEAD + b"".join(map(chunk, (text("one", "stop"), usage(1), DONE))))
        interrupt()
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        result = played(server.endpoint(), [0.0])
    assert outcomes(result) == [(Outcome.COMPLETED, None)]


def test_between_two_tries_a_request_is_incomplete() -> None:
    with ScriptedServer(Sequel(FULL)) as server:
        result = played(server.endpoint(), [0.0, 0.05], policy=UpTo(3, delay_s=60.0))
    assert outcomes(result) == [INCOMPLETE, INCOMPLETE]
    row = request_row(result.requests[0], result.t0)
    assert (row["status_code"], row["attempts"]) == (429, 1)
    assert (row["rejected_s"], row["reject_stage"], row["reject_reason"]) == (None, None, None)


def test_of_a_closed_loop_there_is_what_was_sent() -> None:
    with ScriptedServer(Sequel(TWO_TOKENS, TWO_TOKENS)) as server:
        result = looped(server.endpoint(), 1, bodies(9))
    assert outcomes(result) == [(Outcome.COMPLETED, None)] * 2 + [INCOMPLETE]


def test_one_that_comes_before_time_zero_leaves_nothing() -> None:
    with ScriptedServer(Sequel()) as server, held():
        interrupt()
        with pytest.raises(Interruption):
            played(server.endpoint(), [0.0])


def test_workers_are_interrupted_together() -> None:
    answers = [stream(text("one", "stop"), usage(1), DONE)] * 2
    due_s = np.where(np.arange(6) < 4, 0.0, 60.0).tolist()
    with ScriptedServer(Sequel(*answers)) as server:
        result = played(server.endpoint(), due_s, client_workers=2)
    assert sorted(outcomes(result)) == [(Outcome.COMPLETED, None)] * 2 + [INCOMPLETE] * 4
    assert [request.scheduled_s for request in result.requests] == due_s
    assert result.interrupted_s is not None
