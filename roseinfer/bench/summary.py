"""The summary: one row per cell and repeat, and one pooled row per cell (its `repeat` is null).

Percentiles are nearest rank (`stats.PERCENTILE_METHOD`) over raw rows: those of a pooled row are taken from
all requests of all repeats, never from the percentiles of the repeats. Latencies count completed requests
only, `reject` the refusals at submission, `add_request` the admitted; `itl` pools the gaps between tokens.
An empty sample is null with n = 0. A bound that the repeats cannot give is -inf or inf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from roseinfer.bench.records import FACTORS, REQUEST_SCHEMA, Outcome, derive, token_gaps_s
from roseinfer.bench.stats import cluster_bootstrap, median_interval, percentile, percentiles
from roseinfer.bench.validity import DEFAULT_MAX_ERROR_SHARE, CellFacts, check_cell
from roseinfer.errors import RunError

COMPLETED_METRICS: Final = (
    "queue_wait",
    "ttft",
    "ttft_from_send",
    "tpot",
    "itl",
    "e2el",
    "prefill",
    "tokenize",
)
METRICS: Final = (*COMPLETED_METRICS, "add_request", "reject")
INTERVAL_METRICS: Final = ("queue_wait", "ttft", "tpot", "e2el")
"""Those whose p99 gets intervals in the pooled rows."""

_FACTOR_COLUMNS: Final = (
    *("target", "model", "admission", "max_inflight", "burst_size"),
    *("prompt_len", "output_len", "arrival", "request_rate", "priority"),
)
_IDENTITY: Final = ("run_id", "cell_id", "repeat", *_FACTOR_COLUMNS)

SUMMARY_SCHEMA: Final = pa.schema(
    [
        *[REQUEST_SCHEMA.field(name) for name in _IDENTITY],
        ("repeats", pa.int64()),  # pooled rows only, like every interval
        ("started_utc", pa.string()),
        ("valid", pa.bool_()),
        ("invalid_reasons", pa.string()),  # joined by "; ", null when valid
        ("offered", pa.int64()),
        ("admitted", pa.int64()),  # got a slot
        *[(str(outcome), pa.int64()) for outcome in Outcome],
        ("reject_rate", pa.float64()),  # rejected / offered
        ("duration_s", pa.float64()),  # first send to last token received; pooled: the sum over repeats
        ("request_throughput", pa.float64()),  # completed requests / duration_s
        ("output_throughput", pa.float64()),  # output tokens of completed requests / duration_s
        ("peak_inflight", pa.int64()),
        ("mean_inflight", pa.float64()),  # over duration_s
        *[
            field
            for metric in METRICS
            for field in [
                (f"n_{metric}", pa.int64()),
                *[(f"{figure}_{metric}_ms", pa.float64()) for figure in ("p50", "p95", "p99", "max", "mean")],
            ]
        ],
        *[
            (f"{figure}_{metric}_ms{bound}", pa.float64())
            for metric in INTERVAL_METRICS
            for figure, bounds in [("p99", ("_lo", "_hi")), ("median_p99", ("", "_lo", "_hi"))]
            for bound in bounds
        ],
    ]
)

Samples = Mapping[str, NDArray[np.float64]]
"""The measured values of each metric, in seconds."""


def summarise(
    requests: pd.DataFrame,
    facts: Mapping[tuple[str, int], CellFacts],
    *,
    seed: int = 0,
    max_error_share: float = DEFAULT_MAX_ERROR_SHARE,
) -> pd.DataFrame:
    """The summary of `requests` (REQUEST_SCHEMA), cells in order of appearance, as SUMMARY_SCHEMA columns.

    `facts` holds an entry for every (cell_id, repeat); a row's `valid` and `invalid_reasons` are those of
    `check_cell`. In a pooled row `p99_<m>_ms_lo/_hi` is a cluster bootstrap over repeats (seeded by `seed`)
    and `median_p99_<m>_ms` the median of the p99s of the repeats that measured any, with its
    order-statistic interval: two different questions about the tail. Both are bounds at 95 %.
    Raises RunError when the cells of `requests` and of `facts` differ.
    """
    found = {(str(cell), int(repeat)) for cell, repeat in _keys(requests)}
    if found != set(facts):
        differing = ", ".join(f"{cell} repeat {repeat}" for cell, repeat in sorted(found ^ set(facts)))
        raise RunError(f"rows and facts are not of the same cells: {differing}")
    rows: list[dict[str, Any]] = []
    for _, cell in requests.groupby("cell_id", sort=False):
        repeats = []
        samples = []
        for _, measured in derive(cell).groupby("repeat", sort=True):
            row, sample = _repeat_row(measured, facts, max_error_share)
            repeats.append(row)
            samples.append(sample)
        rows += [*repeats, _pooled_row(repeats, samples, seed)]
    return _frame(rows)


def sort_cells(summary: pd.DataFrame) -> pd.DataFrame:
    """`summary` with its cells ordered by their factors, "no limit" last, and pooled rows after repeats."""
    others = [factor for factor in FACTORS if factor != "max_inflight"]
    by = [*others, "max_inflight", "cell_id", "repeat"]
    return summary.sort_values(by, na_position="last", kind="stable", ignore_index=True)


def pooled(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows that speak of all repeats of a cell."""
    return summary.loc[summary["repeat"].isna()]


def limit_label(max_inflight: float | None) -> str:
    """What tables and figures call a limit: "64", or "no limit" for null."""
    return "no limit" if max_inflight is None or pd.isna(max_inflight) else str(int(max_inflight))


def _repeat_row(
    derived: pd.DataFrame, facts: Mapping[tuple[str, int], CellFacts], max_error_share: float
) -> tuple[dict[str, Any], Samples]:
    first = derived.iloc[0]
    known = facts[str(first["cell_id"]), int(first["repeat"])]
    reasons = check_cell(derived, known, max_error_share=max_error_share)
    count = derived["outcome"].value_counts()
    output_tokens = derived.loc[derived["outcome"] == Outcome.COMPLETED, "output_tokens"]
    duration_s = float(derived["received_last_s"].max() - derived["sent_s"].min())
    row = {
        **{name: first[name] for name in _IDENTITY},
        "started_utc": known.started_utc,
        "valid": not reasons,
        "invalid_reasons": "; ".join(reasons) or None,
        "offered": known.offered,
        "admitted": int(derived["reserved_s"].notna().sum()),
        **{str(outcome): int(count.get(str(outcome), 0)) for outcome in Outcome},
        "duration_s": duration_s if duration_s > 0 else np.nan,
        "peak_inflight": known.peak_inflight,
        "inflight_integral_s": known.inflight_integral_s,
        "tokens_out": float(output_tokens.sum()),
    }
    samples = _samples(derived)
    return {**row, **_rates(row), **_latencies(samples)}, samples


def _pooled_row(rows: Sequence[dict[str, Any]], samples: Sequence[Samples], seed: int) -> dict[str, Any]:
    together = {metric: np.concatenate([sample[metric] for sample in samples]) for metric in METRICS}
    summed = (
        "offered",
        "admitted",
        *[str(outcome) for outcome in Outcome],
        "inflight_integral_s",
        "tokens_out",
    )
    row = {
        **{name: rows[0][name] for name in _IDENTITY},
        "repeat": None,
        "repeats": len(rows),
        "started_utc": min(row["started_utc"] for row in rows),
        "valid": all(row["valid"] for row in rows),
        "invalid_reasons": "; ".join(
            f"repeat {row['repeat']}: {row['invalid_reasons']}" for row in rows if not row["valid"]
        )
        or None,
        **{name: sum(row[name] for row in rows) for name in summed},
        # Each repeat has a clock of its own. One in which nothing was received has no duration.
        "duration_s": float(np.nansum([row["duration_s"] for row in rows])) or np.nan,
        "peak_inflight": max(row["peak_inflight"] for row in rows),
    }
    return {**row, **_rates(row), **_latencies(together), **_intervals(samples, seed)}


def _rates(row: Mapping[str, Any]) -> dict[str, float]:
    """Nothing completed is no throughput: null, not 0."""
    duration_s = row["duration_s"] if row["completed"] else np.nan
    return {
        "reject_rate": row["rejected"] / row["offered"] if row["offered"] else np.nan,
        "request_throughput": row["completed"] / duration_s,
        "output_throughput": row["tokens_out"] / duration_s,
        "mean_inflight": row["inflight_integral_s"] / row["duration_s"],
    }


def _samples(derived: pd.DataFrame) -> Samples:
    completed = derived.loc[derived["outcome"] == Outcome.COMPLETED]
    frames = dict.fromkeys(COMPLETED_METRICS, completed) | {"add_request": derived, "reject": derived}
    return {
        metric: token_gaps_s(frame["token_times_s"])
        if metric == "itl"
        else frame[f"{metric}_s"].dropna().to_numpy(dtype=np.float64)
        for metric, frame in frames.items()
    }


def _latencies(samples: Samples) -> dict[str, float]:
    figures: dict[str, float] = {}
    for metric, values_s in samples.items():
        p50, p95, p99, largest = percentiles(1e3 * values_s, (50, 95, 99, 100))
        figures |= {
            f"n_{metric}": values_s.size,
            f"p50_{metric}_ms": p50,
            f"p95_{metric}_ms": p95,
            f"p99_{metric}_ms": p99,
            f"max_{metric}_ms": largest,
            f"mean_{metric}_ms": 1e3 * float(values_s.mean()) if values_s.size else np.nan,
        }
    return figures


def _intervals(samples: Sequence[Samples], seed: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for metric in INTERVAL_METRICS:
        runs_ms = [1e3 * sample[metric] for sample in samples]
        tail = cluster_bootstrap(runs_ms, 99, seed=seed)
        typical = median_interval([percentile(run_ms, 99) for run_ms in runs_ms])
        figures |= {
            f"p99_{metric}_ms_lo": tail.lo,
            f"p99_{metric}_ms_hi": tail.hi,
            f"median_p99_{metric}_ms": typical.point,
            f"median_p99_{metric}_ms_lo": typical.lo,
            f"median_p99_{metric}_ms_hi": typical.hi,
        }
    return figures


def _keys(requests: pd.DataFrame) -> list[tuple[Any, Any]]:
    unique = requests[["cell_id", "repeat"]].drop_duplicates()
    return list(unique.itertuples(index=False, name=None))


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Through arrow, so that the frame is the one that its reader gets back from the file."""
    columns = [
        pa.array([row.get(field.name) for row in rows], type=field.type, from_pandas=True)
        for field in SUMMARY_SCHEMA
    ]
    frame: pd.DataFrame = pa.Table.from_arrays(columns, schema=SUMMARY_SCHEMA).to_pandas()
    return frame
