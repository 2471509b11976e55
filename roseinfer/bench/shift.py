"""Where a latency moved between two runs: the ratio of their quantiles against the quantile (a shift function)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from roseinfer.bench.figure_style import BLACK, BLUE, GREY, STYLE, Caption, dress, panel_grid, span_text
from roseinfer.bench.labels import label_cells, limit_title
from roseinfer.bench.records import FACTORS, Outcome, derive
from roseinfer.bench.stats import smallest_sample
from roseinfer.bench.steady_state import steady_rows

PERCENTS: Final = (10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.9)
"""Those of them are drawn that lie below the largest value of both samples."""

_LEVEL: Final = 0.95
_MOST_VALUES: Final = 20_000
"""Of a larger sample about so many order statistics stand for it in the band; the estimate itself uses all."""

_RATIO_TICKS: Final = (
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    0.67,
    0.8,
    0.9,
    0.95,
    0.98,
    1.0,
    1.02,
    1.05,
    1.1,
    1.25,
    1.5,
    2.0,
)
_NINES_TICKS: Final = (10, 50, 90, 99, 99.9)


def shift_data(
    a_requests: pd.DataFrame,
    b_requests: pd.DataFrame,
    *,
    paired: bool = False,
    draws: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Per cell that both runs have, a row per percentile of TTFT: `a_ms`, `b_ms`, and `ratio` = b / a with `lo`, `hi`.

    Frames of REQUEST_SCHEMA; cells match by their factors. Completed requests of all repeats are pooled, without the
    warm-up of an open loop, percentiles by nearest rank. The band resamples whole repeats of each side (the same ones
    on both sides if `paired`: the runs share blocks), for all percentiles of a cell together at 95 % (Bonferroni).
    Null with fewer than 2 repeats on a side, and where one side completed nothing.
    """
    sides = [_samples(requests) for requests in (a_requests, b_requests)]
    rows: list[dict[str, Any]] = []
    for number, cell in enumerate(key for key in sides[0] if key in sides[1]):
        a, b = sides[0][cell], sides[1][cell]
        about = dict(zip(FACTORS, cell, strict=True)) | {"a_n": _count(a), "b_n": _count(b)}
        about |= {"a_repeats": len(a), "b_repeats": len(b)}
        percents = [p for p in PERCENTS if min(_count(a), _count(b)) >= smallest_sample(p)]
        if not percents:
            rows.append({**about, "percent": np.nan})
            continue
        a_ms, b_ms = (
            _quantiles(_weighted(side), np.ones((1, len(side)), np.int64), percents)[0] for side in (a, b)
        )
        lo, hi = _band(a, b, percents, paired, draws, np.random.default_rng([seed, number]))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = b_ms / a_ms
        rows += [
            {**about, "percent": percent, "a_ms": a_ms[i], "b_ms": b_ms[i], "ratio": ratio[i]}
            | {"lo": lo[i], "hi": hi[i]}
            for i, percent in enumerate(percents)
        ]
    if not rows:
        return pd.DataFrame()
    columns = ["combination", "limit", "a_n", "b_n", "a_repeats", "b_repeats"]
    columns += ["percent", "a_ms", "b_ms", "ratio", "lo", "hi"]
    return label_cells(pd.DataFrame(rows)).reindex(columns=columns).reset_index(drop=True)


Side = list[NDArray[np.float64]]
"""TTFT in ms of the completed requests, sorted, an array a repeat."""


def _samples(requests: pd.DataFrame) -> dict[tuple[float | str | None, ...], Side]:
    """Of every cell, named by the values of its factors."""
    derived = derive(requests)
    derived = derived.assign(ttft_ms=1000 * derived["ttft_s"].where(derived["outcome"] == Outcome.COMPLETED))
    cells: dict[tuple[float | str | None, ...], Side] = {}
    for values, rows in derived.groupby(list(FACTORS), dropna=False, sort=False):
        name = tuple(None if pd.isna(value) else value for value in cast("tuple[float | str, ...]", values))
        cells[name] = [
            np.sort(repeat["ttft_ms"].dropna().to_numpy(np.float64))
            for _, repeat in steady_rows(rows).groupby("repeat")
        ]
    return cells


def _count(side: Side) -> int:
    return sum(map(len, side))


def _weighted(side: Side) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """All values of a side in order, and the repeat that each belongs to."""
    values = np.concatenate(side)
    order = np.argsort(values, kind="stable")
    return values[order], np.repeat(np.arange(len(side)), [len(repeat) for repeat in side])[order]


def _quantiles(
    pooled: tuple[NDArray[np.float64], NDArray[np.int64]],
    times: NDArray[np.int64],
    percents: Sequence[float],
) -> NDArray[np.float64]:
    """float64[draws, percents]: the nearest-rank percentiles when repeat r is taken `times[draw, r]` times."""
    values, repeat = pooled
    per_mille = np.array([round(10 * percent) for percent in percents])
    found = np.full((len(times), len(percents)), np.nan)
    for draw, taken in enumerate(times):
        reached = np.cumsum(taken[repeat])
        if n := int(reached[-1]):
            found[draw] = values[np.searchsorted(reached, -(-n * per_mille // 1000))]
    return found


def _band(
    a: Side, b: Side, percents: Sequence[float], paired: bool, draws: int, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if min(len(a), len(b)) < 2:
        nothing = np.full(len(percents), np.nan)
        return nothing, nothing
    times = [rng.multinomial(len(side), np.full(len(side), 1 / len(side)), draws) for side in (a, b)]
    if paired:
        times[1] = times[0]
    quantiles = [
        _quantiles(_weighted(_thinned(side)), taken, percents)
        for side, taken in zip((a, b), times, strict=True)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = quantiles[1] / quantiles[0]
    tail = (1 - _LEVEL) / 2 / len(percents)
    lo, hi = np.nanquantile(ratios, (tail, 1 - tail), axis=0, method="inverted_cdf")
    return lo, hi


def _thinned(side: Side) -> Side:
    """Evenly spaced order statistics, the same share of every repeat."""
    share = min(1.0, _MOST_VALUES / _count(side))
    kept = [max(1, round(share * len(repeat))) if len(repeat) else 0 for repeat in side]
    return [
        repeat[((np.arange(k) + 0.5) / k * len(repeat)).astype(np.int64)] if k else repeat
        for repeat, k in zip(side, kept, strict=True)
    ]


@matplotlib.rc_context(STYLE)
def draw_shift(
    shift: pd.DataFrame, caption: Caption, *, names: tuple[str, str] = ("A", "B"), margin: float = 1.1
) -> Figure:
    """A panel per cell: quantiles of the second run over those of the first, above 1 where it was slower.

    `names` are what the runs are called; between the dotted lines the difference is within `margin`.
    """
    cells = list(shift.groupby(["combination", "limit"], sort=False))
    figure, panels = panel_grid(len(cells), 1, width_in=4.4, height_in=2.4)
    drawn = shift[["ratio", "lo", "hi"]].to_numpy(np.float64)
    drawn = drawn[np.isfinite(drawn) & (drawn > 0)]
    reach = 1.08 * max([margin, *(1 / drawn), *drawn])
    for (axes,), ((combination, limit), cell) in zip(panels, cells, strict=True):
        axes.set_title("\n".join(filter(None, [limit_title(str(limit)), str(combination)])))
        axes.set_yscale("log")
        axes.set_ylim(1 / reach, reach)
        axes.yaxis.set_major_locator(FixedLocator(ratio_ticks(reach)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
        axes.set_ylabel(f"TTFT of {names[1]} / {names[0]}")
        axes.axhline(1, color=BLACK, linewidth=0.8)
        for bound in (1 / margin, margin):
            axes.axhline(bound, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_xticks([_nines(percent) for percent in _NINES_TICKS], [f"{p:g}" for p in _NINES_TICKS])
        axes.set_xlim(0, _nines(max(90.0, np.nan_to_num(shift["percent"].max()))) * 1.05)
        axes.set_xlabel("percentile of the completed requests (%)")
        if cell["percent"].isna().all():
            axes.text(0.5, 0.6, "too few completed", transform=axes.transAxes, ha="center", color=GREY)
            continue
        x = _nines(cell["percent"])
        axes.fill_between(x, cell["lo"], cell["hi"], color=BLUE, alpha=0.2, linewidth=0)
        axes.plot(x, cell["ratio"], color=BLUE, marker="o", markersize=3.5, linewidth=1.3, label="ratio")
    marks: list[Artist] = [
        Line2D([], [], color=BLUE, marker="o", markersize=3.5, label=f"{names[1]} / {names[0]}"),
        Patch(color=BLUE, alpha=0.2, linewidth=0, label="95 % band"),
        Line2D([], [], color=GREY, linestyle=":", label=f"a factor of {margin:g}"),
    ]
    facts = (
        f"{names[0]}: {_sample_text(shift, 'a')}. {names[1]}: {_sample_text(shift, 'b')}. Percentiles by nearest"
        " rank over completed requests of all repeats pooled, without warm-up; a line ends where the sample does. Band:"
        " whole repeats drawn anew, all percentiles of a cell together. TTFT: scheduled send to first token received."
    )
    dress(figure, f"Where TTFT moved from {names[0]} to {names[1]}", marks, caption, facts)
    return figure


def _nines(percent: Any) -> Any:
    return -np.log10(1 - percent / 100)


def ratio_ticks(reach: float) -> list[float]:
    """Round ratios from 1 / `reach` to `reach`, far enough apart on a logarithmic axis to be read."""
    ticks = sorted({*_RATIO_TICKS, *(round(1 / tick) for tick in _RATIO_TICKS if tick <= 0.5)})
    inside = [tick for tick in ticks if 1 / reach <= tick <= reach]
    apart = 2 * np.log(reach) / 9
    kept = [1.0]
    for side in ([t for t in inside if t > 1], [t for t in reversed(inside) if t < 1]):
        last = 1.0
        for tick in side:
            if abs(np.log(tick / last)) >= apart:
                kept.append(tick)
                last = tick
    return sorted(kept)


def _sample_text(shift: pd.DataFrame, side: str) -> str:
    return f"{span_text(shift[f'{side}_repeats'])} repeats, n={span_text(shift[f'{side}_n'])} completed"
