"""What all figures share: the colour and marker of the limits, value axes, caption line and files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from roseinfer.bench.labels import NO_LIMIT
from roseinfer.bench.stats import smallest_sample, trusted_sample

P99_SMALLEST: Final = smallest_sample(99)
"""Below it the nearest-rank p99 is the maximum, and is called so."""
P99_TRUSTED: Final = trusted_sample(99)
"""From here on the maximum lies above the true p99 with 95 % confidence."""

STYLE: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a figure looks alike on every machine
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "roseinfer",  # without it the ids in an SVG are random
}

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    "#000000 #E69F00 #56B4E9 #009E73 #0072B2 #D55E00 #CC79A7".split()
)
"""Okabe and Ito's colours, less the yellow, which a white page swallows."""

GREY: Final = "#777777"

_PAGE_WIDTH_IN: Final = 14.0
_MIN_WIDTH_IN: Final = 6.5
_CAPTION_CHARS_PER_IN: Final = 19
_LEGEND_ROW_IN: Final = 0.16
_LEGEND_MARK_IN: Final = 0.5
_LEGEND_CHAR_IN: Final = 0.062
"""Room that a name in a legend needs: a row, a mark and what is around it, and a letter."""
_LIMIT_COLOURS: Final = (ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE)
_LIMIT_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "p")


@dataclass(frozen=True)
class Caption:
    """What the bottom line of every figure says about the run: the model, the machine (in words), the run."""

    model: str
    machine: str
    run_id: str


def limit_styles(limits: Sequence[str]) -> dict[str, tuple[str, str]]:
    """limit -> (colour, marker); "no limit" is black in every figure."""
    styles = {
        limit: (_LIMIT_COLOURS[i % len(_LIMIT_COLOURS)], _LIMIT_MARKERS[i % len(_LIMIT_MARKERS)])
        for i, limit in enumerate(limit for limit in limits if limit != NO_LIMIT)
    }
    return {**styles, NO_LIMIT: (BLACK, "X")}


def share_text(share: float) -> str:
    """A share of 1 in per cent; only a true 0 or 1 reads "0 %" or "100 %". NaN -> "n/a"."""
    if math.isnan(share):
        return "n/a"
    if 0 < share < 0.001:
        return "<0.1 %"
    if 0.999 < share < 1:
        return ">99.9 %"
    return f"{100 * share:.3g} %"


def p99_text(counts: pd.Series[Any]) -> str:
    """What to call nearest-rank p99s of that many samples each: "p99 (n=512)", or "max (n=60–64)"."""
    trusted = counts >= P99_SMALLEST
    name = "p99" if trusted.all() else "p99/max" if trusted.any() else "max"
    return f"{name} (n={span_text(counts)})"


def repeats_text(repeats: float) -> str:
    return "1 repeat" if repeats == 1 else f"{repeats:.0f} repeats"


def number_text(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def scale_values(axes: Axes, values: ArrayLike, label: str, unit: str, *, log: bool | None = None) -> None:
    """Give the y axis its scale, limits, ticks and label, all drawn from `values` (NaN is passed over).

    Panels given the same values get equal axes. Logarithmic if `log` (None: if the values span a factor of four
    or more); linear from zero otherwise, and where a value is not positive.
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if known.size == 0:
        axes.yaxis.set_major_locator(NullLocator())
        axes.set_ylabel(f"{label} ({unit})")
        return
    low, high = float(known.min()), float(known.max())
    if log is None:
        log = low > 0 and high / low >= 4
    if log and low > 0:
        ticks = log_ticks(low, high)
        axes.set_yscale("log")
        axes.set_ylim(ticks[0], ticks[-1])
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel(f"{label} ({unit}, log scale)")
    else:
        axes.set_ylim(min(0.0, 1.1 * low), 1.1 * high if high > 0 else 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.set_ylabel(f"{label} ({unit})")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks 1, 2, 5 of every decade (over long spans the decades alone) that enclose 0 < low <= high."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for mantissas in ((1, 2, 5), (1,)):
        grid = [float(f"{mantissa}e{decade}") for decade in decades for mantissa in mantissas]
        # Some air, so that no marker sits on the frame.
        first = max(i for i, tick in enumerate(grid) if tick <= low / 1.08)
        last = min(i for i, tick in enumerate(grid) if tick >= high * 1.15)
        if last - first < 12:
            break
    return grid[first : last + 1]


def dress(figure: Figure, title: str, marks: Sequence[Artist], caption: Caption, facts: str) -> None:
    """Title and legend (`marks`) above, and below a caption: `facts` about this figure, model, machine and run.

    The figure grows by what they need, so that the panels keep their size and nothing overlaps.
    """
    text = f"{facts}\nModel {caption.model} · {caption.machine} · run {caption.run_id}"
    width_chars = int(_CAPTION_CHARS_PER_IN * figure.get_figwidth())
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width_chars)]
    columns = _legend_columns([str(mark.get_label()) for mark in marks], figure.get_figwidth())
    legend_rows = -(-len(marks) // columns)
    head_in = 0.32 + (0.25 if marks else 0) + _LEGEND_ROW_IN * max(0, legend_rows - 1)
    foot_in = 0.1 + 0.13 * len(lines)
    height_in = figure.get_figheight() + head_in + foot_in
    figure.set_figheight(height_in)
    figure.set_layout_engine(
        "constrained", h_pad=0.08, rect=(0, foot_in / height_in, 1, 1 - (head_in + foot_in) / height_in)
    )
    left = 0.1 / figure.get_figwidth()
    figure.text(left, 1 - 0.08 / height_in, title, va="top", fontsize="x-large")
    if marks:
        corner = (left, 1 - 0.32 / height_in)
        figure.legend(
            handles=marks,
            loc="upper left",
            bbox_to_anchor=corner,
            ncols=columns,
            borderaxespad=0,
            borderpad=0,
        )
    figure.text(
        left,
        0.05 / height_in,
        printable("\n".join(lines)),
        va="bottom",
        fontsize=6.5,
        color="#444444",
        linespacing=1.35,
        parse_math=False,  # a "$" in a name would start a formula
    )


def _legend_columns(labels: Sequence[str], width_in: float) -> int:
    """As many as fit side by side, at least one."""
    widths_in = [_LEGEND_MARK_IN + _LEGEND_CHAR_IN * len(label) for label in labels]
    if sum(widths_in) <= width_in:
        return max(1, len(labels))
    return max(1, int(width_in / max(widths_in)))


def printable(text: str) -> str:
    """`text` with "?" for what the font cannot draw (a model's folder may have any name)."""
    glyphs = get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap()
    return "".join(char if char == "\n" or ord(char) in glyphs else "?" for char in text)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png (150 dpi) and `name`.svg; the same figure gives the same bytes."""
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    with matplotlib.rc_context(STYLE):
        figure.savefig(png, dpi=150)
        figure.set_layout_engine("none")  # it holds; working it out again takes as long as drawing
        figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def panel_grid(
    n_panels: int, rows: int, width_in: float, height_in: float
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `n_panels` small multiples, each of `rows` stacked axes, side by side as far as a page goes."""
    bands = -(-n_panels // max(1, int(_PAGE_WIDTH_IN // width_in)))
    columns = -(-n_panels // bands)
    size = max(_MIN_WIDTH_IN, columns * width_in), bands * (0.6 + rows * height_in)
    figure = Figure(figsize=size)
    grid = figure.subplots(bands * rows, columns, squeeze=False)
    panels = [
        [grid[band * rows + row, column] for row in range(rows)]
        for band in range(bands)
        for column in range(columns)
    ]
    for unused in panels[n_panels:]:
        for axes in unused:
            axes.remove()
    return figure, panels[:n_panels]


def span_text(counts: pd.Series[Any]) -> str:
    """ "128", or "120–128" where the counts differ."""
    least, most = int(counts.min()), int(counts.max())
    return f"{least}" if least == most else f"{least}–{most}"
