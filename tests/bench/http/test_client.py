"""The client of a server: what it makes of answers, on which connections, when it gives up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from roseinfer.bench.http import client, incoming
from roseinfer.bench.http.client import HttpClient
from roseinfer.bench.http.exchange import Endpoint, Failure
from roseinfer.bench.http.incoming import Incoming
from roseinfer.bench.load import Load
from tests.bench.http.playing import Never, bodies, last_tries, looped, played
from tests.bench.http.scripted_server import (
    DONE,
    FULL,
    PATIENCE_S,
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
        peer.send(STREAM_HEAD + chunk(text("one")))
        assert reached.wait(PATIENCE_S)
        peer.send(chunk(text(" two", "length")), chunk(DONE), b"0\r\n\r\n")

    class Noting(Incoming):
        def read(self, data: bytes, received_s: float) -> bool:
            has_ended = super().read(data, received_s)
            reached.set()
            return has_ended

    with pytest.MonkeyPatch.context() as patch, ScriptedServer(script) as server:
        patch.setattr(client, "Incoming", Noting)
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
    monkeypatch.setattr(client, "MOST_WAITING_BYTES", 0)
    with ScriptedServer(answering(TWO_TOKENS)) as server:
        assert [attempt.output_tokens for attempt in last_tries(played(server.endpoint(), [0.0] * 3))] == [
            2,
            2,
            2,
        ]


def test_chunks_of_two_tokens_are_not_guessed() -> None:  # case E11
    answer = stream(text("a b"), text(" c d"), text(" e f", "length"), usage(6), DONE)
    with ScriptedServer(answering(answer)) as server:
        (attempt,) = last_tries(played(server.endpoint(), [0.0]))
    assert [tokens for _, tokens in attempt.deliveries] == [None, None, None]


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


@pytest.mark.parametrize("end", [Peer.reset, Peer.close])
def test_a_connection_closed_while_it_was_idle_is_replaced(end: Callable[[Peer], None]) -> None:
    """The usual race of keep-alive. Both sends are seen."""
    closed = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(TWO_TOKENS)
        if not peer.number:
            end(peer)
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
        with Waiting(server.endpoint(), load, None, bodies(2), Never()) as it:
            result = it.play()
    assert [len(request.tries) for request in result.requests] == [1, 2]
    assert [attempt.failure for attempt in last_tries(result)] == [None, None]
    assert result.requests[1].tries[0].error == client.SENT_AGAIN
    assert (result.resent, result.connections) == (1, 2)


@pytest.mark.parametrize("end", [Peer.reset, Peer.close])
def test_a_server_that_sheds_load_by_closing_is_not_asked_twice(end: Callable[[Peer], None]) -> None:
    """It had the request, on a connection that was used before and may have been idle."""
    taken = []

    def script(peer: Peer) -> None:
        taken.append(peer.request())
        peer.send(TWO_TOKENS)
        taken.append(peer.request())
        end(peer)

    with ScriptedServer(script) as server:
        result = looped(server.endpoint(), 1, bodies(2))
    assert [body["i"] for body in taken] == [0, 1]
    assert [len(request.tries) for request in result.requests] == [1, 1]
    assert last_tries(result)[1].failure in (Failure.RESET, Failure.CLOSED)
    assert result.resent == 0


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


def test_an_answer_that_is_none_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "MOST_HELD_BYTES", 1000)

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
        (attempt,) = last_tries(played(server.endpoint(), [0.0], timeout_s=0.5))
    assert (attempt.failure, attempt.status_code, len(attempt.deliveries)) == (Failure.TIMEOUT, 200, 2)
    assert attempt.output_tokens is None


def test_a_deadline_of_one_request_leaves_the_others_alone() -> None:
    def script(peer: Peer) -> None:
        while True:
            if peer.request()["i"] == 1:
                peer.wait_for_close()
            peer.send(TWO_TOKENS)

    with ScriptedServer(script) as server:
        result = played(server.endpoint(), [0.0, 0.0, 0.0], timeout_s=0.5)
    assert [a.failure for a in last_tries(result)] == [None, Failure.TIMEOUT, None]
