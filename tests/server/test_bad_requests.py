"""Bodies, parameters and paths that a client got wrong: a 4xx that names it, in the shape of OpenAI's errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import an_app, ask, chat, complete, error_of, manager_of

SECRET = "the user's own words"


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
