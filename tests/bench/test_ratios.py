"""Ratios, against scipy's exact tests, enumeration and known values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest
from scipy import stats

from roseinfer.bench import ratios
from roseinfer.bench.ratios import (
    ENOUGH_STANDARD_ERROR,
    fewest_repeats,
    paired_ratio,
    repeats_needed,
    unpaired_ratio,
)
from roseinfer.bench.stats import Interval
from roseinfer.errors import InputError

INF = math.inf


# --- paired


def test_ratio_of_equal_sides_is_one() -> None:
    assert paired_ratio(range(1, 11), range(1, 11)) == Interval(1, 1, 1)


def test_ratio_is_of_the_first_to_the_second() -> None:
    b = np.array([1.0, 2, 4, 8, 16, 32])
    assert paired_ratio(3 * b, b) == pytest.approx(Interval(3, 3, 3))


def test_paired_ratio_of_six_pairs_spans_all_of_them() -> None:
    found = paired_ratio([0.5, 0.8, 1.1, 1.3, 1.9, 2.0], [1] * 6)
    assert (found.lo, found.hi) == pytest.approx((0.5, 2.0))


def test_ratio_is_unbounded_below_six_pairs() -> None:
    assert paired_ratio([2.0] * 5, [1.0] * 5) == pytest.approx(Interval(-INF, 2, INF))


def test_stricter_level_needs_more_pairs() -> None:
    assert paired_ratio([2.0] * 7, [1.0] * 7, level=0.99).hi == INF
    assert paired_ratio([2.0] * 8, [1.0] * 8, level=0.99).hi == pytest.approx(2.0)


def test_paired_ratio_holds_what_the_signed_rank_test_does_not_reject() -> None:
    # The definition, by enumeration of all signs: a ratio is in the interval when neither tail is <= 2.5 %.
    logs = np.array([0.31, -0.12, 0.05, 0.44, 0.27, -0.02, 0.18])
    n = len(logs)
    null = Counter(
        sum(rank for rank, sign in zip(range(1, n + 1), signs, strict=True) if sign)
        for signs in product((0, 1), repeat=n)
    )

    def accepted(shift: float) -> bool:
        distance = logs - shift
        ranks = np.argsort(np.argsort(np.abs(distance))) + 1
        t = int(ranks[distance > 0].sum())
        below = sum(count for value, count in null.items() if value <= t) / 2**n
        above = sum(count for value, count in null.items() if value >= t) / 2**n
        return bool(min(below, above) > 0.025)

    found = paired_ratio(np.exp(logs), np.ones(n))
    lo, hi = math.log(found.lo), math.log(found.hi)
    assert accepted(lo + 1e-6)
    assert accepted(hi - 1e-6)
    assert not accepted(lo - 1e-6)
    assert not accepted(hi + 1e-6)


def test_swapping_the_sides_inverts_the_interval() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.lognormal(size=(2, 9))
    forth, back = paired_ratio(a, b), paired_ratio(b, a)
    assert (1 / back.hi, 1 / back.point, 1 / back.lo) == pytest.approx(forth)


def test_blocks_with_one_side_unmeasured_are_left_out() -> None:
    a, b = [2.0] * 6 + [math.nan], [1.0] * 6 + [5.0]
    assert paired_ratio(a, b) == pytest.approx(Interval(2, 2, 2))


@pytest.mark.parametrize(("a", "b"), [([], []), ([-1.0] * 8, [1.0] * 8), ([1.0] * 8, [-1.0] * 8)])
def test_what_has_no_ratio_is_unbounded(a: list[float], b: list[float]) -> None:
    found = paired_ratio(a, b)
    assert (found.lo, found.hi) == (-INF, INF)
    assert math.isnan(found.point)


def test_sides_of_different_length_are_refused() -> None:
    with pytest.raises(InputError, match="same blocks"):
        paired_ratio([1.0, 2.0], [1.0])


# --- unpaired


def test_unpaired_ratio_of_equal_sides_is_one() -> None:
    assert unpaired_ratio([2.0] * 4, [2.0] * 4) == Interval(1, 1, 1)


def test_unpaired_ratio_is_of_the_first_to_the_second() -> None:
    b = np.array([1.0, 1.01, 1.02, 1.03, 1.04])
    found = unpaired_ratio(3 * b, b)
    assert found.point == pytest.approx(3)
    assert found.lo > 2.8


def test_unpaired_point_is_the_median_of_all_ratios() -> None:
    a, b = [3.0, 5.0, 11.0], [1.0, 2.0]
    logs = [math.log(x / y) for x in a for y in b]
    assert unpaired_ratio(a, b).point == pytest.approx(math.exp(np.median(logs)))


def test_three_against_three_is_unbounded_and_four_against_four_is_not() -> None:
    # 2 / C(6, 3) = 0.1 and 2 / C(8, 4) = 0.0286.
    assert unpaired_ratio([2.0] * 3, [1.0] * 3) == pytest.approx(Interval(-INF, 2, INF))
    assert unpaired_ratio([2.0] * 4, [1.0] * 4) == pytest.approx(Interval(2, 2, 2))


@pytest.mark.parametrize("level", [0.95, 0.99])
@pytest.mark.parametrize(("m", "n"), [(6, 6), (10, 7), (5, 12)])
def test_unpaired_ratio_holds_what_the_rank_sum_test_does_not_reject(m: int, n: int, level: float) -> None:
    rng = np.random.default_rng([m, n])
    a, b = rng.lognormal(sigma=0.3, size=m), rng.lognormal(sigma=0.3, size=n)

    def accepted(ratio: float) -> bool:
        return bool(stats.mannwhitneyu(a / ratio, b, method="exact").pvalue > 1 - level)

    found = unpaired_ratio(a, b, level)
    assert accepted(found.lo * (1 + 1e-9))
    assert accepted(found.hi * (1 - 1e-9))
    assert not accepted(found.lo * (1 - 1e-9))
    assert not accepted(found.hi * (1 + 1e-9))


def test_swapping_unpaired_sides_inverts_the_interval() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.lognormal(size=7), rng.lognormal(size=9)
    forth, back = unpaired_ratio(a, b), unpaired_ratio(b, a)
    assert (1 / back.hi, 1 / back.point, 1 / back.lo) == pytest.approx(forth)


def test_unpaired_sides_may_differ_in_length_and_hold_nan() -> None:
    found = unpaired_ratio([2.0] * 5 + [math.nan], [1.0] * 9)
    assert found == pytest.approx(Interval(2, 2, 2))


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([-1.0] * 8, [1.0] * 8), ([1.0] * 8, [-1.0] * 8)])
def test_unpaired_values_without_a_ratio_are_unbounded(a: list[float], b: list[float]) -> None:
    found = unpaired_ratio(a, b)
    assert (found.lo, found.hi) == (-INF, INF)
    assert math.isnan(found.point)


def test_a_hundred_against_a_hundred_is_within_a_second_digit_of_the_normal_interval() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.lognormal(0.1, 0.05, size=100), rng.lognormal(0.0, 0.05, size=100)
    found = unpaired_ratio(a, b)
    half = 1.96 * 0.05 * math.sqrt(2 / 100) / math.sqrt(3 / math.pi)  # the test's efficiency, for normal logs
    assert math.log(found.hi / found.lo) / 2 == pytest.approx(half, rel=0.2)


# --- zeros: they rank below every other value


@pytest.mark.parametrize("ratio", [paired_ratio, unpaired_ratio])
@pytest.mark.parametrize(
    ("a", "b", "interval"),
    [
        ([0.0] * 8, [0.0] * 8, (1, 1, 1)),
        ([0.0] * 8, [5.0] * 8, (0, 0, 0)),
        ([5.0] * 8, [0.0] * 8, (INF, INF, INF)),
        ([INF] * 8, [5.0] * 8, (INF, INF, INF)),
        ([0.0] * 3, [5.0] * 3, (-INF, 0, INF)),
    ],
)
def test_a_zero_is_further_than_any_ratio(
    ratio: Callable[..., Interval], a: list[float], b: list[float], interval: tuple[float, float, float]
) -> None:
    assert ratio(a, b) == Interval(*interval)


def test_a_minority_of_zeros_leaves_the_typical_ratio() -> None:
    found = unpaired_ratio([0.0] * 3 + [2.0] * 7, [1.0] * 10)
    assert found == pytest.approx(Interval(0.0, 2.0, 2.0))


def test_zeros_among_other_values_make_the_spread_too_large_to_ever_be_enough() -> None:
    assert repeats_needed([0.0, 1.0, 1.0], [1.0, 1.0, 1.0], paired=False) > 1_000_000


# --- many repeats


@pytest.mark.parametrize("tail", [0.025, 2.5e-5])
def test_from_300_repeats_on_the_normal_cut_is_the_exact_one(
    tail: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = ratios._MANY
    exact = ratios._signed_rank_cut(n, tail), ratios._rank_sum_cut(n, n, tail)
    monkeypatch.setattr(ratios, "_MANY", n - 1)
    normal = ratios._signed_rank_cut(n, tail), ratios._rank_sum_cut(n, n, tail)
    assert normal == pytest.approx(exact, rel=0.005)
    assert all(few <= many for few, many in zip(normal, exact, strict=True))  # never narrower


# --- how many repeats


@pytest.mark.parametrize("level", [0.9, 0.95, 0.975, 0.99, 0.999])
@pytest.mark.parametrize("paired", [True, False])
def test_fewest_repeats_is_where_the_bounds_become_finite(level: float, paired: bool) -> None:  # case G11
    ratio = paired_ratio if paired else unpaired_ratio
    n = fewest_repeats(level, paired)
    assert ratio([1.0] * n, [1.0] * n, level).hi == 1
    assert ratio([1.0] * (n - 1), [1.0] * (n - 1), level).hi == INF


@pytest.mark.parametrize(
    ("level", "paired", "n"), [(0.95, True, 6), (0.95, False, 4), (0.998, False, 7), (0.998, True, 10)]
)
def test_fewest_repeats_of_known_levels(
    level: float, paired: bool, n: int
) -> None:  # case G11: 0.002, 6 against 6
    assert fewest_repeats(level, paired) == n


def test_enough_means_that_nine_of_ten_estimates_of_15_percent_exceed_10_percent() -> None:
    above = stats.norm.sf(math.log(1.10), loc=math.log(1.15), scale=ENOUGH_STANDARD_ERROR)
    assert above == pytest.approx(0.90, abs=5e-4)
    assert round(ENOUGH_STANDARD_ERROR, 3) == 0.035


def logs_with_sd(sd: float, n: int) -> list[float]:
    """Values whose logarithms have exactly this standard deviation."""
    z = np.random.default_rng(5).normal(size=n)
    return [float(value) for value in np.exp(sd * (z - z.mean()) / z.std(ddof=1))]


@pytest.mark.parametrize(("sd", "n"), [(0.03, 2), (0.05, 5), (0.10, 17), (0.20, 67)])
def test_repeats_needed_unpaired_follow_from_both_spreads(sd: float, n: int) -> None:
    # 2 sd^2 / 0.0347^2, rounded up.
    assert repeats_needed(logs_with_sd(sd, 10), logs_with_sd(sd, 12), paired=False) == n


def test_repeats_needed_in_pairs_follow_from_the_spread_of_the_ratios() -> None:
    machine = np.random.default_rng(6).lognormal(sigma=1.0, size=10)  # moves both sides alike
    assert repeats_needed(machine * logs_with_sd(0.10, 10), machine, paired=True) == 9


def test_repeats_needed_is_two_where_the_spread_is_unknown() -> None:
    assert repeats_needed([1.0], [2.0], paired=True) == 2
    assert repeats_needed([0.0, 0.0], [math.nan], paired=False) == 2


def test_the_rank_sum_distribution_is_the_enumerated_one() -> None:
    # Through the interval: of 5 against 4 every level at which a bound moves is a count over C(9, 4).
    a, b = np.exp([0.11, 0.52, 0.93, 1.37, 1.88]), np.ones(4) * np.exp([0.01, 0.03, 0.07, 0.13])
    differences = np.sort(np.subtract.outer(np.log(a), np.log(b)).ravel())
    sums = sorted(sum(ranks) - 10 for ranks in combinations(range(1, 10), 4))
    for cut in range(1, 8):
        tail = sum(u <= cut - 1 for u in sums) / math.comb(9, 4)
        found = unpaired_ratio(a, b, level=1 - 2 * tail)
        assert math.log(found.lo) == pytest.approx(differences[cut - 1])
        assert math.log(found.hi) == pytest.approx(differences[-cut])
