"""The figures of a run: what an admission limit does to the tail, and what it costs in refusals.

Each figure comes in two steps, a tidy frame (`*_data`, written as CSV) and its drawing (`draw_*`), so that the
CSV holds what is seen. Nothing here uses pyplot: no display is needed, and no figure outlives its file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from roseinfer.bench.figure_style import (
    STYLE,
    Caption,
    dress,
    label_cells,
    limit_styles,
    limits_of,
    p99_text,
    panel_grid,
    save,
    scale_values,
    share_text,
    span_text,
)
from roseinfer.bench.gantt import draw_gantt, gantt_data
from roseinfer.bench.heat_map import draw_heat_map, heat_map_data
from roseinfer.bench.records import FACTORS, Outcome, derive
from roseinfer.bench.stats import percentile
from roseinfer.errors import RunError

_GREY: Final = "#777777"
_NINES_PERCENT: Final = (0, 50, 90, 99, 99.9, 99.99, 99.999)
_NINES_POINTS: Final = 2000


def draw_all(requests: pd.DataFrame, summary: pd.DataFrame, caption: Caption, folder: Path) -> list[Path]:
    """Draw every figure that the run can carry into `folder`: a PNG, an SVG and the CSV behind them.

    `requests` holds rows of REQUEST_SCHEMA, `summary` one row per cell and repeat and a pooled one per cell
    (`repeat` null). Returns the files in the order of writing. Raises RunError if `folder` cannot be written.
    """
    points = points_data(summary)
    bursts = [burst for _, burst in gantt_data(requests).groupby("combination", sort=False)]
    heat = heat_map_data(summary)
    figures: list[tuple[str, pd.DataFrame, Callable[[pd.DataFrame, Caption], Figure]]] = [
        ("p99_vs_limit", points, draw_p99),
        ("ttft_nines", nines_data(requests), draw_nines),
        ("throughput_vs_limit", points, draw_throughput),
        *[
            ("burst_gantt" if len(bursts) == 1 else f"burst_gantt_{number}", burst, draw_gantt)
            for number, burst in enumerate(bursts, start=1)
        ],
    ]
    if not heat.empty:
        figures.append(("p99_heat_map", heat, draw_heat_map))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files: list[Path] = []
        for name, data, draw in figures:
            files += save(draw(data, caption), folder, name)
            files.append(folder / f"{name}.csv")
            data.to_csv(files[-1], index=False, float_format="%.9g", lineterminator="\n")
    except OSError as error:
        raise RunError(f"figures could not be written to {folder.name!r}: {error.strerror}") from error
    return files


def points_data(summary: pd.DataFrame) -> pd.DataFrame:
    """Behind `draw_p99` and `draw_throughput`: the rows of `summary`, null where nothing was completed."""
    measured = [
        *("p99_ttft_ms", "p99_ttft_ms_lo", "p99_ttft_ms_hi"),
        *("p99_queue_wait_ms", "p99_queue_wait_ms_lo", "p99_queue_wait_ms_hi"),
        "output_throughput",
    ]
    counted = ["offered", "completed", "rejected", "reject_rate", "n_ttft"]
    cells = ["combination", "limit", *FACTORS[1:], "repeat"]
    points = label_cells(summary).reindex(columns=[*cells, *counted, *measured])
    served = points["completed"] > 0
    return points.assign(**{column: points[column].astype("float64").where(served) for column in measured})


@dataclass(frozen=True)
class _Strip:
    """One row of panels: `column` of the points against the limit."""

    column: str
    label: str
    unit: str
    axis_includes: tuple[float, ...] = ()
    log: bool | None = None


def draw_p99(points: pd.DataFrame, caption: Caption) -> Figure:
    """p99 of TTFT and of queue wait against the limit: a dot a repeat, their median, the pooled figure."""
    strips = [_Strip("p99_ttft_ms", "p99 TTFT", "ms"), _Strip("p99_queue_wait_ms", "p99 queue wait", "ms")]
    # A remote server does not say how long a request was queued.
    drawn = [strip for strip in strips if points[strip.column].notna().any()] or strips[:1]
    facts = (
        "Percentiles by nearest rank over completed requests; where n < 100 the p99 is the maximum, and"
        " is named so. TTFT: scheduled send to first token received. Queue wait: stamps of the engine."
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
        f"n={span_text(offered)} requests offered in each of {points['repeat'].nunique()} repeats."
        " Throughput: output tokens over the time from first send to last token received."
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
    pooled = len(repeats) > 1 and f"{strips[0].column}_lo" in points
    figure, panels = panel_grid(len(groups), len(strips), width_in=1.0 + 1.15 * len(limits), height_in=2.0)
    for panel, (combination, cells) in zip(panels, groups, strict=True):
        panel[0].set_title(str(combination))
        for axes, strip in zip(panel, strips, strict=True):
            _draw_strip(axes, cells, strip.column, limits, repeats, pooled)
            values = points[[strip.column, *([f"{strip.column}_hi"] if pooled else [])]].to_numpy().ravel()
            scale_values(axes, [*values, *strip.axis_includes], strip.label, strip.unit, log=strip.log)
            axes.set_xticklabels([])
        panel[-1].set_xticklabels([_tick_text(cells, limit, strips, pooled) for limit in limits])
        panel[-1].set_xlabel("admission limit (max requests in flight)")
    marks = [Line2D([], [], color=_GREY, marker="o", linestyle="", alpha=0.7, label="one repeat")]
    if len(repeats) > 1:
        marks.append(Line2D([], [], color=_GREY, linewidth=2, label="median of the repeats"))
    if pooled:
        marks.append(_pooled_mark([], [], _GREY, label="repeats pooled, 95 % interval"))
    dress(figure, title, marks, caption, facts)
    return figure


def _draw_strip(
    axes: Axes, cells: pd.DataFrame, column: str, limits: list[str], repeats: list[int], pooled: bool
) -> None:
    styles = limit_styles(limits)
    spread = np.linspace(-0.2, 0.2, len(repeats)) if len(repeats) > 1 else [0.0]
    places = dict(zip(repeats, spread, strict=True))
    for x, limit in enumerate(limits):
        cell = cells[cells["limit"] == limit]
        colour, marker = styles[limit]
        runs = cell[cell["repeat"].notna()].dropna(subset=[column])
        if runs.empty:
            why = "not measured" if (cell["completed"] > 0).any() else "none completed"
            axes.text(
                x,
                0.5,
                why,
                transform=axes.get_xaxis_transform(),
                rotation=90,
                ha="center",
                va="center",
                color=_GREY,
            )
            continue
        # A reject rate of 0 or 100 % lies on the frame: it must not be cut in half.
        at = x + runs["repeat"].map(places)
        axes.plot(
            at, runs[column], marker, color=colour, markersize=5, alpha=0.75, markeredgewidth=0, clip_on=False
        )
        if len(repeats) > 1:
            axes.plot([x - 0.3, x + 0.3], [percentile(runs[column], 50)] * 2, color=colour, linewidth=2)
        if pooled:
            row = cell[cell["repeat"].isna()].iloc[0]
            bounds = row[[f"{column}_lo", f"{column}_hi"]].to_numpy(dtype=np.float64)
            if np.isfinite(bounds).all():
                axes.plot([x + 0.38] * 2, bounds, color=colour, linewidth=1)
            axes.add_line(_pooled_mark([x + 0.38], [row[column]], colour))
    axes.set_xlim(-0.6, len(limits) - 0.4)
    axes.xaxis.set_major_locator(FixedLocator(range(len(limits))))
    axes.xaxis.grid(False)
    axes.tick_params(axis="x", length=0)


def _pooled_mark(x: list[float], y: list[float], colour: str, label: str = "") -> Line2D:
    return Line2D(
        x, y, color=colour, marker="d", markerfacecolor="white", markersize=6, linestyle="", label=label
    )


def _tick_text(cells: pd.DataFrame, limit: str, strips: list[_Strip], pooled: bool) -> str:
    """The limit and, under a percentile, what belongs beside it: the refusals, and n."""
    cell = cells[cells["limit"] == limit]
    if cell.empty or not strips[0].column.startswith("p99_"):
        return limit
    runs, whole = cell[cell["repeat"].notna()], cell[cell["repeat"].isna()].iloc[0]
    lines = [limit, f"{share_text(float(whole['reject_rate']))} rejected"]
    if whole["completed"] > 0:
        lines.append(
            f"{'repeat: ' if pooled else ''}{p99_text(int(runs['n_ttft'].min()), int(runs['n_ttft'].max()))}"
        )
        if pooled:
            lines.append(f"pooled: {p99_text(int(whole['n_ttft']), int(whole['n_ttft']))}")
    return "\n".join(lines)


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
        offered = {"offered": len(cell), "reject_rate": (cell["outcome"] == Outcome.REJECTED).mean()}
        frames.append(
            pd.DataFrame({"combination": combination, "limit": limit, "n": n, **offered, **columns})
        )
    return pd.concat(frames, ignore_index=True).reindex(
        columns=["combination", "limit", "n", "offered", "reject_rate", "rank", "q", "ttft_ms"]
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
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), title="admission limit")
    facts = (
        "n completed requests, all repeats pooled; nearest rank. A line ends at 1 - 1/n with the largest value: beyond"
        " it the sample says nothing. TTFT: scheduled send to first token received."
    )
    dress(figure, "TTFT by percentile", [], caption, facts)
    return figure
