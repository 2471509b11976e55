from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from roseinfer.bench.distributions import distance_between


def runs(values: object) -> list[np.ndarray]:
    """Each value a repeat of its own."""
    return [np.array([value], dtype=np.float64) for value in values]  # type: ignore[attr-defined]


def test_a_change_of_spread_is_found() -> None:  # case G12
    a, b = list(range(10, 30)), [*range(10), *range(30, 40)]
    assert stats.mannwhitneyu(a, b).pvalue == 1.0
    found = distance_between(runs(a), runs(b), paired=False, seed=0)
    assert found.distance == stats.ks_2samp(a, b).statistic
    assert found.p == pytest.approx(0.012, abs=0.004)


def test_p_is_the_exact_one_of_independent_values() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=6), rng.normal(1.0, size=7)
    found = distance_between(runs(a), runs(b), paired=False, seed=0)
    exact = stats.ks_2samp(a, b, method="exact")
    assert found == pytest.approx((exact.statistic, exact.pvalue))


def test_copies_of_a_request_are_no_evidence() -> None:
    # Three repeats a side, each of a level of its own: 20 labelings, so p is 2 / 20 at best, however many requests.
    a = [np.full(500, level) for level in (1.0, 2.0, 3.0)]
    b = [np.full(500, level) for level in (4.0, 5.0, 6.0)]
    assert distance_between(a, b, paired=False, seed=0) == (1.0, 0.1)


def test_pairs_are_swapped_within_blocks() -> None:
    # Six blocks of growing latency, b a little above a in each: of the 64 ways to swap sides only the two that swap
    # none or all leave them as far apart. The growth hides it from who forgets the blocks.
    a = [np.linspace(0, 1, 50) + 0.2 * block for block in range(6)]
    b = [run + 0.1 for run in a]
    assert distance_between(a, b, paired=True, seed=0).p == pytest.approx(2 / 64)
    assert distance_between(a, b, paired=False, seed=0).p > 0.5


def test_a_side_with_itself_has_no_distance() -> None:
    a = runs(range(8))
    assert distance_between(a, a, paired=False, seed=0) == (0.0, 1.0)


def test_many_labelings_are_drawn_with_the_seed() -> None:
    a, b = runs(range(0, 30, 2)), runs(range(1, 31, 2))
    first, again = (distance_between(a, b, paired=False, seed=3) for _ in range(2))
    assert first == again
    assert 0 < first.p <= 1


@pytest.mark.parametrize(("a", "b"), [([], []), ([np.empty(0)], [np.ones(3)])])
def test_nothing_has_no_distance(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    assert np.isnan(distance_between(a, b, paired=False, seed=0)).all()
