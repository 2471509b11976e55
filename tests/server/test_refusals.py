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


@pytest.mark.parametrize("value", [0, -1, 1.5, 8.0, "8", True, [8]])
def test_max_tokens_that_is_no_positive_whole_number_is_refused(value: object) -> None:  # case B14
    with an_app() as app:
        response = complete(app, max_tokens=value)
        assert response.status_code == 400
        assert error_of(response)["param"] == "max_tokens"
        assert complete(app, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 3),
        ("n", True),
        ("best_of", 2),
        ("echo", True),
        ("logprobs", 0),
        ("logprobs", True),
        ("top_logprobs", 1),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("suffix", "end"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("min_tokens", 3),
        ("user", "me"),
        ("max_new_tokens", 5),
        ("anything_else", 0),
    ],
)
def test_a_parameter_that_is_not_served_is_named(name: str, value: object) -> None:  # cases A26, B29
    with an_app() as app:
        for response in (complete(app, **{name: value}), chat(app, **{name: value})):
            assert response.status_code == 400
            assert error_of(response)["param"] == name
            assert name in error_of(response)["message"]
        assert manager_of(app).counts().reserved == 0


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "top_logprobs": None},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "suffix": None},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": None},
        {"stop": None, "seed": None, "stream": None, "stream_options": None, "max_tokens": None},
    ],
)
def test_a_parameter_that_asks_for_what_happens_anyway_is_taken(neutral: dict[str, Any]) -> None:
    with an_app() as app:
        assert complete(app, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [0x110000]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["", "b"]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
    ],
)
def test_a_value_that_cannot_work_is_named(body: dict[str, Any], param: str) -> None:
    with an_app() as app:
        response = complete(app, **body)
        assert response.status_code == 400
        assert error_of(response)["param"] == param
        assert manager_of(app).inflight == 0


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages"),
        ([{"role": "tool", "content": "x"}], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages"),
        ([{"role": "user", "content": "x", "name": "bob"}], "name"),
    ],
)
def test_messages_that_cannot_work_are_named(messages: object, param: str) -> None:
    with an_app() as app:
        response = chat(app, messages=messages)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_two_names_for_one_limit_are_refused() -> None:
    with an_app() as app:
        assert error_of(chat(app, max_tokens=1, max_completion_tokens=2))["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"\x00",
        b'{"prompt": ' + b"[" * 100_000,
    ],
)
def test_a_malformed_body_is_a_400(content: bytes) -> None:
    with an_app() as app:
        response = ask(
            app, "POST", "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        (b'{"prompt": [1, 2], "prompt": [3]}', "prompt"),
        (b'{"prompt": "x", "n": 1, "n": 1}', "n"),
        (b'{"prompt": "x", "pr\\u006fmpt": "y"}', "prompt"),
        (b'{"prompt": "x", "stream": true, "stream_options": {"include_usage": true, "include_usage": false}}',
         "include_usage"),
    ],
)  # fmt: skip
def test_a_name_that_comes_twice_is_named(content: bytes, name: str) -> None:
    with an_app() as app:
        response = ask(
            app, "POST", "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        assert error_of(response)["param"] == name
        assert manager_of(app).counts().reserved == 0


def test_a_name_may_come_in_several_objects_and_in_texts() -> None:
    messages = [{"role": "user", "content": '"role": "role": [1] "[2]'}, {"role": "user", "content": "[]"}]
    with an_app() as app:
        assert chat(app, messages=messages).status_code == 200


@pytest.mark.parametrize(
    ("query", "name"), [("n=3", "n"), ("stream", "stream"), ("%6e=3&b=1", "n"), ("=1", "=1"), ("&", "&")]
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/metrics")])
def test_what_is_asked_for_in_the_url_is_named(method: str, path: str, query: str, name: str) -> None:
    with an_app() as app:
        response = ask(app, method, f"{path}?{query}", json={"prompt": "x"})
        assert response.status_code == 400
        assert error_of(response)["param"] == name
        assert error_of(response)["message"].startswith(f"{name}: ")


def test_only_json_is_read() -> None:
    with an_app() as app:
        for content_type in ("text/plain", "application/x-www-form-urlencoded"):
            headers = {"content-type": content_type}
            response = ask(app, "POST", "/v1/completions", content=b'{"prompt": "x"}', headers=headers)
            assert response.status_code == 415
            assert error_of(response)["code"] == "no_json"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)],
)
def test_other_paths_and_methods_have_an_error_of_the_same_shape(method: str, path: str, status: int) -> None:
    with an_app() as app:
        response = ask(app, method, path)
    assert response.status_code == status
    error_of(response)


def test_a_model_that_is_not_served_is_a_404() -> None:
    with an_app(model_name="tiny") as app:
        response = complete(app, model="huge")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


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
