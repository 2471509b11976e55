"""The fit under every cost model: relative errors, no negative coefficients, stalls apart."""

from __future__ import annotations

import numpy as np
import pytest

from roseinfer.bench.robust_fit import robust_fit

RNG = np.random.default_rng(0)
COLUMNS = np.column_stack([np.ones(2000), RNG.integers(0, 500, 2000), RNG.integers(0, 30, 2000)])
TRUTH = np.array([0.01, 2e-4, 5e-4])


def test_an_exact_law_is_found_exactly_and_nothing_stalls() -> None:
    fit = robust_fit(COLUMNS, COLUMNS @ TRUTH)
    assert fit.coefficients == pytest.approx(TRUTH, rel=1e-9)
    assert fit.ratios == pytest.approx(np.ones(2000), rel=1e-9)
    assert not fit.stalled.any()


def test_noise_in_proportion_leaves_the_mean_where_it_is() -> None:
    seconds = COLUMNS @ TRUTH * RNG.gamma(25, 1 / 25, 2000)  # mean 1, 20 %
    fit = robust_fit(COLUMNS, seconds)
    assert fit.coefficients == pytest.approx(TRUTH, rel=0.05)
    assert fit.ratios.mean() == pytest.approx(1, abs=1e-3)


def test_rare_stalls_are_apart_and_do_not_move_the_fit() -> None:
    seconds = COLUMNS @ TRUTH * RNG.uniform(0.97, 1.03, 2000)
    stalled = RNG.choice(2000, 40, replace=False)
    seconds[stalled] += 1.0
    fit = robust_fit(COLUMNS, seconds)
    assert np.flatnonzero(fit.stalled).tolist() == sorted(stalled.tolist())
    assert fit.coefficients == pytest.approx(TRUTH, rel=0.01)


def test_the_ratio_of_a_long_stall_is_all_of_it() -> None:
    seconds = COLUMNS @ TRUTH
    seconds[7] *= 1000
    assert robust_fit(COLUMNS, seconds).ratios[7] == pytest.approx(1000, rel=1e-6)


def test_a_stall_of_what_costs_nothing_has_a_finite_ratio() -> None:
    columns = np.array([[0.0, 1.0]] * 50 + [[1.0, 0.0]])
    seconds = np.array([1.0] * 50 + [1e-3])
    fit = robust_fit(columns, seconds)
    assert np.isfinite(fit.ratios).all()


def test_short_rows_count_as_much_as_long_ones() -> None:
    """Half of the rows last 1 s and half 1 ms, each 10 % above one law and below it: neither group gives way."""
    columns = np.array([[1.0, 0.0], [1.0, 1.0]] * 500)
    seconds = columns @ np.array([1e-3, 1.0]) * np.tile([0.9, 1.1], 500)
    assert robust_fit(columns, seconds).ratios == pytest.approx(np.ones(1000), rel=1e-6)


def test_what_would_be_negative_is_zero() -> None:
    columns = np.column_stack([np.ones(50), np.arange(50.0)])
    fit = robust_fit(columns, 1 - 0.01 * np.arange(50.0))
    assert fit.coefficients[1] == 0
    assert fit.coefficients[0] > 0


def test_a_column_of_zeros_gets_no_coefficient() -> None:
    columns = np.column_stack([np.ones(50), np.zeros(50)])
    assert robust_fit(columns, np.full(50, 0.5)).coefficients.tolist() == pytest.approx([0.5, 0.0])


def test_one_row_is_met() -> None:
    assert robust_fit(np.array([[1.0, 3.0]]), np.array([2.0])).ratios == pytest.approx([1.0])
