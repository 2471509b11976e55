"""What is measured, from flags that were checked without a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.options import RunOptions
from roseinfer.errors import InputError
from tests.bench.experiments import experiment


def test_cells_are_the_product_of_the_lists() -> None:
    made = experiment(max_inflight="0,16", burst_size="8,32", prompt_len="5", max_new_tokens="1,2")
    assert len(made.cells) == len(set(made.cells)) == 8
    assert Cell(AdmissionSpec(16), 32, 5, 2) in made.cells


def test_cell_ids_differ() -> None:
    made = experiment(max_inflight="0,1,16", burst_size="1,16", prompt_len="1,16", max_new_tokens="1,16")
    assert len({cell.cell_id for cell in made.cells}) == 24


def test_limit_0_is_no_limit_and_never_a_limit_of_zero() -> None:  # case A10
    no_limit, limited = experiment(max_inflight="0,16").cells
    assert no_limit.max_inflight is None
    assert "none" in no_limit.cell_id
    assert limited.max_inflight == 16


def test_a_list_of_admissions_is_swept_in_its_order() -> None:
    made = experiment(
        admission="tokens:4096,inflight:16,none,tokens:512+inflight:4", burst_size="8", prompt_len="5"
    )
    assert [str(cell.admission) for cell in made.cells] == [
        *("tokens:4096", "inflight:16", "none", "inflight:4+tokens:512"),
    ]
    assert [cell.cell_id.partition("-burst")[0] for cell in made.cells] == [
        *("tokens_4096", "inflight_16", "inflight_none", "inflight_4-tokens_512"),
    ]
    assert len({cell.shape for cell in made.cells}) == 1


def test_the_short_form_makes_the_same_cells() -> None:
    assert experiment(max_inflight="0,16").cells == experiment(admission="none,inflight:16").cells


@pytest.mark.parametrize(
    "text", ["tokens:0", "16", "tokens:4096,", "tokens:4,inflight:2,tokens:4", "slo:ttft=1"]
)
def test_an_admission_that_is_none_is_named(text: str) -> None:
    with pytest.raises(InputError) as caught:
        experiment(admission=text)
    assert caught.value.name == "--admission"


def test_both_forms_of_a_limit_are_refused_and_named() -> None:
    with pytest.raises(InputError, match=r"--admission 'tokens:4096'.*--max-inflight 16"):
        experiment(admission="tokens:4096", max_inflight="16")


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
    assert made.load.arrival == "constant"
    assert made.cells[0].request_rate == 500
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


TRACE = Path(__file__).parent / "traces" / "azure_llm_2023_conv.csv"


def refused(made: Experiment, context_tokens: int) -> InputError:
    with pytest.raises(InputError) as caught:
        made.check_fits(context_tokens)
    return caught.value


def test_a_trace_that_does_not_fit_names_the_line_and_the_cure() -> None:  # case A15
    made = experiment(trace=TRACE)
    error = refused(made, 1024)
    assert error.name == "--trace"
    assert "line 8: 1313 prompt and 142 new tokens exceed the context of 1024 tokens" in error.why
    assert "--length-scale" in error.why
    made.check_fits(8192)
    experiment(trace=TRACE, length_scale=0.1).check_fits(1024)
    experiment(trace=TRACE, num_requests=4).check_fits(1024)  # what is not played need not fit
    experiment(trace=TRACE, duration=5.0).check_fits(1024)
    experiment(trace=TRACE, prompt_len="8").check_fits(1024)


def test_a_request_that_jitter_may_bring_forward_must_fit_too() -> None:
    ticking = experiment(trace=TRACE.with_name("mooncake_conversation_lengths.csv"), duration=3.0)
    assert ticking.trace is not None
    stamps, needs = ticking.trace.arrived_s, ticking.trace.prompt_tokens + ticking.trace.output_tokens
    first, second = needs[stamps < 2].max(), needs[stamps < 4].max()
    assert first < second
    ticking.check_fits(int(second))
    assert refused(ticking, int(second) - 1).name == "--trace"  # though stamped at 3.0


def test_a_trace_must_fit_the_kv_cache_too() -> None:
    assert "--kv-cache-tokens 512 holds" in refused(experiment(trace=TRACE, kv_cache_tokens=512), 8192).why


def test_prompts_of_a_trace_must_be_longer_than_the_prefix() -> None:
    error = refused(experiment(trace=TRACE, prefix_len=91), 8192)
    assert "91 are shared" in error.why
    experiment(trace=TRACE, prefix_len=90).check_fits(8192)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"prompt_len_dist": "lognormal:1"}, "--prompt-len-dist"),  # 3 % lie above 1020
        ({"output_len_dist": "lognormal:3", "max_new_tokens": "128"}, "--output-len-dist"),
        ({"prompt_len_dist": "uniform:1", "prefix_len": 8}, "--prompt-len-dist"),  # 3 % lie below 9
        ({"prompt_len_dist": "uniform:1", "kv_cache_tokens": 240}, "--prompt-len-dist"),
    ],
)
def test_lengths_that_would_often_be_cut_are_refused(flags: dict[str, Any], name: str) -> None:
    made = experiment(**({"prompt_len": "128"} | flags))
    error = refused(made, 1024)
    assert error.name == name
    assert "% of the requests would have to be cut" in error.why


@pytest.mark.parametrize(
    "flags",
    [
        {"prompt_len_dist": "lognormal:0.8"},  # 0.5 %
        {"prompt_len_dist": "uniform:1", "prefix_len": 1},  # 0.8 %
        {"prompt_len_dist": "uniform:1", "output_len_dist": "uniform:1"},
    ],
)
def test_lengths_that_are_seldom_cut_are_fine(flags: dict[str, Any]) -> None:
    experiment(prompt_len="128", **flags).check_fits(1024)


def test_lengths_whose_typical_request_does_not_fit_are_refused_as_that() -> None:
    made = experiment(prompt_len="32,2000", prompt_len_dist="uniform:0.1")
    assert refused(made, 1024).value == "2000"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"scheduling": "lifo"}, "--scheduling 'lifo'"),
        ({"scheduling": "edf"}, "--scheduling 'edf': needs --ttft-deadline"),
        (
            {"admission": "inflight:4+priority"},
            "--admission 'inflight:4+priority:age=10s': needs --priority-mix",
        ),
        ({"admission": "slo:ttft=1s"}, "--admission 'slo:ttft=1s': weighs"),
        ({"cost_model": Path("m.json")}, "--cost-model"),
    ],
)
def test_a_policy_that_could_do_nothing_is_refused(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        Experiment.from_options(RunOptions(**flags), flags.keys())
