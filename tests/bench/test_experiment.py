"""What is measured, from flags that were checked without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.experiment import Cell
from roseinfer.errors import InputError
from tests.bench.experiments import experiment


def test_cells_are_the_product_of_the_lists() -> None:
    made = experiment(max_inflight="0,16", burst_size="8,32", prompt_len="5", max_new_tokens="1,2")
    assert len(made.cells) == len(set(made.cells)) == 8
    assert Cell(16, 32, 5, 2) in made.cells


def test_cell_ids_differ() -> None:
    made = experiment(max_inflight="0,1,16", burst_size="1,16", prompt_len="1,16", max_new_tokens="1,16")
    assert len({cell.cell_id for cell in made.cells}) == 24


def test_limit_0_is_no_limit_and_never_a_limit_of_zero() -> None:  # case A10
    no_limit, limited = experiment(max_inflight="0,16").cells
    assert no_limit.max_inflight is None
    assert "none" in no_limit.cell_id
    assert limited.max_inflight == 16


@pytest.mark.parametrize(
    "text", ["-1", "", "x", "16,", "1.5", "0x10", "16,-4", "99999999999999999999", "9" * 5000]
)
def test_a_limit_that_is_none_is_named(text: str) -> None:  # case A10
    with pytest.raises(InputError) as caught:
        experiment(max_inflight=text)
    assert caught.value.name == "--max-inflight"
    assert caught.value.value == text
    assert "0 means no limit" in caught.value.why


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"burst_size": "0"}, "--burst-size"),
        ({"burst_size": "4,4"}, "--burst-size"),
        ({"prompt_len": "0"}, "--prompt-len"),
        ({"prompt_len": ""}, "--prompt-len"),
        ({"max_new_tokens": "0"}, "--max-new-tokens"),
        ({"num_requests": 0}, "--num-requests"),
        ({"repeats": 0}, "--repeats"),
        ({"warmup_runs": -1}, "--warmup-runs"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**70}, "--seed"),
        ({"tokenize_workers": -1}, "--tokenize-workers"),
        ({"max_batch_size": 0}, "--max-batch-size"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"prompt": "Hello", "prompt_repeats": 2**31 - 1}, "--prompt-repeats"),
        ({"max_active_requests": 0}, "--max-active-requests"),
        ({"kv_cache_tokens": 0}, "--kv-cache-tokens"),
        ({"num_threads": 0}, "--num-threads"),
        ({"max_num_batched_tokens": 16, "max_batch_size": 16}, "--max-num-batched-tokens"),
        ({"submit_interval_ms": -1.0}, "--submit-interval-ms"),
        ({"submit_interval_ms": float("nan")}, "--submit-interval-ms"),
        ({"submit_interval_ms": float("inf")}, "--submit-interval-ms"),
        ({"max_error_share": 1.5}, "--max-error-share"),
        ({"max_error_share": float("nan")}, "--max-error-share"),
        ({"device": "tpu"}, "--device"),
        ({"dtype": "int8"}, "--dtype"),
        ({"metadata": ["a"]}, "--metadata"),
        ({"metadata": ["=a"]}, "--metadata"),
        ({"metadata": ["a=1", "a=2"]}, "--metadata"),
    ],
)
def test_a_value_out_of_range_is_named(flags: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError) as caught:
        experiment(**flags)
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"prompt": "Hello", "prompt_len": "3"}, "--prompt-len"),
        ({"prompt_repeats": 3}, "--prompt-repeats"),
        ({"prompt": ""}, "--prompt"),
        ({"submit_interval_ms": 5.0, "num_requests": 4, "burst_size": "4"}, "--burst-size"),
        ({"submit_interval_ms": 5.0}, "--submit-interval-ms"),
        ({"num_requests": 5, "burst_size": "4"}, "--num-requests"),
        ({"num_requests": 4, "burst_size": "4,8"}, "--num-requests"),
        ({"pretok": True, "tokenize_workers": 2}, "--tokenize-workers"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError) as caught:
        experiment(**flags)
    assert caught.value.name == name


def test_num_requests_is_the_burst_where_no_burst_is_named() -> None:
    made = experiment(num_requests=5)
    assert made.cells[0].burst_size == made.offered(made.cells[0]) == 5


def test_spaced_requests_are_no_burst() -> None:
    made = experiment(num_requests=5, submit_interval_ms=2.0)
    assert made.is_paced
    assert made.interval_s == 0.002
    assert made.cells[0].burst_size is None
    assert made.offered(made.cells[0]) == 5


def test_nothing_is_tokenised_where_token_ids_are_sent() -> None:
    assert experiment(pretok=True).tokenize_workers == 0
    assert experiment(tokenize_workers=3).tokenize_workers == 3


def test_configuration_is_plain_json_and_holds_flag_names() -> None:
    configuration = experiment(
        max_inflight="0,4", output_dir=Path("x"), slo=["p99_ttft:1"], run_id="r"
    ).configuration()
    assert json.loads(json.dumps(configuration, allow_nan=False)) == configuration
    assert configuration["max-inflight"] == "0,4"
    assert not configuration.keys() & {"output-dir", "slo", "run-id", "resume", "file", "json"}


@pytest.mark.parametrize("spelling", ["{}", "{}/"])
def test_a_local_model_is_recorded_by_its_last_part_only(tmp_path: Path, spelling: str) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    made = experiment(model=spelling.format(folder))
    assert made.model_name == made.configuration()["model"] == "some-model"


def test_the_working_directory_as_a_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert experiment(model=".").model_name == tmp_path.name


@pytest.mark.parametrize("model", ["builtin:gpt2", "openai-community/gpt2", "gpt2"])
def test_other_models_keep_their_name(model: str) -> None:
    assert experiment(model=model).model_name == model


def test_a_prompt_and_its_answer_must_fit_the_context_together() -> None:
    made = experiment(prompt_len="10,28", max_new_tokens="4")
    made.check_fits(32)
    with pytest.raises(InputError) as caught:
        made.check_fits(31)
    assert caught.value.name == "--prompt-len"
    assert caught.value.value == "28"


def test_a_given_prompt_is_judged_once_its_length_is_known() -> None:
    made = experiment(prompt="Hello", max_new_tokens="4")
    made.check_fits(5)
    made.check_fits(32, given_tokens=28)
    with pytest.raises(InputError, match="--prompt '29 tokens'"):
        made.check_fits(32, given_tokens=29)


def test_a_request_must_fit_the_kv_cache_whole() -> None:
    experiment(prompt_len="28", kv_cache_tokens=17).check_fits(1024)  # two blocks of 16
    with pytest.raises(InputError) as caught:
        experiment(prompt_len="29", kv_cache_tokens=17).check_fits(1024)
    assert caught.value.name == "--kv-cache-tokens"
