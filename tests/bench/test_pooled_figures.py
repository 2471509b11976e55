from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.pooled_figures import pooled_figure
from roseinfer.bench.stats import Interval
from tests.bench.made_sides import NO_LIMIT, measured_side, side
from tests.bench.rows import measured

RATES = {"request_throughput": [1.0, 4.0], "duration_s": [30.0, 10.0]}
"""30 requests in 30 s and 40 in 10 s: 70 in 40 s."""


def test_a_rate_is_that_of_the_sums_not_the_mean_of_rates() -> None:  # case F4
    found = pooled_figure(side({NO_LIMIT: RATES}), "inflight_none", "request_throughput", 0.95)
    assert found.interval == pytest.approx(Interval(1.0, 1.75, 4.0))


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
    assert "rough" in wide.remark


def test_a_mean_is_of_all_values() -> None:
    rows = [
        measured(burst_size=4, repeat=0, service_s=0.01),
        measured(burst_size=4, repeat=1, service_s=0.03),
    ]
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


def test_one_repeat_has_no_interval() -> None:
    figures = {"request_throughput": [2.0], "duration_s": [3.0]}
    found = pooled_figure(side({NO_LIMIT: figures}), "inflight_none", "request_throughput", 0.95)
    assert found.interval == Interval(-np.inf, 2.0, np.inf)
    assert found.carries == 2
