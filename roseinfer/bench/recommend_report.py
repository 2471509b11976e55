"""What `recommend` prints: the evidence in a table, and the answer in plain words, or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from roseinfer.admission_spec import parse_admission
from roseinfer.bench.predicted_limits import Prediction
from roseinfer.bench.recommend import Evidence, Judgement, Recommendation, Slo
from roseinfer.bench.report import FEW_REPEATS
from roseinfer.bench.stats import Interval
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


def percentile_columns(slos: Iterable[Slo]) -> list[str]:
    """The headings of `percentile_cells`."""
    return [column for slo in slos for column in (f"p{slo.percentile:g} {slo.metric} ms", "interval", "n")]


def percentile_cells(judgements: Iterable[Judgement]) -> list[str]:
    """Of every SLO the percentile, its interval and its sample."""
    return [
        text
        for judgement in judgements
        for text in (
            number_text(judgement.interval_ms.point),
            interval_text(judgement.interval_ms, number_text),
            str(judgement.n),
        )
    ]


def percentiles_json(judgements: Iterable[Judgement]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [
        {"slo": str(judgement.slo), "n": judgement.n, **bounds_json(judgement.interval_ms)}
        for judgement in judgements
    ]


def bounds_json(interval: Interval) -> dict[str, float | None]:
    return {name: finite(value) for name, value in interval._asdict().items()}


def finite(value: float) -> float | None:
    """Unbounded and not known are null in JSON."""
    return value if math.isfinite(value) else None


def lines(found: Recommendation, prediction: Prediction | None) -> list[str]:
    """The table of one combination of factors, and what follows from it."""
    columns = ["limit", *percentile_columns(found.slos), "refused", "served in goal", "wasted work", "how"]
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
    cells = [limit_label(one.limit), *percentile_cells(one.judgements)]
    cells += [f"{100 * one.reject_rate:.1f} %", f"{100 * one.served_share:.1f} %", _wasted(one), how]
    return cells, "; ".join(one.why_not)


def _wasted(one: Evidence) -> str:
    return "n/a" if math.isnan(one.wasted_share) else f"{100 * one.wasted_share:.1f} %"


def _evidence(one: Evidence) -> dict[str, Any]:
    return {
        "limit": limit_label(one.limit),
        "offered": one.offered,
        "served_share": finite(one.served_share),
        "reject_rate": one.reject_rate,
        "wasted_share": finite(one.wasted_share),
        "percentiles": percentiles_json(one.judgements),
        "why_not": list(one.why_not),
    }
