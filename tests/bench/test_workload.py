"""Workloads: the same for every limit and for every run of one seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.load import CLOSED_LOOP_MOST
from roseinfer.bench.prompts import PromptMaker
from roseinfer.bench.workload import WARM_UP, Workload, WorkloadSource, workload_sha256
from roseinfer.errors import InputError
from tests.bench.experiments import WORDS, WordTokenizer, experiment

TRACES = Path(__file__).parent / "traces"
AZURE = TRACES / "azure_llm_2023_conv.csv"
MOONCAKE = TRACES / "mooncake_conversation_lengths.csv"


def source(max_model_len: int = 1024, **flags: Any) -> WorkloadSource:
    made = experiment(**({"burst_size": "6", "prompt_len": "8", "repeats": 2} | flags))
    return WorkloadSource(made, WordTokenizer(), vocab_size=len(WORDS), max_model_len=max_model_len)


def draw(limit: str = "0", repeat: int = 0, **flags: Any) -> Workload:
    made = source(max_inflight=limit, **flags)
    return made.draw(made._experiment.cells[0], repeat)


def contents(workload: Workload) -> str:
    return str(workload._replace(prompts=list(workload.prompts)))  # shorter than what numpy would shorten


def test_all_limits_get_the_same_requests() -> None:  # case C5
    assert contents(draw("0")) == contents(draw("4"))


def test_two_runs_of_one_seed_get_the_same_requests() -> None:  # case C5
    assert contents(draw(seed=7, repeat=1)) == contents(draw(seed=7, repeat=1))


def test_another_seed_and_another_repeat_have_prompts_of_their_own() -> None:  # case C5
    a, b, c = (set(map(str, draw(seed=s, repeat=r).prompts)) for s, r in [(1, 0), (2, 0), (1, 1)])
    assert not a & b
    assert not a & c


def test_a_server_gets_other_prompts_for_each_shape() -> None:  # cases I5, I7
    made = source(prompt_len="8,12", burst_size="6,9", target="http://127.0.0.1:8000/v1")
    beginnings = [
        {str(prompt)[:9] for prompt in made.draw(cell, 0).prompts} for cell in made._experiment.cells
    ]
    assert len(set[str]().union(*beginnings)) == sum(map(len, beginnings)) == 30


@pytest.mark.parametrize("target", [{}, {"target": "sim", "cost_model": "x.json"}])
def test_of_an_engine_a_cell_is_the_same_whatever_cells_are_beside_it(target: dict[str, Any]) -> None:
    alone, among = (source(burst_size=sizes, **target) for sizes in ("9", "6,9"))
    cell = alone._experiment.cells[0]
    assert contents(alone.draw(cell, 1)) == contents(among.draw(cell, 1))


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
    due_s = draw().scheduled_s
    assert due_s is not None
    assert due_s.tolist() == [0.0] * 6


def test_a_closed_loop_has_requests_but_no_times() -> None:
    drawn = draw(burst_size=None, max_concurrency=2, num_requests=5)
    assert drawn.scheduled_s is None
    assert drawn.arrival == "closed"
    assert len(drawn.prompts) == len(drawn.prompt_tokens) == 5
    assert len(draw(burst_size=None, max_concurrency=2, duration=5.0).prompt_tokens) == CLOSED_LOOP_MOST


def test_a_trace_gives_its_arrivals_and_lengths() -> None:
    drawn = draw(burst_size=None, prompt_len=None, trace=AZURE, length_scale=0.1, num_requests=3)
    assert drawn.scheduled_s == pytest.approx([0, 4.314579, 4.541877])
    assert drawn.prompt_tokens.tolist() == [37, 40, 88]
    assert drawn.output_tokens.tolist() == [4, 11, 6]
    assert [len(str(prompt).split()) for prompt in drawn.prompts] == [37, 40, 88]
    assert drawn.arrival == "trace"


@pytest.mark.parametrize(
    ("flags", "prompts", "outputs"),
    [
        ({"prompt_len": "8"}, [8, 8, 8], [4, 11, 6]),
        ({"prompt": " ab cd"}, [2, 2, 2], [4, 11, 6]),
        ({"max_new_tokens": "3"}, [37, 40, 88], [3, 3, 3]),
    ],
)
def test_a_length_that_a_flag_names_takes_the_traces_place(
    flags: dict[str, Any], prompts: list[int], outputs: list[int]
) -> None:
    traced: dict[str, Any] = {
        "burst_size": None,
        "prompt_len": None,
        "trace": AZURE,
        "length_scale": 0.1,
        "num_requests": 3,
    }
    drawn = draw(**(traced | flags))
    assert drawn.prompt_tokens.tolist() == prompts
    assert drawn.output_tokens.tolist() == outputs


def test_what_a_trace_went_through_is_said() -> None:
    traced: dict[str, Any] = {
        "burst_size": None,
        "prompt_len": None,
        "length_scale": 0.01,
        "num_requests": 40,
    }
    (first, ticks) = source(trace=MOONCAKE, **traced).notes
    assert first == "mooncake_conversation_lengths.csv: the first 40 of 60 requests, token counts times 0.01."
    assert "random time" in ticks
    assert source().notes == []


@pytest.mark.parametrize(("limits", "is_said"), [("0,4", True), ("0,8", False), ("9", False)])
def test_limits_below_the_users_of_a_closed_loop_are_said(limits: str, is_said: bool) -> None:
    closed: dict[str, Any] = {"burst_size": None, "max_concurrency": 8, "num_requests": 9}
    notes = source(max_inflight=limits, **closed).notes
    assert [note[:34] for note in notes] == ["a limit below the 8 users of the c"] * is_said
    assert source(max_inflight=limits, max_concurrency=8).notes == []  # of a schedule each is refused once


def test_bursts_that_are_cut_short_are_said() -> None:
    flags: dict[str, Any] = {
        "arrival": "constant",
        "request_rate": "10",
        "burst_size": "5",
        "burst_interval": 1.45,
    }
    made = source(num_requests=17, **flags)
    made.table()
    assert made.notes == ["--num-requests 17 cuts the last burst short in 2 of 2 schedules."]
    whole = source(num_requests=20, **flags)
    whole.table()
    assert whole.notes == []


TRACED_OUTPUT: dict[str, Any] = {"burst_size": None, "trace": AZURE, "prompt_len": "8"}
TRACED_PROMPT: dict[str, Any] = {
    "burst_size": None,
    "trace": AZURE,
    "prompt_len": None,
    "max_new_tokens": "4",
    "output_len_dist": "uniform:0.5",
}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (TRACED_PROMPT, "line 8: 1313 prompt and 1 new tokens exceed the context of 1000"),
        (
            TRACED_PROMPT | {"prefix_len": 91, "num_requests": 4},
            "line 5: a prompt of 91 tokens has none of its own",
        ),
        (
            TRACED_OUTPUT | {"prompt_len_dist": "uniform:0.5", "length_scale": 20.0},
            "line 3: 1 prompt and 2180 new",
        ),
    ],
)
def test_what_a_trace_says_leaves_a_drawn_length_its_place(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        source(max_model_len=1000, **flags)
    assert caught.value.name == "--trace"
    assert said in caught.value.why


def test_only_what_a_duration_plays_of_a_trace_has_to_fit() -> None:
    drawn = source(max_model_len=1000, duration=6.0, **TRACED_PROMPT)
    assert drawn.draw(drawn._experiment.cells[0], 0).prompt_tokens.max() == 879


def test_drawn_lengths_are_sent_exactly() -> None:  # case I1
    drawn = draw(prompt_len_dist="uniform:0.5", output_len_dist="uniform:0.5", burst_size="200")
    assert [len(str(prompt).split()) for prompt in drawn.prompts] == drawn.prompt_tokens.tolist()
    assert set(drawn.prompt_tokens) == set(range(4, 13))
    assert set(drawn.output_tokens) == set(range(2, 7))


def test_drawn_lengths_are_cut_to_what_fits() -> None:
    drawn = draw(prompt_len_dist="lognormal:0.5", burst_size="500", kv_cache_tokens=32)
    spans = drawn.prompt_tokens + drawn.output_tokens
    assert spans.max() == 32
    assert drawn.prompt_tokens.min() >= 1


def test_a_fixed_prompt_is_never_cut_for_a_long_output() -> None:
    drawn = draw(prompt_len="20", output_len_dist="lognormal:0.4", burst_size="5000", kv_cache_tokens=32)
    assert set(drawn.prompt_tokens) == {20}
    assert drawn.output_tokens.max() == 12


def test_another_seed_changes_arrivals_lengths_and_texts() -> None:  # case C5
    flags: dict[str, Any] = {
        "burst_size": None,
        "request_rate": "5",
        "num_requests": 6,
        "prompt_len_dist": "uniform:0.5",
    }
    first, again, other = (draw(seed=seed, output_len_dist="uniform:0.5", **flags) for seed in (1, 1, 2))
    assert contents(first) == contents(again)
    assert first.scheduled_s is not None
    assert other.scheduled_s is not None
    assert first.scheduled_s[1:].tolist() != other.scheduled_s[1:].tolist()
    assert first.prompt_tokens.tolist() != other.prompt_tokens.tolist()
    assert first.output_tokens.tolist() != other.output_tokens.tolist()
    assert not set(first.prompts) & set(other.prompts)


def test_prompts_share_the_prefix_asked_for_and_no_more() -> None:  # case I7
    prompts = [str(prompt).split() for prompt in draw(prefix_len=5, burst_size="50").prompts]
    assert len({tuple(words[:5]) for words in prompts}) == 1
    assert len({words[5] for words in prompts}) > 30
    assert {len(words) for words in prompts} == {8}


def test_a_warm_up_has_a_prefix_of_its_own() -> None:  # case I3
    prefixes = {
        str(draw(prefix_len=5, repeat=repeat).prompts[0])[:14] for repeat in (0, 1, WARM_UP, WARM_UP + 1)
    }
    assert len(prefixes) == 4


def test_without_a_tokenizer_there_are_lengths_but_no_prompts() -> None:
    made = experiment(burst_size="6", prompt_len="8", prompt_len_dist="uniform:0.5")
    drawn = WorkloadSource(made, None, vocab_size=0, max_model_len=64).draw(made.cells[0], 0)
    assert len(drawn.prompts) == 0
    assert drawn.prompt_tokens.tolist() == draw(prompt_len_dist="uniform:0.5").prompt_tokens.tolist()


def test_the_table_makes_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = source()
    monkeypatch.setattr(PromptMaker, "text", None)
    assert len(made.table()) == 12


def test_a_given_prompt_is_repeated_without_a_space() -> None:
    drawn = draw(prompt=" ab cd", prompt_repeats=3, prompt_len=None)
    assert drawn.prompts == [" ab cd ab cd ab cd"] * 6
    assert drawn.prompt_tokens.tolist() == [6] * 6


@pytest.mark.parametrize("flags", [{"prompt": " ab cd", "prompt_len": None}, {}])
def test_pretok_sends_the_ids_of_the_same_text(flags: dict[str, Any]) -> None:
    texts, ids = draw(**flags).prompts, draw(pretok=True, **flags).prompts
    assert list(ids) == [WordTokenizer().encode(str(text)) for text in texts]


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
    keys = ["repeat", "burst_size", "prompt_len", "output_len", "request_rate", "request_index"]
    assert not table.duplicated(keys).any()
    assert (table["prompt_tokens"] == table["prompt_len"]).all()


def test_the_table_keeps_the_text_only_where_the_user_gave_it() -> None:
    assert source().table()["prompt"].isna().all()
    assert (source(prompt=" ab", prompt_len=None).table()["prompt"] == " ab").all()


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"prompt_len": "9"},
        {"max_new_tokens": "5"},
        {"repeats": 3},
        {"prefix_len": 2},
        {"prompt_len_dist": "uniform:0.5"},
        {"output_len_dist": "uniform:0.5"},
        {"burst_size": None, "num_requests": 6, "request_rate": "5"},
        {"burst_size": None, "num_requests": 6, "max_concurrency": 5},
    ],
)
def test_the_hash_tells_workloads_apart(change: dict[str, Any]) -> None:
    assert workload_sha256([source().table()]) == workload_sha256([source().table()])
    assert workload_sha256([source().table()]) != workload_sha256([source(**change).table()])


def test_the_hash_does_not_depend_on_the_limits() -> None:  # case C5
    tables = [source(max_inflight=limits).table() for limits in ("0", "0,4", "4,16")]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    assert len({workload_sha256([table]) for table in tables}) == 1


@pytest.mark.parametrize(
    "flags",
    [
        {"request_rate": "50", "num_requests": 150_000},
        {"request_rate": "50", "duration": 3000.0, "ramp": 10.0},
        {"request_rate": "50", "num_requests": 2 * 65_536},
        {
            "request_rate": "50",
            "num_requests": 70_000,
            "prompt_len_dist": "lognormal:0.5",
            "output_len_dist": "uniform:0.5",
        },
        {"submit_interval_ms": 10.0, "num_requests": 70_000},
        {"burst_size": "70000"},
        {"request_rate": "50", "burst_size": "1000", "burst_interval": 10.0, "num_requests": 70_000},
        {"max_concurrency": 2, "num_requests": 70_000},
    ],
)
@pytest.mark.parametrize("repeat", [0, 1])
def test_blocks_are_what_is_drawn_in_pieces(flags: dict[str, Any], repeat: int) -> None:
    made = source(**({"burst_size": None} | flags))
    (cell,) = made._experiment.cells
    drawn, blocks = made.draw(cell, repeat), [*made.blocks(cell, repeat)]
    assert [len(block.prompt_tokens) for block in blocks[:-1]] == [65_536] * (len(blocks) - 1)
    assert len(blocks) > 1
    for name in ("prompt_tokens", "output_tokens", "scheduled_s"):
        if getattr(drawn, name) is None:
            assert all(getattr(block, name) is None for block in blocks)
        else:
            pieces = np.concatenate([getattr(block, name) for block in blocks])
            np.testing.assert_array_equal(pieces, getattr(drawn, name))
    known = {(block.arrival, block.prompt_seed, block.repeat) for block in blocks}
    assert known == {(drawn.arrival, drawn.prompt_seed, repeat)}


def test_the_table_in_parts_is_the_table_as_it_was_drawn() -> None:
    made = source(
        burst_size=None, request_rate="50", num_requests=70_000, prompt_len_dist="uniform:0.5", repeats=2
    )
    parts = [*made.table_blocks()]
    assert [len(part) for part in parts] == [65_536, 4464] * 2
    whole = made.table()
    for repeat in (0, 1):
        drawn = made.draw(made._experiment.cells[0], repeat)
        rows = whole[whole["repeat"] == repeat]
        assert rows["request_index"].tolist() == list(range(70_000))
        assert drawn.scheduled_s is not None
        assert np.array_equal(rows["scheduled_s"], drawn.scheduled_s)
        assert np.array_equal(rows["prompt_tokens"], drawn.prompt_tokens)
    assert workload_sha256(parts) == workload_sha256([whole])
