"""What cells are called, and the order they stand in."""

from __future__ import annotations

from typing import Any

import pandas as pd

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.labels import label_cells, tidy_cells
from roseinfer.bench.records import FACTORS


def cells(*rows: tuple[Any, ...]) -> pd.DataFrame:
    """A row is its limit (of requests, or in full), and the other factors as numbers."""
    others = pd.DataFrame([row[1:] for row in rows], columns=list(FACTORS[1:]), dtype="float64")
    limits = [limit if isinstance(limit, str) else str(AdmissionSpec(limit)) for limit, *_ in rows]
    return others.assign(admission=limits)


def test_only_factors_that_vary_are_named() -> None:
    frame = cells((16, 128, 32, 4, 2.5), (16, 64, 32, 4, 10))

    assert list(label_cells(frame)["combination"]) == [
        "burst of 64, 10 requests/s",
        "burst of 128, 2.5 requests/s",
    ]


def test_no_limit_is_the_last_category_of_limits_and_of_cells() -> None:
    # case A10
    tidy = tidy_cells(cells((None, 8, 32, 4, None), (16, 8, 32, 4, None), (9, 8, 32, 4, None)))

    assert list(tidy["limit"].cat.categories) == ["9", "16", "no limit"]
    assert list(tidy["cell"].cat.categories) == ["limit 9", "limit 16", "no limit"]
    assert tidy["limit"].max() == "no limit"


def test_limits_stand_by_their_kind_and_each_kind_from_the_tightest() -> None:
    rows = ("none", "tokens:512", "inflight:16+tokens:64", "tokens:4096", 16, 9)
    tidy = tidy_cells(cells(*[(limit, 8, 32, 4, None) for limit in rows]))

    assert list(tidy["limit"].cat.categories) == [
        *("9", "16", "tokens 512", "tokens 4096", "inflight 16, tokens 64", "no limit"),
    ]
    assert list(tidy["cell"].cat.categories)[1:3] == ["limit 16", "tokens 512"]


def test_rows_keep_their_order() -> None:
    frame = cells((None, 8, 32, 4, 1), (16, 8, 32, 4, 2), (None, 8, 32, 4, 1)).assign(number=[0, 1, 2])
    tidy = tidy_cells(frame.set_index(pd.Index([5, 5, 5])))

    assert list(tidy["number"]) == [0, 1, 2]
    assert list(tidy["cell"]) == [
        "no limit, 1 requests/s",
        "limit 16, 2 requests/s",
        "no limit, 1 requests/s",
    ]


def test_a_factor_that_does_not_apply_is_told_apart_from_one_that_does() -> None:
    assert set(label_cells(cells((None, 8, 32, 4, None), (None, 8, 32, 4, 3)))["combination"]) == {
        "n/a requests/s",
        "3 requests/s",
    }


def test_no_rows_are_no_rows() -> None:
    assert tidy_cells(cells((None, 8, 32, 4, 1)).iloc[:0]).empty
