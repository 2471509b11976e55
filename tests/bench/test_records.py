from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from roseinfer.bench.records import (
    FACTOR_NAMES,
    FACTORS,
    REQUEST_SCHEMA,
    STEP_SCHEMA,
    as_frame,
    derive,
    flattened,
    gaps_s,
)
from tests.bench.rows import measured


def times(*lists: list[float] | None) -> pd.Series[Any]:
    return pd.Series(list(lists), dtype=object)


def as_arrow(lists: pd.Series[Any]) -> pd.Series[Any]:
    return lists.astype(pd.ArrowDtype(pa.list_(pa.float64())))


BOTH_FORMS = pytest.mark.parametrize("form", [lambda lists: lists, as_arrow], ids=["objects", "arrow"])


def test_every_factor_but_the_limit_has_a_name() -> None:
    assert ["admission", *FACTOR_NAMES] == list(FACTORS)


@BOTH_FORMS
def test_gaps_are_within_requests_only(form: Any) -> None:  # case E1
    lists = form(times([1.0, 3.0, 6.0], None, [10.0], [], [20.0, 24.0]))
    assert gaps_s(lists).tolist() == [2.0, 3.0, 4.0]


@BOTH_FORMS
@pytest.mark.parametrize("lists", [[], [None, None], [[]], [[5.0]]])
def test_no_two_tokens_is_no_gap(form: Any, lists: list[list[float] | None]) -> None:  # case E14
    assert gaps_s(form(times(*lists))).size == 0


@BOTH_FORMS
def test_some_rows_of_a_column_give_their_own_gaps(form: Any) -> None:
    lists = form(times([0.0, 1.0], [0.0, 2.0], None, [0.0, 4.0]))
    assert gaps_s(lists.iloc[1:]).tolist() == [2.0, 4.0]
    assert gaps_s(lists[[True, False, True, True]]).tolist() == [1.0, 4.0]


@BOTH_FORMS
def test_every_request_keeps_its_largest_gap(form: Any) -> None:  # case E7
    rows = measured(burst_size=6)
    lists = times([0.0, 1.0, 1.5], None, [3.0], [0.0, 1.0, 9.0], [], [0.0, 7.0, 9.0])
    largest = derive(rows.assign(token_times_s=form(lists)))["largest_itl_s"]
    np.testing.assert_array_equal(largest, [1.0, np.nan, np.nan, 8.0, np.nan, 7.0])


def test_latency_is_ttft_and_the_gaps_of_the_deliveries() -> None:  # case E3
    rows = measured(burst_size=4, output_tokens=5)
    received = [list(np.asarray(tokens) + 1e-4) for tokens in rows["token_times_s"]]
    derived = derive(rows.assign(chunk_times_s=pd.Series(received, dtype=object)))
    gaps = np.array([np.diff(chunks).sum() for chunks in received])
    assert derived["e2el_s"].to_numpy() - derived["ttft_s"].to_numpy() == pytest.approx(gaps, abs=1e-12)
    assert (derived["e2el_s"] + derived["scheduled_s"]).tolist() == derived["received_last_s"].tolist()


def test_no_token_is_no_ttft_and_no_tpot() -> None:  # case E14
    silent = measured(burst_size=1).assign(
        output_tokens=0, received_first_s=np.nan, received_last_s=np.nan, token_times_s=None
    )
    found = derive(silent)[["ttft_s", "tpot_s", "e2el_s", "largest_itl_s"]]
    assert found.isna().all(axis=None)


def test_times_of_failures_run_from_their_sending() -> None:  # case D6
    rows = measured(burst_size=3).assign(
        outcome=["error", "timeout", "completed"], sent_s=[1.0, 2.0, 3.0], ended_s=[1.5, 32.0, 4.0]
    )
    derived = derive(rows)
    np.testing.assert_array_equal(derived["time_to_error_s"], [0.5, np.nan, np.nan])
    np.testing.assert_array_equal(derived["time_to_timeout_s"], [np.nan, 30.0, np.nan])


def test_lists_of_structs_are_flattened_too() -> None:
    members = [[{"request_index": 3, "start": 0, "n_tokens": 5}], [], None]
    items, sizes = flattened(pd.Series(members), STEP_SCHEMA.field("members").type.value_type)
    assert items.field("request_index").to_pylist() == [3]
    assert sizes.tolist() == [1, 0, 0]


def test_a_frame_of_records_makes_no_object_a_list() -> None:
    table = pa.Table.from_pylist([{"token_times_s": [1.0, 2.0]}, {}], schema=REQUEST_SCHEMA)
    frame = as_frame(table)
    assert isinstance(frame["token_times_s"].dtype, pd.ArrowDtype)
    assert gaps_s(frame["token_times_s"]).tolist() == [1.0]
    assert frame["token_times_s"].isna().tolist() == [False, True]
