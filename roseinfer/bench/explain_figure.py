"""p99 TTFT explained, as bars: what it is made of, and whose work the queue waited for."""

from __future__ import annotations

from typing import Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from roseinfer.bench.explain import PARTS, WAITED_FOR, explain
from roseinfer.bench.figure_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    VERMILLION,
    Caption,
    dress,
    number_text,
    panel_grid,
    share_text,
    span_text,
)
from roseinfer.bench.labels import label_cells, limits_of
from roseinfer.bench.stats import percentile_label

_PART_COLOURS: Final = dict(
    zip(PARTS, (GREY, BLACK, VERMILLION, ORANGE, GREEN, SKY, BLUE, PURPLE), strict=True)
)
"""As in the Gantt chart, where both have a stage."""
_WAIT_COLOURS: Final = dict(zip(WAITED_FOR, (BLUE, PURPLE, ORANGE, "#cccccc"), strict=True))
_NAMED: Final = 0.06
"""The share from which a bar has room for its number."""


def explain_figure_data(requests: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """`explain`, a row per cell, with the columns `combination` and `limit`."""
    return label_cells(explain(requests, steps)).reset_index(drop=True)


@matplotlib.rc_context(STYLE)
def draw_explain(explained: pd.DataFrame, caption: Caption) -> Figure:
    """A bar a limit: above the shares of the parts in TTFT around the p99, below those of the time in the queue."""
    limits = limits_of(explained)
    groups = list(explained.groupby("combination", sort=False))
    figure, panels = panel_grid(len(groups), 2, width_in=6.6, height_in=1.1 + 0.3 * len(limits))
    for (parts, waits), (combination, cells) in zip(panels, groups, strict=True):
        parts.set_title(
            "\n".join(filter(None, [str(combination), "TTFT of the requests around the p99 rank"]))
        )
        waits.set_title("What happened while they waited in the queue")
        names = {part: part.replace("_", " ") for part in PARTS}
        _draw_bars(parts, cells, limits, names, _PART_COLOURS)
        _draw_bars(waits, cells, limits, WAITED_FOR, _WAIT_COLOURS)
        _annotate(parts, [_p99_text(cell) for _, cell in _in_order(cells, limits)])
        _annotate(waits, [_wait_text(cell) for _, cell in _in_order(cells, limits)])
    facts = (
        f"Means over the requests around the pooled p99 rank (n={span_text(explained['explained'])} of"
        f" {span_text(explained['n'])} completed). Time in the queue: tokenised (or slot taken) until first given to"
        " the engine. Earlier and later: order of arrival. TTFT: scheduled send to first token received."
    )
    dress(figure, "Where the p99 of TTFT comes from", [], caption, facts)
    return figure


def _in_order(cells: pd.DataFrame, limits: list[str]) -> list[tuple[str, pd.Series[float] | None]]:
    rows = {str(row["limit"]): row for _, row in cells.iterrows()}
    return [(limit, rows.get(limit)) for limit in limits]


def _draw_bars(
    axes: Axes, cells: pd.DataFrame, limits: list[str], names: dict[str, str], colours: dict[str, str]
) -> None:
    columns = [f"{name}_share" for name in names]
    shares = cells.set_index("limit")[columns].reindex(limits).astype("float64")
    left = np.zeros(len(limits))
    for name, column in zip(names, columns, strict=True):
        width = shares[column].to_numpy()
        if not np.nansum(width) > 0:
            continue
        axes.barh(
            range(len(limits)),
            width,
            left=left,
            height=0.7,
            color=colours[name],
            linewidth=0,
            label=names[name],
        )
        for y, (start, share) in enumerate(zip(left, width, strict=True)):
            if share >= _NAMED:
                dark = colours[name] in (BLUE, BLACK, GREEN, GREY, VERMILLION)
                ink = "white" if dark else "black"
                axes.text(
                    start + share / 2, y, share_text(share), ha="center", va="center", color=ink, fontsize=7
                )
        left = left + np.nan_to_num(width)
    for y in map(int, np.flatnonzero(shares.isna().all(axis=1))):
        cell = cells[cells["limit"] == limits[y]]
        why = "not run" if cell.empty else "not measured" if cell["n"].iloc[0] else "none completed"
        axes.text(0.01, y, why, va="center", color=GREY)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(limits) - 0.5, -0.5)
    axes.set_yticks(range(len(limits)), limits)
    axes.set_ylabel("admission limit")
    axes.set_xticks(np.linspace(0, 1, 6), [f"{percent} %" for percent in range(0, 101, 20)])
    axes.yaxis.grid(False)
    axes.tick_params(axis="y", length=0)
    if axes.patches:
        axes.legend(
            loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2 if len(names) == 4 else 4, fontsize=7
        )


def _annotate(axes: Axes, texts: list[str]) -> None:
    for y, text in enumerate(texts):
        axes.annotate(text, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=7)


def _p99_text(cell: pd.Series[float] | None) -> str:
    if cell is None or not cell["n"]:
        return ""
    return f"{percentile_label(99, int(cell['n']))}: {number_text(cell['p99_ttft_ms'])} ms"


def _wait_text(cell: pd.Series[float] | None) -> str:
    if cell is None or pd.isna(cell["steps_waited"]):
        return ""
    counts = {"step": cell["steps_waited"], "other request": cell["requests_waited"]}
    steps, others = [
        f"{count:.0f} {what}{'' if round(count) == 1 else 's'}" for what, count in counts.items()
    ]
    return f"{number_text(cell['wait_ms'])} ms: {steps},\n{others}"
