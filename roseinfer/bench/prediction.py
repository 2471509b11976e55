"""How far a prediction was off: per cell the latencies and refusals that were simulated over those measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from roseinfer.bench.labels import label_cells, tidy_cells
from roseinfer.bench.records import FACTORS, Outcome, derive
from roseinfer.bench.report import METRIC_NAMES, TABLE_WIDTH, Line, layout
from roseinfer.bench.stats import percentiles, smallest_sample
from roseinfer.bench.steady_state import steady_rows
from roseinfer.bench.verdicts import number_text

METRICS: Final = ("ttft", "queue_wait")
PERCENTILES: Final = (50, 90, 99)
JUDGED: Final = ("p50_ttft_ms", "p99_ttft_ms", "p50_queue_wait_ms", "p99_queue_wait_ms")
"""The figures whose errors a verdict speaks of."""

SIDES: Final = ("measured", "predicted")

_REQUEST: Final = ["repeat", "request_index"]
"""What names a request of a cell on both sides."""

ERROR_LEGEND: Final = "error: predicted / measured - 1, n/a where the sample is too small for the percentile"


def figure_name(metric: str, percent: int) -> str:
    """The column of a figure, without its side: "p99_ttft_ms"."""
    return f"p{percent}_{metric}_ms"


def figure_title(figure: str) -> str:
    """What readers call it: "p99 TTFT"."""
    percent, _, metric = figure.removesuffix("_ms").partition("_")
    return f"{percent} {METRIC_NAMES[metric]}"


def errors(measured: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """One row per cell that both frames of REQUEST_SCHEMA have, in the order of `measured`, matched by `cell_id`.

    `offered`, `measured_rejected` and `predicted_rejected` are means per repeat, and `reject_difference` is what
    share of the offered the prediction refused more than was measured. For p50, p90 and p99 of TTFT and queue wait,
    in ms over the completed requests of all repeats, there are `measured_<figure>`, `predicted_<figure>` and
    `error_<figure>` = predicted / measured - 1; `measured_n_<metric>` and `predicted_n_<metric>` are their samples.
    What was warm-up where it was measured counts on neither side. Null where nothing was measured, or too little for
    that percentile, and errors also where 0 was.
    """
    sides = [dict(iter(frame.groupby("cell_id", sort=False))) for frame in (measured, predicted)]
    rows = [
        _row(str(cell_id), sides[0][cell_id], sides[1][cell_id])
        for cell_id in sides[0]
        if cell_id in sides[1]
    ]
    columns = ["cell_id", *FACTORS, "offered", *[f"{side}_rejected" for side in SIDES], "reject_difference"]
    columns += [f"{side}_n_{metric}" for metric in METRICS for side in SIDES]
    columns += [
        f"{what}_{figure_name(metric, percent)}"
        for metric in METRICS
        for percent in PERCENTILES
        for what in (*SIDES, "error")
    ]
    return pd.DataFrame(rows, columns=columns)


def _row(cell_id: str, measured: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, Any]:
    row: dict[str, Any] = {"cell_id": cell_id, **{factor: measured[factor].iloc[0] for factor in FACTORS}}
    refused: list[float] = []
    warm_up = _warm_up(measured)
    for side, requests in zip(SIDES, (measured, predicted), strict=True):
        repeats, rejected = requests["repeat"].nunique(), int((requests["outcome"] == Outcome.REJECTED).sum())
        row[f"{side}_rejected"] = rejected / repeats
        refused.append(rejected / len(requests))
        for metric, values_ms in _samples_ms(requests, warm_up).items():
            row[f"{side}_n_{metric}"] = values_ms.size
            for percent, value in zip(PERCENTILES, percentiles(values_ms, PERCENTILES), strict=True):
                known = values_ms.size >= smallest_sample(percent)
                row[f"{side}_{figure_name(metric, percent)}"] = value if known else math.nan
    row["offered"] = len(measured) / measured["repeat"].nunique()
    row["reject_difference"] = refused[1] - refused[0]
    for metric in METRICS:
        for percent in PERCENTILES:
            figure = figure_name(metric, percent)
            value = row[f"measured_{figure}"]
            row[f"error_{figure}"] = row[f"predicted_{figure}"] / value - 1 if value else math.nan
    return row


def _warm_up(requests: pd.DataFrame) -> pd.Index[Any]:
    """Repeat and index of the requests of one cell that no latency counts."""
    derived = derive(requests.reset_index(drop=True))
    return derived.drop(steady_rows(derived).index).set_index(_REQUEST).index


def _samples_ms(requests: pd.DataFrame, warm_up: pd.Index[Any]) -> dict[str, NDArray[np.float64]]:
    """The latencies of one cell, all repeats together, but for the requests in `warm_up`."""
    derived = derive(requests)
    counts = (derived["outcome"] == Outcome.COMPLETED) & ~derived.set_index(_REQUEST).index.isin(warm_up)
    return {
        metric: 1e3 * derived.loc[counts, f"{metric}_s"].dropna().to_numpy(dtype=np.float64)
        for metric in METRICS
    }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all cells together say of a prediction. Errors are predicted / measured - 1; None: not measured.

    `median_error` is of their sizes over `cells`, for every figure of JUDGED; `worst_error` is the largest of these
    figures and has its sign, in the cell `worst_cell`. `reject_difference` is the largest, a share of the offered.
    """

    cells: int
    median_error: Mapping[str, float | None]
    worst_figure: str | None
    worst_cell: str | None
    worst_error: float | None
    reject_difference: float | None
    reject_cell: str | None


def verdict(errors: pd.DataFrame) -> Verdict:
    """Of a frame from `errors`; cells are named as readers know them."""
    labels = tidy_cells(errors)["cell"].astype(str).tolist() if len(errors) else []
    found = {figure: errors[f"error_{figure}"].to_numpy(dtype=np.float64) for figure in JUDGED}
    sizes = [
        (abs(error), figure, place)
        for figure in JUDGED
        for place, error in enumerate(found[figure])
        if not math.isnan(error)
    ]
    worst = max(sizes, key=lambda one: one[0], default=None)
    refused = errors["reject_difference"].to_numpy(dtype=np.float64)
    farthest = int(np.argmax(abs(refused))) if refused.size else None
    return Verdict(
        cells=len(errors),
        median_error={figure: median_size(found[figure]) for figure in JUDGED},
        worst_figure=None if worst is None else worst[1],
        worst_cell=None if worst is None else labels[worst[2]],
        worst_error=None if worst is None else float(found[worst[1]][worst[2]]),
        reject_difference=None if farthest is None else float(refused[farthest]),
        reject_cell=None if farthest is None else labels[farthest],
    )


def verdict_lines(errors: pd.DataFrame) -> list[str]:
    """The verdict in sentences: typical errors, the worst one, and the refusals."""
    found = verdict(errors)
    if not found.cells:
        return ["Predicted over measured: no cell in common."]
    typical = ", ".join(
        f"{figure_title(figure)} {_size_text(size)}" for figure, size in found.median_error.items()
    )
    cells = "1 cell" if found.cells == 1 else f"{found.cells} cells"
    lines = [f"Predicted over measured, median over {cells} of the size of the error: {typical}."]
    if found.worst_error is not None and found.worst_figure is not None:
        worst = f"{error_text(found.worst_error)} in {figure_title(found.worst_figure)} at {found.worst_cell}"
        lines.append(f"The farthest off: {worst}.")
    if found.reject_difference == 0:
        lines.append("Refusals: as many as measured, in every cell.")
    else:
        assert found.reject_difference is not None
        off = f"{error_text(found.reject_difference)} of the offered at {found.reject_cell}"
        lines.append(f"Refusals: at most {off}.")
    return lines


def table(errors: pd.DataFrame, width: int = TABLE_WIDTH) -> str:
    """Every figure as measured and as predicted: a table per combination of the other factors, a column per limit."""
    if errors.empty:
        return ""
    parts = []
    for combination, cells in label_cells(errors).groupby("combination", sort=False):
        heading = [str(combination)] if combination else []
        parts.append("\n".join([*heading, *layout(list(_lines(cells.to_dict("records"))), width)]))
    return "\n\n".join(parts)


def _lines(cells: list[dict[Any, Any]]) -> Iterator[Line]:
    yield "max inflight", [cell["limit"] for cell in cells]
    yield "offered in a repeat", [number_text(cell["offered"]) for cell in cells]
    for side in SIDES:
        yield f"rejected, {side}", [number_text(cell[f"{side}_rejected"]) for cell in cells]
    yield "difference, of offered", [error_text(cell["reject_difference"]) for cell in cells]
    for metric in METRICS:
        if not any(cell[f"measured_n_{metric}"] for cell in cells):
            yield f"{METRIC_NAMES[metric]} (ms)", ["not measured"] * len(cells)
            continue
        yield f"{METRIC_NAMES[metric]} (ms)", []
        for percent in PERCENTILES:
            figure = figure_name(metric, percent)
            for side in SIDES:
                texts = [_value_text(cell[f"{side}_{figure}"], cell[f"{side}_n_{metric}"]) for cell in cells]
                yield f"  p{percent}, {side}", texts
            yield f"  p{percent}, error", [error_text(cell[f"error_{figure}"]) for cell in cells]


def compare_table(errors: pd.DataFrame, measured: str, predicted: str, notes: Sequence[str]) -> str:
    """What `compare` prints of a measured and a simulated run: the table, the verdict, and notes."""
    about = f"measured: {measured}; predicted: {predicted}; percentiles over all repeats; {ERROR_LEGEND}"
    lines = [*verdict_lines(errors), *[f"Note: {note}" for note in [*notes, about]]]
    return "\n".join([table(errors), "", *lines])


def compare_markdown(errors: pd.DataFrame, measured: str, predicted: str, notes: Sequence[str]) -> str:
    """As `compare_table`, the verdict first."""
    items = [f"- {line}" for line in [*verdict_lines(errors), *notes, ERROR_LEGEND]]
    return "\n".join(
        [f"### {measured} as predicted by {predicted}", "", "```", table(errors), "```", "", *items, ""]
    )


def compare_json(errors: pd.DataFrame, measured: str, predicted: str, notes: Sequence[str]) -> dict[str, Any]:
    """As `to_json`."""
    return {"measured": measured, "predicted": predicted, **to_json(errors), "notes": list(notes)}


def to_json(errors: pd.DataFrame) -> dict[str, Any]:
    """The verdict and a row per cell, as JSON holds them; not measured is null."""
    rows = [
        {str(name): None if pd.isna(value) else value for name, value in row.items()}
        for row in errors.to_dict("records")
    ]
    return {"verdict": asdict(verdict(errors)), "cells": rows}


def error_text(error: float) -> str:
    """A share with its sign, in per cent."""
    if math.isnan(error):
        return "n/a"
    return "0 %" if error == 0 else f"{100 * error:+.1f} %"


def _size_text(size: float | None) -> str:
    return "not measured" if size is None else f"{100 * size:.1f} %"


def _value_text(value: float, n: int) -> str:
    return f"n/a (n={n})" if math.isnan(value) else number_text(value)


def median_size(errors: NDArray[np.float64]) -> float | None:
    """Of the errors of cells that are known; between the middle two of an even number: neither speaks for all."""
    known = errors[~np.isnan(errors)]
    return float(np.median(abs(known))) if known.size else None
