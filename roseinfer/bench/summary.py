"""The summary: one row per cell and repeat, and one pooled row per cell (its `repeat` is null).

Percentiles are nearest rank (`stats.PERCENTILE_METHOD`) over raw rows: those of a pooled row are taken from
all requests of all repeats, never from the percentiles of the repeats. Latencies count completed requests
only, `reject` the refusals at submission, `time_to_drop` what was dropped from the queue, `add_request` the admitted,
`time_to_error` and `time_to_timeout` what ended so; `itl` pools the gaps between tokens, `chunk_gap` those between
deliveries, `largest_itl` takes the largest gap between tokens of each request; `server_queue` and `server_prefill`
are what a remote server says of itself. Of an open loop without bursts they leave the warm-up out (MSER-5); counts,
rates and goodput are of all that was offered. An empty sample is null with n = 0. A bound that the repeats cannot give
is -inf or inf, and so is a recovery that never came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from roseinfer.admission_spec import parse_admission
from roseinfer.bench.goals import Goal, met
from roseinfer.bench.load import CLOSED
from roseinfer.bench.ratios import fewest_repeats, repeats_needed
from roseinfer.bench.records import FACTOR_NAMES, FACTORS, REQUEST_SCHEMA, Outcome, derive, gaps_s, rows_at
from roseinfer.bench.stats import cluster_bootstrap, median_interval, percentile, percentiles
from roseinfer.bench.steady_state import WarmUp, recoveries_s, warm_up
from roseinfer.bench.validity import DEFAULT_MAX_ERROR_SHARE, CellFacts, check_cell
from roseinfer.errors import RunError

COMPLETED_METRICS: Final = (
    "queue_wait",
    "ttft",
    "ttft_from_send",
    "tpot",
    "itl",
    "largest_itl",
    "chunk_gap",
    "e2el",
    "time_to_success",
    "prefill",
    "tokenize",
    "server_queue",
    "server_prefill",
)
METRICS: Final = (
    *COMPLETED_METRICS,
    "add_request",
    "reject",
    "time_to_drop",
    "time_to_error",
    "time_to_timeout",
)
INTERVAL_METRICS: Final = ("queue_wait", "ttft", "tpot", "e2el")
"""Those whose p99 gets intervals in the pooled rows."""

_JUDGED: Final = ("cap_wait_s", "send_lag_s", "ttft_s")
"""Derived durations by which a cell is judged, and its warm-up cut."""

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
        ("admitted", pa.int64()),  # got a slot; null where a server does not say
        ("attempts", pa.int64()),  # tries, of all requests
        ("amplification", pa.float64()),  # attempts / offered
        *[(str(outcome), pa.int64()) for outcome in Outcome],
        ("reject_rate", pa.float64()),  # rejected / offered
        ("error_rate", pa.float64()),  # (error + timeout + incomplete) / offered
        (
            "unserved_rate",
            pa.float64(),
        ),  # (offered - completed) / offered: never succeeded, however often tried
        ("good", pa.int64()),  # served within every goal; null without goals, as the next two
        ("good_share", pa.float64()),  # good / offered
        ("request_goodput", pa.float64()),  # good / duration_s
        ("duration_s", pa.float64()),  # first send to last token received; pooled: the sum over repeats
        ("request_throughput", pa.float64()),  # completed requests / duration_s
        ("output_throughput", pa.float64()),  # output tokens of completed requests / duration_s
        (
            "client_busy_share_max_100ms",
            pa.float64(),
        ),  # of a server's client: in its busiest 100 ms; pooled: the worst
        ("client_longest_turn_ms", pa.float64()),  # that it did not look for what came
        ("client_p99_read_lag_ms", pa.float64()),  # how long what it read may have lain there at most
        ("peak_inflight", pa.int64()),
        ("mean_inflight", pa.float64()),  # over duration_s
        ("warmup_cut", pa.int64()),  # completed requests that MSER-5 cut; open loop without bursts, else null
        ("steady", pa.bool_()),  # MSER-5 found a steady part (pooled: in every repeat)
        ("n_recovery", pa.int64()),  # bursts on background load, of `steady_state.recoveries_s`
        ("recovery_s", pa.float64()),  # their median; inf: most of them were never over
        ("n_ttft_after_start", pa.int64()),  # closed loop, without the first request of every user
        ("p99_ttft_after_start_ms", pa.float64()),
        (
            "repeats_needed",
            pa.int64(),
        ),  # pooled rows: on each side, to compare p99 TTFT; null where simulated
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

_CLIENT_LOAD: Final = ("client_busy_share_max_100ms", "client_longest_turn_ms", "client_p99_read_lag_ms")

SHORTEST_S: Final = 1e-3
"""A run shorter than this has no rates: they would be made of the stamps' own errors."""

Samples = Mapping[str, NDArray[np.float64]]
"""The measured values of each metric, in seconds."""


class _Repeat(NamedTuple):
    """What the pooled row needs of one cell and repeat: its row, and what must be pooled raw."""

    row: dict[str, Any]
    samples: Samples
    recoveries_s: NDArray[np.float64]
    ttft_after_start_s: NDArray[np.float64]


def summarise(
    requests: pd.DataFrame,
    facts: Mapping[tuple[str, int], CellFacts],
    *,
    seed: int = 0,
    max_error_share: float = DEFAULT_MAX_ERROR_SHARE,
    goals: Sequence[Goal] = (),
) -> pd.DataFrame:
    """The summary of `requests` (REQUEST_SCHEMA), cells in order of appearance, as SUMMARY_SCHEMA columns.

    `facts` holds an entry for every (cell_id, repeat); a row's `valid` and `invalid_reasons` are those of
    `check_cell`. In a pooled row `p99_<m>_ms_lo/_hi` is a cluster bootstrap over repeats (seeded by `seed`)
    and `median_p99_<m>_ms` the median of the p99s of the repeats that measured any, with its
    order-statistic interval: two different questions about the tail. Both are bounds at 95 %; those of the
    bootstrap never lie above the largest value seen, and cover less than 95 % where repeats are few.
    Raises RunError when the cells of `requests` and of `facts` differ.
    """
    rows: list[dict[str, Any]] = []
    found = set()
    for cell_id, places in requests.groupby("cell_id", sort=False).indices.items():
        cell = rows_at(requests, places).copy(deep=False)
        # Compared and counted again and again: numbers instead of strings.
        cell["outcome"] = pd.Categorical(cell["outcome"], categories=[str(outcome) for outcome in Outcome])
        identity = {name: cell[name].iloc[0] for name in _IDENTITY}
        if cell["priority"].nunique(dropna=False) > 1:
            identity["priority"] = None  # a cell is one set of requests, of whatever classes
        repeats = []
        places_of: Mapping[Any, Any] = cell.groupby("repeat").indices
        for repeat in sorted(places_of):
            key = (str(cell_id), int(repeat))
            found.add(key)
            if key in facts:
                measured = derive(
                    rows_at(cell, places_of[repeat]), [*_JUDGED, *(f"{g.metric}_s" for g in goals)]
                )
                figures = _repeat(measured, facts[key], max_error_share, goals)
                figures.row.update({**identity, "repeat": repeat})
                repeats.append(figures)
        rows += [*[one.row for one in repeats], _pooled_row(repeats, seed)] if repeats else []
    if found != set(facts):
        differing = ", ".join(f"{cell} repeat {repeat}" for cell, repeat in sorted(found ^ set(facts)))
        raise RunError(f"rows and facts are not of the same cells: {differing}")
    return _frame(rows)


def sort_cells(summary: pd.DataFrame) -> pd.DataFrame:
    """`summary` with its cells ordered by their factors, "no limit" last, and pooled rows after repeats."""
    by = [*FACTORS[1:], "admission", "cell_id", "repeat"]
    return summary.sort_values(by, key=admission_places, na_position="last", kind="stable", ignore_index=True)


def admission_places(column: pd.Series[Any]) -> pd.Series[Any]:
    """For `sort_values(key=...)`: of the column `admission` the places of its limits, others as they are."""
    if column.name != "admission":
        return column
    limits = sorted(column.unique(), key=lambda text: parse_admission(text).place)
    return column.map({limit: place for place, limit in enumerate(limits)})


def pooled(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows that speak of all repeats of a cell."""
    return summary.loc[summary["repeat"].isna()]


def samples_of(derived: pd.DataFrame) -> Samples:
    """What the latencies of one cell and repeat (rows of `records.derive`) are taken from."""
    completed = (derived["outcome"] == Outcome.COMPLETED).to_numpy(dtype=bool)
    cut = warm_up(derived)
    return _samples(derived, completed, np.ones(len(derived), dtype=bool) if cut is None else cut[1])


def limit_label(admission: str) -> str:
    """What tables and figures call a limit: "64", "tokens 4096" or "no limit"."""
    return parse_admission(admission).label


def factor_text(factor: str, value: float) -> str:
    """A factor other than the limit in the words of the tables: "prompt tokens 32", "requests/s 2.5"."""
    return f"{FACTOR_NAMES[factor]} {int(value) if value == int(value) else f'{value:g}'}"


def _repeats_needed(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """How many repeats a question about p99 TTFT needs: each side of a comparison with another such cell.

    None where fewer than 2 repeats, or a p99 of 0, say nothing of how repeats differ, and for a simulation: it is
    compared exactly, request by request.
    """
    measured = [row["p99_ttft_ms"] for row in rows if not math.isnan(row["p99_ttft_ms"])]
    if rows[0]["target"] == "sim" or len(measured) < 2 or min(measured) <= 0:
        return None
    return max(fewest_repeats(0.95, paired=True), repeats_needed(measured, measured, paired=False))


def _repeat(
    derived: pd.DataFrame, known: CellFacts, max_error_share: float, goals: Sequence[Goal]
) -> _Repeat:
    reasons = check_cell(derived, known, max_error_share=max_error_share)
    count = derived["outcome"].value_counts()
    completed = (derived["outcome"] == Outcome.COMPLETED).to_numpy(dtype=bool)
    duration_s = float(derived["received_last_s"].max() - derived["sent_s"].min())
    cut = warm_up(derived)
    warmup, kept = cut or (None, np.ones(len(derived), dtype=bool))
    recoveries = recoveries_s(derive(derived, ["retry_wait_s", "queue_wait_s"]))
    after_start_s = np.empty(0)
    if derived["arrival"].iloc[0] == CLOSED and known.max_concurrency is not None:
        later = completed & (derived["request_index"] >= known.max_concurrency).to_numpy(dtype=bool)
        after_start_s = _measured(derived, "ttft", later)
    row = {
        "started_utc": known.started_utc,
        "valid": not reasons,
        "invalid_reasons": "; ".join(reasons) or None,
        "offered": known.offered,
        "admitted": None if known.peak_inflight is None else int(derived["reserved_s"].notna().sum()),
        "attempts": int(derived["attempts"].sum()),
        **{str(outcome): int(count.get(str(outcome), 0)) for outcome in Outcome},
        "good": int(np.count_nonzero(met(derived, goals))) if goals else None,
        "duration_s": duration_s if duration_s > 0 else np.nan,
        "client_busy_share_max_100ms": known.client_busy_share_max_100ms,
        "client_longest_turn_ms": _ms(known.client_longest_turn_s),
        "client_p99_read_lag_ms": _ms(known.client_p99_read_lag_s),
        "peak_inflight": known.peak_inflight,
        "inflight_integral_s": known.inflight_integral_s,
        "tokens_out": float(np.nansum(derived["output_tokens"].to_numpy(dtype=np.float64)[completed])),
        **_steadiness([warmup] if warmup is not None and completed.any() else []),
    }
    samples = _samples(derived, completed, kept)
    row |= {**_rates(row), **_latencies(samples), **_pooled_raw(recoveries, after_start_s)}
    return _Repeat(row, samples, recoveries, after_start_s)


def _pooled_row(repeats: Sequence[_Repeat], seed: int) -> dict[str, Any]:
    rows = [repeat.row for repeat in repeats]
    samples = [repeat.samples for repeat in repeats]
    together = samples[0]
    if len(samples) > 1:
        together = {metric: np.concatenate([sample[metric] for sample in samples]) for metric in METRICS}
    summed = (
        "offered",
        "admitted",
        "attempts",
        *[str(outcome) for outcome in Outcome],
        "inflight_integral_s",
        "tokens_out",
    )
    is_measured = rows[0]["peak_inflight"] is not None
    warm_ups = [WarmUp(row["warmup_cut"], row["steady"]) for row in rows if row["steady"] is not None]
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
        **{name: None if rows[0][name] is None else sum(row[name] for row in rows) for name in summed},
        "good": None if rows[0]["good"] is None else sum(row["good"] for row in rows),
        # Each repeat has a clock of its own. One in which nothing was received has no duration.
        "duration_s": float(np.nansum([row["duration_s"] for row in rows])) or np.nan,
        **{
            name: max((row[name] for row in rows if row[name] is not None), default=None)
            for name in _CLIENT_LOAD
        },
        "peak_inflight": max(row["peak_inflight"] for row in rows) if is_measured else None,
        **_steadiness(warm_ups),
        "repeats_needed": _repeats_needed(rows),
    }
    raw = _pooled_raw(
        np.concatenate([repeat.recoveries_s for repeat in repeats]),
        np.concatenate([repeat.ttft_after_start_s for repeat in repeats]),
    )
    return {**row, **raw, **_rates(row), **_latencies(together), **_intervals(samples, seed)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _rates(row: Mapping[str, Any]) -> dict[str, float]:
    """Nothing completed is no throughput: null, not 0. Nor is there one where the clock cannot tell the duration."""
    is_known = row["completed"] and row["duration_s"] >= SHORTEST_S
    duration_s = row["duration_s"] if is_known else np.nan
    offered = row["offered"] or np.nan
    good = np.nan if row["good"] is None else row["good"]
    integral_s = np.nan if row["inflight_integral_s"] is None else row["inflight_integral_s"]
    return {
        "reject_rate": row["rejected"] / offered,
        "error_rate": (row["error"] + row["timeout"] + row["incomplete"]) / offered,
        "unserved_rate": (row["offered"] - row["completed"]) / offered,
        "good_share": good / offered,
        "request_goodput": good / duration_s,
        "request_throughput": row["completed"] / duration_s,
        "output_throughput": row["tokens_out"] / duration_s,
        "mean_inflight": integral_s / row["duration_s"],
        "amplification": row["attempts"] / offered,
    }


def _steadiness(warm_ups: Sequence[WarmUp]) -> dict[str, Any]:
    if not warm_ups:
        return {"warmup_cut": None, "steady": None}
    return {
        "warmup_cut": sum(one.cut for one in warm_ups),
        "steady": all(one.steady for one in warm_ups),
    }


def _pooled_raw(recoveries: NDArray[np.float64], after_start_s: NDArray[np.float64]) -> dict[str, float]:
    return {
        "n_recovery": recoveries.size,
        "recovery_s": percentile(recoveries, 50),
        "n_ttft_after_start": after_start_s.size,
        "p99_ttft_after_start_ms": 1e3 * percentile(after_start_s, 99),
    }


def _samples(derived: pd.DataFrame, completed: NDArray[np.bool_], kept: NDArray[np.bool_]) -> Samples:
    done = completed & kept
    pooled_gaps = {"itl": "token_times_s", "chunk_gap": "chunk_times_s"}
    return {
        metric: gaps_s(derived[pooled_gaps[metric]][done])
        if metric in pooled_gaps
        else _measured(derived, metric, done if metric in COMPLETED_METRICS else kept)
        for metric in METRICS
    }


def _measured(derived: pd.DataFrame, metric: str, rows: NDArray[np.bool_]) -> NDArray[np.float64]:
    name = f"{metric}_s"
    # A metric at a time: of a million requests all of them together are large.
    source = derived if name in derived else derive(derived, [name])
    values: NDArray[np.float64] = source[name].to_numpy(dtype=np.float64)[rows]
    return values[~np.isnan(values)]


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


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Through arrow, so that the frame is the one that its reader gets back from the file."""
    columns = [
        pa.array([row.get(field.name) for row in rows], type=field.type, from_pandas=True)
        for field in SUMMARY_SCHEMA
    ]
    frame: pd.DataFrame = pa.Table.from_arrays(columns, schema=SUMMARY_SCHEMA).to_pandas()
    return frame
