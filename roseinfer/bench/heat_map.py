"""A heat map of the limit against one swept factor: the tail, and beside it the refusals that it costs."""

from __future__ import annotations

from typing import Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from roseinfer.bench.figure_style import (
    P99_SMALLEST,
    P99_TRUSTED,
    STYLE,
    Caption,
    dress,
    log_ticks,
    number_text,
    repeats_text,
    share_text,
)
from roseinfer.bench.labels import factor_text, label_cells, limits_of
from roseinfer.bench.records import FACTORS

_HATCH: Final = "////"
_HATCH_COLOUR: Final = "#888888"
_FACTOR_LABEL: Final = {
    "burst_size": "burst size (requests)",
    "prompt_len": "prompt length (tokens)",
    "output_len": "output length (tokens)",
    "request_rate": "offered load (requests/s)",
}


def heat_map_data(summary: pd.DataFrame) -> pd.DataFrame:
    """A row per cell, pooled over repeats; no rows unless a factor besides the limit has several values.

    `factor` names the first such factor (the columns of the map), `value` is its value in the cell, and
    `combination` tells the maps apart where further factors vary. `p99_ttft_ms` is null if nothing completed.
    """
    swept = [factor for factor in FACTORS[1:] if summary[factor].nunique() > 1]
    if not swept:
        return pd.DataFrame()
    factor, *others = swept
    pooled = label_cells(summary[summary["repeat"].isna()].dropna(subset=factor).sort_values(factor), others)
    cells = pooled.assign(
        factor=factor,
        value=pooled[factor],
        p99_ttft_ms=pooled["p99_ttft_ms"].where(pooled["completed"] > 0),
    )
    return cells[
        [
            "combination",
            "factor",
            "value",
            "limit",
            "repeats",
            "valid",
            "completed",
            "n_ttft",
            "p99_ttft_ms",
            "reject_rate",
        ]
    ]


@matplotlib.rc_context({**STYLE, "axes.grid": False, "hatch.linewidth": 0.6})
def draw_heat_map(cells: pd.DataFrame, caption: Caption) -> Figure:
    """p99 TTFT (logarithmic colour) and reject rate, numbers in the cells; few samples are hatched."""
    limits, values = limits_of(cells), sorted(cells["value"].unique())
    maps = list(cells.groupby("combination", sort=False))
    size = 2 * max(4.6, 1.7 + 0.9 * len(values)), len(maps) * (0.9 + 0.55 * len(limits))
    figure = Figure(figsize=size)
    grid = figure.subplots(len(maps), 2, squeeze=False)
    p99_norm, p99_ticks = _colour_scale(cells["p99_ttft_ms"].dropna())
    p99_colours = ScalarMappable(p99_norm, "viridis")
    reject_colours = ScalarMappable(Normalize(0, 1), "cividis")
    for (p99_axes, reject_axes), (combination, group) in zip(grid, maps, strict=True):
        for axes, what in ((p99_axes, "p99 TTFT (ms)"), (reject_axes, "reject rate")):
            _frame(axes, limits, values, _FACTOR_LABEL[cells["factor"].iloc[0]])
            axes.set_title(f"{what}\n{combination}".strip())
        for _, cell in group.iterrows():
            x, y, n = values.index(cell["value"]), limits.index(cell["limit"]), int(cell["n_ttft"])
            text = _p99_text(cell["p99_ttft_ms"], n) + ("" if cell["valid"] else "\nINVALID")
            _draw_cell(p99_axes, x, y, p99_colours, cell["p99_ttft_ms"], text, hatched=n < P99_TRUSTED)
            reject_rate = cell["reject_rate"]
            _draw_cell(reject_axes, x, y, reject_colours, reject_rate, share_text(reject_rate), hatched=False)
    bar = figure.colorbar(p99_colours, ax=grid[:, 0], ticks=p99_ticks, label="p99 TTFT (ms)")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    bar.ax.minorticks_off()
    bar = figure.colorbar(reject_colours, ax=grid[:, 1], label="reject rate")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: share_text(share)))
    marks = []
    if (cells["n_ttft"] < P99_TRUSTED).any():
        label = f"n < {P99_TRUSTED}: the true p99 may well lie above every sample"
        marks = [Patch(facecolor="white", edgecolor=_HATCH_COLOUR, hatch=_HATCH, linewidth=0, label=label)]
    facts = (
        f"p99 by nearest rank over n completed requests, {repeats_text(cells['repeats'].max())} pooled; where n < 100"
        " it is the maximum, and named so. TTFT: scheduled send to first token received. Reject rate: share of the"
        " offered requests."
    )
    dress(figure, "Tail latency, and its price in refusals", marks, caption, facts)
    return figure


def _colour_scale(known: pd.Series[float]) -> tuple[Normalize, list[float] | None]:
    if known.empty or known.min() <= 0:  # a simulated clock may find no time at all
        return Normalize(0, known.max() if not known.empty and known.max() > 0 else 1), None
    ticks = log_ticks(known.min(), known.max())
    return LogNorm(ticks[0], ticks[-1]), ticks


def _frame(axes: Axes, limits: list[str], values: list[float], label: str) -> None:
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_ylim(-0.5, len(limits) - 0.5)
    axes.set_xticks(range(len(values)), [factor_text(value) for value in values])
    axes.set_yticks(range(len(limits)), limits)
    axes.tick_params(length=0)
    axes.set_xlabel(label)
    axes.set_ylabel("admission limit\n(max requests in flight)")


def _p99_text(p99_ttft_ms: float, n: int) -> str:
    if np.isnan(p99_ttft_ms):
        return "none\ncompleted"
    return f"{'max ' if n < P99_SMALLEST else ''}{number_text(p99_ttft_ms)}\n(n={n})"


def _draw_cell(
    axes: Axes, x: int, y: int, colours: ScalarMappable, value: float, text: str, *, hatched: bool
) -> None:
    colour = (1.0, 1.0, 1.0, 1.0) if np.isnan(value) else colours.to_rgba(np.asarray(value))
    corner = (x - 0.5, y - 0.5)
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
    if hatched:
        axes.add_patch(
            Rectangle(corner, 1, 1, fill=False, edgecolor=_HATCH_COLOUR, hatch=_HATCH, linewidth=0)
        )
    dark = float(np.dot(colour[:3], (0.299, 0.587, 0.114))) < 0.5
    ground = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}  # keeps the hatching off the number
    axes.text(x, y, text, ha="center", va="center", color="white" if dark else "black", bbox=ground)
