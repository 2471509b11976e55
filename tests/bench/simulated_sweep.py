"""A sweep without an engine: bursts at a server that works in batches, as the frames that a real run leaves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.records import REQUEST_SCHEMA
from roseinfer.bench.summary import sort_cells, summarise
from roseinfer.bench.validity import CellFacts

_BATCH = 8


def simulate(
    limits: Sequence[int | None] = (None, 16, 64),
    bursts: Sequence[int] = (128,),
    prompt_lens: Sequence[int] = (32,),
    repeats: int = 8,
    refuse_all: bool = False,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`(requests, summary)` of a sweep. Every burst meets an idle server; a slot comes free only after the burst."""
    rows: list[dict[str, Any]] = []
    facts: dict[tuple[str, int], CellFacts] = {}
    for repeat, burst, prompt_len, limit in product(range(repeats), bursts, prompt_lens, limits):
        rng = np.random.default_rng([repeat, burst, prompt_len, limit or 0])
        cell = f"inflight-{limit or 'none'}_burst-{burst}_prompt-{prompt_len}"
        admitted = 0 if refuse_all else min(burst, limit or burst)
        served = _served(rng, admitted, prompt_len)
        for index in range(burst):
            sent_s = 30e-6 * index
            factors = {
                "admission": str(AdmissionSpec(limit)),
                "max_inflight": limit,
                "burst_size": burst,
                "prompt_len": prompt_len,
                "output_len": 4,
                "arrival": "burst",
            }
            key = {"run_id": "run", "cell_id": cell, "repeat": repeat, "request_index": index}
            sent = {"scheduled_s": 0.0, "permitted_s": 0.0, "sent_s": sent_s}
            if index < admitted:
                fate = {
                    "outcome": "completed",
                    "reserved_s": sent_s + 5e-6,
                    "output_tokens": 4,
                    **served[index],
                }
            else:
                fate = {"outcome": "rejected", "rejected_s": sent_s + 9e-6, "reject_stage": "submit"}
            rows.append({**key, **factors, **sent, **fate})
        held_s = float(sum(done["released_s"] - 30e-6 * i - 5e-6 for i, done in enumerate(served)))
        facts[cell, repeat] = CellFacts(
            offered=burst,
            limit=limit,
            peak_inflight=admitted,
            inflight_integral_s=held_s,
            inflight_at_start=0,
            started_utc="2026-01-01T00:00:00Z",
        )
    table = pa.Table.from_pylist(rows, schema=REQUEST_SCHEMA)
    requests: pd.DataFrame = table.to_pandas()
    return requests, sort_cells(summarise(requests, facts))


def _served(rng: np.random.Generator, admitted: int, prompt_len: int) -> list[dict[str, float]]:
    """The stamps of the admitted requests: one tokeniser, then batches of 8 from first to last token."""
    drift = 1 + 0.05 * rng.standard_normal()
    tokenized_s = np.cumsum(rng.uniform(2e-4, 4e-4, admitted))
    stamps: list[dict[str, float]] = []
    free_s = 0.0
    for first in range(0, admitted, _BATCH):
        batch = range(first, min(first + _BATCH, admitted))
        start_s = max(free_s, tokenized_s[batch[-1]])
        token_s = start_s + drift * (0.01 + 2e-4 * prompt_len * len(batch)) * rng.uniform(0.97, 1.05)
        free_s = token_s + 3 * drift * 0.012 * rng.uniform(0.97, 1.05)
        done = {
            "first_scheduled_s": start_s,
            "first_token_s": token_s,
            "last_token_s": free_s,
            "finished_s": free_s,
            "received_first_s": token_s + 2e-4,
            "received_last_s": free_s + 2e-4,
            "released_s": free_s + 3e-4,
            "ended_s": free_s + 3e-4,
        }
        stamps += [{"tokenized_s": float(tokenized_s[index]), **done} for index in batch]
    return stamps


@cache
def simulated(limits: tuple[int | None, ...], flags: frozenset[tuple[str, Any]]) -> pd.DataFrame:
    return simulate(limits, **dict(flags))[1]


def sweep_summary(limits: tuple[int | None, ...] = (None, 16, 64), **flags: Any) -> pd.DataFrame:
    return simulated(limits, frozenset(flags.items())).copy()
