"""Strips of dots against the limit, one dot a repeat: the p99s, and throughput beside refusals."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Final

import matplotlib
import numpy as np
import pandas as pd
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
    share_text,
    span_text,
)
from roseinfer.bench.labels import NO_LIMIT, label_cells, limits_of
from roseinfer.bench.records import FACTORS
from roseinfer.bench.stats import percentile

_TICK_CHARS: Final = 22


def points_data(summary: pd.DataFrame) -> pd.DataFrame:
    """Behind `draw_p99` and `draw_throughput`: the rows of `summary`, null where nothing was completed."""
    measured = [
        *("p99_ttft_ms", "p99_ttft_ms_lo", "p99_ttft_ms_hi"),
        *("p99_queue_wait_ms", "p99_queue_wait_ms_lo", "p99_queue_wait_ms_hi"),
        "output_throughput",
    ]
    counted = ["valid", "offered", "completed", "rejected", "timeout", "reject_rate", "n_ttft"]
    cells = ["combination", "limit", *FACTORS[1:], "repeat"]
    points = label_cells(summary.sort_values("repeat"))[[*cells, *counted, *measured]]
    return points.assign(**{column: points[column].where(points["completed"] > 0) for column in measured})


@dataclass(frozen=True)
class _Strip:
    """One row of panels: `column` of the points against the limit."""

    column: str
    label: str
    unit: str
    axis_includes: tuple[float, ...] = ()
    log: bool | None = None

    @property
    def is_p99(self) -> bool:
        return self.column.startswith("p99_")


def draw_p99(points: pd.DataFrame, caption: Caption) -> Figure:
    """p99 of TTFT and of queue wait against the limit: a dot a repeat, their median, the pooled figure."""
    strips = [_Strip("p99_ttft_ms", "p99 TTFT", "ms"), _Strip("p99_queue_wait_ms", "p99 queue wait", "ms")]
    # A remote server does not say how long a request was queued.
    drawn = [strip for strip in strips if points[strip.column].notna().any()] or strips[:1]
    facts = (
        f"{repeats_text(points['repeat'].nunique())}; percentiles by nearest rank over completed requests;"
        " where n < 100 the p99 is the maximum, and named so. Interval: whole repeats drawn anew."
        " TTFT: scheduled send to first token received. Queue wait: stamps of the engine."
    )
    return _draw_strips(points, drawn, "Tail latency against the admission limit", caption, facts)


def draw_throughput(points: pd.DataFrame, caption: Caption) -> Figure:
    """Output throughput and reject rate against the limit: a dot a repeat, and their median."""
    strips = [
        _Strip("output_throughput", "output throughput", "tokens/s", log=False),
        _Strip("reject_percent", "reject rate", "% of offered", axis_includes=(-4.0, 100.0), log=False),
    ]
    offered = points.loc[points["repeat"].notna(), "offered"]
    facts = (
        f"{repeats_text(points['repeat'].nunique())}, n={span_text(offered)} requests offered in each."
        " Throughput: output tokens of completed requests over the time from first send to last token received."
    )
    shown = points.assign(reject_percent=100 * points["reject_rate"])
    return _draw_strips(shown, strips, "Throughput and refusals against the admission limit", caption, facts)


@matplotlib.rc_context(STYLE)
def _draw_strips(
    points: pd.DataFrame, strips: list[_Strip], title: str, caption: Caption, facts: str
) -> Figure:
    limits = limits_of(points)
    repeats = sorted(points["repeat"].dropna().unique())
    groups = list(points.groupby("combination", sort=False))
    figure, panels = panel_grid(len(groups), len(strips), width_in=1.0 + 1.25 * len(limits), height_in=2.0)
    for panel, (combination, cells) in zip(panels, groups, strict=True):
        panel[0].set_title(str(combination))
        for axes, strip in zip(panel, strips, strict=True):
            axes.set_xlim(-0.6, len(limits) - 0.4)
            axes.set_xticks(range(len(limits)), [])
            axes.xaxis.grid(False)
            axes.tick_params(axis="x", length=0, labelsize=7)
            for x, limit in enumerate(limits):
                _draw_cell(
                    axes, x, cells[cells["limit"] == limit], strip, repeats, limit_styles(limits)[limit]
                )
            bounds = [f"{strip.column}_lo", f"{strip.column}_hi"] if strip.is_p99 else []
            values = [*points[[strip.column, *bounds]].to_numpy().ravel(), *strip.axis_includes]
            scale_values(axes, values, strip.label, strip.unit, log=strip.log)
        texts = [_tick_text(limit, cells[cells["limit"] == limit], strips[0].is_p99) for limit in limits]
        panel[-1].set_xticklabels(texts)
        are_counts = all(limit.isdecimal() or limit == NO_LIMIT for limit in limits)
        panel[-1].set_xlabel("admission limit (max requests in flight)" if are_counts else "admission policy")
    marks = [Line2D([], [], color=GREY, marker="o", linestyle="", label="one repeat")]
    if len(repeats) > 1:
        marks.append(Line2D([], [], color=GREY, linewidth=2, label="median of the repeats"))
        if strips[0].is_p99:
            marks.append(_pooled_mark([], [], GREY, label="repeats pooled, 95 % interval"))
    invalid = "" if points["valid"].all() else " INVALID: a check of the run failed; its summary says which."
    dress(figure, title, marks, caption, facts + invalid)
    return figure


def _draw_cell(
    axes: Axes, x: int, cell: pd.DataFrame, strip: _Strip, repeats: list[int], style: tuple[str, str]
) -> None:
    colour, marker = style
    runs = cell[cell["repeat"].notna()].dropna(subset=[strip.column])
    if runs.empty:
        served = (cell["completed"] > 0).any()
        why = "not run" if cell.empty else "not measured" if served else "none completed"
        axes.annotate(
            why,
            (x, 0.5),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="center",
            va="center",
            color=GREY,
        )
        return
    # Side by side in the order of measuring, so that a drift shows. Dots on the frame are not to be cut in half.
    places = x + np.linspace(-0.25, 0.25, len(repeats) + 2)[1:-1]
    at = places[np.searchsorted(repeats, runs["repeat"])]
    axes.plot(at, runs[strip.column], marker, color=colour, markersize=5, markeredgewidth=0, clip_on=False)
    if len(repeats) == 1:
        return
    axes.plot(
        [x - 0.3, x + 0.3], [percentile(runs[strip.column], 50)] * 2, color=colour, linewidth=2, zorder=1.5
    )
    if strip.is_p99:
        pooled = cell[cell["repeat"].isna()].iloc[0]
        bounds = pooled[[f"{strip.column}_lo", f"{strip.column}_hi"]].to_numpy(dtype=np.float64)
        if np.isfinite(bounds).all():
            axes.plot([x + 0.38] * 2, bounds, color=colour, linewidth=1)
        axes.add_line(_pooled_mark([x + 0.38], [pooled[strip.column]], colour))


def _pooled_mark(x: list[float], y: list[float], colour: str, label: str = "") -> Line2D:
    return Line2D(
        x, y, color=colour, marker="d", markerfacecolor="white", markersize=6, linestyle="", label=label
    )


def _tick_text(limit: str, cell: pd.DataFrame, under_p99: bool) -> str:
    """The limit and, under a percentile, what belongs beside it: the refusals, and n."""
    runs, pooled = cell[cell["repeat"].notna()], cell[cell["repeat"].isna()]
    lines = textwrap.wrap(limit, _TICK_CHARS)
    if under_p99:
        lines += [f"{share_text(rate)} rejected" for rate in pooled["reject_rate"]]
        timed_out = pooled.loc[pooled["timeout"] > 0, "timeout"] / pooled["offered"]
        lines += [f"{share_text(share)} timed out" for share in timed_out.dropna()]
        served = runs.loc[runs["completed"] > 0, "n_ttft"]
        if len(runs) == 1 and len(served):
            lines.append(p99_text(served))
        elif len(served):
            lines += [f"repeat: {p99_text(served)}", f"pooled: {p99_text(pooled['n_ttft'])}"]
    if not pooled["valid"].all():
        lines.append("INVALID")
    # Wider, the labels of two limits would run into each other.
    return "\n".join(line if len(line) <= _TICK_CHARS else line.replace(" (", "\n(") for line in lines)
