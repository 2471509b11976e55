"""The client of a server: when it sends, what it holds back, what it retries, what it leaves behind."""

from __future__ import annotations

import gc
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from typing import overload

import pytest

from roseinfer.bench.http.client import HttpClient
from roseinfer.bench.http.connection import Connection, Pool
from roseinfer.bench.http.exchange import Failure
from roseinfer.bench.http.rows import outcome_of
from roseinfer.bench.load import CLOSED_LOOP_REFUSED_PAUSE_S, Load
from roseinfer.bench.records import Outcome
from roseinfer.bench.retries import RetryPolicy
from tests.bench.http.playing import Never, UpTo, bodies, last_tries, looped, most_outstanding, played
from tests.bench.http.scripted_server import (
    FULL,
    PATIENCE_S,
    TWO_TOKENS,
    Peer,
    ScriptedServer,
    answering,
)

# --- schedules, caps


def test_requests_are_sent_on_schedule_whatever_the_server_does() -> None:  # case C3
    all_there = threading.Barrier(8)

    def script(peer: Peer) -> None:
        peer.request()
        all_there.wait(PATIENCE_S)  # nobody is answered before all have asked
        peer.send(TWO_TOKENS)

    due_s = [0.002 * i for i in range(8)]
    with ScriptedServer(script) as server:
        result = played(server.endpoint(), due_s)
    assert [request.scheduled_s for request in result.requests] == due_s
    for request in result.requests:
        assert request.permitted_s is None
        assert request.tries[0].sent_s is not None
        assert request.tries[0].sent_s >= result.t0 + request.scheduled_s
    assert result.peak_outstanding == most_outstanding(result) == 8


def test_a_cap_holds_back_what_is_due_and_says_since_when() -> None:  # cases C1, C7
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        result = played(server.endpoint(), [0.0] * 12, max_concurrency=3)
        assert result.connections <= 3
    assert result.peak_outstanding == most_outstanding(result) == 3
    assert [request.permitted_s is None for request in result.requests] == [i < 3 for i in range(12)]
    assert [request.inflight for request in result.requests[3:]] == [2] * 9
    ends_s = {request.tries[-1].ended_s for request in result.requests}
    assert {request.permitted_s for request in result.requests[3:]} <= ends_s


def test_requests_that_the_cap_held_back_to_the_end_are_not_sent() -> None:  # case C11
    released = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        assert released.wait(PATIENCE_S)
        peer.send(TWO_TOKENS)

    class Releasing(HttpClient):
        def _stop_sending(self) -> None:
            super()._stop_sending()
            released.set()

    with ScriptedServer(script) as server:
        load = Load(arrival="constant", max_concurrency=1, duration_s=0.05)
        with Releasing(server.endpoint(), load, [0.0] * 3, bodies(3), Never()) as it:
            result = it.play()
    first, *others = result.requests
    assert first.tries[-1].failure is None  # outstanding at the end, and carried through
    for request in others:
        assert request.tries == []
        assert request.unsent_because == "not sent: --max-concurrency 1 was reached until --duration ended"
        assert request.gave_up_s is not None
        assert request.gave_up_s >= result.t0 + 0.05


# --- closed loop


def test_a_user_sends_the_next_when_the_last_has_ended() -> None:  # case C7
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        result = looped(server.endpoint(), 3, bodies(20))
        assert result.connections == server.accepted == 3
    assert len(result.requests) == 20
    assert result.peak_outstanding == most_outstanding(result) == 3
    for request in result.requests:
        assert request.tries[0].sent_s is not None
        assert request.scheduled_s == pytest.approx(request.tries[0].sent_s - result.t0, abs=1e-9)
    assert len(result.refill_lags_s) == 20
    assert min(result.refill_lags_s) >= 0
    assert result.ran_out_s == result.requests[-1].scheduled_s


def test_as_many_are_outstanding_as_were_asked_for() -> None:  # case K2
    """Reported: 100 of 128. Nobody is answered before all users are there."""
    everybody = threading.Barrier(128)

    def script(peer: Peer) -> None:
        peer.request()
        everybody.wait(PATIENCE_S)
        peer.send(TWO_TOKENS)
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        result = looped(server.endpoint(), 128, bodies(128))
    assert result.peak_outstanding == most_outstanding(result) == 128
    assert [attempt.failure for attempt in last_tries(result)] == [None] * 128


def test_a_user_who_was_refused_pauses() -> None:
    with ScriptedServer(answering(FULL)) as server:
        result = looped(server.endpoint(), 1, bodies(3))
    for last, request in zip(result.requests, result.requests[1:], strict=False):
        assert last.tries[0].ended_s is not None
        assert request.tries[0].sent_s is not None
        assert request.tries[0].sent_s - last.tries[0].ended_s >= CLOSED_LOOP_REFUSED_PAUSE_S


class Endless(Sequence[bytes]):
    """Bodies that are made when they are asked for; counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __len__(self) -> int:
        return 1_000_000

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        self.made += 1
        return b"{}"


def test_a_loop_that_ends_by_time_makes_bodies_ahead_but_not_all() -> None:
    endless = Endless()
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        result = looped(server.endpoint(), 2, endless, duration_s=0.1)
    assert 2 <= len(result.requests) <= endless.made <= len(result.requests) + 4 * 2
    assert result.ran_out_s is None
    # Whoever was let go in time may be stamped behind the end, on a busy machine; nobody is let go after that.
    assert sum(request.scheduled_s >= 0.1 for request in result.requests) <= 1


def test_somebody_begins_however_short_the_duration_is() -> None:
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        assert len(looped(server.endpoint(), 2, Endless(), duration_s=1e-9).requests) == 1


# --- retries


def refusing_first(n: int) -> Callable[[Peer], None]:
    """Refuses the first `n` requests of a connection."""

    def script(peer: Peer) -> None:
        for _ in range(n):
            peer.request()
            peer.send(FULL)
        while True:
            peer.request()
            peer.send(TWO_TOKENS)

    return script


def test_a_retry_is_another_try_of_the_same_request() -> None:  # case J3
    policy = UpTo(5, delay_s=0.01)
    with ScriptedServer(refusing_first(2)) as server:
        result = looped(server.endpoint(), 1, bodies(1), policy=policy)
    (request,) = result.requests
    assert [attempt.status_code for attempt in request.tries] == [429, 429, 200]
    assert policy.asked == [1, 2]
    for last, attempt in zip(request.tries, request.tries[1:], strict=False):
        assert last.ended_s is not None
        assert attempt.sent_s is not None
        assert attempt.sent_s - last.ended_s >= 0.01
    assert result.peak_outstanding == 1


def test_a_request_that_is_given_up_has_all_its_tries() -> None:
    with ScriptedServer(answering(FULL)) as server:
        result = played(server.endpoint(), [0.0] * 2, policy=UpTo(3))
    assert [len(request.tries) for request in result.requests] == [3, 3]
    assert {attempt.status_code for request in result.requests for attempt in request.tries} == {429}


def test_a_refused_connection_may_be_tried_again() -> None:
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        endpoint = server.endpoint()
    (request,) = played(endpoint, [0.0], policy=UpTo(2)).requests
    assert [attempt.failure for attempt in request.tries] == [Failure.REFUSED] * 2


def test_no_retry_after_the_deadline_of_the_request() -> None:
    with ScriptedServer(answering(FULL)) as server:
        (request,) = played(server.endpoint(), [0.0], policy=UpTo(9, delay_s=5.0), timeout_s=1.0).requests
    assert [attempt.failure for attempt in request.tries] == [Failure.STATUS]


def stalling_first(n: int) -> Callable[[Peer], None]:
    """Says nothing to the first `n` connections, and answers the others."""

    def script(peer: Peer) -> None:
        peer.request()
        if peer.number < n:
            peer.wait_for_close()
        else:
            peer.send(TWO_TOKENS)

    return script


def test_a_try_that_takes_too_long_is_given_up_and_sent_again() -> None:
    retries = RetryPolicy("immediate", per_try_timeout_s=0.1)
    with ScriptedServer(stalling_first(2)) as server:
        (request,) = played(server.endpoint(), [0.0], policy=UpTo(5), retries=retries).requests
    assert [attempt.failure for attempt in request.tries] == [Failure.TIMEOUT, Failure.TIMEOUT, None]
    assert outcome_of(request.tries[0]) is Outcome.TIMEOUT
    for attempt in request.tries[:2]:
        assert attempt.sent_s is not None
        assert attempt.ended_s is not None
        assert attempt.ended_s - attempt.sent_s >= 0.1
    assert request.tries[0].error == "no whole answer within --per-try-timeout 0.1"


def test_the_deadline_of_the_request_is_over_all_its_tries() -> None:
    retries = RetryPolicy("immediate", per_try_timeout_s=0.1)
    with ScriptedServer(stalling_first(9)) as server:
        result = played(server.endpoint(), [0.0], policy=UpTo(9), retries=retries, timeout_s=0.15)
    assert [attempt.error for attempt in result.requests[0].tries] == [
        "no whole answer within --per-try-timeout 0.1",
        "no whole answer within --timeout 0.15",
    ]


def test_a_request_keeps_its_permit_over_its_tries() -> None:
    with ScriptedServer(refusing_first(2)) as server:
        result = played(server.endpoint(), [0.0] * 3, policy=UpTo(5, delay_s=0.01), max_concurrency=1)
    assert result.peak_outstanding == most_outstanding(result) == 1


# --- what is left behind


def test_an_interrupt_leaves_nothing_open() -> None:
    threads, main = threading.active_count(), threading.main_thread().ident
    assert main is not None

    def script(peer: Peer) -> None:
        peer.request()
        if not peer.number:
            signal.pthread_kill(main, signal.SIGINT)
        peer.wait_for_close()  # it is closed by the client, which does not wait for an answer

    # Which a shell that puts us into the background ignores.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ScriptedServer(script) as server:
            assert played(server.endpoint(), [0.0] * 4).interrupted_s is not None
    finally:
        signal.signal(signal.SIGINT, before)
    assert threading.active_count() == threads
    assert gc.isenabled()


def test_the_limit_of_open_files_is_what_it_was() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        played(server.endpoint(), [0.0])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_a_client_that_has_nothing_to_do_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:  # case K4
    waits: list[float] = []
    ready = Pool.ready

    def noted(self: Pool, until_s: float) -> list[Connection]:
        waits.append(until_s)
        return ready(self, until_s)

    monkeypatch.setattr(Pool, "ready", noted)
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        played(server.endpoint(), [0.0, 0.3])
    assert len(waits) < 40  # one a read and a deadline, whatever the time between


def test_nothing_to_send_is_nothing_played() -> None:
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        result = played(server.endpoint(), [])
    assert result.requests == []
    assert result.peak_outstanding == 0
