"""A burst (or a stretch of a load without one) as a Gantt chart: what every request was doing, and when."""

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
    panel_grid,
    span_text,
)
from roseinfer.bench.labels import label_cells, limit_title, limits_of
from roseinfer.bench.records import HTTP, Outcome

STAGES: Final = (
    ("tokenise", "reserved_ms", "tokenized_ms", GREEN),
    ("queue", "queued_ms", "first_scheduled_ms", SKY),
    ("prefill", "first_scheduled_ms", "first_token_ms", BLUE),
    ("decode", "first_token_ms", "last_token_ms", ORANGE),
)
"""(name, column where it starts, column where it ends, colour) of the bars."""

CLIENTS_STAGES: Final = (
    ("until the first text", "sent_ms", "received_first_ms", SKY),
    ("until the last", "received_first_ms", "received_last_ms", ORANGE),
)
"""The bars of a server's requests, of which only what their client saw is known."""

_MAX_ROWS: Final = 256
_PANEL_HEIGHT_IN: Final = 4.2
_STAMPS: Final = (
    "sent reserved tokenized queued first_scheduled first_token last_token received_first received_last rejected ended"
).split()


def gantt_data(requests: pd.DataFrame) -> pd.DataFrame:
    """The first burst of every cell's first repeat, in the order of arrival.

    Requests of a burst are due at the same instant, and nothing else is. Where there is no burst, the 256 requests
    in the middle of the repeat stand for it. Stamps in milliseconds since the request was due, null for a stage that
    was not reached; `queued_ms` is where the queue begins: tokenised, or reserved for token ids.
    """
    first_repeat = requests["repeat"] == requests.groupby("cell_id")["repeat"].transform("min")
    cells = requests[first_repeat].sort_values("request_index").groupby("cell_id", sort=False)
    drawn = label_cells(pd.concat([_first_burst(cell) for _, cell in cells]))
    drawn = drawn.assign(queued_s=drawn["tokenized_s"].fillna(drawn["reserved_s"]))
    stamps = {f"{name}_ms": 1000 * (drawn[f"{name}_s"] - drawn["scheduled_s"]) for name in _STAMPS}
    drawn = drawn.assign(is_remote=drawn["target"] == HTTP)
    columns = ["combination", "limit", "repeat", "is_burst", "is_remote", "request_index", "outcome"]
    return drawn[columns].assign(**stamps)


def _first_burst(cell: pd.DataFrame) -> pd.DataFrame:
    """Of one repeat's requests, in the order of arrival, those to draw."""
    due = cell["scheduled_s"].dropna()
    shared = due[due.duplicated(keep=False)]
    if len(shared) and cell["burst_size"].notna().any():
        burst: pd.DataFrame = cell[cell["scheduled_s"] == shared.min()]
        return burst.assign(is_burst=True)
    first = max(0, (len(cell) - _MAX_ROWS) // 2)
    return cell.iloc[first : first + _MAX_ROWS].assign(is_burst=False)


@matplotlib.rc_context(STYLE)
def draw_gantt(burst: pd.DataFrame, caption: Caption) -> Figure:
    """A burst per limit, side by side on one time axis; `burst` holds one combination of `gantt_data`."""
    is_burst, is_remote = bool(burst["is_burst"].iloc[0]), bool(burst["is_remote"].iloc[0])
    stages = CLIENTS_STAGES if is_remote else STAGES
    limits = limits_of(burst)
    combination = str(burst["combination"].iloc[0])
    figure, panels = panel_grid(len(limits), 1, width_in=4.2, height_in=_PANEL_HEIGHT_IN)
    end_ms = float(burst[[f"{name}_ms" for name in _STAMPS]].max().max())
    end_ms = end_ms if end_ms > 0 else 1.0
    for (axes,), limit in zip(panels, limits, strict=True):
        rows = burst[burst["limit"] == limit].reset_index(drop=True)
        step = -(-len(rows) // _MAX_ROWS)
        _draw_burst(
            axes,
            rows[rows.index % step == 0],
            stages,
            step,
            row_points=72 * _PANEL_HEIGHT_IN * step / len(rows),
        )
        axes.set_title(_title(limit, rows["outcome"], step))
        axes.set_xlim(-0.02 * end_ms, 1.02 * end_ms)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(f"time since {'the burst began' if is_burst else 'the request was due'} (ms)")
        axes.set_ylabel("request, in order of arrival")
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    marks: list[Artist] = [Patch(color=colour, label=name) for name, _, _, colour in stages]
    marks.append(_mark([], [], VERMILLION, "|", 7, label="rejected"))
    if not burst["outcome"].isin([Outcome.COMPLETED, Outcome.REJECTED]).all():
        marks.append(_mark([], [], BLACK, "x", 5, label="ended otherwise"))
    what = "One burst" if is_burst else "A stretch of the load"
    title = ", ".join(filter(None, [f"{what}, request by request", combination]))
    facts = (
        f"Repeat {span_text(burst['repeat'])}, {'its first burst' if is_burst else 'from its middle'};"
        f" n={span_text(burst.groupby('limit').size())} requests. Stamps of the"
        f" {'client' if is_remote else 'engine'}; zero is the scheduled send."
    )
    dress(figure, title, marks, caption, facts)
    return figure


def _draw_burst(
    axes: Axes,
    rows: pd.DataFrame,
    stages: tuple[tuple[str, str, str, str], ...],
    height: int,
    row_points: float,
) -> None:
    for name, start, end, colour in stages:
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
