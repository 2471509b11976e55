"""What a run says of its classes and of its refusals."""

from __future__ import annotations

from typing import Any

import pandas as pd

from roseinfer.bench.class_report import class_figures, class_tables, reasons_of, refusal_lines
from roseinfer.bench.goals import parse_goal
from tests.bench.rows import as_read, measured


def rows(limit: int | None = 4, **flags: Any) -> pd.DataFrame:
    """8 requests, high and low by turns, of which the first `limit` are served, 10 ms each."""
    made = measured(burst_size=8, limit=limit, **flags)
    made["priority"] = ["high", "low"] * 4
    made.loc[made["outcome"] == "rejected", "reject_reason"] = "inflight"
    return made


def test_each_class_has_its_own_figures() -> None:
    figures = class_figures(rows(), ("high", "low"), [])
    assert figures["class"].tolist() == ["high", "low"]
    assert figures["offered"].tolist() == [4, 4]
    assert figures["good"].tolist() == [2, 2]
    assert figures["refused"].tolist() == [{"inflight": 2}] * 2
    assert figures["p50_ttft_ms"].round(1).tolist() == [20.1, 30.1]
    assert figures["p99_ttft_ms"].round(1).tolist() == [40.1, 50.1]


def test_goals_are_of_the_offered() -> None:
    figures = class_figures(rows(), ("high", "low"), [parse_goal("ttft:25")])
    assert figures["good"].tolist() == [1, 0]


def test_repeats_are_pooled() -> None:
    both = pd.concat([rows(), rows(repeat=1)], ignore_index=True)
    assert class_figures(both, ("high", "low"), [])["offered"].tolist() == [8, 8]


def test_the_table_has_a_column_per_limit_and_a_block_per_class() -> None:
    both = pd.concat([rows(None), rows(4)], ignore_index=True)
    (table,) = class_tables(both, ("high", "low"), [parse_goal("ttft:25")])
    lines = table.splitlines()
    assert lines[0] == "By class, burst 8, prompt tokens 32, new tokens 3"
    assert lines[1].split() == ["max", "inflight", "4", "no", "limit"]
    blocks = [lines.index("high"), lines.index("low")]
    assert blocks == sorted(blocks)
    high = {line[:24].strip(): line[24:].split() for line in lines[blocks[0] : blocks[1]]}
    assert high["offered"] == ["4", "4"]
    assert high["good"] == ["1,", "25.0", "%", "1,", "25.0", "%"]
    assert high["refused: inflight"] == ["2,", "50.0", "%", "0"]
    assert lines[-1].startswith("Good: served with ttft:25 (ms).")


def test_a_class_of_which_nothing_came_is_not_left_out() -> None:
    (table,) = class_tables(rows(), ("urgent", "high", "low"), [])
    assert "urgent" in table
    assert "0, n/a" in table


def test_without_classes_there_is_no_table() -> None:
    assert list(class_tables(rows(), (), [])) == []


def test_reasons_are_listed_where_there_are_several() -> None:
    made = rows(2)
    assert refusal_lines(made) == []
    last = made.index[-1]
    made.loc[last, ["reject_reason", "outcome"]] = ["queue-timeout", "timeout"]
    assert reasons_of(made) == {"inflight": 5, "queue-timeout": 1}
    (line,) = refusal_lines(made)
    assert line == "Refused by reason: limit=2,prompt=32: 5 inflight, 1 queue-timeout."


def test_an_empty_cell_refuses_nothing() -> None:
    assert refusal_lines(as_read([])) == []
