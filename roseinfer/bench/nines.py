"""TTFT against its percentile, drawn so that the tail gets as much room as the middle."""

from __future__ import annotations

from typing import Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from roseinfer.bench.figure_style import (
    GREY,
    STYLE,
    Caption,
    dress,
    limit_styles,
    panel_grid,
    repeats_text,
    scale_values,
    share_text,
)
from roseinfer.bench.labels import label_cells, limits_of
from roseinfer.bench.records import Outcome, derive

_NINES_PERCENT: Final = (0, 50, 90, 99, 99.9, 99.99, 99.999)
_NINES_POINTS: Final = 2000


def nines_data(requests: pd.DataFrame) -> pd.DataFrame:
    """Behind `draw_nines`: per combination and limit the sorted TTFT of the completed, pooled over repeats.

    `ttft_ms` at `rank` i of n (from 1) is the nearest-rank quantile for q in ((i-1)/n, i/n]; `q` is (i-1)/n, so
    that the last row stands at 1 - 1/n. Of more than 2000 samples it holds those evenly spaced on the axis of nines.
    A cell without a completed request is one row with n = 0 and nulls.
    """
    labelled = label_cells(derive(requests))
    frames = []
    for (combination, limit), cell in labelled.groupby(["combination", "limit"], sort=False):
        served = cell[(cell["outcome"] == Outcome.COMPLETED) & cell["ttft_s"].notna()]
        ttft_ms = np.sort(1000 * served["ttft_s"].to_numpy(dtype=np.float64))
        n = len(ttft_ms)
        rank = np.arange(1, n + 1)
        if n > _NINES_POINTS:
            rank = np.unique(n + 1 - np.geomspace(1, n, _NINES_POINTS).round().astype(np.int64))
        columns = {"rank": rank, "q": (rank - 1) / n, "ttft_ms": ttft_ms[rank - 1]} if n else {"rank": [None]}
        offered = {
            "repeats": cell["repeat"].nunique(),
            "offered": len(cell),
            "reject_rate": (cell["outcome"] == Outcome.REJECTED).mean(),
        }
        frames.append(
            pd.DataFrame({"combination": combination, "limit": limit, "n": n, **offered, **columns})
        )
    return pd.concat(frames, ignore_index=True).reindex(
        columns=["combination", "limit", "n", "repeats", "offered", "reject_rate", "rank", "q", "ttft_ms"]
    )


@matplotlib.rc_context(STYLE)
def draw_nines(nines: pd.DataFrame, caption: Caption) -> Figure:
    """TTFT against its percentile on an axis of nines, a line per limit, which ends at 1 - 1/n."""
    limits = limits_of(nines)
    styles = limit_styles(limits)
    groups = list(nines.groupby("combination", sort=False))
    figure, panels = panel_grid(len(groups), 1, width_in=5.6, height_in=3.6 + 0.16 * len(limits))
    x_end = max(-np.log10(1 - nines["q"].max()), 0.4) if nines["q"].notna().any() else 2.0
    for (axes,), (combination, lines) in zip(panels, groups, strict=True):
        axes.set_title(str(combination))
        for limit in limits_of(lines):
            line = lines[lines["limit"] == limit]
            n, reject_rate = int(line["n"].iloc[0]), float(line["reject_rate"].iloc[0])
            colour, marker = styles[limit]
            axes.plot(
                -np.log10(1 - line["q"]),
                line["ttft_ms"],
                color=colour,
                marker=marker,
                markersize=6,
                markevery=[-1],
                drawstyle="steps-post",
                label=f"{limit}: {f'n={n}' if n else 'none completed'}, {share_text(reject_rate)} rejected",
            )
        ticks = [percent for percent in _NINES_PERCENT if -np.log10(1 - percent / 100) <= x_end + 1e-9]
        axes.set_xticks(
            [-np.log10(1 - percent / 100) for percent in ticks], [f"{percent:g}" for percent in ticks]
        )
        axes.set_xlim(-0.02 * x_end, 1.04 * x_end)
        axes.set_xlabel("percentile of the completed requests (%, axis of nines)")
        scale_values(axes, nines["ttft_ms"], "TTFT", "ms", log=True)
        if not lines["n"].any():
            axes.text(0.5, 0.5, "none completed", transform=axes.transAxes, ha="center", color=GREY)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), title="admission limit")
    facts = (
        f"n completed requests, {repeats_text(nines['repeats'].max())} pooled; nearest rank. A line ends at 1 - 1/n"
        " with the largest value: beyond it the sample says nothing. TTFT: scheduled send to first token received."
    )
    dress(figure, "TTFT by percentile", [], caption, facts)
    return figure
