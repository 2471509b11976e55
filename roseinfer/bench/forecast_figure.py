"""What admission predicted against what came of it: the TTFT of every request that it let in with a forecast."""

from __future__ import annotations

from typing import Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from roseinfer.bench.figure_style import (
    BLACK,
    BLUE,
    GREY,
    STYLE,
    Caption,
    dress,
    panel_grid,
    span_text,
)
from roseinfer.bench.labels import label_cells, limit_title, limits_of
from roseinfer.bench.records import Outcome
from roseinfer.bench.stats import percentiles

_MOST_POINTS: Final = 1500
_BINS: Final = 10
_FEWEST_A_BIN: Final = 10
_QUANTILES: Final = (10, 50, 90)


def forecast_figure_data(requests: pd.DataFrame) -> pd.DataFrame:
    """A row per completed request with a forecast, of more than 1500 a limit every so many-th in order of forecast.

    Both in ms from its reservation to its first token, as the engine stamped it. `n`, `median_error` (of predicted /
    actual - 1) and `median_size` (of its size) are of all requests of the limit.
    """
    rows = requests[requests["predicted_ttft_s"].notna() & (requests["outcome"] == Outcome.COMPLETED)]
    if rows.empty:
        return pd.DataFrame(columns=["combination"])
    labelled = label_cells(rows)
    parts = []
    for (combination, limit), cell in labelled.groupby(["combination", "limit"], sort=False):
        points = pd.DataFrame(
            {
                "combination": combination,
                "limit": limit,
                "repeat": cell["repeat"],
                "request_index": cell["request_index"],
                "predicted_ms": 1e3 * cell["predicted_ttft_s"],
                "actual_ms": 1e3 * (cell["first_token_s"] - cell["reserved_s"]),
            }
        )
        error = points["predicted_ms"] / points["actual_ms"] - 1
        points = points.assign(n=len(points), median_error=error.median(), median_size=error.abs().median())
        parts.append(_thinned(points.sort_values(["predicted_ms", "repeat", "request_index"])))
    return pd.concat(parts, ignore_index=True)


def _thinned(points: pd.DataFrame) -> pd.DataFrame:
    if len(points) <= _MOST_POINTS:
        return points
    return points.iloc[np.linspace(0, len(points) - 1, _MOST_POINTS).round().astype(int)]


@matplotlib.rc_context(STYLE)
def draw_forecast(data: pd.DataFrame, caption: Caption) -> Figure:
    """A panel per limit: actual over predicted, and its quantiles; `data` holds one combination."""
    limits = limits_of(data)
    figure, panels = panel_grid(len(limits), 1, width_in=3.6, height_in=3.0)
    for (axes,), limit in zip(panels, limits, strict=True):
        rows = data[data["limit"] == limit]
        _draw_panel(axes, rows)
        first = rows.iloc[0]
        axes.set_title(
            f"{limit_title(limit)}\nmedian error {round(100 * first['median_error']):+d} %,"
            f" {100 * first['median_size']:.0f} % in size",
            loc="left",
        )
    marks: list[Artist] = [
        Line2D([], [], color=BLUE, marker=".", linestyle="", alpha=0.4, label="a request"),
        Line2D([], [], color=BLACK, label="p50"),
        Line2D([], [], color=BLACK, linestyle=":", label="p10 and p90"),
        Line2D([], [], color=GREY, linestyle="--", label="as predicted"),
    ]
    title = ", ".join(filter(None, ["TTFT as admission predicted it", str(data["combination"].iloc[0])]))
    facts = (
        f"Completed requests of all repeats (n={span_text(data['n'])}), from slot taken to first token, by the engine's"
        f" stamps. Quantiles within up to {_BINS} equal parts by what was predicted. Error: predicted / actual - 1."
    )
    dress(figure, title, marks, caption, facts)
    return figure


def _draw_panel(axes: Axes, rows: pd.DataFrame) -> None:
    most = 1.05 * float(rows[["predicted_ms", "actual_ms"]].to_numpy().max())
    predicted, actual = rows["predicted_ms"].to_numpy(), rows["actual_ms"].to_numpy()
    axes.plot([0, most], [0, most], color=GREY, linestyle="--", linewidth=1)
    axes.plot(predicted, actual, ".", color=BLUE, alpha=0.3, markersize=4, label="requests")
    centres, bands = _bands(predicted, actual)
    for percent, band in zip(_QUANTILES, bands.T, strict=True):
        style = "-" if percent == 50 else ":"
        axes.plot(centres, band, color=BLACK, linestyle=style, linewidth=1.2, label=f"p{percent}")
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="predicted TTFT (ms)", ylabel="actual TTFT (ms)")


def _bands(
    predicted: NDArray[np.float64], actual: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean of the predicted in each part, and quantiles of the actual: float64[parts], float64[parts, 3].

    `predicted` is in order.
    """
    parts = np.array_split(np.arange(predicted.size), max(1, min(_BINS, predicted.size // _FEWEST_A_BIN)))
    return (
        np.array([predicted[part].mean() for part in parts]),
        np.array([percentiles(actual[part], _QUANTILES) for part in parts]),
    )
