"""One rule in one cell: PASS, FAIL or UNKNOWN, and how many repeats would turn UNKNOWN into an answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from roseinfer.bench.pooled_figures import pooled_figure
from roseinfer.bench.sides import Comparison, Side, compare_cell
from roseinfer.bench.stats import Interval
from roseinfer.bench.thresholds import Rule

SUSPICIOUS: Final = 0.30
"""An improvement beyond it is more often something that was not measured."""

_FAR: Final = 10_000
"""More repeats than this are not a number to collect."""


class Verdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One rule in one cell. `figure` is the ratio, or the value of an absolute rule; None where there is none.

    `repeats` are those of run and baseline (one number without a baseline), `collect` is how many more each
    side needs for an answer, None where there is an answer or no number of repeats is in sight.
    """

    cell: str
    metric: str
    demand: str
    verdict: Verdict
    figure: Interval | None = None
    is_ratio: bool = True
    n: int | None = None
    repeats: tuple[int, ...] = ()
    collect: int | None = None
    remark: str = ""
    observe: bool = False


def judge_cell(
    run: Side, baseline: Side | None, cell: str, label: str, rule: Rule, level: float
) -> Judgement:
    """One rule in a cell that both sides have."""
    judged = replace(
        failed(label, rule.metric, rule.demand, ""), observe=rule.observe, is_ratio=rule.is_ratio
    )
    for side in (run, *([baseline] if rule.is_ratio and baseline is not None else [])):
        if math.isnan(side.pooled_value(cell, rule.metric)) or side.values(cell, rule.metric).empty:
            return replace(judged, remark=f"{side.name} has no {rule.metric}: not measured")
    if not rule.is_ratio or baseline is None:
        return judge_absolute(judged, run, cell, rule, level)
    comparison = compare_cell(run, baseline, cell, rule.metric, level)
    if not min(comparison.repeats):
        return replace(judged, remark="no block that both sides measured")
    return judge_ratio(replace(judged, n=comparison.n, repeats=comparison.repeats), comparison, rule, level)


def judge_ratio(judged: Judgement, comparison: Comparison, rule: Rule, level: float) -> Judgement:
    """The rule of three answers. `comparison` is run / baseline, also where more is better."""
    judged = replace(judged, figure=comparison.interval)
    interval, most = comparison.interval, rule.bound
    if rule.higher_is_better:
        interval, most = turned_over(interval), 1 / most
    lo, e, hi = interval
    if math.isnan(e):
        return replace(
            judged, verdict=Verdict.UNKNOWN, remark="values of 0 have no ratio: use an absolute bound"
        )
    remark = ""
    improved = comparison.interval.point > 1 + SUSPICIOUS if rule.higher_is_better else e < 1 - SUSPICIOUS
    if improved:
        remark = f"suspicious: better by more than {100 * SUSPICIOUS:.0f} %; was the same thing measured?"
    if hi <= most or (e <= most and lo <= 1 and comparison.enough):
        return replace(judged, verdict=Verdict.PASS, remark=remark)
    if e > most and lo > 1:
        return replace(judged, verdict=Verdict.FAIL, remark=remark)
    repeats = min(comparison.repeats)
    wanted: int | None = comparison.needed
    if lo > -math.inf and not (e <= most and lo <= 1):  # there N repeats are all that it takes
        half, gap = (e / lo, e) if e > most else (hi / e, most / e)
        wanted = repeats_wanted(repeats, math.log(half), math.log(gap))
        wanted = wanted and max(wanted, comparison.needed)
    reason = not_carried(repeats, comparison.carries, level)
    collect = None if wanted is None else wanted - repeats
    remarks = [remark, reason, collect_text(collect)]
    return replace(judged, verdict=Verdict.UNKNOWN, collect=collect, remark="; ".join(filter(None, remarks)))


def judge_absolute(judged: Judgement, run: Side, cell: str, rule: Rule, level: float) -> Judgement:
    """PASS where the whole interval of the pooled figure keeps the bound, FAIL where none of it does."""
    found = pooled_figure(run, cell, rule.metric, level)
    judged = replace(judged, figure=found.interval, n=found.n, repeats=(found.repeats,))
    if found.n < found.smallest_n:
        each = max(1, found.n // found.repeats)
        few = max(1, math.ceil(found.smallest_n / each) - found.repeats)
        why = f"too few: {found.n} values, this percentile takes {found.smallest_n}"
        return replace(judged, verdict=Verdict.UNKNOWN, collect=few, remark=f"{why}; {collect_text(few)}")
    lo, e, hi = found.interval
    inside, outside = (
        (lo >= rule.bound, hi < rule.bound) if rule.higher_is_better else (hi <= rule.bound, lo > rule.bound)
    )
    if inside or outside:
        return replace(judged, verdict=Verdict.PASS if inside else Verdict.FAIL, remark=found.remark)
    reason = not_carried(found.repeats, found.carries, level)
    wanted: int | None = found.carries
    if not reason:
        wanted = repeats_wanted(found.repeats, hi - e if e <= rule.bound else e - lo, abs(rule.bound - e))
    collect = None if wanted is None else wanted - found.repeats
    remarks = [found.remark, reason, collect_text(collect)]
    return replace(judged, verdict=Verdict.UNKNOWN, collect=collect, remark="; ".join(filter(None, remarks)))


def turned_over(interval: Interval) -> Interval:
    """The interval of 1 / ratio."""
    lo, point, hi = interval
    return Interval(-math.inf if hi == math.inf else _inverse(hi), _inverse(point), _inverse(max(lo, 0.0)))


def collect_text(collect: int | None) -> str:
    if collect is None:
        return f"no number of repeats below {_FAR} is likely to decide it"
    return f"collect {_repeats(collect, 'more ')}"


def _repeats(count: int, more: str = "") -> str:
    return f"{count} {more}repeat{'' if count == 1 else 's'}"


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def not_carried(repeats: int, carries: int, level: float) -> str:
    if repeats >= carries:
        return ""
    return f"{_repeats(repeats)} cannot carry a level of {100 * level:.4g} %, {carries} would"


def repeats_wanted(repeats: int, half: float, gap: float) -> int | None:
    """Repeats at which an interval `half` wide to one side is as narrow as `gap`: it shrinks as their root."""
    if gap <= 0 or half / gap > math.sqrt(_FAR / repeats):
        return None
    return max(repeats + 1, math.ceil(repeats * (half / gap) ** 2))


def failed(cell: str, metric: str, demand: str, remark: str) -> Judgement:
    return Judgement(cell=cell, metric=metric, demand=demand, verdict=Verdict.FAIL, remark=remark)
