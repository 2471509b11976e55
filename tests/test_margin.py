from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.margin import LARGEST, QUANTILE, Margin


@pytest.mark.parametrize("bias", [0.5, 1.0, 1.7])
def test_it_settles_where_one_in_fifty_lies_above(bias: float) -> None:
    ratios = bias * np.random.default_rng(0).lognormal(0.0, 0.2, 8000)
    margin = Margin()
    above = 0
    for i, ratio in enumerate(ratios):
        above += i >= 2000 and ratio > margin.factor
        margin.saw(0.25, 0.25 * float(ratio))
    assert above / 6000 == pytest.approx(1 - QUANTILE, abs=0.005)
    assert margin.factor == pytest.approx(bias * np.exp(0.2 * 2.054), rel=0.15)  # the normal quantile of 0.98


def test_it_follows_a_machine_that_becomes_slower_within_a_few_dozen() -> None:
    margin = Margin()
    for _ in range(20):
        margin.saw(1.0, 2.0)
    assert margin.factor > 2.0


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)), max_size=300))
def test_it_stays_within_its_bounds(seen: list[tuple[float, float]]) -> None:
    margin = Margin()
    for predicted_s, actual_s in seen:
        margin.saw(predicted_s, actual_s)
        assert 1 / LARGEST <= margin.factor <= LARGEST
