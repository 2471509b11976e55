"""Workloads: the same for every limit and for every run of one seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.workload import WARM_UP, Workload, WorkloadSource, workload_sha256
from roseinfer.errors import InputError
from tests.bench.experiments import WORDS, WordTokenizer, experiment


def source(max_model_len: int = 1024, **flags: Any) -> WorkloadSource:
    made = experiment(**({"burst_size": "6", "prompt_len": "8", "repeats": 2} | flags))
    return WorkloadSource(made, WordTokenizer(), vocab_size=len(WORDS), max_model_len=max_model_len)


def draw(limit: str = "0", repeat: int = 0, **flags: Any) -> Workload:
    made = source(max_inflight=limit, **flags)
    return made.draw(made._experiment.cells[0], repeat)


def same(a: Workload, b: Workload) -> bool:
    return str(a) == str(b)  # shorter than what numpy would shorten


def test_all_limits_get_the_same_requests() -> None:  # case C5
    assert same(draw("0"), draw("4"))


def test_two_runs_of_one_seed_get_the_same_requests() -> None:  # case C5
    assert same(draw(seed=7, repeat=1), draw(seed=7, repeat=1))


def test_another_seed_and_another_repeat_have_prompts_of_their_own() -> None:  # case C5
    a, b, c = (set(map(str, draw(seed=s, repeat=r).prompts)) for s, r in [(1, 0), (2, 0), (1, 1)])
    assert not a & b
    assert not a & c


def test_warm_up_prompts_are_never_measured() -> None:  # case I3
    measured = {str(prompt) for repeat in range(8) for prompt in draw(repeat=repeat).prompts}
    warm = {str(prompt) for run in range(3) for prompt in draw(repeat=WARM_UP + run).prompts}
    assert len(warm) == 18
    assert not {prompt[:9] for prompt in measured} & {
        prompt[:9] for prompt in warm
    }  # nor their first three words


def test_spaced_requests_are_due_where_the_interval_says() -> None:  # case C6
    due_s = draw(submit_interval_ms=20.0, num_requests=50, burst_size=None).scheduled_s
    assert due_s == pytest.approx(np.arange(50) * 0.020)


def test_a_burst_is_due_at_once() -> None:
    assert draw().scheduled_s.tolist() == [0.0] * 6


def test_a_given_prompt_is_repeated_without_a_space() -> None:
    drawn = draw(prompt=" ab cd", prompt_repeats=3, prompt_len=None)
    assert drawn.prompts == [" ab cd ab cd ab cd"] * 6
    assert drawn.prompt_tokens.tolist() == [6] * 6


@pytest.mark.parametrize("flags", [{"prompt": " ab cd", "prompt_len": None}, {}])
def test_pretok_sends_the_ids_of_the_same_text(flags: dict[str, Any]) -> None:
    texts, ids = draw(**flags).prompts, draw(pretok=True, **flags).prompts
    assert ids == [WordTokenizer().encode(str(text)) for text in texts]


def test_every_request_wants_the_cells_output_tokens() -> None:
    assert draw(max_new_tokens="3").output_tokens.tolist() == [3] * 6


def test_prompts_that_could_never_be_served_are_refused_at_once() -> None:  # case A15
    with pytest.raises(InputError, match="--prompt-len '8'"):
        source(max_model_len=11, max_new_tokens="4")
    with pytest.raises(InputError, match="--prompt '8 tokens'"):
        source(max_model_len=11, prompt=" ab" * 8, prompt_len=None, max_new_tokens="4")


def test_the_table_holds_every_request_of_every_shape_and_repeat_once() -> None:
    table = source(max_inflight="0,4", burst_size="3,5", prompt_len="8,9").table()
    assert len(table) == 2 * 2 * (3 + 5)  # repeats, prompt lengths; not limits
    keys = ["repeat", "burst_size", "prompt_len", "output_len", "request_index"]
    assert not table.duplicated(keys).any()
    assert (table["prompt_tokens"] == table["prompt_len"]).all()


def test_the_table_keeps_the_text_only_where_the_user_gave_it() -> None:
    assert source().table()["prompt"].isna().all()
    assert (source(prompt=" ab", prompt_len=None).table()["prompt"] == " ab").all()


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"prompt_len": "9"}, {"max_new_tokens": "5"}, {"repeats": 3}]
)
def test_the_hash_tells_workloads_apart(change: dict[str, Any]) -> None:
    assert workload_sha256(source().table()) == workload_sha256(source().table())
    assert workload_sha256(source().table()) != workload_sha256(source(**change).table())


def test_the_hash_does_not_depend_on_the_limits() -> None:  # case C5
    tables = [source(max_inflight=limits).table() for limits in ("0", "0,4", "4,16")]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    assert len({workload_sha256(table) for table in tables}) == 1
