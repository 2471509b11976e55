"""Flags of the load: what they mean together, and what contradicts what. Nothing here needs a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.load import CLOSED
from roseinfer.bench.retries import RetryPolicy
from roseinfer.errors import InputError
from tests.bench.experiments import experiment

AZURE = Path(__file__).parent / "traces" / "azure_llm_2023_conv.csv"


def sent(**flags: Any) -> Experiment:
    """An experiment of so many requests, with these flags."""
    return experiment(**({"num_requests": 12} | flags))


@pytest.mark.parametrize(
    ("flags", "arrival"),
    [
        ({}, "burst"),
        ({"burst_size": "12"}, "burst"),
        ({"request_rate": "5"}, "poisson"),
        ({"request_rate": "5", "burstiness": 1.0}, "gamma"),
        ({"request_rate": "5", "arrival": "constant"}, "constant"),
        ({"submit_interval_ms": 20.0}, "constant"),
        ({"trace": AZURE}, "trace"),
        ({"trace": AZURE, "arrival": "trace"}, "trace"),
        ({"max_concurrency": 4}, CLOSED),
        ({"max_concurrency": 4, "arrival": "burst"}, "burst"),
        ({"max_concurrency": 4, "burst_size": "12"}, "burst"),
        ({"max_concurrency": 4, "request_rate": "5"}, "poisson"),
        ({"max_concurrency": 4, "trace": AZURE}, "trace"),
        ({"max_concurrency": 4, "submit_interval_ms": 20.0}, "constant"),
    ],
)
def test_flags_say_how_requests_arrive(flags: dict[str, Any], arrival: str) -> None:
    made = sent(**flags)
    assert made.load.arrival == arrival
    assert made.load.is_closed == (arrival == CLOSED)


def test_users_of_a_ramp_start_one_after_another() -> None:
    assert sent(max_concurrency=4, ramp=8.0).load.user_starts_s == (0.0, 4.0, 6.0, 8.0)
    assert sent(max_concurrency=3).load.user_starts_s == (0.0, 0.0, 0.0)


def test_rates_are_swept_and_may_be_below_one() -> None:  # case H1
    made = sent(request_rate="0.3,1,2.5", max_inflight="0,4")
    assert [cell.request_rate for cell in made.cells] == [0.3, 1.0, 2.5] * 2
    assert made.cells[0].cell_id == "inflight_none-prompt_32-output_4-rate_0.3"
    assert len({cell.cell_id for cell in made.cells}) == 6


def test_an_interval_is_a_rate() -> None:
    (cell,) = sent(submit_interval_ms=20.0).cells
    assert cell.request_rate == 50
    assert cell.burst_size is None


def test_bursts_on_top_of_a_rate_have_both_factors() -> None:
    (cell,) = sent(request_rate="5", burst_size="4", burst_interval=2.0).cells
    assert (cell.burst_size, cell.request_rate) == (4, 5.0)


def test_a_trace_has_the_lengths_that_no_flag_names() -> None:
    assert [(cell.prompt_len, cell.output_len) for cell in sent(trace=AZURE).cells] == [(None, None)]
    assert [cell.output_len for cell in sent(trace=AZURE, max_new_tokens="2,3").cells] == [2, 3]
    assert [cell.prompt_len for cell in sent(trace=AZURE, prompt_len="8").cells] == [8]


@pytest.mark.parametrize(
    ("flags", "offered"),
    [
        ({}, 128),
        ({"num_requests": 6}, 6),
        ({"burst_size": "8"}, 8),
        ({"burst_size": "8", "burst_interval": 1.0, "num_requests": 32}, 32),
        ({"burst_size": "8", "burst_interval": 1.0, "duration": 3.0}, None),
        ({"burst_size": "8", "max_concurrency": 2, "duration": 3.0}, 8),
        ({"request_rate": "5", "num_requests": 6}, 6),
        ({"request_rate": "5", "num_requests": 6, "duration": 9.0}, None),
        ({"max_concurrency": 2, "num_requests": 6}, 6),
        ({"max_concurrency": 2, "duration": 6.0}, None),
        ({"trace": AZURE}, None),
        ({"trace": AZURE, "num_requests": 6}, 6),
    ],
)
def test_how_many_are_offered_is_said_where_the_flags_say_it(
    flags: dict[str, Any], offered: int | None
) -> None:
    made = experiment(**flags)
    assert made.offered(made.cells[0]) == offered


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        # values
        ({"arrival": "uniform"}, "--arrival"),
        ({"request_rate": "0"}, "--request-rate"),
        ({"request_rate": "-1"}, "--request-rate"),
        ({"request_rate": "nan"}, "--request-rate"),
        ({"request_rate": "inf"}, "--request-rate"),
        ({"request_rate": "1e10"}, "--request-rate"),
        ({"request_rate": "x"}, "--request-rate"),
        ({"request_rate": ""}, "--request-rate"),
        ({"request_rate": "1,"}, "--request-rate"),
        ({"request_rate": "0.5,0.50"}, "--request-rate"),
        ({"request_rate": "1.0000001,1.0000002"}, "--request-rate"),  # one name for two cells
        ({"num_requests": 10_000_001}, "--num-requests"),
        ({"burst_size": "10000001", "num_requests": None}, "--burst-size"),
        ({"duration": 0.0, "request_rate": "5"}, "--duration"),
        ({"duration": float("nan"), "request_rate": "5"}, "--duration"),
        ({"duration": float("inf"), "request_rate": "5"}, "--duration"),
        ({"burst_interval": -1.0, "burst_size": "4"}, "--burst-interval"),
        ({"burstiness": 0.0, "request_rate": "5"}, "--burstiness"),
        ({"ramp": 0.0, "request_rate": "5"}, "--ramp"),
        ({"timeout": 0.0}, "--timeout"),
        ({"timeout": float("nan")}, "--timeout"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"trace": AZURE, "time_scale": 0.0}, "--time-scale"),
        ({"trace": AZURE, "length_scale": float("inf")}, "--length-scale"),
        ({"prefix_len": -1}, "--prefix-len"),
        ({"prompt_len_dist": "normal:1"}, "--prompt-len-dist"),
        ({"prompt_len_dist": "uniform"}, "--prompt-len-dist"),
        ({"prompt_len_dist": "uniform:"}, "--prompt-len-dist"),
        ({"prompt_len_dist": "uniform:1.1"}, "--prompt-len-dist"),
        ({"prompt_len_dist": "uniform:0"}, "--prompt-len-dist"),
        ({"prompt_len_dist": "fixed:1"}, "--prompt-len-dist"),
        ({"output_len_dist": "lognormal:nan"}, "--output-len-dist"),
        ({"output_len_dist": "lognormal:6"}, "--output-len-dist"),
        ({"target": "remote"}, "--target"),
        # what lacks something
        ({"request_rate": "5", "num_requests": None}, "--request-rate"),
        ({"submit_interval_ms": 5.0, "num_requests": None}, "--submit-interval-ms"),
        ({"max_concurrency": 4, "num_requests": None}, "--max-concurrency"),
        ({"burst_size": "4", "burst_interval": 1.0, "num_requests": None}, "--burst-interval"),
        ({"arrival": "poisson"}, "--arrival"),
        ({"arrival": "constant"}, "--arrival"),
        ({"arrival": "gamma", "burstiness": 0.5}, "--arrival"),
        ({"arrival": "gamma", "request_rate": "5"}, "--arrival"),
        ({"burstiness": 0.5}, "--burstiness"),
        ({"arrival": "trace"}, "--arrival"),
        ({"burst_interval": 1.0}, "--burst-interval"),
        ({"request_rate": "5", "burst_size": "4"}, "--burst-size"),
        ({"ramp": 1.0}, "--ramp"),
        ({"ramp": 1.0, "trace": AZURE}, "--ramp"),
        ({"time_scale": 2.0}, "--time-scale"),
        ({"length_scale": 2.0}, "--length-scale"),
        ({"keep_ticks": True}, "--keep-ticks"),
        ({"target": "sim"}, "--target"),
        ({"cost_model": Path("c.json")}, "--cost-model"),
        ({"trace": AZURE, "prompt_len_dist": "uniform:0.5"}, "--prompt-len-dist"),
        ({"trace": AZURE, "output_len_dist": "uniform:0.5"}, "--output-len-dist"),
        # what contradicts something
        ({"arrival": "burst", "request_rate": "5"}, "--request-rate"),
        ({"arrival": "poisson", "request_rate": "5", "burstiness": 0.5}, "--burstiness"),
        ({"arrival": "burst", "burstiness": 0.5}, "--burstiness"),
        ({"submit_interval_ms": 5.0, "request_rate": "5"}, "--request-rate"),
        ({"submit_interval_ms": 5.0, "arrival": "poisson"}, "--submit-interval-ms"),
        ({"submit_interval_ms": 5.0, "burstiness": 0.5}, "--burstiness"),
        ({"submit_interval_ms": 5.0, "burst_size": "4"}, "--burst-size"),
        ({"trace": AZURE, "arrival": "poisson"}, "--trace"),
        ({"trace": AZURE, "request_rate": "5"}, "--request-rate"),
        ({"trace": AZURE, "burst_size": "5"}, "--burst-size"),
        ({"trace": AZURE, "submit_interval_ms": 5.0}, "--submit-interval-ms"),
        ({"trace": AZURE, "burstiness": 5.0}, "--burstiness"),
        ({"prompt": "a", "prefix_len": 2}, "--prefix-len"),
        ({"prompt": "a", "prompt_len_dist": "uniform:0.5"}, "--prompt-len-dist"),
        # what would do nothing, or not what it says
        ({"burst_size": "12", "duration": 5.0}, "--duration"),
        ({"burst_size": "4", "num_requests": 12}, "--num-requests"),
        ({"burst_size": "5", "burst_interval": 1.0, "num_requests": 12}, "--num-requests"),
        ({"request_rate": "5", "ramp": 5.0, "duration": 5.0}, "--ramp"),
        ({"request_rate": "5,6", "ramp": 4.0, "num_requests": 12}, "--ramp"),
        ({"max_concurrency": 13}, "--max-concurrency"),
        ({"max_concurrency": 1, "ramp": 1.0}, "--ramp"),
        ({"trace": AZURE, "keep_ticks": True}, "--keep-ticks"),
        ({"prompt_len_dist": "uniform:0.01", "prompt_len": "32"}, "--prompt-len-dist"),
        ({"prompt_len_dist": "lognormal:0.001", "prompt_len": "320,32"}, "--prompt-len-dist"),
        ({"output_len_dist": "uniform:0.1", "max_new_tokens": "4"}, "--output-len-dist"),
        ({"max_concurrency": 65_537, "duration": 5.0, "num_requests": None}, "--max-concurrency"),
        ({"request_rate": "1e6", "duration": 11.0, "num_requests": None}, "--request-rate"),
        ({"submit_interval_ms": 0.001, "duration": 11.0, "num_requests": None}, "--submit-interval-ms"),
        (
            {"burst_size": "4", "burst_interval": 1e-9, "duration": 1e9, "num_requests": None},
            "--burst-interval",
        ),
        ({"burst_size": "12", "burst_interval": 1.0}, "--burst-interval"),
        ({"burst_size": "4", "burst_interval": 1.0, "duration": 1.0}, "--burst-interval"),
        ({"burst_size": "4", "burst_interval": 3.0, "request_rate": "4"}, "--burst-interval"),
        ({"submit_interval_ms": 100.0, "ramp": 2.4}, "--ramp"),
        ({"prefix_len": 8, "prompt_len": "16,8"}, "--prefix-len"),
        ({"trace": AZURE, "num_requests": 31}, "--num-requests"),
        ({"trace": AZURE, "length_scale": 0.5, "prompt_len": "8", "max_new_tokens": "2"}, "--length-scale"),
        ({"trace": AZURE, "length_scale": 0.5, "prompt": "a", "max_new_tokens": "2"}, "--length-scale"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(flags: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError) as caught:
        sent(**flags)
    assert caught.value.name == name


@pytest.mark.parametrize(
    "flags",
    [
        {"model": "other"},
        {"device": "cpu"},
        {"dtype": "float32"},
        {"num_threads": 2},
        {"prompt": "a"},
        {"prefix_len": 2},
        {"pretok": True},
        {"tokenize_workers": 2},
        {"stop_at_eos": True},
        {"warmup_runs": 1},
    ],
)
def test_the_simulator_takes_no_flag_that_it_does_not_read(flags: dict[str, Any]) -> None:
    simulated = {"target": "sim", "cost_model": Path("c.json")}
    assert sent(**simulated).options.target == "sim"
    with pytest.raises(InputError) as caught:
        sent(**simulated, **flags)
    assert caught.value.name == "--" + next(iter(flags)).replace("_", "-")
    assert "--target sim" in caught.value.why


def test_files_are_recorded_by_the_last_part_of_their_path() -> None:
    assert sent(trace=AZURE).configuration()["trace"] == "azure_llm_2023_conv.csv"


# --- clients that come back


def test_a_policy_is_read_from_its_flags() -> None:
    made = experiment(num_requests=4, retry="exponential", retry_budget=0.1, per_try_timeout=2.0)
    assert made.load.retries == RetryPolicy("exponential", 0.1, 2.0)
    assert made.configuration()["retry-budget"] == 0.1
    assert not experiment(num_requests=4).load.retries.is_on


@pytest.mark.parametrize("target", ["engine", "http://127.0.0.1:8000/v1"])
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"retry": "always"}, "--retry"),
        ({"retry_budget": 0.1}, "--retry-budget"),
        ({"per_try_timeout": 1.0}, "--per-try-timeout"),
        ({"retry": "immediate", "retry_budget": 0.0}, "--retry-budget"),
        ({"retry": "immediate", "retry_budget": 1.5}, "--retry-budget"),
        ({"retry": "immediate", "retry_budget": float("nan")}, "--retry-budget"),
        ({"retry": "immediate", "per_try_timeout": 0.0}, "--per-try-timeout"),
        ({"retry": "immediate", "per_try_timeout": 3.0, "timeout": 3.0}, "--per-try-timeout"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(target: str, flags: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError) as caught:
        experiment(target=target, num_requests=4, **flags)
    assert caught.value.name == name
