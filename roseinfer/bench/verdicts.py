"""What `check`, `compare` and `ab` print: a table for a terminal, JSON, and Markdown for the summary of a CI step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from roseinfer.bench.check import Report
from roseinfer.bench.compare import DISTRIBUTION, Difference, Differences
from roseinfer.bench.judgement import Judgement
from roseinfer.bench.stats import Interval

Row = tuple[list[str], str]
"""The cells of a line, and a remark that stands below it or in a last column."""

_SHARES: Final = ("refused", "served")
_CHECK_COLUMNS: Final = ("verdict", "cell", "metric", "measured", "interval", "demanded", "n", "R", *_SHARES)
_COMPARE_COLUMNS: Final = ("answer", "cell", "metric", "A", "B", "B / A", "interval", "n", "R", *_SHARES)
_SHARES_LEGEND: Final = (
    "refused, served: shares of the offered requests; served within the goals, where the run has any"
)


def check_table(report: Report, unknown: int = 3) -> str:
    """A line for each rule and cell, notes, and the verdict. `unknown` is the exit code of UNKNOWN."""
    rows = [_judgement_row(judgement) for judgement in report.judgements]
    lines = aligned(_CHECK_COLUMNS, rows) if rows else []
    return "\n".join([*lines, *_notes(check_notes(report, unknown)), _title(report)])


def check_markdown(report: Report, unknown: int = 3) -> str:
    """As `check_table`, the verdict first."""
    rows = [_judgement_row(judgement) for judgement in report.judgements]
    return _markdown(_title(report), _CHECK_COLUMNS, rows, check_notes(report, unknown))


def check_json(report: Report, unknown: int = 3) -> dict[str, Any]:
    """NaN and unbounded are null: JSON knows neither."""
    values = {
        "verdict": report.headline.partition(":")[0],
        "exit_code": report.exit_code(unknown),
        "invalid_reason": report.invalid,
        "run": report.run,
        "baseline": report.baseline,
        "how": report.how,
        "level": report.level,
        "rules": [_named(judgement) for judgement in report.judgements],
        "notes": check_notes(report, unknown),
    }
    return _plain_dict(values)


def check_notes(report: Report, unknown: int) -> list[str]:
    """Those of the report, and how to read its table."""
    notes = list(report.notes)
    if report.judgements:
        of = "" if report.baseline is None else " of run / baseline"
        notes.append(f"{report.how}{_level_text(report.level)}; R: repeats; n and R{of}")
    if any(judgement.served for judgement in report.judgements):
        notes.append(_SHARES_LEGEND)
    if report.exit_code() == 3 and unknown != 3:
        notes.append(f"UNKNOWN counts as {'a pass' if unknown == 0 else 'a failure'} here (--unknown)")
    return notes


def compare_table(found: Differences) -> str:
    """A line for each cell and metric, and notes."""
    rows = [_difference_row(row) for row in found.rows]
    return "\n".join([*aligned(_COMPARE_COLUMNS, rows), *_notes(compare_notes(found))])


def compare_markdown(found: Differences) -> str:
    """As `compare_table`."""
    rows = [_difference_row(row) for row in found.rows]
    return _markdown(f"{found.b} (B) against {found.a} (A)", _COMPARE_COLUMNS, rows, compare_notes(found))


def compare_json(found: Differences) -> dict[str, Any]:
    """As `check_json`."""
    values = {**asdict(found), "rows": [_named(row) for row in found.rows], "notes": compare_notes(found)}
    return _plain_dict(values)


def compare_notes(found: Differences) -> list[str]:
    """Those of the comparison, and how to read its table."""
    within = f"[{ratio_text(1 / (1 + found.margin))}, {ratio_text(1 + found.margin)}]"
    ratios = "" if math.isnan(found.level) else "ratios of per-repeat figures, "
    notes = [
        *found.notes,
        f"A is {found.a}, B is {found.b}; {ratios}{found.how}{_level_text(found.level)}; R: repeats; n and R of A / B",
    ]
    notes.append(
        "DIFFERENT: the ratio is not 1; SAME: it is"
        if math.isnan(found.level)
        else f"DIFFERENT: the interval excludes 1; SAME: it lies within {within}"
    )
    if any(row.metric == DISTRIBUTION for row in found.rows):
        notes.append(
            f"{DISTRIBUTION}: the largest distance D between the two distribution functions over completed requests,"
            " and p from giving whole repeats to the sides anew: requests of one burst are one draw"
        )
    return [*notes, _SHARES_LEGEND]


def _level_text(level: float) -> str:
    return "" if math.isnan(level) else f"; intervals at {100 * level:.4g} %"


def interval_text(interval: Interval, text: Callable[[float], str]) -> str:
    """Bounds as `text` gives them; "unbounded" where the repeats cannot give any."""
    lo, _, hi = interval
    if lo == -math.inf and hi == math.inf:
        return "unbounded"
    return f"[{text(lo)}, {text(hi)}]"


def ratio_text(ratio: float) -> str:
    """Three decimals."""
    return "n/a" if math.isnan(ratio) else "unbounded" if math.isinf(ratio) else f"{ratio:.3f}"


def number_text(value: float) -> str:
    """Four significant digits."""
    if math.isnan(value):
        return "n/a"
    return "unbounded" if math.isinf(value) else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _title(report: Report) -> str:
    about = report.run if report.baseline is None else f"{report.run} against {report.baseline}"
    return f"{report.headline}: {about}"


def _judgement_row(judgement: Judgement) -> Row:
    figure = judgement.figure
    measured = bounds = ""
    if judgement.growth is not None and judgement.p is not None:
        measured, bounds = f"{100 * judgement.growth:+.1f} points", f"p {number_text(judgement.p)}"
    elif figure is not None and judgement.is_ratio:
        measured, bounds = f"x{ratio_text(figure.point)}", interval_text(figure, ratio_text)
    elif figure is not None:
        measured, bounds = number_text(figure.point), interval_text(figure, number_text)
    cells = [
        f"({judgement.verdict})" if judgement.observe else str(judgement.verdict),
        judgement.cell,
        judgement.metric,
        measured,
        bounds,
        judgement.demand,
        _counts(judgement.n),
        _counts(judgement.repeats),
        _per_cent(judgement.refused),
        _per_cent(judgement.served),
    ]
    observed = "observed only, decides nothing" if judgement.observe else ""
    return cells, "; ".join(filter(None, [observed, judgement.remark]))


def _difference_row(row: Difference) -> Row:
    ratio = bounds = ""
    if row.distance is not None and row.p is not None:
        ratio, bounds = f"D {number_text(row.distance)}", f"p {number_text(row.p)}"
    elif row.figure is not None:
        ratio, bounds = f"x{ratio_text(row.figure.point)}", interval_text(row.figure, ratio_text)
    values = ["" if math.isnan(value) else number_text(value) for value in (row.a, row.b)]
    counts = [_counts(row.n), _counts(row.repeats), _per_cent(row.refused), _per_cent(row.served)]
    return [str(row.answer), row.cell, row.metric, *values, ratio, bounds, *counts], row.remark


def _counts(counts: Sequence[int]) -> str:
    return _joined([str(count) for count in counts])


def _joined(texts: Sequence[str]) -> str:
    """One where they are all the same."""
    return " / ".join(texts[:1] if len(set(texts)) == 1 else texts)


def _per_cent(shares: Sequence[float]) -> str:
    return _joined([f"{100 * share:.1f} %" for share in shares])


def aligned(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The lines of a table."""
    widths = [
        max(len(cells[i]) for cells in (columns, *(cells for cells, _ in rows))) for i in range(len(columns))
    ]
    lines = [_line(columns, widths), "-" * (sum(widths) + 2 * (len(widths) - 1))]
    for cells, remark in rows:
        lines.append(_line(cells, widths))
        if remark:
            lines.append(" " * (widths[0] + 2) + remark)
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _notes(notes: Iterable[str]) -> list[str]:
    return [f"Note: {note}" for note in notes]


def _markdown(title: str, columns: Sequence[str], rows: Sequence[Row], notes: Sequence[str]) -> str:
    lines = [f"### {title}", ""]
    if rows:
        lines += [_markdown_line([*columns, "remark"]), "|" + " --- |" * (len(columns) + 1)]
        lines += [_markdown_line([*cells, remark]) for cells, remark in rows]
        lines.append("")
    return "\n".join([*lines, *(f"- {note}" for note in notes)]) + "\n"


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _named(row: Judgement | Difference) -> dict[str, Any]:
    return {**asdict(row), "figure": None if row.figure is None else row.figure._asdict()}


def _plain_dict(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain_dict(value)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
