"""What a run says of the classes of its requests, and of who was refused and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from roseinfer.bench.goals import Goal, met
from roseinfer.bench.records import Outcome, derive
from roseinfer.bench.report import (
    OTHERS,
    TABLE_WIDTH,
    Line,
    heading,
    layout,
    limits_line,
    percent,
    percentile_of,
    wrapped,
)
from roseinfer.bench.stats import percentiles
from roseinfer.bench.steady_state import steady_rows
from roseinfer.bench.summary import admission_places

_PERCENTILES: Final = (50, 99)
_METRICS: Final = ("ttft", "queue_wait")


def class_figures(requests: pd.DataFrame, names: Sequence[str], goals: Sequence[Goal]) -> pd.DataFrame:
    """A row per cell and class, classes in the order of `names`, pooled over repeats.

    `good` was served within all `goals` (without any: served), and is of all that was offered, as are the counts in
    `refused`, a dict by reason. Latencies count what the summary counts: completed requests, without the warm-up.
    """
    rows: list[dict[str, Any]] = []
    for cell_id, cell in requests.groupby("cell_id", sort=False):
        derived = derive(cell)
        steady = steady_rows(derived)
        completed = steady[steady["outcome"] == Outcome.COMPLETED]
        derived = derived.assign(good=met(derived, goals))
        for name in names:
            of_class = derived[derived["priority"] == name]
            served = completed[completed["priority"] == name]
            row = {
                **{factor: cell[factor].iloc[0] for factor in ("admission", *OTHERS, "arrival", "target")},
                "cell_id": cell_id,
                "class": name,
                "offered": len(of_class),
                "good": int(of_class["good"].sum()),
                "refused": reasons_of(of_class),
            }
            for metric in _METRICS:
                values_ms = 1e3 * served[f"{metric}_s"].dropna().to_numpy(dtype=np.float64)
                row[f"n_{metric}"] = values_ms.size
                figures = percentiles(values_ms, _PERCENTILES)
                row |= {f"p{p}_{metric}_ms": figure for p, figure in zip(_PERCENTILES, figures, strict=True)}
            rows.append(row)
    return pd.DataFrame(rows)


def class_tables(
    requests: pd.DataFrame, names: Sequence[str], goals: Sequence[Goal], width: int = TABLE_WIDTH
) -> Iterator[str]:
    """A table per combination of the other factors, a column per limit; none where all requests are alike."""
    if not names:
        return
    figures = class_figures(requests, names, goals)
    for _, cells in figures.groupby(list(OTHERS), dropna=False, sort=True):
        ordered = cells.sort_values("admission", key=admission_places, kind="stable")
        limits = ordered["admission"].drop_duplicates()
        lines: list[Line] = [limits_line(limits)]
        for name in names:
            lines += _lines(name, ordered[ordered["class"] == name].to_dict("records"), bool(goals))
        title = ", ".join(filter(None, ["By class", heading(cells.iloc[0])]))
        note = "Shares are of what was offered of the class."
        if goals:
            note = f"Good: served with {' and '.join(map(str, goals))} (ms). {note}"
        yield "\n".join([title, *layout(lines, width), *wrapped([note], width)])


def refusal_lines(requests: pd.DataFrame) -> list[str]:
    """For each cell that refused for more than one reason, how many each: a queue's timeouts are among them."""
    lines = []
    for cell_id, cell in requests.groupby("cell_id", sort=False):
        reasons = reasons_of(cell)
        if len(reasons) > 1:
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            lines.append(f"Refused by reason: {cell_id}: {counts}.")
    return lines


def reasons_of(rows: pd.DataFrame) -> dict[str, int]:
    """How many were refused or dropped for each reason, the most frequent first."""
    counts = rows["reject_reason"].value_counts()
    named = {str(reason): int(count) for reason, count in counts.items() if count}
    return dict(sorted(named.items(), key=lambda one: (-one[1], one[0])))


def _lines(name: str, cells: list[dict[Any, Any]], has_goals: bool) -> Iterator[Line]:
    yield name, []
    yield "  offered", [str(c["offered"]) for c in cells]
    share = "good" if has_goals else "served"
    yield f"  {share}", [f"{c['good']}, {percent(_share(c['good'], c['offered']))}" for c in cells]
    for p in _PERCENTILES:
        yield f"  TTFT p{p} (ms)", [percentile_of(c, "ttft", p) for c in cells]
    if any(c["n_queue_wait"] for c in cells):
        yield "  queue wait p99 (ms)", [percentile_of(c, "queue_wait", 99) for c in cells]
    for reason in dict.fromkeys(reason for c in cells for reason in c["refused"]):
        counts = [c["refused"].get(reason, 0) for c in cells]
        yield (
            f"  refused: {reason}",
            [
                f"{n}, {percent(_share(n, c['offered']))}" if n else "0"
                for n, c in zip(counts, cells, strict=True)
            ],
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else np.nan
