from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.bench.stats import (
    PERCENTILE_METHOD,
    Interval,
    cluster_bootstrap,
    median_interval,
    nearest_rank,
    order_ranks,
    percentile,
    percentile_label,
    percentiles,
    smallest_sample,
    trusted_sample,
)
from roseinfer.errors import InputError

INF = math.inf


# --- percentiles


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([10, 20, 30], 99, 30),  # case F1
        (range(20), 95, 18),  # case F2
        (range(1, 101), 99, 99),
        (range(1, 301), 99, 297),  # case F8
        ([7], 50, 7),
        ([3, 1, 2], 0, 1),
        ([3, 1, 2], 100, 3),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[float], p: float, expected: float) -> None:
    assert percentile(list(values), p) == expected


@pytest.mark.parametrize("permille", [1, 100, 500, 900, 950, 990, 995, 999])
def test_rank_equals_integer_arithmetic_at_every_size(permille: int) -> None:  # case F8
    wrong = [n for n in range(1, 3001) if nearest_rank(permille / 10, n) != -(-n * permille // 1000)]
    assert wrong == []


def test_percentile_at_every_size_takes_the_value_at_its_rank() -> None:  # case F8
    wrong = [n for n in range(1, 3001) if percentile(np.arange(1, n + 1), 99) != -(-n * 99 // 100)]
    assert wrong == []


def test_method_is_named_as_numpy_names_it() -> None:
    values = np.random.default_rng(0).normal(size=137)
    for p in (1, 50, 95, 99):
        assert percentile(values, p) == np.percentile(values, p, method=PERCENTILE_METHOD)


def test_percentile_of_nothing_is_nan() -> None:  # case F7
    assert math.isnan(percentile([], 99))


def test_unmeasured_values_count_nowhere() -> None:  # case E6
    assert percentile([math.nan, 7, 1, math.nan, 3, 2, 6, 5, 4, math.nan], 50) == 4


def test_infinite_values_count_as_the_largest() -> None:
    assert percentile([INF, 1, 2], 100) == INF


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_percentiles_never_decrease_and_never_exceed_the_maximum(values: list[float]) -> None:  # case F5
    found = percentiles(values, (0, 1, 50, 90, 95, 99, 99.9, 100))
    assert found == sorted(found)
    assert found[-1] == max(values)


def test_pooled_percentile_is_not_the_mean_of_the_workers() -> None:  # case F4
    pooled = [10.0] * 900 + [1000.0] * 100
    assert percentiles(pooled, (99, 90)) == [1000.0, 10.0]


@pytest.mark.parametrize("p", [-1, 101, math.nan])
def test_percentile_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(InputError, match="between 0 and 100"):
        percentile([1.0], p)


# --- labels and sample sizes


@pytest.mark.parametrize(
    ("p", "n", "label"),
    [
        (99, 0, "n/a"),
        (99, 64, "max (n=64)"),
        (99, 99, "max (n=99)"),
        (99, 100, "p99"),
        (99.9, 100, "max (n=100)"),  # case F3
        (99.9, 1000, "p99.9"),
        (50, 1, "max (n=1)"),
        (50, 2, "p50"),
    ],
)
def test_a_percentile_that_is_the_maximum_is_called_so(p: float, n: int, label: str) -> None:
    assert percentile_label(p, n) == label


@pytest.mark.parametrize("p", [50, 90, 95, 99, 99.9])
def test_smallest_sample_is_where_the_label_changes(p: float) -> None:
    n = smallest_sample(p)
    assert percentile_label(p, n - 1).startswith("max")
    assert percentile_label(p, n) == f"p{p:g}"


@pytest.mark.parametrize(("p", "n"), [(90, 29), (95, 59), (99, 299), (99.9, 2995)])
def test_trusted_sample_sizes(p: float, n: int) -> None:  # case F10
    assert trusted_sample(p) == n


@pytest.mark.parametrize("size", [smallest_sample, trusted_sample])
def test_no_sample_carries_the_hundredth_percentile(size: type) -> None:
    with pytest.raises(InputError, match="100"):
        size(100)


# --- order statistics


@pytest.mark.parametrize(
    ("n", "q", "ranks"),
    [
        (500, 0.99, (490, 500)),
        (1000, 0.99, (983, 997)),
        (10_000, 0.99, (9880, 9920)),
        (367, 0.99, (359, 368)),  # 368 = n + 1: unbounded
        (368, 0.99, (360, 368)),
        (6, 0.5, (1, 6)),
        (5, 0.5, (0, 6)),
        (0, 0.5, (0, 1)),
    ],
)
def test_order_ranks(n: int, q: float, ranks: tuple[int, int]) -> None:
    assert order_ranks(n, q) == ranks


def test_upper_bound_of_p99_is_unbounded_at_128() -> None:  # case F9
    assert order_ranks(128, 0.99)[1] == 129


def test_a_tail_that_equals_its_bound_counts_as_within_it() -> None:
    assert order_ranks(4, 0.5, level=0.875) == (1, 4)  # 1/16 in each tail


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([6, 1, 4, 2, 5, 3], Interval(1, 3, 6)),
        ([5, 1, 4, 2, 3], Interval(-INF, 3, INF)),
        ([1], Interval(-INF, 1, INF)),
        ([math.nan, 6, 1, 4, 2, 5, 3], Interval(1, 3, 6)),
    ],
)
def test_median_interval_is_unbounded_below_six(values: list[float], expected: Interval) -> None:
    assert median_interval(values) == expected


def test_median_interval_of_nothing_is_nan() -> None:
    assert all(math.isnan(bound) for bound in median_interval([]))


# --- cluster bootstrap


def test_bootstrap_equals_pooling_every_draw() -> None:
    rng = np.random.default_rng(3)
    runs = [rng.lognormal(size=n).round(1) for n in (5, 40, 17, 80)]  # rounded: with ties
    draws = np.random.default_rng(7).multinomial(4, np.full(4, 0.25), size=300)
    pooled = [
        percentile(np.concatenate([run for run, k in zip(runs, draw, strict=True) for _ in range(k)]), 90)
        for draw in draws
    ]
    expected = Interval(percentile(pooled, 5), percentile(np.concatenate(runs), 90), percentile(pooled, 95))
    assert cluster_bootstrap(runs, 90, draws=300, seed=7, level=0.9) == expected


def test_bootstrap_repeats_with_its_seed() -> None:
    runs = list(np.random.default_rng(0).normal(size=(8, 30)))
    assert cluster_bootstrap(runs, 99, seed=1) == cluster_bootstrap(runs, 99, seed=1)


def test_identical_runs_have_zero_width() -> None:
    run = np.array([4.0, 1.0, 9.0])
    assert cluster_bootstrap([run] * 5, 50, seed=0) == Interval(4, 4, 4)


def test_one_run_is_unbounded() -> None:
    assert cluster_bootstrap([np.arange(1.0, 101)], 99, seed=0) == Interval(-INF, 99, INF)


def test_runs_without_a_value_take_no_part() -> None:
    run = np.arange(1.0, 101)
    assert cluster_bootstrap([run, np.empty(0), np.array([math.nan])], 99, seed=0) == Interval(-INF, 99, INF)


def test_bootstrap_of_nothing_is_nan() -> None:
    assert all(math.isnan(bound) for bound in cluster_bootstrap([np.empty(0)], 99, seed=0))


def test_interval_follows_the_runs_not_the_requests() -> None:
    # Every run is one value copied 1000 times: the number of requests must not narrow the interval.
    few = cluster_bootstrap([np.full(1, value) for value in range(1, 9)], 50, seed=0)
    many = cluster_bootstrap([np.full(1000, value) for value in range(1, 9)], 50, seed=0)
    assert many == few
    assert few.lo < few.point < few.hi
