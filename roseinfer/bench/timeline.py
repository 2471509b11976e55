"""A cell in time: how many requests were in flight and how many waited, when some were refused, and the limit."""

from __future__ import annotations

from typing import Any, Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from roseinfer.bench.figure_style import (
    BLACK,
    BLUE,
    ORANGE,
    STYLE,
    VERMILLION,
    Caption,
    dress,
    panel_grid,
    span_text,
)
from roseinfer.bench.labels import NO_LIMIT, label_cells, limit_title, limits_of
from roseinfer.bench.records import HTTP, Outcome

_MOST_POINTS: Final = 2000


def concurrency(starts: ArrayLike, ends: ArrayLike, at_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many of the spans [start, end) hold each instant of `at_s`; NaN starts never, and NaN ends never end.

    Counted from the spans themselves, not in bins of time: [0, 0.4) and [0.5, 0.9) are never two at once.
    """
    first, last = np.asarray(starts, np.float64), np.asarray(ends, np.float64)
    last = last[~np.isnan(first)]
    begun = np.searchsorted(np.sort(first[~np.isnan(first)]), at_s, side="right")
    ended = np.searchsorted(np.sort(last[~np.isnan(last)]), at_s, side="right")
    return begun - ended


def timeline_data(
    requests: pd.DataFrame, steps: pd.DataFrame | None = None, attempts: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Of every cell's first repeat a row per instant at which something changed, in seconds since time zero.

    `in_flight` requests hold a slot; `waiting` ones of them are tokenised (or came as token ids) and have not been
    given to the engine; `refused` counts the refusals up to then. `inflight_limit` is where a limit that moves stood at
    the last of `steps`, null where there is none. Of more than 2000 instants those are kept
    that hold the extremes of each stretch, so that no peak is lost. No rows of a server, which
    does not say when it gave slots.

    A request knows the slot of its last try only: where clients came back, the counts are those with which each of
    `steps` was planned (no rows without), and the refusals those of `attempts`.
    """
    if (requests["target"] == HTTP).all():
        return pd.DataFrame(columns=["combination"])
    first_repeat = requests["repeat"] == requests.groupby("cell_id")["repeat"].transform("min")
    labelled = label_cells(requests[first_repeat])
    frames = [pd.DataFrame(columns=["combination"])]
    for (combination, limit), cell in labelled.groupby(["combination", "limit"], sort=False):
        its_steps, its_tries = _of(cell, steps), _of(cell, attempts)
        moves = _moves(its_steps)
        comes_back = bool((cell["attempts"] > 1).any())
        if comes_back and its_steps.empty:
            continue
        refused_s = cell["rejected_s"].dropna()
        if not its_tries.empty:
            refused_s = its_tries.loc[its_tries["outcome"] == Outcome.REJECTED, "ended_s"]
        queued = cell["tokenized_s"].fillna(cell["reserved_s"])
        left_queue = cell["first_scheduled_s"].fillna(cell["released_s"])
        spans = [cell["reserved_s"], cell["released_s"], queued, left_queue]
        if comes_back:
            spans = [its_steps["plan_start_s"], its_steps["published_s"].tail(1)]
        changes = [*spans, refused_s, moves["plan_start_s"]]
        at_s = np.unique(np.concatenate([[0.0], *[times.dropna() for times in changes]]))
        if comes_back:
            waiting = _planned(its_steps, its_steps["waiting"], at_s)
            in_flight = waiting + _planned(its_steps, its_steps["running"], at_s)
        else:
            waiting = concurrency(queued, left_queue, at_s)
            in_flight = concurrency(cell["reserved_s"], cell["released_s"], at_s)
        rows = pd.DataFrame(
            {
                "combination": combination,
                "limit": limit,
                "max_inflight": cell["max_inflight"].iloc[0],
                "repeat": cell["repeat"].iloc[0],
                "time_s": at_s,
                "in_flight": in_flight,
                "waiting": waiting,
                "refused": np.searchsorted(np.sort(refused_s), at_s, side="right"),
                "inflight_limit": _standing(moves, at_s),
            }
        )
        frames.append(_thinned(rows))
    return pd.concat(frames[1:], ignore_index=True) if frames[1:] else frames[0]


def _of(cell: pd.DataFrame, rows: pd.DataFrame | None) -> pd.DataFrame:
    """The rows of the cell's repeat, in the order in which they happened."""
    if rows is None or rows.empty:
        return pd.DataFrame(columns=["plan_start_s", "inflight_limit"], dtype=np.float64)
    its: pd.DataFrame = rows[
        (rows["cell_id"] == cell["cell_id"].iloc[0]) & (rows["repeat"] == cell["repeat"].iloc[0])
    ]
    return its


def _planned(steps: pd.DataFrame, counts: pd.Series[int], at_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """What the last step was planned with, at each instant; 0 before the first and after the last."""
    known = np.concatenate([[0], counts.to_numpy(np.int64)])
    standing = known[np.searchsorted(steps["plan_start_s"].to_numpy(np.float64), at_s, side="right")]
    return np.where(at_s < steps["published_s"].iloc[-1], standing, 0)


def _moves(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps of one cell and repeat at which a limit that moves had moved, its first too."""
    known = steps.loc[steps["inflight_limit"].notna(), ["plan_start_s", "inflight_limit"]]
    known = known.astype(np.float64).sort_values("plan_start_s")
    moved: pd.DataFrame = known[known["inflight_limit"].diff() != 0]
    return moved


def _standing(moves: pd.DataFrame, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The limit at each instant: before the first step that of the first step, NaN without one."""
    if moves.empty:
        return np.full(at_s.size, np.nan)
    last = np.searchsorted(moves["plan_start_s"].to_numpy(), at_s, side="right") - 1
    stood: NDArray[np.float64] = moves["inflight_limit"].to_numpy()[np.maximum(last, 0)]
    return stood


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    if len(rows) <= _MOST_POINTS:
        return rows
    stretch = np.arange(len(rows)) * (_MOST_POINTS // 4) // len(rows)
    grouped = rows.groupby(stretch)
    kept = {0, len(rows) - 1}
    for column in ("in_flight", "waiting", "inflight_limit"):
        if rows[column].notna().all():
            kept |= {*grouped[column].idxmax(), *grouped[column].idxmin()}
    return rows.loc[sorted(kept)]


@matplotlib.rc_context(STYLE)
def draw_timeline(timeline: pd.DataFrame, caption: Caption) -> Figure:
    """A panel per limit, one under the other on one time axis; `timeline` holds one combination."""
    limits = limits_of(timeline)
    combination = str(timeline["combination"].iloc[0])
    figure, ((*panels,),) = panel_grid(1, len(limits), width_in=8.0, height_in=1.5)
    end_s = max(float(timeline["time_s"].max()), 1e-9)
    most = max(int(timeline["in_flight"].max()), 1)
    for axes, limit in zip(panels, limits, strict=True):
        rows = timeline[timeline["limit"] == limit]
        _draw_cell(axes, rows, end_s, most)
        axes.set_xlim(-0.01 * end_s, 1.01 * end_s)
        axes.set_ylim(0, 1.22 * most)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.set_ylabel("requests")
        axes.set_title(_title(limit, rows), loc="left")
        if axes is not panels[-1]:
            axes.tick_params(labelbottom=False)
    panels[-1].set_xlabel("time since the first request was due (s)")
    marks: list[Artist] = [
        Line2D([], [], color=BLUE, label="in flight"),
        Line2D([], [], color=ORANGE, label="of these waiting"),
        Line2D([], [], color=BLACK, linestyle="--", label="limit"),
        Line2D([], [], color=VERMILLION, marker="|", linestyle="", label="refused"),
    ]
    title = ", ".join(filter(None, ["In flight and waiting over time", combination]))
    facts = (
        f"Repeat {span_text(timeline['repeat'])}. In flight: slot taken to slot given back, counted at every change;"
        " waiting: in the queue (tokenised), not yet given to the engine. Where clients came back: as each step"
        " was planned, and every try that was refused."
    )
    dress(figure, title, marks, caption, facts)
    return figure


def _draw_cell(axes: Axes, rows: pd.DataFrame, end_s: float, most: int) -> None:
    axes.fill_between(rows["time_s"], rows["waiting"], step="post", color=ORANGE, alpha=0.35, linewidth=0)
    for column, colour in (("waiting", ORANGE), ("in_flight", BLUE)):
        axes.plot(
            rows["time_s"], rows[column], drawstyle="steps-post", color=colour, linewidth=1.2, label=column
        )
    dashed: dict[str, Any] = {"color": BLACK, "linestyle": "--", "linewidth": 1, "label": "limit"}
    limit = rows["max_inflight"].iloc[0]
    if rows["inflight_limit"].notna().any():
        axes.plot(rows["time_s"], rows["inflight_limit"], drawstyle="steps-post", **dashed)
    elif pd.notna(limit) and limit <= 1.2 * most:
        axes.plot([0, end_s], [limit] * 2, **dashed)
    refusals = rows.loc[rows["refused"].diff().fillna(rows["refused"]) > 0, "time_s"]
    axes.plot(
        refusals,
        np.full(len(refusals), 1.12 * most),
        color=VERMILLION,
        marker="|",
        markersize=7,
        linestyle="",
        label="refused",
    )


def _title(limit: str, rows: pd.DataFrame) -> str:
    parts = [f"at most {rows['in_flight'].max()} in flight", f"{rows['waiting'].max()} waiting"]
    if rows["inflight_limit"].notna().any():
        parts.insert(0, f"the limit at {span_text(rows['inflight_limit'])}")
    if limit != NO_LIMIT or rows["refused"].max():
        parts.append(f"{rows['refused'].max()} refused")
    return f"{limit_title(limit)}: {', '.join(parts)}"
