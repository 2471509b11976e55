"""Clients that leave, stall or come in crowds, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import selectors
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from roseinfer.manager import SchedulerManager
from roseinfer.server.connection import MOST_QUEUED, Connection
from tests.scripted import ScriptedEngine, StepGate
from tests.server.serving import (
    PacedSteps,
    Served,
    an_app,
    manager_of,
    read_until,
    request_bytes,
    served,
    stream_to,
    until,
)

STREAM: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "stream": True}


def reset(connection: socket.socket) -> None:
    """Closes with a RST, as a killed client does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def answer(one: Served, **body: Any) -> bytes:
    """The whole answer to a request that goes well."""
    connection = one.send({"prompt": "x", "max_tokens": 4, "temperature": 0, **body})
    data = read_until(connection, b"}}")
    connection.close()
    return data


def holds_nothing(manager: SchedulerManager) -> bool:
    return (
        manager.inflight == 0 and manager.running == 0 and manager._core.scheduler.kv_cache.used_tokens == 0
    )


def until_all_are_gone(one: Served) -> None:
    """Also those that the kernel still holds: who comes after them is taken after them."""
    with one.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
        read_until(connection, b'{"status":"ok"}')
    state = one.server.server_state
    until(lambda: not state.connections and not state.tasks)
    until(lambda: holds_nothing(one.manager))


def has_ended(one: Served, how: str) -> bool:
    """One request ended so."""
    return (
        f'roseinfer_requests_total{{finish_reason="{how}"}} 1.0'
        in one.app.state.service.metrics.text().decode()
    )


# ---- clients that leave ----


def test_clients_that_reset_before_the_body_leave_nothing_behind() -> None:  # case A3
    with served(max_inflight_requests=8) as one:
        for _ in range(1000):
            reset(one.send(STREAM))
        until_all_are_gone(one)
        assert b'"text": "abcd"' in answer(one)
        assert one.manager.counts().peak_inflight <= 8


def test_clients_that_reset_at_any_byte_of_their_request_leave_nothing_behind() -> None:  # case A3
    with served(max_inflight_requests=8) as one:
        whole = len(b"POST /v1/completions HTTP/1.1") + 150
        for n_bytes in range(0, whole, 7):
            connection = one.connect()
            connection.sendall(request_bytes(STREAM)[:n_bytes])
            reset(connection)
        until_all_are_gone(one)
        assert b'"text": "abcd"' in answer(one)


def test_a_client_that_gives_up_while_it_waits_frees_its_slot_and_costs_no_prefill() -> None:  # case A18
    steps = PacedSteps()
    engine = ScriptedEngine(steps)
    with served(engine, max_inflight_requests=2, max_batch_size=1) as one, steps:
        running = one.send(STREAM)
        steps.entered.acquire()
        waiting = one.send(STREAM)
        until(lambda: one.manager.inflight == 2)
        reset(waiting)
        until(lambda: has_ended(one, "client_gone"))
        steps.permits.release()  # a request is dropped between steps
        until(lambda: one.manager.inflight == 1)
        running.close()
        steps.run_free()
        until(lambda: holds_nothing(one.manager))
    assert len({request_id for plan in engine.plans for request_id, _, _ in plan}) == 1


def test_a_client_that_leaves_before_its_first_token_ends_its_request() -> None:
    steps = PacedSteps()
    with served(ScriptedEngine(steps), max_inflight_requests=1) as one, steps:
        connection = one.send(STREAM)
        steps.entered.acquire()
        reset(connection)
        until(lambda: has_ended(one, "client_gone"))
        steps.permits.release()
        until(lambda: holds_nothing(one.manager))


@pytest.mark.parametrize("leave", [reset, socket.socket.close])
def test_generation_stops_within_two_steps_of_its_client(
    leave: Callable[[socket.socket], None],
) -> None:  # case B10
    steps = PacedSteps()
    engine = ScriptedEngine(steps)
    with served(engine, max_inflight_requests=1) as one, steps:
        connection = one.send(STREAM)
        steps.permits.release()
        read_until(connection, b'"text": "a"')
        leave(connection)
        until(lambda: has_ended(one, "client_gone"))
        n_steps = len(engine.plans)
        steps.run_free()
        until(lambda: holds_nothing(one.manager))
        assert len(engine.plans) <= n_steps + 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_though_it_has_sent_another_behind_it(stream: bool) -> None:
    """Of the whole answer nothing can be written meanwhile: it is noticed because the connection is still read."""
    steps = PacedSteps()
    with served(ScriptedEngine(steps), max_inflight_requests=1) as one, steps:
        request = request_bytes({**STREAM, "stream": stream})
        connection = one.send({**STREAM, "stream": stream})
        until(lambda: "queue_wait_seconds_count 1.0" in one.app.state.service.metrics.text().decode())
        connection.sendall(request)
        until(lambda: len(only_connection(one).pipeline) == 1)
        reset(connection)
        until(lambda: has_ended(one, "client_gone"))
        steps.run_free()
        until(lambda: holds_nothing(one.manager))


def only_connection(one: Served) -> Connection:
    (connection,) = one.server.server_state.connections
    assert isinstance(connection, Connection)
    return connection


def test_of_requests_sent_at_once_only_some_are_read_ahead() -> None:
    steps = PacedSteps()
    with served(ScriptedEngine(steps)) as one, steps, one.send(STREAM) as connection:
        steps.entered.acquire()
        protocol = only_connection(one)
        for _ in range(MOST_QUEUED):
            connection.sendall(request_bytes(STREAM))
        until(lambda: len(protocol.pipeline) == MOST_QUEUED)
        assert not protocol.flow.read_paused
        connection.sendall(request_bytes(STREAM))
        until(lambda: protocol.flow.read_paused)


def test_a_client_that_leaves_a_whole_answer_ends_its_request() -> None:
    steps = PacedSteps()
    with served(ScriptedEngine(steps), max_inflight_requests=1) as one, steps:
        connection = one.send({**STREAM, "stream": False})
        steps.entered.acquire()
        connection.close()
        until(lambda: has_ended(one, "client_gone"))
        steps.run_free()
        until(lambda: holds_nothing(one.manager))


# ---- clients that stall ----


def test_a_reader_that_stalls_is_closed_and_delays_nobody() -> None:  # case B23
    engine = ScriptedEngine(script="a" * 40)
    engine.max_model_len = 1 << 20
    with served(
        engine, max_inflight_requests=2, write_timeout_s=0.5, send_buffer=4096, kv_cache_tokens=1 << 18
    ) as one:
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(one.address)
        stalled.sendall(request_bytes({**STREAM, "max_tokens": 100_000}))
        assert b'"text": "aaaa"' in answer(one)  # beside it
        until(lambda: holds_nothing(one.manager))
        until(lambda: not one.server.server_state.connections)
        stalled.close()


def test_a_write_that_does_not_end_ends_its_request() -> None:
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Future()

    with an_app(write_timeout_s=0.01) as app:
        asyncio.run(stream_to(send, app, STREAM))
        until(lambda: holds_nothing(manager_of(app)))
        assert 'finish_reason="stalled_reader"} 1.0' in app.state.service.metrics.text().decode()


def test_a_reader_that_comes_back_in_time_misses_nothing() -> None:
    engine = ScriptedEngine()
    with served(engine, send_buffer=4096) as one:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(one.address)
        connection.sendall(
            request_bytes({"prompt": "x", "max_new_tokens": 1000, "stream": True}).replace(
                b"/v1/completions", b"/generate"
            )
        )
        until(lambda: one.manager.running == 0 and len(engine.plans) > 0)
        data = read_until(connection, b"\r\n0\r\n\r\n")
        connection.close()
        head, _, body = data.partition(b"\r\n\r\n")
        assert b"200 OK" in head
        assert unchunked(body) == (engine.script * 40)[:1000].encode()


def unchunked(body: bytes) -> bytes:
    text = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        text += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return text


# ---- crowds ----


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for a crowd's sockets at both ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2048 if hard == resource.RLIM_INFINITY else min(2048, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_of_a_crowd_exactly_as_many_are_let_in_as_there_are_slots() -> None:  # cases A1, A2, A14
    gate = StepGate()
    engine = ScriptedEngine(gate)
    with served(engine, max_inflight_requests=64, max_batch_size=64) as one, contextlib.ExitStack() as end:
        end.callback(gate.opened.set)
        for _ in range(20):
            statuses = crowd(one, gate)
            assert statuses == {200: 64, 429: 192}
            until(lambda: holds_nothing(one.manager))
            gate.opened.clear()
        assert one.manager.counts().peak_inflight == 64


def crowd(one: Served, gate: StepGate) -> Counter[int]:
    """256 connections that send at once; none of those let in ends before all the others were refused."""
    connections = [one.connect() for _ in range(256)]
    for connection in connections:
        connection.sendall(request_bytes({**STREAM, "max_tokens": 8}))
    statuses: Counter[int] = Counter()
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while statuses.total() < len(connections):
            if statuses[429] == 192:
                gate.opened.set()  # from here on all others get their heads
            ready = selector.select(timeout=20)
            assert ready, f"no further answer after {statuses}"
            for key, _ in ready:
                statuses[int(key.fileobj.recv(1 << 16)[9:12])] += 1  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
    gate.opened.set()
    for connection in connections:
        reset(connection)
    return statuses
