"""Rows of a made-up server whose every latency is known, and the facts that agree with them."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.goals import parse_goal
from roseinfer.bench.records import REQUEST_SCHEMA
from roseinfer.bench.summary import pooled, summarise
from roseinfer.bench.validity import CellFacts

SEND_GAP_S = 20e-6
SERVER_START_S = 0.010


def measured(
    *,
    burst_size: int = 8,
    limit: int | None = None,
    repeat: int = 0,
    service_s: float = 0.010,
    output_tokens: int = 3,
    token_gap_s: float = 0.001,
    prompt_len: int = 32,
    interval_s: float | None = None,
) -> pd.DataFrame:
    """One cell and repeat: request i of those admitted is served alone, the i-th, for `service_s`.

    A burst at time zero whose first `limit` requests get a slot, or, with `interval_s`, paced arrivals.
    TTFT of the i-th is SERVER_START_S + (i + 1) * service_s + 0.1 ms after time zero.
    """
    rows = []
    for i in range(burst_size):
        due_s = 0.0 if interval_s is None else i * interval_s
        sent_s = due_s + (i if interval_s is None else 1) * SEND_GAP_S
        row: dict[str, Any] = {
            "run_id": "run",
            "cell_id": f"limit={limit},prompt={prompt_len}",
            "repeat": repeat,
            "request_index": i,
            "target": "inprocess",
            "admission": str(AdmissionSpec(limit)),
            "max_inflight": limit,
            "burst_size": burst_size,
            "prompt_len": prompt_len,
            "output_len": output_tokens,
            "arrival": "burst" if interval_s is None else "constant",
            "scheduled_s": due_s,
            "permitted_s": due_s,
            "sent_s": sent_s,
            "attempts": 1,
        }
        if limit is not None and i >= limit:
            row |= {
                "rejected_s": sent_s + 4e-6,
                "ended_s": sent_s + 4e-6,
                "outcome": "rejected",
                "reject_stage": "submit",
            }
        else:
            scheduled_s = max(SERVER_START_S, sent_s + 1e-4) + i * service_s
            first_token_s = scheduled_s + service_s
            times_s = [first_token_s + k * token_gap_s for k in range(output_tokens)]
            row |= {
                "reserved_s": sent_s + 5e-6,
                "tokenized_s": sent_s + 6e-6,
                "admitted_s": sent_s + 10e-6,
                "first_scheduled_s": scheduled_s,
                "first_token_s": first_token_s,
                "last_token_s": times_s[-1],
                "finished_s": times_s[-1],
                "received_first_s": first_token_s + 1e-4,
                "received_last_s": times_s[-1] + 1e-4,
                "released_s": times_s[-1] + 2e-4,
                "ended_s": times_s[-1] + 2e-4,
                "outcome": "completed",
                "output_tokens": output_tokens,
                "token_times_s": times_s,
            }
        rows.append(row)
    return as_read(rows)


def as_read(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The frame that a reader gets of these rows from their parquet file."""
    frame: pd.DataFrame = pa.Table.from_pylist(rows, schema=REQUEST_SCHEMA).to_pandas()
    return frame


def facts_of(requests: pd.DataFrame) -> CellFacts:
    """The facts that a run without a fault would have recorded beside these rows."""
    limit = requests["max_inflight"].iloc[0]
    return CellFacts(
        offered=len(requests),
        limit=None if pd.isna(limit) else int(limit),
        peak_inflight=int(requests["reserved_s"].notna().sum()),
        inflight_integral_s=float((requests["released_s"] - requests["reserved_s"]).sum()),
        inflight_at_start=0,
        started_utc=f"2026-01-01T00:00:{int(requests['repeat'].iloc[0]):02d}+00:00",
    )


def facts_by_cell(requests: pd.DataFrame) -> dict[tuple[str, int], CellFacts]:
    """`facts_of` for every cell and repeat of `requests`."""
    return {
        (str(cell), repeat): facts_of(rows)
        for cell, repeats in requests.groupby("cell_id")
        for repeat, rows in (
            (r, repeats[repeats["repeat"] == r]) for r in map(int, repeats["repeat"].unique())
        )
    }


def with_goals(rows: pd.DataFrame, *goals: str) -> pd.DataFrame:
    return summarise(rows, facts_by_cell(rows), goals=[parse_goal(goal) for goal in goals])


def summary_of(*repeats: pd.DataFrame, goals: tuple[str, ...] = ()) -> pd.DataFrame:
    requests = pd.concat(repeats, ignore_index=True)
    return summarise(requests, facts_by_cell(requests), goals=[parse_goal(goal) for goal in goals])


def only(*repeats: pd.DataFrame, goals: tuple[str, ...] = ()) -> pd.Series[Any]:
    """The pooled row of a summary of one cell."""
    rows = pooled(summary_of(*repeats, goals=goals))
    assert len(rows) == 1
    return rows.iloc[0]
