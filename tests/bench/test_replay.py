"""Replays: a run's own workload gives the same requests again, and so may a table that somebody wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from roseinfer.bench.workload import WARM_UP, WorkloadSource, workload_sha256
from roseinfer.errors import InputError
from tests.bench.experiments import WORDS, WordTokenizer, experiment


def source(**flags: Any) -> WorkloadSource:
    made = experiment(**({"repeats": 2} | flags))
    return WorkloadSource(made, WordTokenizer(), vocab_size=len(WORDS), max_model_len=1024)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(table: pd.DataFrame | dict[str, list[Any]]) -> Path:
        path = tmp_path / "workload.parquet"
        pd.DataFrame(table).to_parquet(path, index=False)
        return path

    return write


def texts(made: WorkloadSource) -> list[object]:
    experiment_ = made._experiment
    return [
        (str(workload.scheduled_s), list(workload.prompts), workload.output_tokens.tolist(), workload.arrival)
        for repeat in range(experiment_.options.repeats)
        for cell in experiment_.cells
        for workload in [made.draw(cell, repeat)]
    ]


@pytest.mark.parametrize(
    "flags",
    [
        {"burst_size": "3,5", "prompt_len": "8,9"},
        {"request_rate": "0.3,5", "num_requests": 6},
        {"request_rate": "5", "burst_size": "3", "burst_interval": 0.4, "num_requests": 12},
        {"num_requests": 6, "prompt": " ab cd"},
        {"num_requests": 6, "prompt_len": "8", "prefix_len": 5, "seed": 4},
        {"num_requests": 6, "prompt_len_dist": "uniform:0.5", "output_len_dist": "lognormal:0.5"},
        {"max_concurrency": 2, "num_requests": 6},
        {"trace": Path(__file__).parent / "traces" / "azure_llm_2023_conv.csv", "length_scale": 0.1},
    ],
)
def test_a_run_played_again_sends_the_same_bytes_at_the_same_times(
    written: Any, flags: dict[str, Any]
) -> None:  # case C5
    original = source(**flags)
    kept = {key: value for key, value in flags.items() if key == "max_concurrency"}
    again = source(workload=written(original.table()), **kept)
    assert again._experiment.cells == original._experiment.cells
    assert workload_sha256([again.table()]) == workload_sha256([original.table()])
    assert texts(again) == texts(original)


def test_a_replay_meets_other_limits(written: Any) -> None:
    original = source(burst_size="6")
    again = source(workload=written(original.table()), max_inflight="0,4")
    assert [cell.max_inflight for cell in again._experiment.cells] == [None, 4]
    assert texts(again)[:2] == [texts(original)[0]] * 2


def test_fewer_repeats_are_taken_from_the_start(written: Any) -> None:
    original = source(burst_size="6", repeats=3)
    path = written(original.table())
    assert texts(source(workload=path, repeats=1)) == texts(original)[:1]
    with pytest.raises(InputError, match="more than the 3 of --workload") as caught:
        source(workload=path, repeats=4)
    assert caught.value.name == "--repeats"


def test_a_duration_ends_a_replay(written: Any) -> None:
    path = written(source(request_rate="5", arrival="constant", num_requests=10).table())
    made = source(workload=path, duration=1.0)
    assert len(made.draw(made._experiment.cells[0], 0).prompts) == 5


def test_a_warm_up_does_not_use_what_is_measured(written: Any) -> None:  # case I3
    made = source(workload=written(source(burst_size="6").table()))
    cell = made._experiment.cells[0]
    measured = {str(prompt) for repeat in (0, 1) for prompt in made.draw(cell, repeat).prompts}
    warm = {str(prompt) for run in (0, 1) for prompt in made.draw(cell, WARM_UP + run).prompts}
    assert len(warm) == 12
    assert not warm & measured


MINIMAL: dict[str, list[Any]] = {
    "scheduled_s": [12.0, 10.0, 10.5],
    "prompt_tokens": [3, 4, 5],
    "output_tokens": [1, 2, 6],
}


def test_a_table_by_hand_needs_three_columns(written: Any) -> None:
    made = source(workload=written(MINIMAL))
    (cell,) = made._experiment.cells
    assert cell.cell_id == "inflight_none"
    first, second = (made.draw(cell, repeat) for repeat in (0, 1))
    assert first.scheduled_s is not None
    assert first.scheduled_s.tolist() == [0, 0.5, 2.0]  # in order, from the first
    assert first.prompt_tokens.tolist() == [4, 5, 3]
    assert [len(str(prompt).split()) for prompt in first.prompts] == [4, 5, 3]
    assert first.output_tokens.tolist() == [2, 6, 1]
    assert first.arrival == "trace"
    assert list(first.prompts) != list(second.prompts)  # one schedule for all repeats, but texts of their own


@pytest.mark.parametrize("pretok", [False, True])
def test_a_table_may_have_the_texts(written: Any, pretok: bool) -> None:
    path = written(MINIMAL | {"prompt": [" ab cd ef", " aa bb cc dd", " ab ab ab ab ab"]})
    made = source(workload=path, pretok=pretok)
    drawn = made.draw(made._experiment.cells[0], 0)
    in_order = [" aa bb cc dd", " ab ab ab ab ab", " ab cd ef"]
    assert list(drawn.prompts) == [WordTokenizer().encode(text) if pretok else text for text in in_order]


def test_texts_are_counted_where_the_table_does_not_say(written: Any) -> None:
    table = {"scheduled_s": [0.0, 1.0], "prompt": [" ab", " ab cd"], "output_tokens": [1, 1]}
    made = source(workload=written(table))
    assert made.draw(made._experiment.cells[0], 0).prompt_tokens.tolist() == [1, 2]
    with pytest.raises(InputError, match="cannot count"):
        experiment(workload=written(table), target="sim", cost_model=Path("c.json"))


def test_a_closed_loop_is_played_again_as_one(written: Any) -> None:
    path = written(source(max_concurrency=2, num_requests=6).table())
    made = experiment(workload=path, max_concurrency=3, ramp=1.0, repeats=1)
    assert made.load.is_closed
    assert made.cells[0].prompt_len == 32
    with pytest.raises(InputError, match="needs --max-concurrency"):
        experiment(workload=path, repeats=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheduled_s": [0.0, None, 1.0]}, "row 1: scheduled_s"),
        ({"scheduled_s": [0.0, float("inf"), 1.0]}, "row 1: scheduled_s"),
        ({"output_tokens": [1, 0, 1]}, "row 1: output_tokens 0"),
        ({"output_tokens": [1, 1, 1.5]}, "row 2: output_tokens 1.5"),
        ({"prompt_tokens": [1, None, 1]}, "row 1: prompt_tokens"),
        ({"prompt": [" ab", None, " ab"]}, "row 1: prompt"),
        ({"prompt": [" ab", " ab", " ab"]}, "4 tokens that are 1 here"),
        ({"repeat": [0, 1, -1]}, "row 2: repeat"),
        ({"repeat": [0, 2, 2]}, "each of repeats 0 to 2"),
        ({"prompt_len": [4, 5, 5], "repeat": [0, 0, 1]}, "each of repeats 0 to 1"),
        ({"arrival": ["x", "x", "x"]}, "arrival 'x'"),
        ({"arrival": ["closed", "closed", "closed"]}, "arrival 'closed'"),
        ({"arrival": ["burst", "poisson", "burst"]}, "several values of arrival"),
        ({"prompt_seed": [1, 2, 2]}, "several values of prompt_seed"),
        ({"prompt_tokens": [3, 1023, 4]}, "1023 prompt and 2 new tokens exceeds the context of 1024"),
        ({"prefix_tokens": [3, 3, 3]}, "none of its own, 3 are shared"),
        ({"request_rate": [1.0, 1.00000001, 1.0]}, "seventh digit"),
        ({"burst_size": ["a", "b", "c"]}, "row 0: burst_size 'a'"),
        ({"burst_size": [2.5] * 3}, "row 0: burst_size 2.5"),
        ({"burst_size": [-1] * 3}, "row 0: burst_size -1"),
        ({"burst_size": [True] * 3}, "row 0: burst_size True"),
        ({"burst_size": [[1]] * 3}, "row 0: burst_size"),
        ({"prompt_len": ["x"] * 3}, "row 0: prompt_len 'x'"),
        ({"output_len": [4, 0, 4]}, "row 1: output_len 0"),
        ({"request_rate": ["fast"] * 3}, "row 0: request_rate 'fast'"),
        ({"request_rate": [1.0, -3.0, 1.0]}, "row 1: request_rate -3.0"),
        ({"request_rate": [float("inf")] * 3}, "row 0: request_rate inf"),
        ({"prompt_seed": ["x"] * 3}, "row 0: prompt_seed 'x'"),
        ({"prompt_seed": [-5] * 3}, "row 0: prompt_seed -5"),
        ({"prompt_seed": [2.0**64] * 3}, "row 0: prompt_seed"),
        ({"prefix_tokens": [[1]] * 3}, "row 0: prefix_tokens"),
        ({"output_tokens": [[1]] * 3}, "row 0: output_tokens"),
        ({"output_tokens": ["1", "2", "3"]}, "row 0: output_tokens '1'"),
        (
            {"scheduled_s": [0.0, 1e300, 1.0]},
            "row 1: scheduled_s 1e+300 is more than 1e+09 s after the first",
        ),
        ({"scheduled_s": ["a", "b", "c"]}, "row 0: scheduled_s 'a'"),
        ({"scheduled_s": pd.to_datetime(["2024-01-01"] * 3)}, "row 0: scheduled_s"),
        ({"arrival": [["a"]] * 3}, "row 0: arrival"),
        ({"arrival": [None] * 3}, "row 0: arrival None"),
    ],
)
def test_a_table_that_cannot_be_played_says_why(written: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        source(workload=written(MINIMAL | changes), repeats=1)
    assert caught.value.name == "--workload"
    assert said in caught.value.why


@pytest.mark.parametrize("name", ["prompt_seed", "burst_size", "prompt_len", "output_len", "request_rate"])
def test_a_column_of_nothing_is_as_good_as_none(written: Any, name: str) -> None:
    plain = texts(source(workload=written(MINIMAL)))
    assert texts(source(workload=written(MINIMAL | {name: [None] * 3}))) == plain


def test_more_users_than_requests_are_refused(written: Any) -> None:
    path = written(source(max_concurrency=2, num_requests=4).table())
    assert experiment(workload=path, max_concurrency=4, repeats=1).load.max_concurrency == 4
    with pytest.raises(InputError, match="never reached with the 4 requests") as caught:
        experiment(workload=path, max_concurrency=5, repeats=1)
    assert caught.value.name == "--max-concurrency"


@pytest.mark.parametrize("missing", list(MINIMAL))
def test_a_column_that_is_missing_is_named(written: Any, missing: str) -> None:
    table = {name: values for name, values in MINIMAL.items() if name != missing}
    with pytest.raises(InputError, match=f"has no column {missing}"):
        source(workload=written(table))


def test_a_file_that_is_no_table_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(InputError, match="is no parquet file"):
        source(workload=tmp_path / "x.parquet")
    with pytest.raises(InputError, match="No such file"):
        source(workload=tmp_path / "y.parquet")
    pd.DataFrame({name: [] for name in MINIMAL}).to_parquet(tmp_path / "z.parquet")
    with pytest.raises(InputError, match="has no requests"):
        source(workload=tmp_path / "z.parquet")


@pytest.mark.parametrize(
    "flags",
    [
        {"arrival": "burst"},
        {"num_requests": 3},
        {"burst_size": "3"},
        {"burst_interval": 3.0},
        {"request_rate": "3"},
        {"burstiness": 3.0},
        {"submit_interval_ms": 3.0},
        {"ramp": 3.0},
        {"trace": Path("t.csv")},
        {"time_scale": 2.0},
        {"length_scale": 2.0},
        {"keep_ticks": True},
        {"prompt": "a"},
        {"prompt_repeats": 2},
        {"prompt_len": "3"},
        {"prompt_len_dist": "uniform:0.5"},
        {"prefix_len": 2},
        {"max_new_tokens": "3"},
        {"output_len_dist": "uniform:0.5"},
    ],
)
def test_nothing_else_may_say_what_is_sent(written: Any, flags: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        source(workload=written(MINIMAL), **flags)
    assert caught.value.name == "--" + next(iter(flags)).replace("_", "-")
