from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.pooled_figures import pooled_figure
from roseinfer.bench.stats import Interval
from tests.bench.made_sides import NO_LIMIT, measured_side, side
from tests.bench.rows import measured

RATES = {"request_throughput": [1.0, 4.0] * 6, "duration_s": [30.0, 10.0] * 6}
"""30 requests in 30 s and 40 in 10 s, by turns: 70 in 40 s."""


def test_a_rate_is_that_of_the_sums_not_the_mean_of_rates() -> None:  # case F4
    found = pooled_figure(side({NO_LIMIT: RATES}), "inflight_none", "request_throughput", 0.95)
    assert found.interval.point == pytest.approx(1.75)
    assert 1.0 < found.interval.lo < 1.75 < found.interval.hi < 4.0


def test_a_share_is_of_all_that_were_offered() -> None:  # case D4
    shares = {"good_share": [0.9, 0.1], "offered": [100, 300]}
    found = pooled_figure(side({NO_LIMIT: shares}), "inflight_none", "good_share", 0.95)
    assert found.interval.point == pytest.approx((90 + 30) / 400)


def test_a_percentile_resamples_whole_repeats_at_the_level() -> None:
    rows = [measured(burst_size=128, repeat=r, service_s=0.01 + 0.001 * r) for r in range(5)]
    run = measured_side(pd.concat(rows, ignore_index=True))
    (cell,) = run.cells
    wide, narrow = (pooled_figure(run, cell, "p99_ttft_ms", level) for level in (0.99, 0.50))
    assert wide.interval.lo < narrow.interval.lo <= narrow.interval.point
    assert wide.interval.point == run.pooled_value(cell, "p99_ttft_ms")
    assert (wide.n, wide.repeats, wide.smallest_n) == (640, 5, 100)
    assert wide.remark == "a bootstrap of 5 repeats covers less than 99 %"


def test_a_mean_is_of_all_values() -> None:
    rows = [measured(burst_size=4, repeat=r, service_s=0.01 + 0.02 * (r % 2)) for r in range(6)]
    run = measured_side(pd.concat(rows, ignore_index=True))
    (cell,) = run.cells
    found = pooled_figure(run, cell, "mean_ttft_ms", 0.95)
    assert found.interval.point == pytest.approx(run.pooled_value(cell, "mean_ttft_ms"))
    assert found.interval.lo < found.interval.point < found.interval.hi


def test_what_is_known_per_repeat_only_is_the_median_over_repeats() -> None:
    recoveries = {"recovery_s": [1.0, 5.0, 2.0, 4.0, 3.0, 6.0]}
    found = pooled_figure(side({NO_LIMIT: recoveries}), "inflight_none", "recovery_s", 0.95)
    assert found.interval == Interval(1.0, 3.0, 6.0)
    assert found.remark == "the median over repeats"


@pytest.mark.parametrize(("level", "carries"), [(0.95, 4), (0.99, 4), (1 - 0.05 / 1000, 6)])
def test_repeats_that_cannot_carry_the_level_have_no_interval(level: float, carries: int) -> None:  # case G11
    # The same repeat R times over is drawn once in R^R: that must be rarer than a tail.
    for r in (1, 2, carries - 1, carries):
        figures = {"request_throughput": [2.0 + i for i in range(r)], "duration_s": [3.0] * r}
        found = pooled_figure(side({NO_LIMIT: figures}), "inflight_none", "request_throughput", level)
        assert found.carries == carries
        assert np.isinf(found.interval.lo) == (r < carries)


@pytest.mark.parametrize(
    ("r", "remark"), [(3, ""), (9, "a bootstrap of 9 repeats covers less than 95 %"), (10, "")]
)
def test_few_repeats_are_said_to_cover_less(r: int, remark: str) -> None:
    figures = {"request_throughput": [2.0] * r, "duration_s": [3.0] * r}
    assert (
        pooled_figure(side({NO_LIMIT: figures}), "inflight_none", "request_throughput", 0.95).remark == remark
    )
