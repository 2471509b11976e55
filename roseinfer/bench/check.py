"""The verdict on a run: does it keep the rules, against a baseline and against absolute bounds?

In this order: is the run valid, was anything measured, are the cells there, did outcomes get worse (then latencies
are not compared: those of the few that were served say nothing), and only then the rules. Three answers: with e
the ratio to the baseline and [l, u] its interval at level 1 - 0.05 / (number of rule-cells), a rule PASSes if
u <= max_ratio, or e <= max_ratio and l <= 1 with the N repeats that `ratios.repeats_needed` asks for; it FAILs
if e > max_ratio and l > 1; else it is UNKNOWN. Where more is better the ratio is turned over first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from roseinfer.bench.pooled_figures import pooled_figure
from roseinfer.bench.ratios import fewest_repeats
from roseinfer.bench.sides import (
    Comparison,
    Side,
    compare_cell,
    compare_shares,
    differing_rows,
    how_compared,
    notes_on,
    other_machine,
    share_blocks,
)
from roseinfer.bench.stats import Interval
from roseinfer.bench.thresholds import Rule
from roseinfer.errors import InputError

FALSE_ALARMS: Final = 0.05
"""Of a whole check, whatever the number of rules and cells."""
SUSPICIOUS: Final = 0.30
"""An improvement beyond it is more often something that was not measured."""
OUTCOME_MARGIN: Final = 0.01
"""Share of the offered requests by which errors or refusals may exceed the baseline's; as --max-error-share."""

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


@dataclass(frozen=True)
class Report:
    """What `check` found. `level` is that of every interval, and `how` says what these are."""

    run: str
    baseline: str | None
    how: str
    level: float
    judgements: Sequence[Judgement]
    notes: Sequence[str]
    invalid: str | None = None
    nothing: bool = False

    def exit_code(self, unknown: int = 3) -> int:
        """0 PASS, 1 FAIL, 3 UNKNOWN (or what `unknown` makes of it), 4 invalid, 5 nothing measured."""
        if self.invalid is not None:
            return 4
        if self.nothing:
            return 5
        return {Verdict.FAIL: 1, Verdict.UNKNOWN: unknown, Verdict.PASS: 0}[self.verdict]

    @property
    def verdict(self) -> Verdict:
        """Of all rules that decide together."""
        found = {judgement.verdict for judgement in self.judgements if not judgement.observe}
        return next(
            (verdict for verdict in (Verdict.FAIL, Verdict.UNKNOWN) if verdict in found), Verdict.PASS
        )

    @property
    def headline(self) -> str:
        """The one word, e.g. PASS, and what it is about."""
        if self.invalid is not None:
            return f"INVALID: {self.invalid}"
        return "NOTHING MEASURED" if self.nothing else str(self.verdict)


def check(
    run: Side, baseline: Side | None, rules: Sequence[Rule], *, allow_other_machine: bool = False
) -> Report:
    """Judges `run`. Raises InputError where it cannot be compared with this baseline at all."""
    if baseline is None and any(rule.is_ratio for rule in rules):
        metric = next(rule.metric for rule in rules if rule.is_ratio)
        raise InputError("--baseline", None, f"is needed: the rule on {metric} is a ratio to it")
    about = (
        (run.name, None, "pooled")
        if baseline is None
        else (run.name, baseline.name, how_compared(run, baseline))
    )
    sides = [side for side in (run, baseline) if side is not None]
    for side, what in zip(sides, ("the run", "the baseline"), strict=False):
        if side.is_empty:
            return Report(*about, math.nan, [], [f"{what}, {side.name}, has no rows"], nothing=True)
    if baseline is not None:
        refuse(run, baseline, allow_other_machine=allow_other_machine)
    for side, what in zip(sides, ("the run", "the baseline"), strict=False):
        reason = side.invalid_reason()
        if reason is not None:
            return Report(*about, math.nan, [], [], invalid=f"{what}, {side.name}: {reason}")

    notes = [] if baseline is None else notes_on(run, baseline)
    if baseline is not None and run.is_simulated:
        differing, of, first = differing_rows(run, baseline)
        where = "" if first is None else f", the first: {first}"
        notes.insert(0, f"{differing} of {of} simulated requests differ from the baseline's{where}")
    level = 1 - FALSE_ALARMS / _rule_cells(rules, sides)
    return Report(*about, level, [*_judge(run, baseline, rules, level, notes)], notes)


def refuse(run: Side, baseline: Side, *, allow_other_machine: bool) -> None:
    """Raises InputError for runs of which one says nothing about the other."""
    if run.is_simulated != baseline.is_simulated:
        raise InputError("--baseline", baseline.name, "one of the runs is simulated, the other is not")
    if run.is_simulated and run.manifest.get("workload_sha256") != baseline.manifest.get("workload_sha256"):
        why = (
            "simulated another workload (other arrivals, lengths or prompts): its rows answer other requests"
        )
        raise InputError("--baseline", baseline.name, why)
    differs = other_machine(run, baseline)
    if differs and not allow_other_machine:
        why = f"was measured on another machine ({'; '.join(differs)}): --allow-other-machine compares all the same"
        raise InputError("--baseline", baseline.name, why)


def _rule_cells(rules: Sequence[Rule], sides: Sequence[Side]) -> int:
    cells = {cell: side.factors(cell) for side in sides for cell in side.cells}
    deciding = [rule for rule in rules if not rule.observe] or rules
    return max(1, sum(rule.applies_to(factors) for rule in deciding for factors in cells.values()))


def _judge(
    run: Side, baseline: Side | None, rules: Sequence[Rule], level: float, notes: list[str]
) -> list[Judgement]:
    judgements: list[Judgement] = []
    sides = [side for side in (baseline, run) if side is not None]
    cells = {cell: side for side in sides for cell in side.cells}
    matched: set[int] = set()
    for cell, side in cells.items():
        label, factors = str(side.cells[cell]["label"]), side.factors(cell)
        applying = [rule for rule in rules if rule.applies_to(factors)]
        matched |= {id(rule) for rule in applying}
        if absent := [one.name for one in sides if cell not in one.cells]:
            remark = f"this cell is missing in {absent[0]}"
            if applying:
                missing = _fail(label, "cell", "present in both", remark)
                judgements.append(replace(missing, observe=all(rule.observe for rule in applying)))
            continue
        if baseline is not None and applying:
            outcomes = _outcomes(run, baseline, cell, label, level)
            observe = all(rule.observe for rule in applying)
            judgements += [replace(outcome, observe=observe) for outcome in outcomes]
            _compare_counts(run, baseline, cell, label, notes)
            if any(outcome.verdict is Verdict.FAIL for outcome in outcomes):
                continue
        for rule in applying:
            judgements.append(judge_cell(run, baseline, cell, label, rule, level))
    for rule in rules:
        if id(rule) not in matched:
            judgements.append(
                replace(
                    _fail("none", rule.metric, rule.demand, "no cell is as this rule's `cells` says"),
                    observe=rule.observe,
                )
            )
    return judgements


def _outcomes(run: Side, baseline: Side, cell: str, label: str, level: float) -> list[Judgement]:
    """What makes latencies incomparable: more errors or refusals than before. Empty where neither is so.

    More is by over OUTCOME_MARGIN. Errors fail also where the repeats are too few to carry the level: no run has
    business with them. The number of refusals may be the machine's doing, so that they need the interval.
    """
    found = []
    for metric in ("error_rate", "reject_rate"):
        difference = compare_shares(run, baseline, cell, metric, level)
        if not difference.point > OUTCOME_MARGIN:
            continue
        unbounded = difference.lo == -math.inf
        failed = difference.lo > 0 or (metric == "error_rate" and unbounded)
        repeats = (len(run.values(cell, metric)), len(baseline.values(cell, metric)))
        before, now = (100 * side.pooled_value(cell, metric) for side in (baseline, run))
        remark = f"went from {before:.1f} % to {now:.1f} %"
        collect = None
        if failed:
            remark += ": latencies are not compared"
        elif unbounded:
            collect = fewest_repeats(level, share_blocks(run, baseline)) - min(repeats)
        found.append(
            Judgement(
                cell=label,
                metric=metric,
                demand=f"at most {100 * OUTCOME_MARGIN:g} points more",
                verdict=Verdict.FAIL if failed else Verdict.UNKNOWN,
                n=run.count(cell, metric),
                repeats=repeats,
                collect=collect,
                remark=remark,
            )
        )
    return found


def _compare_counts(run: Side, baseline: Side, cell: str, label: str, notes: list[str]) -> None:
    """A run that served far fewer requests than its baseline was perhaps hardly measured."""
    before, now = (side.cells[cell]["completed"] / side.cells[cell]["repeats"] for side in (baseline, run))
    if now < (1 - SUSPICIOUS) * before:
        notes.append(f"suspicious: {label}: {now:g} requests completed a repeat, {before:g} in the baseline")


def judge_cell(
    run: Side, baseline: Side | None, cell: str, label: str, rule: Rule, level: float
) -> Judgement:
    """One rule in a cell that both sides have."""
    judged = replace(_fail(label, rule.metric, rule.demand, ""), observe=rule.observe, is_ratio=rule.is_ratio)
    for side in (run, *([baseline] if rule.is_ratio and baseline is not None else [])):
        if math.isnan(side.pooled_value(cell, rule.metric)) or side.values(cell, rule.metric).empty:
            return replace(judged, remark=f"{side.name} has no {rule.metric}: not measured")
    if not rule.is_ratio or baseline is None:
        return judge_absolute(judged, run, cell, rule, level)
    comparison = compare_cell(run, baseline, cell, rule.metric, level)
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
    return f"collect {collect} more repeat{'' if collect == 1 else 's'}"


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def not_carried(repeats: int, carries: int, level: float) -> str:
    if repeats >= carries:
        return ""
    return f"{repeats} repeats cannot carry a level of {100 * level:.4g} %, {carries} would"


def repeats_wanted(repeats: int, half: float, gap: float) -> int | None:
    """Repeats at which an interval `half` wide to one side is as narrow as `gap`: it shrinks as their root."""
    if gap <= 0 or half / gap > math.sqrt(_FAR / repeats):
        return None
    return max(repeats + 1, math.ceil(repeats * (half / gap) ** 2))


def _fail(cell: str, metric: str, demand: str, remark: str) -> Judgement:
    return Judgement(cell=cell, metric=metric, demand=demand, verdict=Verdict.FAIL, remark=remark)
