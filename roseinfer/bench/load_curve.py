"""Latency and what is served against the offered load: the curve that bends where the server is full.

The offered rate is on the x axis and lines join in its order. Throughput is no x axis: past saturation it stands
still or falls, so that a line over it turns back on itself.
"""

from __future__ import annotations

from typing import Any, Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from roseinfer.bench.figure_style import (
    GREY,
    STYLE,
    Caption,
    dress,
    limit_styles,
    p99_text,
    panel_grid,
    repeats_text,
    scale_values,
    span_text,
)
from roseinfer.bench.labels import factor_text, label_cells, limits_of
from roseinfer.bench.records import FACTORS
from roseinfer.bench.stats import Interval, median_interval

_MEASURES: Final = {
    "p50_ttft_ms": "p50 TTFT",
    "p99_ttft_ms": "p99 TTFT",
    "request_goodput": "goodput",
    "request_throughput": "throughput",
    "reject_percent": "rejected",
}
_LOG_SPAN: Final = 8
"""Rates that span this factor stand on a logarithmic axis."""


def load_curve_data(summary: pd.DataFrame) -> pd.DataFrame:
    """A row per cell and measure; no rows unless the request rate has several values.

    `median` of the repeats, `lo` and `hi` its order-statistic interval at 95 % (unbounded below 6 repeats),
    `least` and `most` of the repeats. Null where no repeat measured it; latencies and throughput of a repeat
    in which nothing was completed are not measured.
    """
    if summary["request_rate"].nunique() < 2:
        return pd.DataFrame()
    others = [name for name in FACTORS[1:] if name != "request_rate"]
    repeats = summary[summary["repeat"].notna()].dropna(subset="request_rate")
    repeats = repeats.assign(reject_percent=100 * repeats["reject_rate"])
    served = ["p50_ttft_ms", "p99_ttft_ms", "request_throughput"]
    repeats[served] = repeats[served].where(repeats["completed"] > 0)
    if "request_goodput" not in repeats:
        repeats["request_goodput"] = np.nan
    rows = []
    labelled = label_cells(repeats.sort_values("request_rate"), others)
    for (combination, limit, rate), cell in labelled.groupby(
        ["combination", "limit", "request_rate"], sort=False
    ):
        about = {
            "combination": combination,
            "limit": limit,
            "request_rate": rate,
            "repeats": len(cell),
            "n_ttft_least": cell["n_ttft"].min(),
            "n_ttft_most": cell["n_ttft"].max(),
            "valid": bool(cell["valid"].all()),
        }
        for measure in _MEASURES:
            values = cell[measure].dropna().to_numpy(np.float64)
            interval = median_interval(values) if values.size else Interval(np.nan, np.nan, np.nan)
            span = (values.min(), values.max()) if values.size else (np.nan, np.nan)
            lo, median, hi = interval
            rows.append(
                {**about, "measure": measure, "median": median, "lo": lo, "hi": hi}
                | {"least": span[0], "most": span[1]}
            )
    return pd.DataFrame(rows)


@matplotlib.rc_context(STYLE)
def draw_load_curve(curve: pd.DataFrame, caption: Caption) -> Figure:
    """TTFT (logarithmic), goodput or else throughput, and the reject rate, against the offered rate."""
    limits = limits_of(curve)
    styles = limit_styles(limits)
    groups = list(curve.groupby("combination", sort=False))
    rates = np.sort(curve["request_rate"].unique())
    has_goals = curve.loc[curve["measure"] == "request_goodput", "median"].notna().any()
    served = "request_goodput" if has_goals else "request_throughput"
    figure, panels = panel_grid(len(groups), 3, width_in=6.2, height_in=2.1)
    for (latency, served_axes, refused), (combination, cells) in zip(panels, groups, strict=True):
        latency.set_title(str(combination))
        for axes in (latency, served_axes, refused):
            _scale_rates(axes, rates, labelled=axes is refused)
        for limit in limits_of(cells):
            lines = cells[cells["limit"] == limit]
            _draw_line(latency, lines, "p50_ttft_ms", styles[limit], dashed=True)
            _draw_line(latency, lines, "p99_ttft_ms", styles[limit])
            _draw_line(served_axes, lines, served, styles[limit])
            _draw_line(refused, lines, "reject_percent", styles[limit])
        latencies = curve[curve["measure"].isin(["p50_ttft_ms", "p99_ttft_ms"])]
        scale_values(latency, _extent(latencies), "TTFT", "ms", log=True)
        served_axes.plot(rates, rates, color=GREY, linestyle=":", linewidth=1, zorder=1)
        served_values = [*_extent(curve[curve["measure"] == served]), *rates]
        scale_values(served_axes, served_values, _MEASURES[served], "requests/s", log=False)
        scale_values(refused, [-4.0, 100.0], "reject rate", "% of offered", log=False)
        if not latencies["median"].notna().any():
            latency.text(0.5, 0.5, "none completed", transform=latency.transAxes, ha="center", color=GREY)
    marks: list[Artist] = [
        Line2D([], [], color=styles[limit][0], marker=styles[limit][1], label=limit) for limit in limits
    ]
    samples = curve.loc[curve["measure"] == "p99_ttft_ms"]
    name = p99_text(pd.concat([samples["n_ttft_least"], samples["n_ttft_most"]]))
    marks += [
        Line2D([], [], color=GREY, label=name),
        Line2D([], [], color=GREY, linestyle="--", label="p50"),
        Line2D([], [], color=GREY, linestyle=":", label="all that is offered"),
    ]
    dress(
        figure, "Latency and requests served against the offered load", marks, caption, _facts(curve, served)
    )
    return figure


def _facts(curve: pd.DataFrame, served: str) -> str:
    repeats = curve["repeats"]
    many = repeats_text(repeats.max()) if repeats.nunique() == 1 else f"{span_text(repeats)} repeats"
    bars = (
        "bars: its 95 % interval"
        if repeats.max() >= 6
        else "bars: the least and the most of them (95 % takes 6 repeats)"
    )
    what = {
        "request_goodput": "Goodput: requests that met every goal, over the time from first send to last token.",
        "request_throughput": "Throughput: completed requests over the time from first send to last token.",
    }[served]
    invalid = "" if curve["valid"].all() else " INVALID: a check of the run failed; its summary says which."
    return (
        f"{many}; a mark is the median of the repeats, {bars}. Percentiles by nearest rank over completed requests;"
        f" where n < 100 the p99 is the maximum, and named so. TTFT: scheduled send to first token received. {what}"
        f"{invalid}"
    )


def _draw_line(
    axes: Axes, lines: pd.DataFrame, measure: str, style: tuple[str, str], *, dashed: bool = False
) -> None:
    colour, marker = style
    line = lines[lines["measure"] == measure]
    shown = {"linestyle": "--", "markerfacecolor": "white"} if dashed else {}
    axes.plot(
        line["request_rate"],
        line["median"],
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1.3,
        clip_on=False,
        label=f"{line['limit'].iloc[0]}: {_MEASURES[measure]}",
        **shown,  # type: ignore[arg-type]
    )
    low, high = _bars(line)
    axes.vlines(line["request_rate"], low, high, color=colour, linewidth=1, alpha=0.7)


def _bars(line: pd.DataFrame) -> tuple[pd.Series[Any], pd.Series[Any]]:
    """Where the bars end: the interval where it is bounded, else the least and the most of the repeats."""
    bounded = np.isfinite(line["lo"]) & np.isfinite(line["hi"])
    return line["lo"].where(bounded, line["least"]), line["hi"].where(bounded, line["most"])


def _extent(line: pd.DataFrame) -> list[float]:
    low, high = _bars(line)
    return [*low.dropna(), *high.dropna()]


def _scale_rates(axes: Axes, rates: np.ndarray, *, labelled: bool) -> None:
    if rates[0] > 0 and rates[-1] / rates[0] >= _LOG_SPAN:
        axes.set_xscale("log")
        axes.set_xlim(rates[0] / 1.15, rates[-1] * 1.15)
    else:
        air = 0.05 * (rates[-1] - rates[0])
        axes.set_xlim(rates[0] - air, rates[-1] + air)
    axes.set_xticks(rates, [factor_text(rate) for rate in rates] if labelled else [""] * len(rates))
    axes.set_xticks([], minor=True)
    if labelled:
        axes.set_xlabel("offered load (requests/s)")
