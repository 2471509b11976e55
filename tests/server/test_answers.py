"""What the three APIs answer, whole and as a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roseinfer.chat_template import ChatTemplate
from roseinfer.request import SamplingParams
from roseinfer.tokenization import builtin_tokenizer
from tests.scripted import EOS, ScriptedEngine
from tests.server.serving import an_app, ask, chat, complete, events_of, manager_of, text_of

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def test_a_completion_has_text_usage_and_timings() -> None:
    with an_app(model_name="tiny") as app:
        answer = complete(app, prompt="hey", max_tokens=4).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["timings"]["prompt_tokens"] == 3
    assert answer["timings"]["completion_tokens"] == 4


def test_usage_tells_what_the_prefix_cache_knew() -> None:
    with an_app() as app:
        usages = [complete(app, prompt="x" * 40, max_tokens=1).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 32]


def test_a_streamed_completion_has_the_same_text_and_ends_with_done() -> None:
    with an_app() as app:
        response = complete(app, max_tokens=4, stream=True)
    events = events_of(response.text)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert text_of(events) == "abcd"
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]
    assert len({event["id"] for event in events}) == 1


def test_usage_is_a_last_chunk_of_its_own_where_it_was_asked_for() -> None:
    with an_app() as app:
        *others, last = events_of(complete(app, max_tokens=4, **USAGE).text)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert last["timings"]["completion_tokens"] == 4
    assert all(event["usage"] is None and "timings" not in event for event in others)


def test_without_usage_the_timings_come_with_the_finish_reason() -> None:
    with an_app() as app:
        *others, last = events_of(complete(app, max_tokens=4, stream=True).text)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["prompt_tokens"] == 1
    assert not any("usage" in event for event in [*others, last])


def test_a_chat_streams_a_role_and_then_its_text() -> None:
    with an_app() as app:
        first, *others = events_of(chat(app, max_tokens=3, stream=True).text)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of([first, *others]) == "abc"
    assert others[-1]["choices"][0]["delta"] == {}


def test_a_whole_chat_is_a_message() -> None:
    with an_app() as app:
        answer = chat(app, max_completion_tokens=3).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abc"}


def test_the_length_of_a_chat_is_counted_after_its_template() -> None:  # case I2
    engine = ScriptedEngine()
    engine.chat_template = ChatTemplate("<{{ messages[0].content }}>", {})  # type: ignore[attr-defined]
    with an_app(engine) as app:
        assert chat(app, max_tokens=1).json()["usage"]["prompt_tokens"] == len("<hi>")
    with an_app() as app:
        assert chat(app, max_tokens=1).json()["usage"]["prompt_tokens"] == len("user: hi\nassistant:")


def test_content_in_parts_is_one_text() -> None:
    content = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    with an_app() as app:
        answer = chat(app, messages=[{"role": "user", "content": content}], max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant:")


def test_generate_answers_json_or_streams_bare_text() -> None:
    body: dict[str, Any] = {"prompt": "x", "max_new_tokens": 5}
    with an_app() as app:
        whole = ask(app, "POST", "/generate", json=body).json()
        stream = ask(app, "POST", "/generate", json={**body, "stream": True})
    assert whole["text"] == stream.text == "abcde"
    assert whole["finish_reason"] == "length"
    assert stream.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("prompt", ["hey", ["hey"], [1, 2, 3], [[1, 2, 3]]])
def test_a_prompt_is_text_or_ids_or_a_list_of_one(prompt: Any) -> None:
    with an_app() as app:
        assert complete(app, prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"] == 3


def test_defaults_are_those_of_the_api() -> None:
    with an_app() as app:
        answer = ask(app, "POST", "/v1/completions", json={"prompt": "x"}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_parameters_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    with an_app() as app:
        manager = manager_of(app)
        submit = manager.submit

        def noted(prompt: Any, params: SamplingParams, **options: Any) -> Any:
            seen.append(params)
            return submit(prompt, params, **options)

        monkeypatch.setattr(manager, "submit", noted)
        complete(app, max_tokens=3, temperature=0.5, top_p=0.9, top_k=-1, seed=7, stop="z", ignore_eos=True)
    (params,) = seen
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (3, 0.5, 0.9, 0)
    assert (params.seed, params.stop, params.ignore_eos) == (7, ("z",), True)


@pytest.mark.parametrize("stream", [False, True])
def test_eos_ends_an_answer_and_counts_as_a_token(stream: bool) -> None:  # case B12
    with an_app(ScriptedEngine(script=f"ab{chr(EOS)}")) as app:
        response = complete(app, max_tokens=8, **(USAGE if stream else {}))
        unheeded = complete(app, max_tokens=8, ignore_eos=True).json()
    answer = events_of(response.text)[-1] if stream else response.json()
    assert answer["usage"]["completion_tokens"] == 3
    assert unheeded["usage"]["completion_tokens"] == 8
    assert unheeded["choices"][0]["text"] == "ababab"


def test_an_answer_without_any_text_is_complete() -> None:  # case B15
    with an_app(ScriptedEngine(script=chr(EOS))) as app:
        events = events_of(complete(app, **USAGE).text)
        assert manager_of(app).inflight == 0
    assert text_of(events) == ""
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_stop_string_over_three_tokens_is_sent(stream: bool) -> None:  # case B11
    with an_app() as app:
        response = complete(app, max_tokens=20, stop=["def", "zzz"], stream=stream)
    events = events_of(response.text) if stream else [response.json()]
    assert text_of(events) == "abc"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_text_held_as_a_possible_stop_comes_at_the_end() -> None:  # case B11
    with an_app(ScriptedEngine(script=f"abde{chr(EOS)}")) as app:
        events = events_of(complete(app, max_tokens=20, stop="dex", stream=True).text)
    assert text_of(events) == "abde"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_characters_split_over_tokens_arrive_whole(stream: bool) -> None:  # case B8
    tokenizer = builtin_tokenizer()
    ids = tokenizer.encode("a😀漢é!")
    assert len(ids) > 5
    engine = ScriptedEngine(script="".join(map(chr, ids)))
    engine.eos_token_ids = frozenset()
    engine.make_tokenizer = tokenizer.clone  # type: ignore[assignment]
    with an_app(engine) as app:
        response = complete(app, max_tokens=len(ids), stream=stream)
    assert text_of(events_of(response.text) if stream else [response.json()]) == "a😀漢é!"


def test_the_stages_lie_within_what_the_client_saw() -> None:  # case E15
    with an_app() as app:
        timings = complete(app, max_tokens=4).json()["timings"]
    assert timings["queue_s"] >= 0
    assert timings["prefill_s"] >= 0
    assert timings["decode_s"] >= 0


def test_models_names_what_is_served() -> None:
    with an_app(model_name="tiny") as app:
        models = ask(app, "GET", "/v1/models").json()
        assert complete(app, model="tiny").status_code == 200
    assert models["object"] == "list"
    assert [(model["id"], model["object"]) for model in models["data"]] == [("tiny", "model")]


def test_every_response_has_a_request_id_of_its_own() -> None:
    with an_app() as app:
        ids = [ask(app, "GET", path).headers["x-request-id"] for path in ("/health", "/nowhere", "/health")]
        answer = complete(app)
    assert len(set(ids)) == 3
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


def test_several_tokens_that_wait_for_a_reader_are_one_chunk() -> None:  # case B23
    # In process the app's loop starts to read when the engine has long done everything.
    with an_app() as app:
        events = [json.dumps(event) for event in events_of(complete(app, max_tokens=2000, stream=True).text)]
    assert len(events) < 2000
