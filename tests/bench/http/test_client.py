"""The client of a server: when it sends, on which connections, what it retries, when it gives up."""

from __future__ import annotations

import gc
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from typing import overload

import pytest

from roseinfer.bench.http import client
from roseinfer.bench.http.answers import AnswerReader
from roseinfer.bench.http.client import HttpClient
from roseinfer.bench.http.connection import Connection, Pool
from roseinfer.bench.http.exchange import Endpoint, Failure, HttpPlayed
from roseinfer.bench.load import CLOSED_LOOP_REFUSED_PAUSE_S, Load
from tests.bench.http.playing import Never, UpTo, bodies, last_tries, looped, played
from tests.bench.http.scripted_server import (
    DONE,
    PATIENCE_S,
    STREAM_HEAD,
    TWO_TOKENS,
    Peer,
    ScriptedServer,
    chunk,
    event,
    stream,
    text,
    usage,
    whole,
)

FULL = whole(
    "429 Too Many Requests", {"error": {"message": "full", "code": "max_inflight"}}, ["Retry-After: 2"]
)


def answering(answer: bytes) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        while True:
            peer.request()
            peer.send(answer)

    return script


def most_outstanding(result: HttpPlayed) -> int:
    """From the moments alone: the most that had been sent and not ended at any of them."""
    moments: list[tuple[float, int]] = []
    for request in result.requests:
        if request.tries:
            sent_s, ended_s = request.tries[0].sent_s, request.tries[-1].ended_s
            assert sent_s is not None
            assert ended_s is not None
            moments += [(sent_s, 1), (ended_s, -1)]
    now = most = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


# --- answers


def test_an_answer_is_noted_with_its_times() -> None:
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        result = played(server.endpoint(), [0.0])
    (attempt,) = result.requests[0].tries
    assert attempt.failure is None
    assert (attempt.status_code, attempt.finish_reason) == (200, "length")
    assert (attempt.prompt_tokens, attempt.output_tokens) == (8, 2)
    assert [tokens for _, tokens in attempt.deliveries] == [1, 1]
    assert attempt.sent_s is not None
    assert attempt.head_s is not None
    assert attempt.ended_s is not None
    stamps = [result.t0, attempt.sent_s, attempt.head_s, *(at_s for at_s, _ in attempt.deliveries)]
    assert stamps == sorted(stamps)
    assert stamps[-1] <= attempt.ended_s


def test_the_first_token_counts_when_it_comes_not_when_all_is_there() -> None:  # case E13
    reached = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(STREAM_HEAD, chunk(text("one")))
        assert reached.wait(PATIENCE_S)
        peer.send(chunk(text(" two", "length")), chunk(DONE), b"0\r\n\r\n")

    class Noting(AnswerReader):
        def read(self, body: bytes, received_s: float) -> None:
            super().read(body, received_s)
            reached.set()

    with pytest.MonkeyPatch.context() as patch, ScriptedServer(script) as server:
        patch.setattr(client, "AnswerReader", Noting)
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    (first_s, _), (last_s, _) = attempt.deliveries
    assert first_s < last_s


def test_an_answer_ends_with_its_message_not_with_done() -> None:
    went_on = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(STREAM_HEAD, chunk(text("one", "stop")), chunk(DONE))
        assert not went_on.is_set()
        peer.send(b"0\r\n\r\n")
        peer.request()
        went_on.set()
        peer.send(TWO_TOKENS)

    with ScriptedServer(script) as server:
        result = looped(server.endpoint(), 1, bodies(2))
    assert [attempt.failure for attempt in last_tries(result)] == [None, None]
    assert result.connections == 1


def test_a_server_that_closes_after_each_answer_works_too() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", text("one", "stop"), usage(1), DONE
        )

    with ScriptedServer(script) as server:
        result = looped(server.endpoint(), 1, bodies(3))
    assert [attempt.output_tokens for attempt in last_tries(result)] == [1, 1, 1]
    assert result.connections == server.accepted == 3


def test_an_answer_that_lacks_only_the_end_of_its_message_is_whole() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(STREAM_HEAD, chunk(text("one", "stop")), chunk(usage(1)), chunk(DONE))

    with ScriptedServer(script) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    assert attempt.failure is None


def test_the_request_carries_its_body_and_headers() -> None:
    seen: list[tuple[object, bool]] = []

    def script(peer: Peer) -> None:
        body = peer.request()
        seen.append((body, "\r\nAuthorization: Bearer key" in peer.head))
        peer.send(TWO_TOKENS)

    with ScriptedServer(script) as server:
        played(server.endpoint(("Authorization", "Bearer key")), [0.0])
    assert seen == [({"i": 0}, True)]


def test_a_body_larger_than_the_system_takes_at_once_goes_out_whole() -> None:
    large = b'{"prompt": "%b"}' % (b"x" * 16_000_000)
    seen: list[int] = []

    def script(peer: Peer) -> None:
        seen.append(len(peer.request()["prompt"]))
        peer.send(TWO_TOKENS)

    with ScriptedServer(script) as server:
        (attempt,) = last_tries(looped(server.endpoint(), 1, [large]))
    assert attempt.failure is None
    assert seen == [16_000_000]


def test_a_refusal_before_the_whole_request_was_read_is_a_refusal() -> None:
    large = b'{"prompt": "%b"}' % (b"x" * 16_000_000)

    def script(peer: Peer) -> None:
        peer.send(whole("413 Content Too Large", {"error": {"message": "too long"}}, ["Connection: close"]))
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        (attempt,) = last_tries(looped(server.endpoint(), 1, [large]))
    assert (attempt.failure, attempt.status_code, attempt.error) == (Failure.STATUS, 413, "too long")


def test_what_nobody_need_understand_at_once_is_not_kept_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "MOST_HELD_BYTES", 0)
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        assert [attempt.output_tokens for attempt in last_tries(played(server.endpoint(), [0.0] * 3))] == [
            2,
            2,
            2,
        ]


def test_chunks_of_two_tokens_are_taken_for_what_they_are() -> None:  # case E11
    answer = stream(text("a b"), text(" c d"), text(" e f", "length"), usage(6), DONE)
    with ScriptedServer(answering(answer)) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    assert [tokens for _, tokens in attempt.deliveries] == [2, 2, 2]


# --- connections


def test_connections_are_reused() -> None:
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        result = looped(server.endpoint(), 1, bodies(5))
        assert len(result.requests) == 5
        assert result.connections == server.accepted == 1


def test_a_burst_finds_its_connections_open() -> None:
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        result = played(server.endpoint(), [0.0] * 16)
        assert result.connections == server.accepted == 16
    assert result.peak_outstanding == 16
    assert [request.inflight for request in result.requests] == list(range(16))


def test_a_connection_closed_while_it_was_idle_is_replaced() -> None:  # the usual race of keep-alive
    closed = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(TWO_TOKENS)
        if not peer.number:
            peer.reset()
            closed.set()
        else:
            peer.wait_for_close()

    class Waiting(HttpClient):
        def _send_due(self) -> None:
            if self._n_sent == 1 and not self._outstanding:
                assert closed.wait(PATIENCE_S)  # so that the second request goes to a connection that is gone
            super()._send_due()

    with ScriptedServer(script) as server:
        load = Load(arrival="closed", max_concurrency=1)
        with Waiting(server.endpoint(), load, None, bodies(2), Never(), seed=1) as it:
            result = it.play()
    assert [len(request.tries) for request in result.requests] == [1, 1]
    assert [attempt.failure for attempt in last_tries(result)] == [None, None]
    assert result.connections == 2


def test_a_fresh_connection_that_is_reset_is_no_race() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.reset()

    with ScriptedServer(script) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
        assert server.accepted == 1
    assert attempt.failure in (Failure.RESET, Failure.CLOSED)


def test_a_reset_amid_an_answer_is_no_race() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(TWO_TOKENS)
        peer.request()
        peer.send(STREAM_HEAD, chunk(text("one")))

    with ScriptedServer(script) as server:
        first, second = last_tries(looped(server.endpoint(), 1, bodies(2)))
    assert first.failure is None
    assert second.failure is Failure.CLOSED
    assert len(second.deliveries) == 1  # what had come is kept


# --- failures


def closing(*pieces: bytes) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(*pieces)

    return script


@pytest.mark.parametrize(
    ("script", "failure", "status_code", "n_deliveries"),
    [
        (closing(FULL), Failure.STATUS, 429, 0),
        (closing(whole("500 Oops", {"error": {"message": "x"}})), Failure.STATUS, 500, 0),
        (closing(b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\ncut"), Failure.STATUS, 503, 0),
        (
            closing(stream(text("one"), event(error={"message": "x"}), DONE)),
            Failure.STREAM_ERROR,
            200,
            1,
        ),
        (closing(STREAM_HEAD, chunk(text("one")), b"zz\r\n"), Failure.BAD_ANSWER, 200, 1),
        (closing(b"SSH-2.0-OpenSSH\r\n"), Failure.BAD_ANSWER, None, 0),
        (closing(stream(b"data: {\n\n")), Failure.BAD_ANSWER, 200, 0),
        (closing(STREAM_HEAD, chunk(text("one"))), Failure.CLOSED, 200, 1),
        (closing(stream(text("one"))), Failure.CLOSED, 200, 1),
        (closing(STREAM_HEAD[:20]), Failure.CLOSED, None, 0),
        (closing(), Failure.CLOSED, None, 0),
    ],
)
def test_every_failure_has_its_name_and_keeps_what_came(  # cases D7, D12
    script: Callable[[Peer], None], failure: Failure, status_code: int | None, n_deliveries: int
) -> None:
    with ScriptedServer(script) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    assert (attempt.failure, attempt.status_code) == (failure, status_code)
    assert len(attempt.deliveries) == n_deliveries
    assert attempt.error
    assert attempt.ended_s is not None


def test_a_refusal_says_why_and_for_how_long() -> None:
    with ScriptedServer(answering(FULL)) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    assert (attempt.reject_reason, attempt.retry_after_s, attempt.error) == ("max_inflight", 2.0, "full")


def test_an_answer_that_is_none_does_not_go_on_for_ever() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(STREAM_HEAD, chunk(b"data: {\n\n" + b"data: x\n\n" * 4000))
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    assert attempt.failure is Failure.BAD_ANSWER


def test_nobody_listening_is_refused() -> None:
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        endpoint = server.endpoint()
    (attempt,) = last_tries(played(endpoint, [0.0]))
    assert attempt.failure is Failure.REFUSED
    assert attempt.sent_s is not None
    assert attempt.head_s is None


def test_a_host_that_is_not_found_is_told_for_every_request() -> None:
    result = played(Endpoint("http", "no-such-host.invalid", 80, "/v1/completions"), [0.0, 0.0])
    assert [attempt.failure for attempt in last_tries(result)] == [Failure.RESOLVE, Failure.RESOLVE]


# --- deadlines


def test_a_server_that_does_not_answer_is_given_up() -> None:
    gone = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        try:
            peer.wait_for_close()
        finally:
            gone.set()

    with ScriptedServer(script) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0], timeout_s=0.05))
        assert gone.wait(PATIENCE_S)
    assert attempt.failure is Failure.TIMEOUT
    assert attempt.sent_s is not None
    assert attempt.ended_s is not None
    assert attempt.ended_s - attempt.sent_s >= 0.05


def test_what_came_before_the_deadline_is_kept() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(STREAM_HEAD, chunk(text("one")), chunk(text(" two")))
        peer.wait_for_close()

    with ScriptedServer(script) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0], timeout_s=0.2))
    assert (attempt.failure, attempt.status_code, len(attempt.deliveries)) == (Failure.TIMEOUT, 200, 2)
    assert attempt.output_tokens is None


def test_a_deadline_of_one_request_leaves_the_others_alone() -> None:
    def script(peer: Peer) -> None:
        while True:
            if peer.request()["i"] == 1:
                peer.wait_for_close()
            peer.send(TWO_TOKENS)

    with ScriptedServer(script) as server:
        result = played(server.endpoint(), [0.0, 0.0, 0.0], timeout_s=0.2)
    assert [a.failure for a in last_tries(result)] == [None, Failure.TIMEOUT, None]


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
        with Releasing(server.endpoint(), load, [0.0] * 3, bodies(3), Never(), seed=1) as it:
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
    assert all(request.scheduled_s < 0.1 for request in result.requests)


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
    assert policy.asked == [(429, 1), (429, 2)]
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

    with ScriptedServer(script) as server, pytest.raises(KeyboardInterrupt):
        played(server.endpoint(), [0.0] * 4)
    assert threading.active_count() == threads
    assert gc.isenabled()


def test_the_limit_of_open_files_is_what_it_was() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        played(server.endpoint(), [0.0])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_a_client_that_has_nothing_to_do_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:  # case K4
    waits: list[float | None] = []
    ready = Pool.ready

    def noted(self: Pool, wait_s: float | None) -> list[Connection]:
        waits.append(wait_s)
        return ready(self, wait_s)

    monkeypatch.setattr(Pool, "ready", noted)
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        played(server.endpoint(), [0.0, 0.3])
    assert len(waits) < 40  # one a read and a deadline, whatever the time between


def test_nothing_to_send_is_nothing_played() -> None:
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        result = played(server.endpoint(), [])
    assert result.requests == []
    assert result.peak_outstanding == 0
