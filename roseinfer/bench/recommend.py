"""Which limit to set, given what a percentile of a latency must not exceed.

Among the limits whose pooled percentile does not lie above any SLO, the one that serves the largest share of
the OFFERED requests within all of them: a refused request was not served. Ties go to the larger limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
import pandas as pd

from roseinfer.admission_spec import parse_admission
from roseinfer.bench.goals import Goal, met
from roseinfer.bench.judgement import Verdict
from roseinfer.bench.records import FACTORS, Outcome, derive
from roseinfer.bench.shares import FEWEST_PAIRS, paired_gap
from roseinfer.bench.stats import Interval, cluster_bootstrap, percentile_label, smallest_sample
from roseinfer.bench.steady_state import steady_rows
from roseinfer.bench.summary import limit_label, pooled, sort_cells
from roseinfer.bench.wasted_work import wasted_share
from roseinfer.errors import InputError

SLO_METRICS: Final = ("ttft", "ttft_from_send", "queue_wait", "prefill", "tpot", "e2el")
"""Latencies of which every completed request has one."""

_FORM: Final = re.compile(r"p(\d+(?:\.\d+)?)_([a-z0-9_]+):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Slo:
    """A percentile of a latency and what it must not exceed: p99_ttft:250."""

    percentile: float
    metric: str
    limit_ms: float

    def __str__(self) -> str:
        return f"p{self.percentile:g}_{self.metric}:{self.limit_ms:g}"


def parse_slo(text: str) -> Slo:
    """`p99_ttft:250` as an Slo. Raises InputError on another form, an unknown metric or an empty range."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise InputError("--slo", text, "must look like p99_ttft:250 (percentile, metric, milliseconds)")
    p, metric, limit_ms = float(found[1]), found[2], float(found[3])
    if metric not in SLO_METRICS:
        raise InputError("--slo", text, f"unknown metric {metric!r}, known are {', '.join(SLO_METRICS)}")
    if not 0 < p < 100:
        raise InputError("--slo", text, "the percentile must lie between 0 and 100, both excluded")
    if not 0 < limit_ms < math.inf:
        raise InputError("--slo", text, "the milliseconds must be a finite number above 0")
    return Slo(p, metric, limit_ms)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One SLO at one limit: the pooled percentile in ms over `n` completed requests, and why it fails."""

    slo: Slo
    interval_ms: Interval
    n: int
    why_not: str | None  # None: the SLO holds, as far as the interval can tell

    @property
    def is_judged(self) -> bool:
        """The sample was large enough to say whether the SLO holds."""
        return self.n >= smallest_sample(self.slo.percentile) and math.isfinite(self.interval_ms.lo)

    @property
    def verdict(self) -> Verdict:
        """PASS where the whole interval keeps the SLO, FAIL where none of it does."""
        if self.is_judged and self.interval_ms.hi <= self.slo.limit_ms:
            return Verdict.PASS
        return Verdict.FAIL if self.is_judged and self.interval_ms.lo > self.slo.limit_ms else Verdict.UNKNOWN

    def describe(self) -> str:
        """The percentile in words: p99 ttft 212.3 ms (95 % interval 200.1 to 231.0, n=512)."""
        lo, point, hi = self.interval_ms
        if self.n == 0:
            return f"p{self.slo.percentile:g} {self.slo.metric} n/a (nothing completed has one)"
        bounds = f"95 % interval {lo:.1f} to {hi:.1f}" if math.isfinite(lo) else "no interval from one repeat"
        label = percentile_label(self.slo.percentile, self.n)
        count = "" if "n=" in label else f", n={self.n}"
        return f"{label} {self.slo.metric} {point:.1f} ms ({bounds}{count})"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one limit did. `limit` is as the column `admission`; `served` met every SLO bound, as single requests.

    `repeats` has (served, offered) of each, by its number. `wasted_share` of the tokens went to requests that were not
    served so; NaN where that is not known.
    """

    limit: str
    offered: int
    served: int
    repeats: Mapping[int, tuple[int, int]]
    reject_rate: float
    wasted_share: float
    judgements: tuple[Judgement, ...]
    why_not: tuple[str, ...]  # empty: it qualifies

    @property
    def qualifies(self) -> bool:
        return not self.why_not

    @property
    def max_inflight(self) -> int | None:
        """The limit where it is one of requests alone."""
        spec = parse_admission(self.limit)
        return spec.inflight if spec.tokens is None else None

    @property
    def served_share(self) -> float:
        """Of the offered requests; NaN when none was offered."""
        return self.served / self.offered if self.offered else math.nan

    def describe(self) -> str:
        """The evidence in words, without the limit."""
        percentiles = ", ".join(judgement.describe() for judgement in self.judgements)
        return (
            f"{percentiles}, {100 * self.served_share:.1f} % of the {self.offered} offered requests served"
            f" within the goal, {100 * self.reject_rate:.1f} % refused"
        )


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The limit to set for one combination of the other swept factors.

    `factors` holds those that vary in the sweep. `evidence` has every limit tried, smallest first, no limit
    last. `chosen` is one of them, None when none qualifies.
    """

    factors: Mapping[str, float]
    slos: tuple[Slo, ...]
    evidence: tuple[Evidence, ...]
    chosen: Evidence | None

    def sentence(self) -> str:
        """The answer in plain words, with its numbers."""
        where = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in self.factors.items())
        prefix = f"At {where}: " if where else ""
        goal = " and ".join(str(slo) for slo in self.slos)
        if self.chosen is None:
            smallest = self.evidence[0]
            return (
                f"{prefix}none of the limits tried can be recommended for {goal}. At the smallest"
                f" ({limit_label(smallest.limit)}): {smallest.describe()}; {'; '.join(smallest.why_not)}."
            )
        unsettled = [judgement for judgement in self.chosen.judgements if _straddles(judgement)]
        doubt = (
            " The interval reaches above the bound: more repeats would tell whether it really holds."
            if unsettled
            else ""
        )
        limit = limit_label(self.chosen.limit)
        unjudged = [one for one in self.evidence if any(not j.is_judged for j in one.judgements)]
        silent = "".join(f" Not judged: {limit_label(one.limit)} ({one.why_not[0]})." for one in unjudged)
        return f"{prefix}recommended for {goal}: {limit}. {self.chosen.describe()}.{doubt}{silent}"

    @property
    def runner_up(self) -> Evidence | None:
        """What would be recommended if the chosen limit had not been tried."""
        return best([one for one in self.evidence if one is not self.chosen])

    def how_sure(self) -> str | None:
        """By how much the chosen limit is ahead of the runner-up, repeat by repeat; None where none is chosen.

        The chosen one was picked for its lead, so of two that serve alike either may come to be tested: the interval
        is two-sided. It is of the median repeat, by order statistics, which holds for any number of repeats.
        """
        first, second = self.chosen, self.runner_up
        if first is None:
            return None
        if second is None:
            return "No other limit that was tried qualifies."
        both = sorted(first.repeats.keys() & second.repeats.keys())
        lo, _, hi = paired_gap([first.repeats[n] for n in both], [second.repeats[n] for n in both])
        other = limit_label(second.limit)
        if both and all(first.repeats[n] == second.repeats[n] for n in both):
            return f"The runner-up, {other}, serves as many in every repeat: the larger limit was taken."
        lead = 100 * (first.served_share - second.served_share)
        ahead = (
            f"{lead:.1f} points more of the offered requests are served within the goal than with {other},"
            " the runner-up"
        )
        if len(both) < FEWEST_PAIRS:
            few = "1 paired repeat is" if len(both) == 1 else f"{len(both)} paired repeats are"
            why = f"{few} too few to tell whether by chance: that takes {FEWEST_PAIRS} at least"
            return f"Not sure: {ahead}, but {why}."
        bounds = f"median of {len(both)} paired repeats, 95 %: {100 * lo:.1f} to {100 * hi:.1f} points"
        if lo > 0:
            return f"Sure of it: {ahead} ({bounds})."
        return f"Not sure: {ahead}, and it may be chance ({bounds}): more repeats would tell."


def recommend(
    requests: pd.DataFrame, summary: pd.DataFrame, slos: Sequence[Slo], *, seed: int
) -> list[Recommendation]:
    """One recommendation per combination of the swept factors other than the limit.

    `requests` holds raw rows (REQUEST_SCHEMA), `summary` is what `summarise` made of them. Percentiles are
    pooled over repeats, with the interval of `cluster_bootstrap(..., seed=seed)`. A limit is not judged, and
    so not recommended, when its sample is smaller than the percentile needs (100 for p99), when one repeat
    gives no interval, or when its cell is invalid. Raises InputError without SLOs.
    """
    if not slos:
        raise InputError("--slo", None, "a recommendation needs at least one, such as p99_ttft:250")
    cells = sort_cells(pooled(summary))
    others = list(FACTORS[1:])
    swept = [factor for factor in others if cells[factor].nunique(dropna=False) > 1]
    answers = []
    for _, combination in cells.groupby(others, sort=False, dropna=False):
        first = combination.iloc[0]
        evidence = tuple(
            _evidence(requests.loc[requests["cell_id"] == cell["cell_id"]], cell, slos, seed)
            for _, cell in combination.iterrows()
        )
        factors = {factor: float(first[factor]) for factor in swept if not pd.isna(first[factor])}
        answers.append(Recommendation(factors, tuple(slos), evidence, best(evidence)))
    return answers


def best(evidence: Sequence[Evidence]) -> Evidence | None:
    """Of those that qualify, the one that serves most, and of several such the largest limit."""
    qualified = [one for one in evidence if one.qualifies]
    if not qualified:
        return None
    return max(
        qualified,
        key=lambda one: (Fraction(one.served, one.offered), parse_admission(one.limit).place),
    )


def _evidence(requests: pd.DataFrame, cell: pd.Series, slos: Sequence[Slo], seed: int) -> Evidence:
    derived = derive(requests)
    counted = steady_rows(derived)
    completed = counted.loc[counted["outcome"] == Outcome.COMPLETED]
    judgements = tuple(_judge(completed, slo, seed) for slo in slos)
    served = met(derived, [Goal(slo.metric, slo.limit_ms) for slo in slos])
    by_repeat = pd.Series(served).groupby(derived["repeat"].to_numpy()).agg(["sum", "size"])
    why_not = [judgement.why_not for judgement in judgements if judgement.why_not is not None]
    if not cell["valid"]:
        why_not.append(f"the measurement is invalid: {cell['invalid_reasons']}")
    return Evidence(
        limit=str(cell["admission"]),
        offered=len(derived),
        served=int(np.count_nonzero(served)),
        repeats=dict(
            zip(
                by_repeat.index.astype(int).tolist(),
                zip(by_repeat["sum"].tolist(), by_repeat["size"].tolist(), strict=True),
                strict=True,
            )
        ),
        wasted_share=wasted_share(derived, served),
        reject_rate=float((derived["outcome"] == Outcome.REJECTED).mean()),
        judgements=judgements,
        why_not=tuple(why_not),
    )


def _judge(completed: pd.DataFrame, slo: Slo, seed: int) -> Judgement:
    runs_ms = [
        1e3 * run[f"{slo.metric}_s"].dropna().to_numpy(dtype=np.float64)
        for _, run in completed.groupby("repeat")
    ]
    interval = cluster_bootstrap(runs_ms, slo.percentile, seed=seed)
    n, needed = sum(run_ms.size for run_ms in runs_ms), smallest_sample(slo.percentile)
    why_not = None
    if n < needed:
        why_not = f"{slo} cannot be judged: too few completed requests ({n}, needs {needed})"
    elif not math.isfinite(interval.lo):
        why_not = f"{slo} cannot be judged: one repeat gives no interval, repeat at least twice"
    elif interval.lo > slo.limit_ms:
        why_not = f"{slo} is missed: even the lower end of the interval is {interval.lo:.1f} ms"
    return Judgement(slo, interval, n, why_not)


def _straddles(judgement: Judgement) -> bool:
    return judgement.interval_ms.hi > judgement.slo.limit_ms
