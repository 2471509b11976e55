"""Frames that take little memory say what the plain ones say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roseinfer.bench.lean_frames import lean_frame
from roseinfer.bench.records import as_frame

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("stamp_s", pa.float64()),
        ("same_s", pa.float64()),
        ("never_s", pa.float64()),
        ("count", pa.int64()),
        ("limit", pa.int64()),
        ("some", pa.int64()),
        ("times_s", pa.list_(pa.float64())),
    ]
)


def table(n: int, first: int = 0) -> pa.Table:
    places = list(range(first, first + n))
    columns = [
        ["abc"[place % 3] if place % 5 else None for place in places],
        [place / 7 for place in places],
        [2.5] * n,
        [None] * n,
        places,
        [64] * n,
        [place if place % 2 else None for place in places],
        [[0.5] * (place % 3) if place % 4 else None for place in places],
    ]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two of them, with row groups of 4 rows; the second is of a version that did not know all columns."""
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(table(10), first, row_group_size=4)
    pq.write_table(table(7, first=10).drop_columns(["limit"]), second, row_group_size=4)
    return [first, second]


def plain(files: list[Path]) -> pd.DataFrame:
    return as_frame(pa.concat_tables([pq.read_table(file) for file in files], promote_options="default"))


def test_all_values_are_those_of_the_plain_frame(files: list[Path]) -> None:
    lean, expected = lean_frame(files, SCHEMA, ["never_s"]), plain(files).drop(columns="never_s")
    assert lean["name"].astype("str").tolist() == expected["name"].tolist()
    columns = expected.columns.drop("name").tolist()
    pd.testing.assert_frame_equal(lean[columns], expected[columns], check_exact=True)


def test_a_column_in_which_all_is_the_same_takes_no_room(files: list[Path]) -> None:
    lean = lean_frame(files[:1], SCHEMA, ["count"])
    assert [lean[name].to_numpy().strides for name in ("same_s", "never_s", "limit")] == [(0,)] * 3
    assert lean["limit"].dtype == np.int64
    assert lean["never_s"].isna().all()


def test_no_files_are_no_rows() -> None:
    assert lean_frame([], SCHEMA, ["count"]).empty
