"""Everything that is not served, and how its client hears of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from roseinfer.errors import InputError, SchedulerManagerOverloadedError
from roseinfer.executor import StepPlan
from roseinfer.request import SamplingParams
from roseinfer.server.bodies import BodyLimits
from roseinfer.server.refusals import refusal_of
from tests.scripted import ScriptedEngine, ScriptedTokenizer, StepGate
from tests.server.serving import an_app, ask, chat, complete, error_of, manager_of

SECRET = "the user's own words"


def overload(retry_after_s: float | None) -> httpx.Headers:
    error = SchedulerManagerOverloadedError(
        limit=16, inflight=17, reason="inflight", retry_after_s=retry_after_s
    )
    return httpx.Headers(refusal_of(error).response().headers.items())


@contextmanager
def a_full_app(limit: int = 2, **options: Any) -> Iterator[FastAPI]:
    """All slots are taken, by requests that the engine does not end."""
    gate = StepGate()
    with an_app(ScriptedEngine(gate), max_inflight_requests=limit, **options) as app:
        for _ in range(limit):
            manager_of(app).submit([1])
        try:
            yield app
        finally:
            gate.opened.set()


# ---- over the limit ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send", [complete, chat])
def test_over_the_limit_every_route_answers_429(send: Any, stream: bool) -> None:  # cases A14, J5, J6
    with a_full_app() as app:
        response = send(app, stream=stream)
    error = error_of(response)
    assert response.status_code == 429
    assert response.headers["content-type"] == "application/json"
    assert (error["code"], error["reason"], error["param"]) == ("max_inflight", "max_inflight", None)
    assert error["type"] == "overloaded_error"


def test_the_plain_route_answers_429_as_well() -> None:  # case J6
    with a_full_app() as app:
        response = ask(app, "POST", "/generate", json={"prompt": "x", "stream": True})
    assert response.status_code == 429
    assert error_of(response)["code"] == "max_inflight"


def test_a_refusal_names_limit_and_in_flight_separately() -> None:  # case A6
    error = SchedulerManagerOverloadedError(limit=16, inflight=17, reason="inflight", retry_after_s=None)
    with a_full_app(limit=3) as app:
        body = error_of(complete(app))
    assert (body["limit"], body["inflight"]) == (3, 3)
    assert "17 in flight, limit 16" in refusal_of(error).message
    assert dict(refusal_of(error).more) == {"limit": 16, "measured": 17, "inflight": 17}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send", [complete, chat])
def test_over_the_token_budget_every_route_answers_429(send: Any, stream: bool) -> None:  # cases A7, A14, J6
    gate = StepGate()
    with an_app(ScriptedEngine(gate), admission="tokens:300") as app:
        manager_of(app).submit([1] * 250, SamplingParams(25))
        response = send(app, stream=stream, max_tokens=30)
        gate.opened.set()
    error = error_of(response)
    assert response.status_code == 429
    assert (error["code"], error["reason"], error["type"]) == ("tokens", "tokens", "overloaded_error")
    assert (error["limit"], error["measured"], error["inflight"]) == (300, 275, 1)
    assert error["requested"] > 30
    assert response.headers["x-roseinfer-reason"] == "tokens"
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[1] * 20, "x" * 20])
def test_what_exceeds_the_token_budget_by_itself_is_told_not_to_come_back(prompt: Any, stream: bool) -> None:
    """As a 429, for it is a limit of the operator's, but without a time: no waiting mends it."""
    with an_app(ScriptedEngine(), admission="tokens:30") as app:
        response = complete(app, prompt=prompt, stream=stream, max_tokens=20)
        assert manager_of(app).counts().held_tokens == 0
    error = error_of(response)
    assert response.status_code == 429
    assert (error["code"], error["reason"]) == ("tokens-never-fits", "tokens-never-fits")
    assert (error["limit"], error["requested"]) == (30, 40)
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-roseinfer-reason"] == "tokens-never-fits"
    assert "retry-after" not in response.headers


def test_a_refusal_says_when_to_come_back_and_why() -> None:  # case J7
    with a_full_app() as app:
        headers = complete(app).headers
    assert headers["retry-after"] == "1"
    assert headers["retry-after-ms"] == "1000"
    assert headers["x-roseinfer-reason"] == "max_inflight"
    assert headers["x-request-id"]


@pytest.mark.parametrize(
    ("estimate_s", "seconds", "milliseconds"),
    [
        (None, "1", "1000"),
        (0.0001, "1", "1"),
        (0.3, "1", "300"),
        (1.0, "1", "1000"),
        (2.01, "3", "2010"),
        (60.0, "60", "60000"),
        (1e9, "60", "60000"),
    ],
)
def test_retry_after_is_whole_seconds_within_a_minute(
    estimate_s: float | None, seconds: str, milliseconds: str
) -> None:  # cases J8, J9
    headers = overload(estimate_s)
    assert (headers["retry-after"], headers["retry-after-ms"]) == (seconds, milliseconds)


def test_a_full_server_is_healthy_and_measurable() -> None:  # case A14
    with a_full_app() as app:
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert ask(app, "GET", path).status_code == 200
        assert manager_of(app).counts().refused == 0


def test_a_refused_prompt_is_not_tokenised() -> None:  # case A9
    texts: list[str] = []

    class Tokenizer(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            texts.append(text)
            return super().encode(text)

        def new_decoder(self) -> Any:
            texts.append("decoder")
            return super().new_decoder()

    gate = StepGate()
    engine = ScriptedEngine(gate)
    engine.make_tokenizer = Tokenizer
    with an_app(engine, max_inflight_requests=1) as app:
        manager_of(app).submit([1])
        assert complete(app, prompt=SECRET).status_code == 429
        gate.opened.set()
    assert texts == []


def test_the_slot_is_free_when_the_answer_has_been_sent() -> None:
    with an_app(max_inflight_requests=1) as app:
        for _ in range(5):
            assert complete(app, stream=True).status_code == 200
            assert manager_of(app).inflight == 0


# ---- what cannot be served ----


@pytest.mark.parametrize("prompt", ["x" * 100, list(range(100))])
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_fit_is_a_client_error(prompt: Any, stream: bool) -> None:  # cases A15, A17
    with an_app(kv_cache_tokens=256) as app:
        response = complete(app, prompt=prompt, max_tokens=400, stream=stream)
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"
        assert "the KV cache holds 256" in error_of(response)["message"]
        assert manager_of(app).inflight == 0
        assert complete(app, prompt=prompt, max_tokens=156).status_code == 200
        assert complete(app, prompt=prompt, max_tokens=157).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_over_the_context_are_refused_before_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Their number says it already, and a copy of a million would hold up the event loop."""
    with an_app() as app:
        monkeypatch.setattr(manager_of(app), "submit", None)
        response = complete(app, prompt=[1] * 4000, max_tokens=97, stream=stream)
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"
        assert "needs 4097 tokens, the context holds 4096" in error_of(response)["message"]


def test_bodies_prompts_and_outputs_have_limits() -> None:
    limits = BodyLimits(body_bytes=1000, prompt_chars=100, output_tokens=10)
    with an_app(limits=limits) as app:
        assert complete(app, prompt="x" * 100, max_tokens=10).status_code == 200
        assert error_of(complete(app, prompt="x" * 101))["param"] == "prompt"
        assert error_of(chat(app, messages=[{"role": "user", "content": "x" * 101}]))["param"] == "messages"
        assert error_of(complete(app, max_tokens=11))["param"] == "max_tokens"
        too_large = complete(app, prompt="x" * 1000)
        assert too_large.status_code == 413
        assert error_of(too_large)["code"] == "body_too_large"


def test_a_body_of_unknown_length_has_the_same_limit() -> None:
    async def body() -> Any:
        for _ in range(100):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    with an_app(limits=BodyLimits(body_bytes=1000)) as app:
        response = ask(app, "POST", "/v1/completions", content=body(), headers=headers)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


# ---- the key ----


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer sécret", 401),
        ("Bearer secret", 200),
    ],
)
def test_a_key_is_asked_of_everything_but_the_probes(header: str | None, status: int) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    with an_app(api_key="secret") as app:
        assert ask(app, "GET", "/health").status_code == 200
        assert ask(app, "GET", "/ready").status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            response = ask(app, "GET", path, headers=headers)
            assert response.status_code == status
        if status == 401:
            assert error_of(response)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "options", [{"api_key": ""}, {"api_key": "a\nb"}, {"tokenize_workers": 0}, {"write_timeout_s": 0.0}]
)
def test_options_that_cannot_work_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught, an_app(**options):
        pass
    assert [caught.value.name] == list(options)


# ---- failures ----


def test_an_engine_that_fails_before_the_first_token_is_a_500() -> None:  # case B16
    """Of a stream the head has gone by then: tests of heads."""

    def compute(plan: StepPlan) -> None:
        raise RuntimeError(SECRET)

    with an_app(ScriptedEngine(compute), max_inflight_requests=1) as app:
        for _ in range(2):
            response = complete(app)
            assert response.status_code == 500
            assert error_of(response)["type"] == "server_error"
            assert SECRET not in response.text
            assert manager_of(app).inflight == 0


def test_an_engine_that_fails_later_ends_the_stream_with_an_error() -> None:  # case D7
    def compute(plan: StepPlan) -> None:
        if len(engine.plans) == 4:
            raise RuntimeError(SECRET)

    engine = ScriptedEngine(compute)
    with an_app(engine) as app:
        response = complete(app, stream=True)
        assert manager_of(app).inflight == 0
    assert response.status_code == 200
    assert SECRET not in response.text
    assert response.text.rstrip().splitlines()[-1].removeprefix("data: ").startswith('{"error": ')
    assert "[DONE]" not in response.text


def test_an_unexpected_error_leaves_no_trace_outside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError(SECRET)

    with an_app() as app, caplog.at_level(logging.DEBUG):
        monkeypatch.setattr(app.state.service, "accept", broken)
        response = complete(app, prompt=SECRET)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "Traceback" not in response.text
    assert "RuntimeError" in caplog.text
    assert SECRET not in response.text + caplog.text


def test_prompts_are_logged_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        with an_app() as app:
            complete(app, prompt=SECRET)
            complete(app, prompt=SECRET, n=2)
            complete(app, prompt=[SECRET, SECRET])
        assert SECRET not in caplog.text
        with an_app(log_requests=True) as app:
            complete(app, prompt=SECRET)
    assert SECRET in caplog.text
