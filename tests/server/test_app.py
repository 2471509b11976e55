"""The routes, on a scripted engine whose tokens are letters: what is answered, and that every slot comes back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from roseinfer.executor import StepPlan
from tests.scripted import ScriptedEngine
from tests.server.serving import (
    Served,
    an_app,
    ask,
    chat,
    complete,
    error_of,
    events_of,
    manager_of,
    served,
    text_of,
)


class Held:
    """An engine whose steps wait until they are let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.engine = ScriptedEngine(self._compute)

    def _compute(self, _plan: StepPlan) -> None:
        assert self.go_on.wait(60)


@contextmanager
def held(**options: Any) -> Iterator[tuple[Held, Served]]:
    one = Held()
    with served(one.engine, **options) as server:
        try:
            yield one, server
        finally:
            one.go_on.set()


def wait_for_inflight(server: Served, n: int) -> None:
    seen = threading.Event()
    for _ in range(6000):  # other threads' progress shows nowhere else
        if server.manager.inflight == n:
            return
        seen.wait(0.01)
    raise AssertionError(f"{server.manager.inflight} in flight, not {n}")


# Answers.


def test_a_completion_comes_whole() -> None:
    with an_app() as app:
        answer = complete(app, max_tokens=5).json()
    assert answer["choices"][0]["text"] == "abcde"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}


def test_a_stream_joins_to_the_same_text_and_its_parts_to_its_times() -> None:  # case E15
    with an_app() as app:
        answer = complete(app, max_tokens=5, stream=True, stream_options={"include_usage": True})
    events = events_of(answer.text)
    assert text_of(events) == "abcde"
    assert events[-1]["usage"]["completion_tokens"] == 5
    timings = events[-1]["timings"]
    assert timings["prompt_tokens"] == 1
    assert all(timings[name] >= 0 for name in ("queue_s", "prefill_s", "decode_s"))


def test_a_chat_streams() -> None:
    with an_app() as app:
        answer = chat(app, max_tokens=4, stream=True)
    assert text_of(events_of(answer.text)) == "abcd"


def test_a_prompt_may_be_token_ids() -> None:
    with an_app() as app:
        answer = complete(app, prompt=[5, 6, 7], max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_three_tokens_is_not_shown(stream: bool) -> None:  # case B11
    with an_app() as app:
        answer = complete(app, max_tokens=20, stop=["def"], stream=stream)
    text = text_of(events_of(answer.text)) if stream else answer.json()["choices"][0]["text"]
    assert text == "abc"


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 3), ("logprobs", 2), ("best_of", 2), ("echo", True), ("suffix", "x"), ("presence_penalty", 0.5)],
)
def test_what_is_not_served_is_refused_by_name(name: str, value: object) -> None:  # cases A26, B29
    with an_app() as app:
        answer = complete(app, **{name: value})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name


@pytest.mark.parametrize("value", [0, -1, 1.5, "8"])
def test_a_wrong_max_tokens_fails_alone(value: object) -> None:  # case B14
    with an_app() as app:
        answer = complete(app, max_tokens=value)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "max_tokens"
        assert complete(app, max_tokens=1).status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b'{"prompt": 1}', b"\xff\xfe"])
def test_a_malformed_body_is_a_400_in_the_right_shape(content: bytes) -> None:  # case J10
    with an_app() as app:
        headers = {"Content-Type": "application/json"}
        answer = ask(app, "POST", "/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert error_of(answer)["message"]


def test_a_prompt_that_can_never_fit_is_a_400_and_takes_no_slot() -> None:  # cases A15, A17
    with an_app() as app:
        answer = complete(app, prompt=[1] * 4090, max_tokens=100)
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "context_length_exceeded"
        assert manager_of(app).inflight == 0


def test_without_the_key_nothing_but_health_is_answered() -> None:
    with an_app(api_key="secret") as app:
        assert complete(app).status_code == 401
        assert ask(app, "GET", "/metrics").status_code == 401
        assert ask(app, "GET", "/health").status_code == 200
        good = {"Authorization": "Bearer secret"}
        assert ask(app, "GET", "/v1/models", headers=good).json()["data"][0]["object"] == "model"


# Refusals.


@pytest.mark.parametrize("stream", [False, True])
def test_over_the_limit_a_429_comes_before_any_stream(stream: bool) -> None:  # cases A14, J6, J7, J9
    with held(max_inflight_requests=1) as (_, server):
        first = server.send({"prompt": "x", "max_tokens": 2})
        wait_for_inflight(server, 1)
        answer = complete(server.app, stream=stream)
        assert answer.status_code == 429
        error = error_of(answer)
        assert (error["limit"], error["inflight"], error["param"]) == (1, 1, None)
        assert error["reason"] == answer.headers["x-roseinfer-reason"] == "max_inflight"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert int(answer.headers["retry-after-ms"]) >= 1
        assert ask(server.app, "GET", "/health").status_code == 200
        assert "roseinfer" in ask(server.app, "GET", "/metrics").text
        first.close()


def test_limit_and_depth_are_two_figures() -> None:  # case A6
    with held(max_inflight_requests=2) as (_, server):
        connections = [server.send({"prompt": "x"}) for _ in range(2)]
        wait_for_inflight(server, 2)
        error = error_of(complete(server.app))
        assert (error["limit"], error["inflight"]) == (2, 2)
        for connection in connections:
            connection.close()


def test_of_256_connections_at_limit_64_exactly_64_stream() -> None:
    with held(max_inflight_requests=64) as (one, server):
        body = {"prompt": "x", "max_tokens": 8, "stream": True}
        connections = [server.send(body) for _ in range(256)]
        refused = 0
        waiting: list[socket.socket] = []
        wait_for_inflight(server, 64)
        for connection in connections:
            connection.setblocking(False)
        for _ in range(6000):
            waiting = []
            for connection in connections:
                try:
                    head = connection.recv(4096)
                except BlockingIOError:
                    waiting.append(connection)
                    continue
                assert head.startswith(b"HTTP/1.1 429 ")
                refused += 1
                connection.close()
            connections = waiting
            if refused == 192:
                break
            one.go_on.wait(0.01)
        assert (refused, len(waiting)) == (192, 64)
        one.go_on.set()
        for connection in waiting:
            connection.settimeout(60)
            received = b""
            while b"[DONE]" not in received:
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200 ")
            connection.close()
        wait_for_inflight(server, 0)


# Clients that leave.


def test_clients_that_reset_leave_no_slot_taken() -> None:  # case A3
    with held(max_inflight_requests=None) as (one, server):
        for _ in range(200):
            server.send({"prompt": "x", "stream": True}).close()
        one.go_on.set()  # a request is dropped when the step that it is in ends
        wait_for_inflight(server, 0)
        assert complete(server.app, max_tokens=2).json()["choices"][0]["text"] == "ab"


def test_a_client_that_leaves_in_the_middle_frees_its_slot() -> None:  # case B10
    with served() as server:
        connection = server.send({"prompt": "x", "max_tokens": 4000, "stream": True})
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        connection.close()
        wait_for_inflight(server, 0)


def test_an_engine_that_fails_is_a_500_without_its_inside() -> None:  # case B16
    def fail(_plan: StepPlan) -> None:
        raise RuntimeError("secret detail")

    with an_app(ScriptedEngine(fail)) as app:
        answer = complete(app, stream=True)
        assert answer.status_code == 500
        assert "secret detail" not in answer.text
        assert manager_of(app).inflight == 0


def test_a_server_that_drains_finishes_what_it_took_and_refuses_the_rest() -> None:
    with held(max_inflight_requests=8) as (one, server):
        first = server.send({"prompt": "x", "max_tokens": 3})
        wait_for_inflight(server, 1)
        server.end()
        for _ in range(6000):
            if ask(server.app, "GET", "/ready").status_code == 503:
                break
            one.go_on.wait(0.01)
        late = complete(server.app)
        assert late.status_code == 503
        assert error_of(late)["reason"] == "draining"
        one.go_on.set()
        first.settimeout(60)
        received = b""
        while b'"abc"' not in received:
            received += first.recv(65536)
        assert received.startswith(b"HTTP/1.1 200")
        first.close()
        server.thread.join(60)
        assert not server.thread.is_alive()


# The SDK that most clients are.


def test_the_openai_sdk_streams_and_sees_a_rate_limit() -> None:  # case J10
    with (
        served(max_inflight_requests=1) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model="roseinfer", prompt="x", max_tokens=5, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "abcde"
        said = client.chat.completions.create(
            model="roseinfer", messages=[{"role": "user", "content": "x"}], max_tokens=3
        )
        assert said.choices[0].message.content == "abc"
        wait_for_inflight(server, 0)
        ticket = server.manager.admission.reserve(0.0, 1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="roseinfer", prompt="x")
        server.manager.admission.release(ticket, 0.0)
        assert caught.value.code == "max_inflight"
