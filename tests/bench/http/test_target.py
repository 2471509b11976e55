"""What is asked of a server, and what is written down of a cell: on a client that only says what it was given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.http import target
from roseinfer.bench.http.address import Address
from roseinfer.bench.http.asking import find_model
from roseinfer.bench.http.exchange import (
    ClientLoad,
    Endpoint,
    Failure,
    HttpAttempt,
    HttpPlayed,
    HttpRequest,
)
from roseinfer.bench.http.target import MOST_TOKENS, HttpTarget, tokenizer_of
from roseinfer.bench.load import Load
from roseinfer.bench.records import ATTEMPT_SCHEMA, REQUEST_SCHEMA, Outcome
from roseinfer.bench.retries import Retrier
from roseinfer.bench.store import RunFolder
from roseinfer.bench.validity import check_cell
from roseinfer.bench.workload import WorkloadSource
from roseinfer.errors import InputError, RunError
from roseinfer.tokenization import FastTokenizer
from tests.bench.experiments import experiment
from tests.bench.http.openai_server import OpenAiServer

LOAD = ClientLoad(0.25, 0.75, 0.002, 0.001)
URL = "http://127.0.0.1:1/v1"  # nobody is asked there


class Client:
    """Stands for `play`: keeps what it was given, and answers every request a millisecond after it was due."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.endpoint: Endpoint | None = None
        self.workers = 0
        self.connections = 5
        self.cached_tokens: int | None = None  # what the server says of each prompt

    def play(
        self,
        endpoint: Endpoint,
        load: Load,
        scheduled_s: list[float] | None,
        bodies: Sequence[bytes],
        retrier: Retrier,
        *,
        client_workers: int,
    ) -> HttpPlayed:
        assert scheduled_s is not None
        self.bodies += [json.loads(body) for body in bodies]
        self.endpoint, self.workers = endpoint, client_workers
        requests = [HttpRequest(at_s, tries=[self.answer(10.0 + at_s)]) for at_s in scheduled_s]
        return HttpPlayed(requests, 10.0, "2026-01-01T00:00:00+00:00", 1, self.connections, 2, LOAD, [], None)

    def answer(self, due_s: float) -> HttpAttempt:
        sent_s, first_s = due_s + 0.0001, due_s + 0.001
        return HttpAttempt(
            sent_s=sent_s,
            head_s=first_s,
            ended_s=first_s,
            status_code=200,
            deliveries=[(first_s, 1)],
            cached_tokens=self.cached_tokens,
        )


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(target, "play", made.play)
    return made


def run(**flags: Any) -> Any:
    made = experiment(**{"target": URL, "model": "mock", "num_requests": 3, "arrival": "burst", **flags})
    tokenizer = tokenizer_of(made.options.tokenizer)
    vocab_size = tokenizer.tokenizer.get_vocab_size() if isinstance(tokenizer, FastTokenizer) else 0
    source = WorkloadSource(made, tokenizer, vocab_size=vocab_size, max_model_len=MOST_TOKENS)
    with HttpTarget(made) as http:
        return http.run(made.cells[0], source.draw(made.cells[0], 0))


def test_a_completion_is_asked_for_as_text(client: Client) -> None:
    run(prompt_len="5", max_new_tokens="7")
    assert client.endpoint is not None
    assert client.endpoint.path == "/v1/completions"
    body = client.bodies[0]
    assert len(body.pop("prompt").split()) == 5
    assert body == {
        "model": "mock",
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_with_a_tokenizer_a_completion_is_asked_for_as_ids(client: Client) -> None:  # case I1
    run(prompt_len="5", tokenizer="builtin")
    prompts = [body["prompt"] for body in client.bodies]
    assert all(len(prompt) == 5 and type(prompt[0]) is int for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_a_chat_is_asked_for_as_a_message(client: Client) -> None:  # case I2
    run(prompt_len="5", tokenizer="builtin", api="chat")
    assert client.endpoint is not None
    assert client.endpoint.path == "/v1/chat/completions"
    (message,) = client.bodies[0]["messages"]
    assert message["role"] == "user"
    assert len(tokenizer_of("builtin").encode(message["content"])) == 5


def test_a_server_that_does_not_know_ignore_eos_need_not_hear_it(client: Client) -> None:
    run(stop_at_eos=True)
    assert "ignore_eos" not in client.bodies[0]


def test_a_key_goes_to_the_server_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-1")
    result = run(api_key_env="SOME_KEY", client_workers=3)
    assert client.endpoint is not None
    assert client.endpoint.headers == (("Authorization", "Bearer sk-1"),)
    assert client.workers == 3
    assert "sk-1" not in json.dumps([result.notes, result.requests.to_json()])


def test_rows_and_facts_pass_the_rules_and_claim_no_slot(client: Client, tmp_path: Path) -> None:
    result = run()
    assert set(result.requests.columns) <= set(REQUEST_SCHEMA.names)
    assert list(result.requests["target"].unique()) == ["http"]
    assert (result.facts.peak_inflight, result.facts.inflight_integral_s) == (None, None)
    folder = RunFolder.create(tmp_path, "one", "run", {})
    folder.write_cell("cell", 0, result.requests, result.steps, result.facts.to_json())
    assert check_cell(folder.read_requests(), result.facts) == []
    assert folder.read_steps().empty
    assert result.notes["client"] == {**LOAD._asdict(), "connections": 5, "resent": 2, "workers": 1}
    assert result.facts.client_busy_share_max_100ms == 0.75
    assert (result.facts.client_longest_turn_s, result.facts.client_p99_read_lag_s) == (0.002, 0.001)


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [({}, 1), ({"prefix_len": 2, "prompt_len": "5"}, 0), ({"prompt": "x"}, 0), ({"api": "chat"}, 0)],
)
def test_a_server_that_has_met_the_prompts_before_is_found(
    client: Client, tmp_path: Path, flags: dict[str, Any], reasons: int
) -> None:  # cases I5, I7
    client.cached_tokens = 32
    result = run(**flags)
    folder = RunFolder.create(tmp_path, "one", "run", {})
    folder.write_cell("cell", 0, result.requests, result.steps, result.facts.to_json())
    assert len(check_cell(folder.read_requests(), result.facts)) == reasons


def test_tries_are_kept_where_clients_retry(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:  # case J3
    assert run().attempts is None
    refused = HttpAttempt(sent_s=10.0, head_s=10.0, ended_s=10.0, failure=Failure.STATUS, status_code=429)
    monkeypatch.setattr(client, "answer", lambda due_s: refused)
    result = run(retry="immediate")
    assert set(result.attempts.columns) <= set(ATTEMPT_SCHEMA.names)
    assert list(result.attempts["outcome"]) == [Outcome.REJECTED] * 3


def test_a_prompt_of_the_user_s_has_no_length_in_words(client: Client) -> None:
    result = run(prompt="Hello there", prompt_repeats=2)
    assert client.bodies[0]["prompt"] == "Hello thereHello there"
    assert result.requests["prompt_len"].isna().all()


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError) as caught:
        tokenizer_of(str(tmp_path))
    assert caught.value.name == "--tokenizer"


def test_a_folder_with_one_is_as_good_as_ours(tmp_path: Path) -> None:
    builtin = tokenizer_of("builtin")
    assert isinstance(builtin, FastTokenizer)
    builtin.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of(str(tmp_path)).encode(" abc def") == builtin.encode(" abc def")


# --- the model's name -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("models", "named"), [(("mock",), None), (("a", "b"), "b"), ((), "b")])
def test_the_model_is_the_only_one_or_the_named(models: tuple[str, ...], named: str | None) -> None:
    with OpenAiServer(models=models) as server:
        found = find_model(Address.parse(server.url), named, None)
    assert found.model == (named or "mock")


def test_a_model_that_its_server_names_by_a_path_is_found_by_the_last_part_of_it() -> None:
    with OpenAiServer(models=("/home/alice/models/gpt2", "gpt3")) as server:
        found = find_model(Address.parse(server.url), "gpt2", None)
    assert found.model == "/home/alice/models/gpt2"


def test_its_server_hears_that_path_and_no_record_does(client: Client) -> None:
    path = "/home/alice/models/gpt2"
    with OpenAiServer(models=(path,)) as server:
        made = experiment(target=server.url, num_requests=3, arrival="burst")
        source = WorkloadSource(made, tokenizer_of(None), vocab_size=0, max_model_len=MOST_TOKENS)
        with HttpTarget(made) as http:
            cell = made.cells[0]
            described = http.describe(cell)
            result = http.run(cell, source.draw(cell, 0))
    assert {body["model"] for body in client.bodies} == {path}
    assert described["model"] == "gpt2"
    assert list(result.requests["model"].unique()) == ["gpt2"]


@pytest.mark.parametrize(
    ("models", "named"),
    [(("a", "b"), None), ((), None), (("a", "b"), "c"), (("/a/m", "/b/m"), "m")],
)
def test_a_model_that_is_not_there_or_not_clear_is_refused(
    models: tuple[str, ...], named: str | None
) -> None:
    with OpenAiServer(models=models) as server, pytest.raises(InputError) as caught:
        find_model(Address.parse(server.url), named, None)
    assert caught.value.name == "--model"


def test_a_server_that_is_not_there_is_told() -> None:
    with OpenAiServer() as server:
        address = Address.parse(server.url)
    with pytest.raises(RunError, match=r"nothing answers at 127\.0\.0\.1 port \d+: Connection refused"):
        find_model(address, "mock", None)
