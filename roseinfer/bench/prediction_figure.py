"""Predicted over measured: a mark per cell and percentile, at 1 where the prediction was right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from roseinfer.bench.figure_style import GREY, STYLE, Caption, dress, limit_styles, log_ticks
from roseinfer.bench.labels import label_cells, limit_title, limits_of
from roseinfer.bench.prediction import METRICS, PERCENTILES, figure_name, median_size
from roseinfer.bench.records import FACTORS
from roseinfer.bench.report import METRIC_NAMES
from roseinfer.bench.shift import ratio_ticks

REJECTED: Final = "rejected"
"""The measure of refusals, in per cent of the offered; the others are "ttft" and "queue_wait", in ms."""

REJECT_MARGIN_POINTS: Final = 2.0
"""In the band a share of refusals is within so many per cent of the offered."""

_MARKERS: Final = dict(zip(PERCENTILES, ("o", "s", "^"), strict=True))
_HOLLOW: Final[dict[str, Any]] = {
    "markersize": 5.5,
    "markerfacecolor": "none",
    "markeredgewidth": 1.2,
    "clip_on": False,
}
_BAND_ALPHA: Final = 0.15
_PANEL_IN: Final = 3.4
_MOST_LABELS: Final = 6
"""More would run into each other below an axis."""


def prediction_figure_data(errors: pd.DataFrame) -> pd.DataFrame:
    """A row per cell and figure of a frame from `prediction.errors`: `measure`, `percent`, `measured`, `predicted`.

    `error` is predicted / measured - 1, of refusals the difference in per cent of the offered. No rows where no cell
    was both measured and predicted.
    """
    if errors.empty:
        return pd.DataFrame()
    cells = label_cells(errors)
    about = cells[["cell_id", "combination", "limit", *FACTORS]]
    parts = [
        about.assign(
            measure=metric,
            percent=percent,
            measured=cells[f"measured_{figure_name(metric, percent)}"],
            predicted=cells[f"predicted_{figure_name(metric, percent)}"],
            error=cells[f"error_{figure_name(metric, percent)}"],
        )
        for metric in METRICS
        for percent in PERCENTILES
    ]
    measured = 100 * cells["measured_rejected"] / cells["offered"]
    predicted = measured + 100 * cells["reject_difference"]
    parts.append(
        about.assign(
            measure=REJECTED,
            percent=np.nan,
            measured=measured,
            predicted=predicted,
            error=predicted - measured,
        )
    )
    return pd.concat(parts, ignore_index=True)


@matplotlib.rc_context(STYLE)
def draw_prediction(data: pd.DataFrame, caption: Caption, *, margin: float = 0.10) -> Figure:
    """TTFT, queue wait (where it was measured) and refusals: predicted over measured, against measured.

    The band holds what is within a factor of 1 + `margin`, of refusals within REJECT_MARGIN_POINTS.
    """
    limits = limits_of(data)
    styles = limit_styles(limits)
    has_errors = data[data["error"].notna()].groupby("measure")["error"].size()
    latencies = [metric for metric in METRICS if metric in has_errors] or [METRICS[0]]
    shown = _on_log_axes(data[data["measure"] != REJECTED])
    ratios = (shown["predicted"] / shown["measured"]).to_numpy(dtype=np.float64)
    reach = 1.08 * max([1 + margin, *ratios, *(1 / ratios)])
    figure = Figure(figsize=(_PANEL_IN * (len(latencies) + 1), _PANEL_IN))
    panels = figure.subplots(1, len(latencies) + 1, squeeze=False)[0]
    for axes, metric in zip(panels, latencies, strict=False):
        axes.set_title(METRIC_NAMES[metric])
        axes.set_xlabel(f"measured {METRIC_NAMES[metric]} (ms, log scale)")
        axes.set_ylabel("predicted / measured")
        axes.set(yscale="log", ylim=(1 / reach, reach))
        _set_ticks(axes.yaxis, ratio_ticks(reach), lambda value, _: f"{value:g}")
        axes.axhspan(1 / (1 + margin), 1 + margin, color=GREY, alpha=_BAND_ALPHA, linewidth=0)
        axes.axhline(1, color=GREY, linewidth=0.8)
        _draw_latency(axes, shown[shown["measure"] == metric], styles)
    _draw_refusals(panels[-1], data[data["measure"] == REJECTED], styles)
    marks: list[Artist] = [
        Line2D([], [], color=styles[limit][0], marker="o", linestyle="", label=limit_title(limit))
        for limit in limits
    ]
    marks += [
        Line2D([], [], color=GREY, marker=marker, linestyle="", markerfacecolor="white", label=f"p{percent}")
        for percent, marker in _MARKERS.items()
    ]
    band = f"within a factor of {1 + margin:g}"
    marks.append(Patch(color=GREY, alpha=_BAND_ALPHA, linewidth=0, label=band))
    dress(figure, "Predicted over measured", marks, caption, _facts(data))
    return figure


def _draw_latency(axes: Axes, rows: pd.DataFrame, styles: dict[str, tuple[str, str]]) -> None:
    if rows.empty:
        axes.set_xticks([])
        axes.text(0.5, 0.6, "too few completed", transform=axes.transAxes, ha="center", color=GREY)
        return
    ticks = log_ticks(float(rows["measured"].min()), float(rows["measured"].max()))
    is_crowded = len(ticks) > _MOST_LABELS
    axes.set(xscale="log", xlim=(ticks[0], ticks[-1]))
    _set_ticks(
        axes.xaxis,
        ticks,
        lambda value, _: "" if is_crowded and not np.log10(value).is_integer() else f"{value:,g}",
    )
    for percent, marker in _MARKERS.items():
        for limit, marks in rows[rows["percent"] == percent].groupby("limit", sort=False):
            y = marks["predicted"] / marks["measured"]
            axes.plot(marks["measured"], y, marker, color=styles[str(limit)][0], **_HOLLOW)


def _draw_refusals(axes: Axes, rows: pd.DataFrame, styles: dict[str, tuple[str, str]]) -> None:
    axes.set_title("refusals")
    axes.set_xlabel("measured refusals (% of offered)")
    axes.set_ylabel("predicted - measured (% of offered)")
    reach = 1.15 * max(2 * REJECT_MARGIN_POINTS, rows["error"].abs().max())
    axes.set(xlim=(-4, 104), xticks=range(0, 101, 20), ylim=(-reach, reach))
    axes.axhspan(-REJECT_MARGIN_POINTS, REJECT_MARGIN_POINTS, color=GREY, alpha=_BAND_ALPHA, linewidth=0)
    axes.axhline(0, color=GREY, linewidth=0.8)
    for limit, marks in rows.groupby("limit", sort=False):
        axes.plot(marks["measured"], marks["error"], "o", color=styles[str(limit)][0], **_HOLLOW)


def _set_ticks(axis: Axis, ticks: Sequence[float], text: Callable[[float, int | None], str]) -> None:
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(text))


def _on_log_axes(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["measured"] > 0) & (rows["predicted"] > 0)]


def _facts(data: pd.DataFrame) -> str:
    sizes = []
    for metric in METRICS:
        for percent in PERCENTILES:
            rows = data[(data["measure"] == metric) & (data["percent"] == percent)]
            size = median_size(rows["error"].to_numpy(dtype=np.float64))
            if size is not None:
                sizes.append(f"p{percent} {METRIC_NAMES[metric]} {100 * size:.1f} %")
    cells = data["cell_id"].nunique()
    many = "1 cell" if cells == 1 else f"{cells} cells"
    typical = f"Median over {many} of the size of the error: {', '.join(sizes)}. " if sizes else ""
    latencies = data[data["measure"] != REJECTED].dropna(subset=["measured", "predicted"])
    hidden = len(latencies) - len(_on_log_axes(latencies))
    left_out = f" Figures of 0 ms have no place here: {hidden} are left out." if hidden else ""
    return (
        f"{typical}A mark is a cell and percentile over completed requests of all repeats pooled, by nearest rank,"
        " without warm-up; none where the sample is too small for it. TTFT: scheduled send to first token received."
        f" Band of refusals: {REJECT_MARGIN_POINTS:g} % of the offered.{left_out}"
    )
