"""What `recommend` prints: the evidence in a table, and the answer in plain words, or JSON."""

from __future__ import annotations

import math
from typing import Any, Final

from roseinfer.admission_spec import parse_admission
from roseinfer.bench.predicted_limits import Prediction
from roseinfer.bench.recommend import Evidence, Recommendation
from roseinfer.bench.report import FEW_REPEATS
from roseinfer.bench.summary import limit_label
from roseinfer.bench.verdicts import Row, aligned, interval_text, number_text

LEGEND: Final = (
    "refused and served in goal: shares of the offered requests; wasted work: share of the computed tokens, prompts and"
    " outputs, of requests that missed the goal or were cut off"
)


def about_intervals(repeats: int) -> str:
    """What the intervals of a table are worth, whose cells have so many repeats at least."""
    much_less = f", under {FEW_REPEATS} repeats far less" if repeats < FEW_REPEATS else ""
    return f"intervals at 95 %, by resampling whole repeats: they cover less than that{much_less}"


def lines(found: Recommendation, prediction: Prediction | None) -> list[str]:
    """The table of one combination of factors, and what follows from it."""
    columns = ["limit"]
    columns += [
        column for slo in found.slos for column in (f"p{slo.percentile:g} {slo.metric} ms", "interval", "n")
    ]
    columns += ["refused", "served in goal", "wasted work", "how"]
    rows = [(one, "measured") for one in found.evidence]
    if prediction is not None:
        rows += [(one, "predicted") for one in prediction.between]
    rows.sort(key=lambda row: parse_admission(row[0].limit).place)
    sentences = [found.sentence(), price(found), found.how_sure()]
    if prediction is not None:
        sentences.append(prediction.sentence())
    return [
        *aligned(columns, [_row(evidence, how) for evidence, how in rows]),
        *[sentence for sentence in sentences if sentence is not None],
    ]


def price(found: Recommendation) -> str | None:
    """What the recommended limit costs, beside what no limit, or the loosest that was tried, would."""
    chosen, loosest = found.chosen, found.evidence[-1]
    if chosen is None:
        return None
    own = f"{100 * chosen.reject_rate:.1f} % refused, {_wasted(chosen)} of the computed tokens wasted"
    if chosen is loosest:
        return f"The price: {own}."
    other = f"{100 * loosest.reject_rate:.1f} % and {_wasted(loosest)} with {limit_label(loosest.limit)}"
    return f"The price: {own}; {other}."


def to_json(found: Recommendation, prediction: Prediction | None) -> dict[str, Any]:
    """As `lines`; unbounded and not known are null, and so is no limit."""
    evidence = [{**_evidence(one), "how": "measured"} for one in found.evidence]
    sentences = [found.sentence(), price(found), found.how_sure()]
    if prediction is not None:
        evidence += [{**_evidence(one), "how": "predicted"} for one in prediction.between]
        sentences.append(prediction.sentence())
    return {
        "factors": dict(found.factors),
        "slos": [str(slo) for slo in found.slos],
        "qualifies": found.chosen is not None,
        "admission": None if found.chosen is None else found.chosen.limit,
        "max_inflight": None if found.chosen is None else found.chosen.max_inflight,
        "runner_up": None if found.runner_up is None else limit_label(found.runner_up.limit),
        "evidence": evidence,
        "sentences": [sentence for sentence in sentences if sentence is not None],
    }


def _row(one: Evidence, how: str) -> Row:
    cells = [limit_label(one.limit)]
    for judgement in one.judgements:
        interval = judgement.interval_ms
        cells += [number_text(interval.point), interval_text(interval, number_text), str(judgement.n)]
    cells += [f"{100 * one.reject_rate:.1f} %", f"{100 * one.served_share:.1f} %", _wasted(one), how]
    return cells, "; ".join(one.why_not)


def _wasted(one: Evidence) -> str:
    return "n/a" if math.isnan(one.wasted_share) else f"{100 * one.wasted_share:.1f} %"


def _evidence(one: Evidence) -> dict[str, Any]:
    return {
        "limit": limit_label(one.limit),
        "offered": one.offered,
        "served_share": _finite(one.served_share),
        "reject_rate": one.reject_rate,
        "wasted_share": _finite(one.wasted_share),
        "percentiles": [
            {
                "slo": str(judgement.slo),
                "n": judgement.n,
                **{name: _finite(value) for name, value in judgement.interval_ms._asdict().items()},
            }
            for judgement in one.judgements
        ],
        "why_not": list(one.why_not),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
