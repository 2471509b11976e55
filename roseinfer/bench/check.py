"""The verdict on a run: does it keep the rules, against a baseline and against absolute bounds?

In this order: is the run valid, was anything measured, are the cells there, did outcomes get worse (then latencies
are not compared: those of the few that were served say nothing), and only then the rules. Three answers: with e
the ratio to the baseline and [l, u] its interval at level 1 - 0.05 / (number of rule-cells), a rule PASSes if
u <= max_ratio, or e <= max_ratio and l <= 1 with the N repeats that `ratios.repeats_needed` asks for; it FAILs
if e > max_ratio and l > 1; else it is UNKNOWN. Where more is better the ratio is turned over first.

The tests of outcomes are not among the rule-cells. A rule FAILs to one side of its interval only, so that all rules
together raise a false alarm in at most half of FALSE_ALARMS; the two tests of outcomes in a cell, each to one side at
the same level and only beyond OUTCOME_MARGIN, add at most the other half where a cell has two rules or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from roseinfer.bench.judgement import SUSPICIOUS, Judgement, Verdict, failed, judge_cell
from roseinfer.bench.outcomes import judge_outcomes
from roseinfer.bench.sides import Side, how_compared, notes_on, other_machine, other_repeats
from roseinfer.bench.thresholds import Rule
from roseinfer.errors import InputError

FALSE_ALARMS: Final = 0.05
"""Of a whole check, whatever the number of rules and cells."""


@dataclass(frozen=True)
class Report:
    """What `check` found. `level` is that of every interval (NaN: there are none), `how` says what was compared."""

    run: str
    baseline: str | None
    how: str
    level: float = math.nan
    judgements: Sequence[Judgement] = ()
    notes: Sequence[str] = ()
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
    how = "pooled over repeats" if baseline is None else how_compared(run, baseline)
    report = Report(run.name, None if baseline is None else baseline.name, how)
    sides = {"run": run} if baseline is None else {"run": run, "baseline": baseline}
    for what, side in sides.items():
        if side.is_empty:
            return replace(report, nothing=True, notes=[f"the {what}, {side.name}, has no rows"])
    if baseline is not None:
        refuse(run, baseline, allow_other_machine=allow_other_machine)
    for what, side in sides.items():
        reason = side.invalid_reason()
        if reason is not None:
            return replace(report, invalid=f"the {what}, {side.name}: {reason}")

    notes = [] if baseline is None else notes_on(run, baseline)
    level = 1 - FALSE_ALARMS / _rule_cells(rules, [*sides.values()])
    judgements = [_unfinished(reason) for side in sides.values() if (reason := side.unfinished())]
    judgements += _judge(run, baseline, rules, level, notes)
    return replace(report, level=math.nan if run.is_simulated else level, judgements=judgements, notes=notes)


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
    repeats = other_repeats(run, baseline)
    if repeats is not None:
        raise InputError("--baseline", baseline.name, repeats)
    if differs and not allow_other_machine:
        why = f"was measured on another machine ({'; '.join(differs)}): --allow-other-machine compares all the same"
        raise InputError("--baseline", baseline.name, why)


def _rule_cells(rules: Sequence[Rule], sides: Sequence[Side]) -> int:
    cells = {cell: side.factors(cell) for side in sides for cell in side.cells}
    deciding = [rule for rule in rules if not rule.observe]
    return max(1, sum(rule.applies_to(factors) for rule in deciding for factors in cells.values()))


def _unfinished(reason: str) -> Judgement:
    """What is missing might have failed: such a run cannot pass."""
    return Judgement(
        cell="all", metric="run", demand="finished", verdict=Verdict.UNKNOWN, remark=reason, is_ratio=False
    )


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
                missing = failed(label, "cell", "present in both", remark)
                judgements.append(replace(missing, observe=all(rule.observe for rule in applying)))
            continue
        if baseline is not None and applying:
            outcomes = judge_outcomes(run, baseline, cell, label, level)
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
                    failed("none", rule.metric, rule.demand, "no cell is as this rule's `cells` says"),
                    observe=rule.observe,
                )
            )
    return judgements


def _compare_counts(run: Side, baseline: Side, cell: str, label: str, notes: list[str]) -> None:
    """A run that served far fewer requests than its baseline was perhaps hardly measured."""
    before, now = (side.cells[cell]["completed"] / side.cells[cell]["repeats"] for side in (baseline, run))
    if now < (1 - SUSPICIOUS) * before:
        notes.append(f"suspicious: {label}: {now:g} requests completed a repeat, {before:g} in the baseline")
