"""One rule in one cell: PASS, FAIL or UNKNOWN, and how many repeats would turn UNKNOWN into an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from roseinfer.bench.pooled_figures import pooled_figure
from roseinfer.bench.sides import FAR, Comparison, Side, compare_cell
from roseinfer.bench.stats import Interval
from roseinfer.bench.thresholds import Rule

SUSPICIOUS: Final = 0.30
"""An improvement beyond it is more often something that was not measured."""


ERRATIC: Final = "repeats differ too much (0 in some?) for a typical ratio to speak for all"


class Verdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One rule in one cell. `figure` is the ratio, or the value of an absolute rule; None where there is none.

    Of outcomes there is `growth`, of their share, and `p`, how often chance makes it so much. `n`, `repeats` and,
    beside latencies, the shares of the offered requests that were `refused` and `served` are those of run and
    baseline, or one number without a baseline. `collect` is how many more repeats each side needs for an answer,
    None where there is an answer or no number of repeats is in sight.
    """

    cell: str
    metric: str
    demand: str
    verdict: Verdict
    figure: Interval | None = None
    is_ratio: bool = True
    growth: float | None = None
    p: float | None = None
    n: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    refused: tuple[float, ...] = ()
    served: tuple[float, ...] = ()
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
    sides = [run, *([baseline] if rule.is_ratio and baseline is not None else [])]
    if is_latency(rule.metric):
        shares = [side.shares(cell) for side in sides]
        judged = replace(judged, refused=tuple(x for x, _ in shares), served=tuple(x for _, x in shares))
    for side in sides:
        if missing := side.unmeasured(cell, rule.metric):
            return replace(judged, remark=missing)
    if not rule.is_ratio or baseline is None:
        return judge_absolute(judged, run, cell, rule, level)
    comparison = compare_cell(run, baseline, cell, rule.metric, level)
    if not min(comparison.repeats):
        return replace(judged, remark="no block that both sides measured")
    judged = replace(judged, n=comparison.n, repeats=comparison.repeats)
    judged = judge_ratio(judged, comparison, rule, level)
    return replace(judged, remark=joined(few_values(sides, cell, rule.metric), judged.remark))


def judge_ratio(judged: Judgement, comparison: Comparison, rule: Rule, level: float) -> Judgement:
    """The rule of three answers. `comparison` is run / baseline, also where more is better."""
    judged = replace(judged, figure=comparison.interval)
    interval, most = comparison.interval, rule.bound
    if rule.higher_is_better:
        interval, most = turned_over(interval), 1 / most
    lo, e, hi = interval
    remark = ""
    improved = comparison.interval.point > 1 + SUSPICIOUS if rule.higher_is_better else e < 1 - SUSPICIOUS
    if improved:
        remark = f"suspicious: better by more than {100 * SUSPICIOUS:.0f} %; was the same thing measured?"
    certain = hi < 1 if comparison.is_erratic else hi <= most
    if certain or (e <= most and lo <= 1 and comparison.enough):
        return replace(judged, verdict=Verdict.PASS, remark=remark)
    if e > most and lo > 1:
        return replace(judged, verdict=Verdict.FAIL, remark=remark)
    repeats = min(comparison.repeats)
    wanted = None if comparison.is_erratic else comparison.needed
    if lo > -math.inf and not (e <= most and lo <= 1):  # there N repeats are all that it takes
        e_log, most_log = log(e), math.log(most)
        half, gap = (e_log - log(lo), e_log) if e > most else (log(hi) - e_log, most_log - e_log)
        wanted = repeats_wanted(repeats, half, gap)
        if wanted is not None and not comparison.is_erratic:
            wanted = max(wanted, comparison.needed)
    reason = joined(not_carried(comparison, level), ERRATIC if comparison.is_erratic else "")
    collect = None if wanted is None else max(1, wanted - repeats)
    return replace(
        judged, verdict=Verdict.UNKNOWN, collect=collect, remark=joined(remark, reason, collect_text(collect))
    )


def judge_absolute(judged: Judgement, run: Side, cell: str, rule: Rule, level: float) -> Judgement:
    """PASS where the whole interval of the pooled figure keeps the bound, FAIL where none of it does."""
    found = pooled_figure(run, cell, rule.metric, level)
    judged = replace(judged, figure=found.interval, n=(found.n,), repeats=(found.repeats,))
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
    reason = "" if found.repeats >= found.carries else _too_few((found.repeats,), found.carries, level)
    wanted: int | None = found.carries
    if not reason:
        wanted = repeats_wanted(found.repeats, hi - e if e <= rule.bound else e - lo, abs(rule.bound - e))
    collect = None if wanted is None else wanted - found.repeats
    remark = joined(found.remark, reason, collect_text(collect))
    return replace(judged, verdict=Verdict.UNKNOWN, collect=collect, remark=remark)


def is_latency(metric: str) -> bool:
    """Of the requests that were served, or refused, only: the shares of both belong beside it."""
    return metric.endswith("_ms")


def few_values(sides: Sequence[Side], cell: str, metric: str) -> str:
    """That a percentile is a maximum, where a repeat has too few values for it; "" else."""
    names = {side.name_of_percentile(cell, metric) for side in sides} - {None}
    return (
        "" if not names else f"{metric.partition('_')[0]} is the {' and the '.join(sorted(map(str, names)))}"
    )


def joined(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))


def turned_over(interval: Interval) -> Interval:
    """The interval of 1 / ratio."""
    lo, point, hi = interval
    return Interval(-math.inf if hi == math.inf else _inverse(hi), _inverse(point), _inverse(max(lo, 0.0)))


def collect_text(collect: int | None) -> str:
    if collect is None:
        return f"no number of repeats below {FAR} is likely to decide it"
    return f"collect {_repeats(collect, 'more ')}"


def _repeats(count: int, more: str = "") -> str:
    return f"{count} {more}repeat{'' if count == 1 else 's'}"


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def not_carried(comparison: Comparison, level: float) -> str:
    """That a ratio has no bounds because of too few repeats; "" where it has some."""
    bounded = comparison.interval.lo > -math.inf
    return "" if bounded else _too_few(comparison.repeats, comparison.carries, level)


def _too_few(repeats: tuple[int, ...], carries: int, level: float) -> str:
    if len(set(repeats)) == 1:
        return f"{_repeats(repeats[0])} cannot carry a level of {100 * level:.4g} %, {carries} would"
    counts = " against ".join(map(str, repeats))
    return f"{counts} repeats cannot carry a level of {100 * level:.4g} %, {carries} each would"


def log(ratio: float) -> float:
    """The logarithm, of 0 too."""
    return math.log(ratio) if ratio > 0 else -math.inf


def repeats_wanted(repeats: int, half: float, gap: float) -> int | None:
    """Repeats at which an interval `half` wide to one side is as narrow as `gap`: it shrinks as their root.

    An interval without a width (its ends are 0 or infinite) says nothing: as many again.
    """
    if gap <= 0:
        return None
    if not math.isfinite(half):
        return 2 * repeats
    if half / gap > math.sqrt(FAR / repeats):
        return None
    return max(repeats + 1, math.ceil(repeats * (half / gap) ** 2))


def failed(cell: str, metric: str, demand: str, remark: str) -> Judgement:
    return Judgement(cell=cell, metric=metric, demand=demand, verdict=Verdict.FAIL, remark=remark)
