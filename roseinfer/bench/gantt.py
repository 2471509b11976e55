"""A burst as a Gantt chart: what every request of it was doing, and when."""

from __future__ import annotations

from typing import Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from roseinfer.bench.figure_style import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    STYLE,
    VERMILLION,
    Caption,
    dress,
    label_cells,
    limit_title,
    limits_of,
    panel_grid,
    span_text,
)
from roseinfer.bench.records import Outcome

STAGES: Final = (
    ("tokenise", "reserved_ms", "tokenized_ms", GREEN),
    ("queue", "queued_ms", "first_scheduled_ms", SKY),
    ("prefill", "first_scheduled_ms", "first_token_ms", BLUE),
    ("decode", "first_token_ms", "last_token_ms", ORANGE),
)
"""(name, column where it starts, column where it ends, colour) of the bars."""

_MAX_ROWS: Final = 256
_PANEL_HEIGHT_IN: Final = 4.2
_STAMPS: Final = ("reserved tokenized queued first_scheduled first_token last_token rejected ended").split()


def gantt_data(requests: pd.DataFrame) -> pd.DataFrame:
    """The first burst (all requests, if they come one by one) of every cell's first repeat, in arrival order.

    Stamps in milliseconds since the burst's first scheduled send, null for a stage that was not reached;
    `queued_ms` is where the queue begins: tokenised, or reserved for a prompt that came as token ids.
    """
    first_repeat = requests["repeat"] == requests.groupby("cell_id")["repeat"].transform("min")
    later = (requests["arrival"] == "burst") & (requests["request_index"] >= requests["burst_size"])
    burst = label_cells(requests[first_repeat & ~later].sort_values("request_index"))
    burst = burst.assign(queued_s=burst["tokenized_s"].fillna(burst["reserved_s"]))
    start_s = burst.groupby("cell_id")["scheduled_s"].transform("min")
    stamps = {f"{name}_ms": 1000 * (burst[f"{name}_s"] - start_s) for name in _STAMPS}
    return burst[["combination", "limit", "repeat", "request_index", "outcome"]].assign(**stamps)


@matplotlib.rc_context(STYLE)
def draw_gantt(burst: pd.DataFrame, caption: Caption) -> Figure:
    """One burst per limit, side by side on one time axis; `burst` holds one combination of `gantt_data`."""
    limits = limits_of(burst)
    combination = str(burst["combination"].iloc[0])
    figure, panels = panel_grid(len(limits), 1, width_in=4.2, height_in=_PANEL_HEIGHT_IN)
    end_ms = float(burst[[f"{name}_ms" for name in _STAMPS]].max().max())
    end_ms = end_ms if end_ms > 0 else 1.0
    for (axes,), limit in zip(panels, limits, strict=True):
        rows = burst[burst["limit"] == limit].reset_index(drop=True)
        step = -(-len(rows) // _MAX_ROWS)
        _draw_burst(
            axes, rows[rows.index % step == 0], step, row_points=72 * _PANEL_HEIGHT_IN * step / len(rows)
        )
        axes.set_title(_title(limit, rows["outcome"], step))
        axes.set_xlim(-0.02 * end_ms, 1.02 * end_ms)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("time since the burst began (ms)")
        axes.set_ylabel("request, in order of arrival")
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    marks: list[Artist] = [Patch(color=colour, label=name) for name, _, _, colour in STAGES]
    marks.append(_mark([], [], VERMILLION, "|", 7, label="rejected"))
    if not burst["outcome"].isin([Outcome.COMPLETED, Outcome.REJECTED]).all():
        marks.append(_mark([], [], BLACK, "x", 5, label="ended otherwise"))
    title = ", ".join(filter(None, ["One burst, request by request", combination]))
    facts = (
        f"Repeat {span_text(burst['repeat'])}, its first burst; n={span_text(burst.groupby('limit').size())}"
        " requests. Stamps of the engine; zero is the first scheduled send."
    )
    dress(figure, title, marks, caption, facts)
    return figure


def _draw_burst(axes: Axes, rows: pd.DataFrame, height: int, row_points: float) -> None:
    for name, start, end, colour in STAGES:
        bars = rows.dropna(subset=[start, end])
        left, right = bars[start].to_numpy(), bars[end].to_numpy()
        top = bars.index.to_numpy() - 0.5
        corners = [(left, top), (right, top), (right, top + height), (left, top + height)]
        outline = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
        axes.add_collection(
            PolyCollection(list(outline), facecolor=colour, linewidth=0, label=name), autolim=False
        )
    size = float(np.clip(row_points, 1.5, 7))
    refused = rows[rows["outcome"] == Outcome.REJECTED]
    axes.add_line(
        _mark(refused["rejected_ms"], refused.index + (height - 1) / 2, VERMILLION, "|", size, "rejected")
    )
    lost = rows[~rows["outcome"].isin([Outcome.COMPLETED, Outcome.REJECTED])]
    axes.add_line(
        _mark(lost["ended_ms"], lost.index + (height - 1) / 2, BLACK, "x", max(size, 3), "ended otherwise")
    )


def _mark(x: ArrayLike, y: ArrayLike, colour: str, marker: str, size: float, label: str) -> Line2D:
    return Line2D(
        x, y, color=colour, marker=marker, markersize=size, markeredgewidth=2, linestyle="", label=label
    )


def _title(limit: str, outcomes: pd.Series[str], step: int) -> str:
    counts = [
        f"{(outcomes == outcome).sum()} {outcome}" for outcome in Outcome if (outcomes == outcome).any()
    ]
    drawn = "" if step == 1 else f"\n(1 in {step} requests is drawn)"
    return f"{limit_title(limit)}: {', '.join(counts)}{drawn}"
