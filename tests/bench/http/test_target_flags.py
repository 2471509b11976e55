"""Which flags a server takes, and which of a server's others do not."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer.errors import InputError
from tests.bench.experiments import experiment

URL = "http://127.0.0.1:8000/v1"


def refused(**flags: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        experiment(**flags)
    return caught.value


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"device": "cpu"}, "--device"),
        ({"dtype": "float32"}, "--dtype"),
        ({"max_batch_size": 8}, "--max-batch-size"),
        ({"kv_cache_tokens": 80}, "--kv-cache-tokens"),
        ({"max_model_len": 80}, "--max-model-len"),
        ({"prefix_cache": False}, "--prefix-cache"),
        ({"prefix_cache": True}, "--prefix-cache"),
        ({"paged_attn": False}, "--paged-attn"),
        ({"cuda_graph": False}, "--cuda-graph"),
        ({"nvtx": True}, "--nvtx"),
        ({"device": "auto"}, "--device"),  # as it is without the flag: nothing would read it either
        ({"tokenize_workers": 0}, "--tokenize-workers"),
        ({"pretok": True}, "--pretok"),
        ({"tokenize_workers": 2}, "--tokenize-workers"),
        ({"cost_model": "x.json"}, "--cost-model"),
        ({"api": "responses"}, "--api"),
        ({"retry": "always"}, "--retry"),
        ({"model": ""}, "--model"),
        ({"client_workers": 0}, "--client-workers"),
        ({"client_workers": 2, "max_concurrency": 2, "num_requests": 4}, "--client-workers"),
        ({"max_inflight": "0,16"}, "--max-inflight"),
        ({"max_inflight": "16"}, "--max-inflight"),
        ({"max_inflight": "16", "target_cmd": "serve"}, "--max-inflight"),
        ({"admission": "tokens:512"}, "--admission"),
        ({"admission": "tokens:512", "target_cmd": "serve --seqs {max_inflight}"}, "--admission"),
        ({"admission": "tokens:512", "max_inflight": "4", "target_cmd": "serve {admission}"}, "--admission"),
        ({"target_cmd": "serve '"}, "--target-cmd"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "--api-key-env"),
    ],
)
def test_what_a_server_cannot_be_told_is_refused(flags: dict[str, Any], name: str) -> None:
    assert refused(target=URL, **flags).name == name


def test_a_switch_that_is_off_asks_a_server_for_nothing() -> None:
    assert not experiment(target=URL, pretok=False).options.pretok


@pytest.mark.parametrize("target", ["engine", "sim"])
@pytest.mark.parametrize(
    "flags",
    [
        {"api": "chat"},
        {"api_key_env": "HOME"},
        {"tokenizer": "builtin"},
        {"target_cmd": "serve"},
        {"client_workers": 2},
    ],
)
def test_flags_of_a_server_need_one(target: str, flags: dict[str, Any]) -> None:
    assert refused(target=target, **flags).name == "--" + next(iter(flags)).replace("_", "-")


@pytest.mark.parametrize("target", ["localhost:8000", "ftp://host/v1", "http:/host", "server"])
def test_a_target_is_an_engine_a_simulation_or_a_url(target: str) -> None:
    assert refused(target=target).name == "--target"


def test_a_command_starts_no_server_on_another_machine() -> None:
    assert refused(target="http://192.0.2.1:8000/v1", target_cmd="serve").name == "--target"


def test_a_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-1\n2")
    assert "sk-1" not in str(refused(target=URL, api_key_env="KEY"))


def test_a_server_is_warmed_up_only_when_asked() -> None:
    assert experiment(target=URL).warmup_runs == 0
    assert experiment(target=URL, warmup_runs=2).warmup_runs == 2
    assert experiment().warmup_runs == 1


def test_a_server_is_given_up_after_ten_minutes_unless_told_otherwise() -> None:
    for flags, timeout_s in (({}, 600.0), ({"timeout": 5.0}, 5.0)):
        made = experiment(target=URL, **flags)
        assert (made.load.timeout_s, made.configuration()["timeout"]) == (timeout_s, timeout_s)
    assert experiment().load.timeout_s is None


def test_one_burst_is_as_large_as_there_are_requests() -> None:
    made = experiment(target=URL, arrival="burst", num_requests=64)
    assert [cell.burst_size for cell in made.cells] == [64]


def test_configuration_names_no_place_no_host_and_no_key() -> None:
    assert experiment(target="https://gpu7.example.org/v1").configuration()["target"] == "https://remote/v1"
    configuration = experiment(
        target=URL,
        tokenizer="/home/alice/models/gpt2",
        model="/home/alice/models/gpt2-large",
        target_cmd="/home/alice/bin/serve /home/alice/gpt2 --api-key sk-1 [[--seqs {max_inflight}]]",
    ).configuration()
    assert configuration["tokenizer"] == "gpt2"
    assert configuration["model"] == "gpt2-large"
    assert configuration["target-cmd"] == "serve gpt2 --api-key *** [[--seqs {max_inflight}]]"
    assert not configuration.keys() & {"device", "max-batch-size", "cost-model"}


def test_other_targets_keep_their_configuration() -> None:
    assert not experiment().configuration().keys() & {"api", "target-cmd", "client-workers"}


def test_cells_share_a_server_where_its_command_is_the_same() -> None:
    command = "serve [[--seqs {max_inflight}]]"
    made = experiment(target=URL, target_cmd=command, max_inflight="0,4", burst_size="2,3")
    assert len({made.server_of(cell) for cell in made.cells}) == 2
    assert len({experiment(target=URL).server_of(cell) for cell in made.cells}) == 1
    command = "serve [[--admission {admission}]]"
    made = experiment(target=URL, target_cmd=command, admission="none,tokens:9,tokens:99", burst_size="2,3")
    assert len({made.server_of(cell) for cell in made.cells}) == 3
