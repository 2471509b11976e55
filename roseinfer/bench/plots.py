"""The figures of a run: what an admission limit does to the tail, and what it costs in refusals.

Each figure comes in two steps, a tidy frame (`*_data`, written as CSV) and its drawing (`draw_*`), so that the
CSV holds what is seen. Nothing here uses pyplot: no display is needed, and no figure outlives its file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from roseinfer.bench.figure_style import Caption, save
from roseinfer.bench.gantt import draw_gantt, gantt_data
from roseinfer.bench.heat_map import draw_heat_map, heat_map_data
from roseinfer.bench.nines import draw_nines, nines_data
from roseinfer.bench.strips import draw_p99, draw_throughput, points_data
from roseinfer.errors import RunError


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
