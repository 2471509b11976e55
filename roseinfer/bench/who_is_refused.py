"""Who is refused: the share that each policy turned away, by length of the prompt and by place in the burst."""

from __future__ import annotations

from typing import Any, Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from roseinfer.admission_spec import parse_admission
from roseinfer.bench.figure_style import STYLE, Caption, dress, limit_styles, span_text
from roseinfer.bench.labels import label_cells, limit_title, limits_of
from roseinfer.bench.records import FACTORS

LENGTH, PLACE = "prompt length", "place in burst"
_TITLES: Final = {LENGTH: "By length of the prompt", PLACE: "By place in the burst"}
_FIFTHS: Final = 5
_KEYS: Final = ("repeat", *FACTORS[1:], "request_index")
WORKLOAD_COLUMNS: Final = (*_KEYS, "prompt_tokens")
"""What it needs of a workload."""

_PANEL_IN: Final = (4.4, 3.0)


def who_is_refused_data(requests: pd.DataFrame, workload: pd.DataFrame | None) -> pd.DataFrame:
    """A row per limit that refused anybody, `axis` (LENGTH, PLACE) and fifth of the offered requests along it.

    `low` and `high` are the least and the largest of the fifth: tokens of the prompt as it was asked for in
    `workload` (None: not known, since nobody counts the prompts of refused requests), or places in the burst, from 1.
    `refused` counts what was dropped from the queue too, its timeouts included; `share` is of `offered`.

    No rows where it would show nothing: nobody was refused, or only by a count of requests that were all alike.
    """
    refusing = requests[requests["rejected_s"].notna()]["cell_id"].unique()
    rows = label_cells(requests)
    rows = rows[rows["cell_id"].isin(refusing)]
    if rows.empty:
        return pd.DataFrame(columns=["combination"])
    rows = rows.assign(refused=rows["rejected_s"].notna())
    lengths = None if workload is None else _lengths(rows, workload)
    has_lengths = lengths is not None and np.unique(lengths[~np.isnan(lengths)]).size > 1
    if not has_lengths and all(parse_admission(one).is_count_alone for one in rows["admission"].unique()):
        return pd.DataFrame(columns=["combination"])
    parts = []
    for combination, group in rows.assign(length=lengths).groupby("combination", sort=False):
        if has_lengths:
            parts += _shares(str(combination), group, LENGTH, group["length"].to_numpy(np.float64))
        places, fifths = _places(group)
        parts += _shares(str(combination), group, PLACE, places, fifths)
    return pd.DataFrame(parts, columns=_COLUMNS)


_COLUMNS: Final = ("combination", "limit", "axis", "fifth", "low", "high", "offered", "refused", "share")


def _lengths(rows: pd.DataFrame, workload: pd.DataFrame) -> NDArray[np.float64]:
    """Tokens of the prompt that each row asked for."""
    asked = workload[[*WORKLOAD_COLUMNS]].astype(np.float64)
    found = rows[list(_KEYS)].astype(np.float64).merge(asked, on=list(_KEYS), how="left")
    lengths: NDArray[np.float64] = found["prompt_tokens"].to_numpy()
    return lengths


def _places(group: pd.DataFrame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The place of each request among those due with it, from 1, and its fifth; NaN where they are under five."""
    due = group.groupby(["cell_id", "repeat", "scheduled_s"], sort=False)["request_index"]
    size = due.transform("size").to_numpy(np.float64)
    place = due.rank(method="first").to_numpy(np.float64)
    is_burst = (size >= _FIFTHS) & group["burst_size"].notna().to_numpy()
    fifth = np.floor((place - 1) * _FIFTHS / size)
    return np.where(is_burst, place, np.nan), np.where(is_burst, fifth, np.nan)


def _shares(
    combination: str,
    group: pd.DataFrame,
    axis: str,
    values: NDArray[np.float64],
    fifths: NDArray[np.float64] | None = None,
) -> list[tuple[Any, ...]]:
    known = ~np.isnan(values)
    if np.unique(values[known]).size < 2:
        return []
    if fifths is None:
        inner = np.quantile(values[known], np.arange(1, _FIFTHS) / _FIFTHS)
        fifths = np.searchsorted(np.unique(inner), values, side="left").astype(np.float64)
    frame = group.assign(value=values, fifth=fifths)[known]
    bounds = frame.groupby("fifth")["value"].agg(["min", "max"])  # of all limits: they had the same requests
    counts = frame.groupby(["limit", "fifth"], sort=False)["refused"].agg(["size", "sum"])
    return [
        (
            combination,
            limit,
            axis,
            int(fifth) + 1,
            *bounds.loc[fifth],
            int(size),
            int(refused),
            refused / size,
        )
        for (limit, fifth), size, refused in sorted(counts.itertuples(name=None))
    ]


@matplotlib.rc_context(STYLE)
def draw_who_is_refused(data: pd.DataFrame, caption: Caption) -> Figure:
    """A panel per axis, a line per limit; `data` holds one combination."""
    axes_of = [axis for axis in _TITLES if (data["axis"] == axis).any()]
    limits = limits_of(data)
    styles = limit_styles(limits)
    width_in, height_in = _PANEL_IN
    figure = Figure(figsize=(max(6.5, width_in * len(axes_of)), height_in))
    for panel, axis in zip(figure.subplots(1, len(axes_of), squeeze=False)[0], axes_of, strict=True):
        _draw_panel(panel, data[data["axis"] == axis], limits, styles)
        panel.set_title(_TITLES[axis], loc="left")
        panel.set_xlabel("tokens of the prompt" if axis == LENGTH else "place in the burst")
    marks: list[Artist] = [
        Line2D([], [], color=styles[limit][0], marker=styles[limit][1], label=limit_title(limit))
        for limit in limits
    ]
    title = ", ".join(filter(None, ["Who is refused", str(data["combination"].iloc[0])]))
    facts = (
        "Refused: turned away, or dropped from the queue, its timeouts included. A mark is a fifth of the offered"
        f" requests along the axis, over all repeats (n={span_text(data['offered'])}). Limits that refused nobody are"
        " left out."
    )
    dress(figure, title, marks, caption, facts)
    return figure


def _draw_panel(
    panel: Axes, rows: pd.DataFrame, limits: list[str], styles: dict[str, tuple[str, str]]
) -> None:
    for limit in limits:
        line = rows[rows["limit"] == limit].sort_values("fifth")
        colour, marker = styles[limit]
        panel.plot(line["fifth"], 100 * line["share"], color=colour, marker=marker, markersize=5, label=limit)
    fifths = rows.drop_duplicates("fifth").sort_values("fifth")
    panel.set_xticks(
        fifths["fifth"], [_range(*one) for one in zip(fifths["low"], fifths["high"], strict=True)]
    )
    panel.set_ylim(-4, 104)
    panel.set_ylabel("refused (% of offered)")


def _range(low: float, high: float) -> str:
    return f"{low:.0f}" if low == high else f"{low:.0f}–{high:.0f}"
