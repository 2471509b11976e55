"""Classes of requests: drawn alike for every limit, kept with the workload, sent with each request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.classes import draw_classes
from roseinfer.bench.priorities import (
    PriorityMix,
    TtftDeadlines,
    parse_deadlines,
    parse_mix,
)
from roseinfer.bench.seeds import BLOCK_ROWS
from roseinfer.bench.workload import WorkloadSource, workload_sha256
from roseinfer.errors import InputError
from tests.bench.experiments import WORDS, WordTokenizer, experiment

MIX = "high:0.25,low:0.75"


def source(**flags: Any) -> WorkloadSource:
    made = experiment(**({"burst_size": "40", "prompt_len": "8", "repeats": 2} | flags))
    return WorkloadSource(made, WordTokenizer(), vocab_size=len(WORDS), max_model_len=1024)


def classes_of(limit: str = "0", repeat: int = 0, **flags: Any) -> list[int]:
    made = source(**({"priority_mix": MIX, "max_inflight": limit} | flags))
    classes = made.draw(made._experiment.cells[0], repeat).classes
    assert classes is not None
    return [int(place) for place in classes.places]


def test_classes_come_in_the_order_of_their_names() -> None:
    assert parse_mix("high:0.1,mid_2:0.2,low-x:0.7") == PriorityMix(
        ("high", "mid_2", "low-x"), (0.1, 0.2, 0.7)
    )
    assert parse_mix("only:1").names == ("only",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("high:0.1,low:0.8", "sum to 0.9"),
        ("high:0.1,low:0.9001", "must sum to 1"),
        ("high:0,low:1", "no share above 0"),
        ("high:1.5,low:-0.5", "no share above 0"),
        ("high:nan,low:1", "no share above 0"),
        ("high:x,low:1", "no share above 0"),
        ("high:0.5,high:0.5", "names high twice"),
        ("High:1", "'High:1' is not as in"),
        ("high", "'high' is not as in"),
        ("", "'' is not as in"),
        (":1", "':1' is not as in"),
        ("high:0.5,,low:0.5", "'' is not as in"),
        (",".join(f"c{i}:0.05" for i in range(20)), "20 classes"),
    ],
)
def test_what_is_no_mix_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(InputError, match="--priority-mix") as refused:
        parse_mix(text)
    assert why in str(refused.value)


def test_shares_may_miss_one_by_a_rounding() -> None:
    assert parse_mix("a:0.333333,b:0.333333,c:0.333334").names == ("a", "b", "c")
    assert parse_mix("a:0.3333333,b:0.3333333,c:0.3333333").names == ("a", "b", "c")


def test_each_class_is_drawn_as_often_as_its_share() -> None:
    drawn = draw_classes(PriorityMix(("a", "b", "c"), (0.1, 0.2, 0.7)), 100_000, seed=1, repeat=0).places
    assert np.bincount(drawn) / 100_000 == pytest.approx([0.1, 0.2, 0.7], abs=0.01)


def test_the_first_of_a_longer_run_are_those_of_a_shorter_one() -> None:
    mix = PriorityMix(("a", "b"), (0.5, 0.5))
    longer = draw_classes(mix, BLOCK_ROWS + 10, seed=3, repeat=1)
    assert draw_classes(mix, 50, seed=3, repeat=1).places.tolist() == longer.places[:50].tolist()
    assert len(longer.places) == BLOCK_ROWS + 10


def test_all_limits_get_the_same_classes_and_each_repeat_and_seed_its_own() -> None:  # case C5
    assert classes_of("0") == classes_of("4")
    assert classes_of(repeat=0) != classes_of(repeat=1)
    assert classes_of(seed=1) != classes_of(seed=2)


def test_classes_change_nothing_else_of_a_workload() -> None:
    plain, mixed = source(), source(priority_mix=MIX)
    shape = plain._experiment.cells[0].shape
    assert plain.draw(shape, 1)._replace(prompts=(), classes=None).prompt_tokens.tolist() == (
        mixed.draw(shape, 1).prompt_tokens.tolist()
    )
    assert list(plain.draw(shape, 1).prompts) == list(mixed.draw(shape, 1).prompts)
    assert plain.draw(shape, 1).classes is None
    assert "priority" not in plain.table()  # a run from before there were classes is still the same workload


def test_blocks_have_the_classes_of_the_whole(tmp_path: Path) -> None:
    flags = {"burst_size": None, "request_rate": "10", "num_requests": 30, "priority_mix": MIX}
    made = source(**flags)
    (block,) = made.blocks(made._experiment.cells[0], 1)
    whole = made.draw(made._experiment.cells[0], 1)
    assert block.classes is not None
    assert whole.classes is not None
    assert block.classes.names == whole.classes.names == ("high", "low")
    assert block.classes.places.tolist() == whole.classes.places.tolist()
    (first,) = source(priority_mix=MIX).blocks(source(priority_mix=MIX)._experiment.cells[0], 1)
    assert first.classes is not None


def test_classes_are_saved_and_played_again(tmp_path: Path) -> None:  # case C5
    table = source(priority_mix=MIX).table()
    table.to_parquet(tmp_path / "workload.parquet")
    assert set(table["priority"]) == {"high", "low"}
    again = WorkloadSource(
        experiment(workload=tmp_path / "workload.parquet", repeats=2),
        WordTokenizer(),
        vocab_size=len(WORDS),
        max_model_len=1024,
    )
    shape = again._experiment.cells[0].shape
    classes = again.draw(shape, 1).classes
    assert classes is not None
    assert (classes.names, classes.places.tolist()) == (("high", "low"), classes_of(repeat=1))
    assert workload_sha256([again.table()]) == workload_sha256([table])


def test_a_replay_cut_by_its_duration_keeps_the_classes_in_place(tmp_path: Path) -> None:
    rows = {"scheduled_s": [2.0, 0.0, 1.0], "output_tokens": [1, 1, 1], "prompt_tokens": [8, 8, 8]}
    rows |= {"priority": ["c", "a", "b"], "priority_rank": [3, 0, 1]}
    pd.DataFrame(rows).to_parquet(tmp_path / "w.parquet")
    made = source(workload=tmp_path / "w.parquet", duration=1.5, repeats=1, burst_size=None, prompt_len=None)
    classes = made.draw(made._experiment.cells[0], 0).classes
    assert classes is not None
    assert [classes.names[place] for place in classes.places] == ["a", "b"]
    assert len(classes.names) == 4


def test_a_workload_that_is_played_again_has_its_own_classes(tmp_path: Path) -> None:
    source().table().to_parquet(tmp_path / "w.parquet")
    with pytest.raises(InputError, match="--priority-mix 'high:1': contradicts --workload"):
        experiment(workload=tmp_path / "w.parquet", repeats=1, priority_mix="high:1")


@pytest.mark.parametrize(
    ("priority", "rank", "why"),
    [
        (["a", "b"], None, "has a priority and no priority_rank"),
        (None, [0, 1], "has a priority_rank and no priority"),
        (["a", "a"], [0, 1], "calls two ranks a"),
        (["a", "b"], [0, 0], "has two names of rank 0"),
        (["A", "b"], [0, 1], "row 0: priority 'A' is no name"),
        (["a", None], [0, 1], "row 1: priority nan is no name"),
        (["a", "b"], [0, 99], "row 1: priority_rank 99 is no whole number from 0 to 15"),
        (["a", "b"], [0, 1.5], "row 1: priority_rank 1.5 is no whole number"),
    ],
)
def test_classes_of_a_table_that_make_no_sense_are_refused(
    tmp_path: Path, priority: Any, rank: Any, why: str
) -> None:
    rows: dict[str, Any] = {"scheduled_s": [0.0, 1.0], "output_tokens": [1, 1], "prompt_tokens": [8, 8]}
    rows |= {name: value for name, value in [("priority", priority), ("priority_rank", rank)] if value}
    pd.DataFrame(rows).to_parquet(tmp_path / "w.parquet")
    with pytest.raises(InputError, match="--workload") as refused:
        experiment(workload=tmp_path / "w.parquet", repeats=1)
    assert why in str(refused.value)


def test_deadlines_are_of_all_or_of_classes() -> None:
    assert parse_deadlines("2s") == TtftDeadlines(2.0, {})
    assert parse_deadlines("2s").of(()) == (2.0,)
    assert parse_deadlines("2s").of(("a", "b")) == (2.0, 2.0)
    assert parse_deadlines("high:250ms,low:5s").of(("high", "mid", "low")) == (0.25, None, 5.0)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"ttft_deadline": "2"}, "'2' is no duration"),
        ({"ttft_deadline": "0s"}, "'0s' is no duration"),
        ({"ttft_deadline": "high:250ms"}, "no request is of class high: needs --priority-mix"),
        (
            {"ttft_deadline": "mid:1s", "priority_mix": MIX},
            "no request is of class mid: the classes are high, low",
        ),
        ({"ttft_deadline": "high:1s,high:2s", "priority_mix": MIX}, "names high twice"),
        ({"ttft_deadline": "high:x", "priority_mix": MIX}, "'x' is no duration"),
        ({"ttft_deadline": "2s", "target": "http://127.0.0.1:1/v1"}, "takes no deadline"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused_by_name(flags: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match="--ttft-deadline") as refused:
        experiment(**flags)
    assert why in str(refused.value)
