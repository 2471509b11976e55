"""The three answers, on intervals and figures that are given."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.judgement import (
    Judgement,
    Verdict,
    failed,
    judge_absolute,
    judge_cell,
    judge_ratio,
    repeats_wanted,
    turned_over,
)
from roseinfer.bench.sides import Comparison, comparison_of
from roseinfer.bench.stats import Interval
from roseinfer.bench.thresholds import Rule
from tests.bench.made_sides import NO_LIMIT, measured_side, side
from tests.bench.rows import measured

INF = math.inf
SLOWER = Rule(metric="p99_ttft_ms", bound=1.10, is_ratio=True)
FEWER = Rule(metric="output_throughput", bound=1 / 1.10, is_ratio=True)


def judged(
    lo: float, e: float, hi: float, *, repeats: int = 10, needed: int = 8, rule: Rule = SLOWER
) -> Judgement:
    comparison = Comparison(Interval(lo, e, hi), (1000, 1000), (repeats, repeats), needed, 6)
    return judge_ratio(failed("cell", rule.metric, rule.demand, ""), comparison, rule, 0.95)


@pytest.mark.parametrize(
    ("interval", "repeats", "verdict"),
    [
        ((0.95, 1.00, 1.10), 10, Verdict.PASS),  # u <= max
        ((1.02, 1.05, 1.09), 4, Verdict.PASS),  # u <= max, however few, and although slower
        ((0.90, 1.05, 1.20), 8, Verdict.PASS),  # e <= max, l <= 1, N repeats
        ((0.90, 1.05, 1.20), 7, Verdict.UNKNOWN),  # one short of N
        ((1.00, 1.10, 1.20), 8, Verdict.PASS),  # at the bounds
        ((1.01, 1.05, 1.20), 10, Verdict.UNKNOWN),  # slower for certain, by how much is open
        ((1.01, 1.15, 1.30), 10, Verdict.FAIL),  # e > max, l > 1
        ((1.01, 1.15, 1.30), 4, Verdict.FAIL),
        ((1.00, 1.15, 1.30), 10, Verdict.UNKNOWN),  # l = 1
        ((-INF, 1.00, INF), 10, Verdict.PASS),  # never so in practice: N carries the level
        ((-INF, 1.00, INF), 3, Verdict.UNKNOWN),
        ((-INF, 3.00, INF), 3, Verdict.UNKNOWN),  # case G8
        ((0.20, 0.50, 0.90), 4, Verdict.PASS),  # case G4: an improvement is no failure
        ((0.00, 0.00, 1.00), 4, Verdict.PASS),  # zeros
        ((0.00, 1.00, INF), 4, Verdict.UNKNOWN),
        ((1.00, INF, INF), 10, Verdict.UNKNOWN),
        ((2.00, INF, INF), 4, Verdict.FAIL),
    ],
)
def test_the_rule_of_three_answers(
    interval: tuple[float, float, float], repeats: int, verdict: Verdict
) -> None:
    assert judged(*interval, repeats=repeats).verdict is verdict


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.93, 1.00, 1.05), Verdict.PASS),
        ((0.80, 0.86, 0.99), Verdict.FAIL),
        ((0.80, 0.86, 1.01), Verdict.UNKNOWN),
        ((1.20, 1.25, 1.40), Verdict.PASS),  # case G4
    ],
)
def test_where_more_is_better_the_ratio_is_turned_over(
    interval: tuple[float, float, float], verdict: Verdict
) -> None:
    assert judged(*interval, rule=FEWER).verdict is verdict
    assert judged(*interval, rule=FEWER).figure == Interval(*interval)


@pytest.mark.parametrize(
    ("interval", "rule", "suspicious"),
    [
        ((0.5, 0.69, 0.9), SLOWER, True),  # case G4
        ((0.5, 0.71, 0.9), SLOWER, False),
        ((1.1, 1.31, 1.5), FEWER, True),
        ((1.1, 1.29, 1.5), FEWER, False),
    ],
)
def test_a_large_improvement_is_suspicious(
    interval: tuple[float, float, float], rule: Rule, suspicious: bool
) -> None:
    found = judged(*interval, rule=rule)
    assert found.verdict is Verdict.PASS
    assert ("suspicious" in found.remark) is suspicious


def test_unknown_says_how_many_more_repeats_it_takes() -> None:  # case G8
    found = judged(0.9, 1.05, 1.2, repeats=3, needed=8)
    assert found.collect == 5
    assert "collect 5 more repeats" in found.remark


def test_unknown_says_when_so_few_repeats_cannot_carry_the_level() -> None:  # case G11
    found = judged(-INF, 1.2, INF, repeats=3, needed=8)
    assert "3 repeats cannot carry a level of 95 %, 6 would" in found.remark
    assert found.collect == 5


def test_unknown_with_enough_repeats_says_how_many_would_exclude_1() -> None:
    # log 1.12 from 1 takes a half-width of log 1.12; it is log(1.12 / 0.95): so (1.452)^2 as many.
    assert (
        judged(0.95, 1.12, 1.30, repeats=10).collect
        == math.ceil(10 * (math.log(1.12 / 0.95) / math.log(1.12)) ** 2) - 10
    )


def test_unknown_on_the_bound_itself_promises_nothing() -> None:
    found = judged(1.02, 1.10, 1.18)
    assert found.collect is None
    assert "no number of repeats" in found.remark


def test_an_interval_without_a_width_asks_for_as_many_again() -> None:
    assert judged(1.0, INF, INF, repeats=10).collect == 10
    assert repeats_wanted(10, half=INF, gap=0.1) == 20


def test_erratic_repeats_pass_only_where_all_ratios_are_better() -> None:
    assert judged(0.9, 1.0, 1.0, repeats=10, needed=10**12).verdict is Verdict.UNKNOWN
    assert judged(0.0, 0.5, 0.9, repeats=10, needed=10**12).verdict is Verdict.PASS


def test_values_that_are_never_precise_enough_promise_nothing() -> None:
    assert judged(0.0, 1.0, INF, repeats=10, needed=10**12).collect is None


def test_so_few_on_one_side_only_can_carry_a_level() -> None:
    # 3 of 43 places are the lowest by chance in 1 / 12,341: bounded, and 4 against 4 is not what it takes.
    few, many = [1.3, 1.0, 1.1], [1.0 + 0.01 * i for i in range(40)]
    found = judge_ratio(
        failed("cell", SLOWER.metric, SLOWER.demand, ""),
        comparison_of(np.array(few), np.array(many), paired=False, level=0.95, n=(3, 40)),
        SLOWER,
        0.95,
    )
    assert "cannot carry" not in found.remark
    assert (
        "2 against 3 repeats cannot carry a level of 95 %, 4 each would"
        in judge_ratio(
            failed("cell", SLOWER.metric, SLOWER.demand, ""),
            comparison_of(np.array(few[:2]), np.array(many[:3]), paired=False, level=0.95, n=(2, 3)),
            SLOWER,
            0.95,
        ).remark
    )


def test_wanted_repeats_grow_with_the_square() -> None:
    assert repeats_wanted(10, half=0.2, gap=0.1) == 40
    assert repeats_wanted(10, half=0.1, gap=0.1) == 11  # as now, which was not enough
    assert repeats_wanted(10, half=0.1, gap=0.0) is None


@pytest.mark.parametrize(
    ("interval", "over"),
    [
        ((0.5, 1, 2), (0.5, 1, 2)),
        ((-INF, 2, INF), (-INF, 0.5, INF)),
        ((INF, INF, INF), (-INF, 0, 0)),
        ((0, 0, 0), (INF, INF, INF)),
    ],
)
def test_turned_over(interval: tuple[float, float, float], over: tuple[float, float, float]) -> None:
    assert turned_over(Interval(*interval)) == Interval(*over)


# --- through a cell


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([math.nan] * 8, Verdict.FAIL),
        ([100.0] * 7 + [math.nan], Verdict.FAIL),
        ([100.0] * 4 + [math.nan] * 4, Verdict.FAIL),
        ([100.0] * 8, Verdict.PASS),
    ],
)
@pytest.mark.parametrize("bound", [1.1, 1000.0])
def test_a_metric_that_a_repeat_lacks_fails(
    values: list[float], verdict: Verdict, bound: float
) -> None:  # cases G1, G2
    run = side({NO_LIMIT: {"output_throughput": values, "duration_s": 1.0}})
    run.cells["inflight_none"]["output_throughput"] = float(np.nanmean([*values, 100.0]))  # type: ignore[index]
    baseline = side({NO_LIMIT: {"output_throughput": 100.0}}, name="base")
    rule = Rule(metric="output_throughput", bound=0.9, is_ratio=bound < 2)
    found = judge_cell(run, baseline, "inflight_none", "no limit", rule, 0.95)
    assert found.verdict is verdict


def test_a_repeat_without_a_refusal_lacks_nothing() -> None:
    figures = {"p99_reject_ms": [0.1] * 7 + [math.nan], "n_reject": [100] * 7 + [0]}
    run, baseline = (side({64: figures}, name=name) for name in ("run", "base"))
    for made in (run, baseline):
        made.cells["inflight_64"]["p99_reject_ms"] = 0.1  # type: ignore[index]
    rule = Rule(metric="p99_reject_ms", bound=1.1, is_ratio=True)
    assert judge_cell(run, baseline, "inflight_64", "limit 64", rule, 0.95).verdict is Verdict.PASS


def test_a_percentile_of_too_few_is_called_a_maximum() -> None:  # case F6
    rule = Rule(metric="p99_ttft_ms", bound=1.1, is_ratio=True)
    few, many = side({16: {"n_ttft": 16}}), side({16: {}}, name="base")
    assert (
        judge_cell(few, many, "inflight_16", "limit 16", rule, 0.95).remark
        == "p99 is the max of 16 in a repeat"
    )
    assert judge_cell(many, many, "inflight_16", "limit 16", rule, 0.95).remark == ""


def test_both_sides_have_an_n() -> None:
    rule = Rule(metric="p99_ttft_ms", bound=1.1, is_ratio=True)
    few, many = side({16: {"n_ttft": 16}}), side({16: {}}, name="base")
    assert judge_cell(few, many, "inflight_16", "limit 16", rule, 0.95).n == (128, 1024)


@pytest.mark.parametrize("is_ratio", [True, False])
def test_beside_a_latency_stand_the_refused_and_the_served(is_ratio: bool) -> None:  # case D3
    run = side({16: {"reject_rate": 0.25, "completed": 96, "rejected": 32}})
    baseline = side({16: {"good_share": 0.5}}, name="base")
    rule = Rule(metric="p99_queue_wait_ms", bound=1.1, is_ratio=is_ratio)
    found = judge_cell(run, baseline, "inflight_16", "limit 16", rule, 0.95)
    assert found.refused == ((0.25, 0.0) if is_ratio else (0.25,))
    assert found.served == ((0.75, 0.5) if is_ratio else (0.75,))
    throughput = Rule(metric="output_throughput", bound=0.9, is_ratio=True)
    assert judge_cell(run, baseline, "inflight_16", "limit 16", throughput, 0.95).served == ()


def test_a_baseline_without_the_metric_fails_and_is_named() -> None:  # case G2
    run, baseline = side({NO_LIMIT: {"p50_ttft_ms": 1.0}}), side({NO_LIMIT: {}}, name="base")
    rule = Rule(metric="p50_ttft_ms", bound=1.1, is_ratio=True)
    found = judge_cell(run, baseline, "inflight_none", "no limit", rule, 0.95)
    assert (found.verdict, found.remark) == (Verdict.FAIL, "base has no p50_ttft_ms: not measured")


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ([0.0] * 8, Verdict.PASS),
        ([0.2] * 8, Verdict.FAIL),
        ([0.0] * 4 + [0.2] * 4, Verdict.UNKNOWN),
        ([0.0] * 1 + [0.2] * 7, Verdict.FAIL),
    ],
)
def test_a_ratio_to_zero(now: list[float], verdict: Verdict) -> None:
    run, baseline = side({NO_LIMIT: {"reject_rate": now}}), side({NO_LIMIT: {"reject_rate": 0.0}})
    rule = Rule(metric="reject_rate", bound=1.1, is_ratio=True)
    assert judge_cell(run, baseline, "inflight_none", "no limit", rule, 0.95).verdict is verdict


@pytest.mark.parametrize(
    ("zeros", "verdict"),
    [(0, Verdict.PASS), (2, Verdict.UNKNOWN), (4, Verdict.UNKNOWN), (6, Verdict.UNKNOWN), (9, Verdict.FAIL)],
)
def test_repeats_that_served_nothing_in_time_have_a_rank(zeros: int, verdict: Verdict) -> None:
    run = side({NO_LIMIT: {"good_share": [0.0] * zeros + [1.0] * (10 - zeros)}})
    baseline = side({NO_LIMIT: {"good_share": [1.0] * 10}}, name="base")
    rule = Rule(metric="good_share", bound=0.9, is_ratio=True)
    assert judge_cell(run, baseline, "inflight_none", "no limit", rule, 0.95).verdict is verdict


# --- absolute bounds: TTFT of the i-th of a burst is 20.1 + 10 i ms


def absolute(n: int, repeats: int, limit_ms: float, metric: str = "p99_ttft_ms") -> Judgement:
    rows = [measured(burst_size=n, repeat=repeat) for repeat in range(repeats)]
    run = measured_side(pd.concat(rows, ignore_index=True))
    (cell,) = run.cells
    rule = Rule(metric=metric, bound=limit_ms, is_ratio=False)
    judged = failed("cell", metric, rule.demand, "")
    return judge_absolute(judged, run, cell, rule, 0.95)


def test_an_absolute_bound_is_on_the_pooled_figure() -> None:
    # p99 of 4 x 100 values, each four times: TTFT of request 98.
    assert absolute(100, 4, 1010.0).figure == pytest.approx(Interval(*[1000.1] * 3), abs=2)
    assert absolute(100, 4, 1010.0).verdict is Verdict.PASS
    assert absolute(100, 4, 990.0).verdict is Verdict.FAIL


def test_a_p99_of_fewer_than_100_is_too_few() -> None:  # case F6
    found = absolute(9, 2, 1e6)
    assert found.verdict is Verdict.UNKNOWN
    assert "too few: 18 values, this percentile takes 100" in found.remark
    assert found.collect == 10


def test_two_repeats_cannot_carry_an_absolute_bound() -> None:  # case G11
    assert absolute(128, 2, 1e6).verdict is Verdict.UNKNOWN


def test_one_repeat_cannot_carry_an_absolute_bound() -> None:  # case G11
    found = absolute(128, 1, 1e6)
    assert (found.verdict, found.collect) == (Verdict.UNKNOWN, 3)
    assert "1 repeat cannot carry" in found.remark


def test_a_maximum_needs_no_sample_size() -> None:
    assert absolute(3, 4, 41.0, "max_ttft_ms").verdict is Verdict.PASS


def test_counts_are_facts_without_an_interval() -> None:  # case G3: a floor on counts
    run = side({NO_LIMIT: {"completed": 3}})
    for bound, verdict in ((24, Verdict.PASS), (25, Verdict.FAIL)):
        rule = Rule(metric="completed", bound=bound, is_ratio=False)
        found = judge_cell(run, None, "inflight_none", "no limit", rule, 0.95)
        assert (found.verdict, found.figure) == (verdict, Interval(24, 24, 24))
