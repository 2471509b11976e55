"""A load shared by several processes: what they play together is what one would."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from roseinfer.bench.http.exchange import HttpAttempt, HttpRequest
from roseinfer.bench.http.workers import _count_outstanding
from roseinfer.errors import InputError, RunError
from tests.bench.http.playing import Never, last_tries, played
from tests.bench.http.scripted_server import Peer, ScriptedServer, stream, text, usage


def test_workers_play_one_schedule_together() -> None:
    seen: list[int] = []
    lock = threading.Lock()

    def script(peer: Peer) -> None:
        while True:
            number = peer.request()["i"]
            with lock:
                seen.append(number)
            peer.send(stream(*[text("word")] * number, text("last", "stop"), usage(number + 1)))

    due_s = [0.005 * i for i in range(7)]
    with ScriptedServer(script) as server:
        result = played(server.endpoint(), due_s, client_workers=2)
    assert sorted(seen) == list(range(7))
    assert [request.scheduled_s for request in result.requests] == due_s
    # Each request has its own answer, whichever process got it.
    assert [attempt.output_tokens for attempt in last_tries(result)] == list(range(1, 8))
    for request in result.requests:
        assert request.tries[0].sent_s is not None
        assert request.tries[0].sent_s >= result.t0 + request.scheduled_s  # on the clock of this process
    assert result.connections >= 2
    assert 0 < result.client_load.busy_share <= result.client_load.busy_share_max_100ms <= 1
    assert not multiprocessing.active_children()


def test_workers_cannot_share_a_cap_or_a_closed_loop() -> None:
    with ScriptedServer(lambda peer: None) as server:
        with pytest.raises(InputError, match="--client-workers 2"):
            played(server.endpoint(), [0.0], max_concurrency=4, client_workers=2)
        assert server.accepted == 0


class Mute(Never):
    """A policy that does not survive the way to another process."""

    def __reduce__(self) -> str:
        raise TypeError("no way")


def test_a_share_that_cannot_be_handed_over_is_told() -> None:
    with ScriptedServer(lambda peer: None) as server, pytest.raises(RunError, match="no way"):
        played(server.endpoint(), [0.0, 0.0], policy=Mute(), client_workers=2)
    assert not multiprocessing.active_children()


class Deadly(Never):
    """A policy that ends the process it is handed over to."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (3,)


def test_a_worker_that_dies_is_told() -> None:
    with (
        ScriptedServer(lambda peer: None) as server,
        pytest.raises(RunError, match="--client-workers has died"),
    ):
        played(server.endpoint(), [0.0, 0.0], policy=Deadly(), client_workers=2)
    assert not multiprocessing.active_children()


def sent(begun_s: float, ended_s: float) -> HttpRequest:
    return HttpRequest(0.0, tries=[HttpAttempt(sent_s=begun_s, ended_s=ended_s)])


def test_what_all_workers_had_outstanding_is_counted_again() -> None:
    requests = [sent(0.0, 3.0), sent(2.0, 4.0), sent(1.0, 2.0), sent(5.0, 6.0)]
    assert _count_outstanding(requests) == 2
    assert [request.inflight for request in requests] == [0, 1, 1, 0]
