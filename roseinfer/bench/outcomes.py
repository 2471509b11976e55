"""Did more requests fail, or were more refused, than before? Then the latencies of the others cannot be compared."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from scipy import stats
from scipy.special import ndtri

from roseinfer.bench.judgement import Judgement, Verdict, collect_text, repeats_wanted
from roseinfer.bench.ratios import fewest_repeats, rarest
from roseinfer.bench.sides import Side, share_blocks, values_of

OUTCOME_MARGIN: Final = 0.01
"""Share of the offered requests by which errors or refusals may exceed the baseline's; as --max-error-share."""

_DRAWS: Final = 4000
"""Of a permutation test, where there are more permutations and no smaller probability is asked for."""


class ShareChange(NamedTuple):
    """A share of the offered requests, the mean over repeats: before, now, and how often chance makes it grow so much.

    `p` is one-sided, `smallest_p` the smallest that so many repeats can have.
    """

    before: float
    now: float
    p: float
    smallest_p: float
    repeats: tuple[int, int]


def share_change(run: Side, baseline: Side, cell: str, metric: str, most_p: float) -> ShareChange:
    """By giving whole repeats to the sides anew (within blocks, where they share them), enough often to see `most_p`.

    Of the mean and not of a typical repeat: what fails in a few repeats only has failed. A simulated run has no
    chance in it. Growth within OUTCOME_MARGIN has a `p` of 1. NaN where a side has no repeat.
    """
    a, b = values_of(run, baseline, cell, metric)
    repeats, paired = (len(a), len(b)), share_blocks(run, baseline)
    if not min(repeats):
        return ShareChange(math.nan, math.nan, math.nan, math.nan, repeats)
    before, now = float(b.mean()), float(a.mean())
    if not now - before > OUTCOME_MARGIN or (min(repeats) == 1 and not run.is_simulated):
        return ShareChange(before, now, 1.0, rarest(repeats, paired), repeats)
    if run.is_simulated:
        return ShareChange(before, now, 0.0, 0.0, repeats)
    found = stats.permutation_test(
        (a, b),
        lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        permutation_type="samples" if paired else "independent",
        n_resamples=max(_DRAWS, math.ceil(4 / most_p)),
        batch=500,
        alternative="greater",
        rng=np.random.default_rng(int(baseline.manifest["seed"])),
    )
    return ShareChange(before, now, float(found.pvalue), rarest(repeats, paired), repeats)


def judge_outcomes(run: Side, baseline: Side, cell: str, label: str, level: float) -> list[Judgement]:
    """A line for errors and for refusals that are more than OUTCOME_MARGIN above the baseline's; mostly none.

    FAIL where chance makes the difference in at most half of 1 - level: a rule, too, FAILs to one side only. Errors
    FAIL also where so few repeats could not show it: no run has business with them. Else UNKNOWN.
    """
    most_p = (1 - level) / 2
    found = []
    for metric in ("error_rate", "reject_rate"):
        change = share_change(run, baseline, cell, metric, most_p)
        difference = change.now - change.before
        if not difference > OUTCOME_MARGIN:
            continue
        shown, carried = change.p <= most_p, change.smallest_p <= most_p
        is_worse = shown or (metric == "error_rate" and not carried)
        remark = f"went from {100 * change.before:.1f} % to {100 * change.now:.1f} %"
        collect = None
        if is_worse:
            remark += ": latencies are not compared"
        else:
            collect = _collect(change, most_p, fewest_repeats(level, share_blocks(run, baseline)))
            remark += f"; {collect_text(collect)}"
        found.append(
            Judgement(
                cell=label,
                metric=metric,
                demand=f"at most {100 * OUTCOME_MARGIN:g} points more",
                verdict=Verdict.FAIL if is_worse else Verdict.UNKNOWN,
                growth=difference,
                p=change.p,
                n=(run.count(cell, metric), baseline.count(cell, metric)),
                repeats=change.repeats,
                collect=collect,
                remark=remark,
            )
        )
    return found


def _collect(change: ShareChange, most_p: float, carries: int) -> int | None:
    """More repeats until the same difference is shown: in standard errors it grows as the root of their number."""
    repeats = min(change.repeats)
    if change.smallest_p > most_p:
        return max(1, carries - repeats)
    wanted = repeats_wanted(repeats, -float(ndtri(most_p)), -float(ndtri(change.p)))
    return None if wanted is None else wanted - repeats
