"""The figures of a run: what an admission limit does to the tail, and what it costs in refusals.

Each figure comes in two steps, a tidy frame (`*_data`, written as CSV) and its drawing (`draw_*`), so that the
CSV holds what is seen. Nothing here uses pyplot: no display is needed, and no figure outlives its file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from roseinfer.bench.explain_figure import draw_explain, explain_figure_data
from roseinfer.bench.figure_style import Caption, save
from roseinfer.bench.forecast_figure import draw_forecast, forecast_figure_data
from roseinfer.bench.gantt import draw_gantt, gantt_data
from roseinfer.bench.heat_map import draw_heat_map, heat_map_data
from roseinfer.bench.load_curve import draw_load_curve, load_curve_data
from roseinfer.bench.nines import draw_nines, nines_data
from roseinfer.bench.prediction_figure import draw_prediction, prediction_figure_data
from roseinfer.bench.records import HTTP
from roseinfer.bench.strips import draw_p99, draw_throughput, points_data
from roseinfer.bench.timeline import draw_timeline, timeline_data
from roseinfer.bench.who_is_refused import draw_who_is_refused, who_is_refused_data
from roseinfer.errors import RunError

_MOST_OF_A_KIND: Final = 6

_FigureOf = tuple[str, pd.DataFrame, Callable[[pd.DataFrame, Caption], Figure]]


def draw_all(
    requests: pd.DataFrame,
    summary: pd.DataFrame,
    caption: Caption,
    folder: Path,
    *,
    steps: pd.DataFrame | None = None,
    workload: pd.DataFrame | None = None,
    prediction_errors: pd.DataFrame | None = None,
) -> list[Path]:
    """Draw every figure that the run can carry into `folder`: a PNG, an SVG and the CSV behind them.

    `requests` holds rows of REQUEST_SCHEMA, `summary` one row per cell and repeat and a pooled one per cell
    (`repeat` null), `steps` rows of STEP_SCHEMA (None, and for a server: the p99 is not explained), `workload` all that
    was to be sent (None: nobody knows the prompts of refused requests), `prediction_errors` those of
    `prediction.errors` (None: nothing was predicted). Returns the files in the order of writing. Raises RunError if
    `folder` cannot be written.
    """
    points = points_data(summary)
    figures: list[_FigureOf] = [
        ("p99_vs_limit", points, draw_p99),
        ("ttft_nines", nines_data(requests), draw_nines),
        ("throughput_vs_limit", points, draw_throughput),
        *_one_each("burst_gantt", gantt_data(requests), draw_gantt),
        *_one_each("timeline", timeline_data(requests, steps), draw_timeline),
        *_one_each("who_is_refused", who_is_refused_data(requests, workload), draw_who_is_refused),
        *_one_each("predicted_ttft", forecast_figure_data(requests), draw_forecast),
        ("p99_heat_map", heat_map_data(summary), draw_heat_map),
        ("load_curve", load_curve_data(summary), draw_load_curve),
    ]
    if steps is not None and not (requests["target"] == HTTP).all():
        figures.append(("p99_explained", explain_figure_data(requests, steps), draw_explain))
    if prediction_errors is not None:
        figures.append(("prediction", prediction_figure_data(prediction_errors), draw_prediction))
    figures = [figure for figure in figures if not figure[1].empty]
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


def _one_each(
    name: str, data: pd.DataFrame, draw: Callable[[pd.DataFrame, Caption], Figure]
) -> list[_FigureOf]:
    """A figure for every combination of the factors besides the limit, or, of many, for some from first to last."""
    groups = [group for _, group in data.groupby("combination", sort=False)]
    if len(groups) == 1:
        return [(name, groups[0], draw)]
    drawn = np.unique(np.linspace(0, len(groups) - 1, min(len(groups), _MOST_OF_A_KIND)).round().astype(int))
    return [(f"{name}_{place + 1}", groups[place], draw) for place in drawn]
