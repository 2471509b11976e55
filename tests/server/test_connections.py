"""Clients that leave, stall or come in crowds, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from roseinfer.executor import StepPlan
from roseinfer.manager import SchedulerManager
from tests.scripted import ScriptedEngine, StepGate
from tests.server.serving import Served, an_app, manager_of, request_bytes, served, stream_to, until

STREAM: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "stream": True}


def reset(connection: socket.socket) -> None:
    """Closes with a RST, as a killed client does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = connection.recv(1 << 16)
        assert piece, f"closed before {mark!r}: {data[-200:]!r}"
        data += piece
    return data


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


class PacedSteps:
    """Steps that wait for a permit each until `run_free`."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.free = False
        self.entered = threading.Semaphore(0)

    def __call__(self, plan: StepPlan) -> None:
        self.entered.release()
        if not self.free:
            self.permits.acquire()

    def run_free(self) -> None:
        self.free = True
        self.permits.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.run_free()  # else nothing that waits for the engine would end


def has_ended(one: Served, how: str) -> bool:
    """One request ended so."""
    return (
        f'roseinfer_requests_total{{finish_reason="{how}"}} 1.0'
        in one.app.state.service.metrics.text().decode()
    )


# ---- clients that leave ----


def test_clients_that_reset_before_the_body_leave_nothing_behind() -> None:  # case A3
    with served(max_inflight_requests=8) as one:
        for _ in range(200):
            reset(one.send(STREAM))
        until(lambda: holds_nothing(one.manager))
        assert b'"text": "abcd"' in answer(one)
        assert one.manager.counts().peak_inflight <= 8


def test_clients_that_reset_at_any_byte_of_their_request_leave_nothing_behind() -> None:  # case A3
    with served(max_inflight_requests=8) as one:
        whole = len(b"POST /v1/completions HTTP/1.1") + 150
        for n_bytes in range(0, whole, 7):
            connection = one.connect()
            connection.sendall(request_bytes(STREAM)[:n_bytes])
            reset(connection)
        until(lambda: holds_nothing(one.manager))
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


def test_a_client_that_leaves_ends_its_request_though_it_has_sent_another_behind_it() -> None:
    steps = PacedSteps()
    with served(ScriptedEngine(steps), max_inflight_requests=1) as one, steps:
        connection = one.connect()
        connection.sendall(2 * request_bytes(STREAM))
        steps.permits.release()
        read_until(connection, b'"text": "a"')
        reset(connection)

        def is_noticed() -> bool:
            steps.permits.release()  # the connection is not read meanwhile: a token must be written
            return has_ended(one, "client_gone")

        until(is_noticed)
        steps.run_free()
        until(lambda: holds_nothing(one.manager))


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


def crowd(one: Served, gate: StepGate) -> dict[int, int]:
    """256 connections that send at once; none of those let in ends before all the others were refused."""
    connections = [one.connect() for _ in range(256)]
    for connection in connections:
        connection.sendall(request_bytes({**STREAM, "max_tokens": 8}))
    statuses: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while sum(statuses.values()) < len(connections):
            if statuses.get(429) == 192:
                gate.opened.set()  # from here on the others get their heads
            for key, _ in selector.select(timeout=60):
                status = int(key.fileobj.recv(1 << 16)[9:12])  # type: ignore[union-attr]
                statuses[status] = statuses.get(status, 0) + 1
                selector.unregister(key.fileobj)
    for connection in connections:
        reset(connection)
    return statuses
