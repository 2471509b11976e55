"""Steps out of deliveries: what a client of a server can tell."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from roseinfer.bench.observed_steps import observed_steps
from roseinfer.bench.records import REQUEST_SCHEMA, as_frame
from roseinfer.bench.row_files import record_table
from roseinfer.sim.cost_model import COMPOSITION

TWO_TOGETHER: list[dict[str, Any]] = [
    {"sent_s": 0.0, "prompt_tokens": 10, "chunk_times_s": [0.100, 0.150, 0.200], "chunk_tokens": [1, 1, 1]},
    {"sent_s": 0.1, "prompt_tokens": 4, "chunk_times_s": [0.151, 0.2005], "chunk_tokens": [1, 1]},
]


def observed(*rows: dict[str, Any]) -> pd.DataFrame:
    frame = pd.DataFrame([{"cell_id": "c", "repeat": 0, **row} for row in rows])
    return observed_steps(as_frame(record_table(frame, REQUEST_SCHEMA)))


def test_deliveries_that_come_together_are_a_step() -> None:
    steps = observed(*TWO_TOGETHER)
    assert steps[list(COMPOSITION)].to_numpy().tolist() == [[10, 55, 0, 0], [4, 10, 1, 11], [0, 0, 2, 12 + 5]]
    assert steps["exec_end_s"].tolist() == [0.100, 0.151, 0.2005]


def test_a_step_begins_where_the_one_before_ended() -> None:
    assert observed(*TWO_TOGETHER)["exec_start_s"].tolist() == [0.0, 0.100, 0.151]


def test_after_a_pause_it_begins_with_its_request() -> None:
    later = {"sent_s": 5.0, "prompt_tokens": 3, "chunk_times_s": [5.2]}
    assert observed(*TWO_TOGETHER, later)["exec_start_s"].tolist()[-1] == 5.0


def test_a_second_delivery_of_a_request_is_another_step_however_near() -> None:
    fast = {"sent_s": 0.0, "prompt_tokens": 2, "chunk_times_s": [0.0010, 0.0015, 0.0020]}
    assert observed(fast)["decode_requests"].tolist() == [0, 1, 1]


def test_a_busy_server_may_take_a_part_of_a_step_to_write_its_tokens() -> None:
    first = {"sent_s": 0.0, "prompt_tokens": 2, "chunk_times_s": [0.10, 0.20, 0.30]}
    last = {"sent_s": 0.0, "prompt_tokens": 2, "chunk_times_s": [0.12, 0.22, 0.32]}
    assert observed(first, last)["decode_requests"].tolist() == [0, 2, 2]


def test_a_delivery_of_several_tokens_counts_them_in_what_follows() -> None:
    steps = observed({"sent_s": 0.0, "prompt_tokens": 2, "chunk_times_s": [0.1, 0.2], "chunk_tokens": [3, 1]})
    assert steps["context_tokens"].tolist() == [0, 5]


@pytest.mark.parametrize("lacks", ["prompt_tokens", "chunk_times_s"])
def test_what_is_not_known_leaves_no_step(lacks: str) -> None:
    assert observed({**TWO_TOGETHER[0], lacks: None}).empty
