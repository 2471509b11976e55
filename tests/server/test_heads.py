"""When the head of an answer is sent, and what may still have a status of its own until then."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.executor import StepPlan
from tests.scripted import FakeClock, ScriptedEngine
from tests.server.serving import PacedSteps, Served, an_app, complete, error_of, read_until, served, until

STREAM: dict[str, Any] = {"prompt": "x", "max_tokens": 8, "temperature": 0, "stream": True}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_the_head_of_a_stream_is_sent_while_its_first_step_is_computed(path: str) -> None:
    """And nothing else: a client takes the first bytes of a body for the first token."""
    steps = PacedSteps()
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    with (
        served(ScriptedEngine(steps)) as one,
        steps,
        one.send({**prompt, "stream": True}, path) as connection,
    ):
        steps.entered.acquire()
        head = read_until(connection, b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"x-request-id: " in head
        assert head.endswith(b"\r\n\r\n")
        steps.permits.release()
        assert b"a" in read_until(connection, b"\r\n")


def late(one: Served, body: dict[str, Any], steps: PacedSteps, error: Exception) -> tuple[bytes, Any]:
    """Head and body of what a request gets that waits, and is dropped with `error`."""
    running = one.send(STREAM)
    steps.entered.acquire()
    read_until(running, b"\r\n\r\n")
    waiting = one.send(body)
    until(lambda: one.manager.inflight == 2)
    core = one.manager._core
    one.manager._command(lambda: core.fail(core.live_ids()[-1], error, one.manager._clock()))
    steps.permits.release()
    head, _, content = read_until(waiting, b"}}").partition(b"\r\n\r\n")
    steps.run_free()
    read_until(running, b"[DONE]")
    for connection in (running, waiting):
        connection.close()
    return head, json.loads(content)["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_dropped_while_it_waits_is_a_429(stream: bool) -> None:
    steps = PacedSteps()
    error = SchedulerManagerOverloadedError(limit=1, inflight=2, reason="queue-timeout", retry_after_s=2.0)
    with served(ScriptedEngine(steps), max_batch_size=1) as one, steps:
        head, found = late(one, {**STREAM, "stream": stream}, steps, error)
        metrics = one.app.state.service.metrics.text().decode()
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"x-roseinfer-reason: queue-timeout" in head
    assert b"retry-after: 2" in head
    assert (found["code"], found["reason"]) == ("queue-timeout", "queue-timeout")
    assert 'roseinfer_refusals_total{reason="queue-timeout"} 1.0' in metrics
    assert 'roseinfer_requests_total{finish_reason="refused"} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_for_too_long_is_a_429(stream: bool) -> None:
    steps, clock = PacedSteps(), FakeClock()
    with (
        served(ScriptedEngine(steps), max_batch_size=1, admission="queue-timeout:2s", clock=clock) as one,
        steps,
        one.send({"prompt": "x", "max_tokens": 8, "stream": True}) as running,
    ):
        steps.entered.acquire()
        read_until(running, b"\r\n\r\n")
        waiting = one.send({"prompt": "x", "stream": stream})
        until(lambda: one.manager.inflight == 2)
        steps.permits.release()
        steps.entered.acquire()  # the engine has seen the other
        clock.now = 3.0
        steps.permits.release()
        head, _, content = read_until(waiting, b"}}").partition(b"\r\n\r\n")
        waiting.close()
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: " in head
    assert json.loads(content)["error"]["code"] == "queue-timeout"


def test_an_engine_that_fails_at_the_first_step_ends_a_begun_stream_with_an_error() -> None:  # cases B16, D7
    steps = PacedSteps()

    def compute(plan: StepPlan) -> None:
        steps(plan)
        raise RuntimeError

    with served(ScriptedEngine(compute)) as one, steps, one.send(STREAM) as connection:
        head = read_until(connection, b"\r\n\r\n")
        steps.permits.release()
        body = read_until(connection, b"0\r\n\r\n")
        until(lambda: one.manager.inflight == 0)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b'data: {"error": ' in body
    assert b"[DONE]" not in body


def test_a_prompt_that_turns_out_too_long_has_a_status() -> None:
    """Known once it is tokenised, after it was accepted."""
    with an_app(kv_cache_tokens=256) as app:
        response = complete(app, prompt="x" * 250, max_tokens=100, stream=True)
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


def test_a_client_that_leaves_with_its_head_alone_ends_its_request() -> None:
    steps = PacedSteps()
    with served(ScriptedEngine(steps)) as one, steps:
        connection = one.send(STREAM)
        read_until(connection, b"\r\n\r\n")
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        until(lambda: not one.app.state.service._generations._live)
        steps.run_free()
        until(lambda: one.manager.inflight == 0)
