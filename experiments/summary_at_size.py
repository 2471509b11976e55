"""What the summary of a million requests costs: seconds, CPU seconds and peak memory, from the file to the table.

12 cells (3 rates, 4 limits) of 20 repeats, 4 tokens a request, open loop, refusals and two goals: all percentiles,
intervals of 2,000 draws, goodput, warm-up cut. Bars on 2 cores: 10 s and 1.5 GB. Each try is a process of its own.

    python experiments/summary_at_size.py
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roseinfer.bench.goals import parse_goal
from roseinfer.bench.records import REQUEST_SCHEMA, as_frame
from roseinfer.bench.summary import pooled, summarise
from roseinfer.bench.validity import CellFacts

RATES = (50.0, 80.0, 110.0)
LIMITS = (16, 32, 64, None)
REPEATS = 20
TOKENS = 4
TOKEN_GAP_S = 0.008
GOALS = ("ttft:250", "tpot:50")


def main() -> None:
    """Makes the rows once and measures in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        _measure(args.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requests.parquet"
        with pq.ParquetWriter(file, REQUEST_SCHEMA, compression="zstd") as writer:
            for table in _cells(args.requests):
                writer.write_table(table)
        print(f"{pq.read_metadata(file).num_rows} rows, {file.stat().st_size / 1e6:.0f} MB", flush=True)
        for _ in range(args.tries):
            subprocess.run([sys.executable, __file__, "--measure", str(file)], check=True)


def _measure(file: Path) -> None:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    with pq.ParquetFile(file) as source:
        requests = as_frame(source.read())
    read_s = time.perf_counter() - wall_s
    keys = requests[["cell_id", "repeat"]].drop_duplicates().itertuples(index=False, name=None)
    n = len(requests) // (len(RATES) * len(LIMITS) * REPEATS)
    facts = {key: _facts(n, key[0]) for key in keys}
    summary = summarise(requests, facts, goals=[parse_goal(goal) for goal in GOALS])
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        f"{wall_s:.1f} s ({read_s:.1f} s of it reading), CPU {cpu_s:.1f} s, peak memory {peak_gb:.2f} GB;"
        f" {len(summary)} rows, {int(pooled(summary)['good'].sum())} good",
        flush=True,
    )


def _facts(n: int, cell_id: str) -> CellFacts:
    limit = cell_id.partition("-")[0].removeprefix("inflight_")
    return CellFacts(
        offered=n,
        limit=None if limit == "none" else int(limit),
        peak_inflight=1,
        inflight_integral_s=0.0,  # not what the rows say: the cells are invalid, with its sentence to be made
        inflight_at_start=0,
        started_utc="2026-01-01T00:00:00+00:00",
    )


def _cells(requests: int) -> Iterator[pa.Table]:
    n = requests // (len(RATES) * len(LIMITS) * REPEATS)
    for (rate, limit), repeat in product(product(RATES, LIMITS), range(REPEATS)):
        rng = np.random.default_rng([int(rate), limit or 0, repeat])
        yield _cell(rng, n, rate, limit, repeat)


def _cell(rng: np.random.Generator, n: int, rate: float, limit: int | None, repeat: int) -> pa.Table:
    due_s = np.cumsum(rng.exponential(1 / rate, n))
    due_s -= due_s[0]
    refused = rng.random(n) < (0.0 if limit is None else 4 / limit)
    sent_s = due_s + rng.exponential(50e-6, n)
    reserved_s = sent_s + 5e-6
    scheduled_s = reserved_s + 1e-4 + rng.lognormal(np.log(0.05 * rate / 50), 0.8, n)
    first_s = scheduled_s + rng.lognormal(np.log(0.02), 0.2, n)
    times_s = first_s[:, None] + TOKEN_GAP_S * np.cumsum(rng.exponential(1, (n, TOKENS)), axis=1)
    first_s, last_s = times_s[:, 0], times_s[:, -1]
    served = {
        "reserved_s": reserved_s,
        "admitted_s": reserved_s + 2e-5,
        "tokenized_s": reserved_s + 1e-4,
        "first_scheduled_s": scheduled_s,
        "first_token_s": first_s,
        "last_token_s": last_s,
        "finished_s": last_s,
        "received_first_s": first_s + 2e-4,
        "received_last_s": last_s + 2e-4,
        "released_s": last_s + 3e-4,
    }
    columns: dict[str, Any] = {
        **{name: _where(~refused, stamps) for name, stamps in served.items()},
        "scheduled_s": due_s,
        "permitted_s": due_s,
        "sent_s": sent_s,
        "rejected_s": _where(refused, sent_s + 1e-5),
        "ended_s": np.where(refused, sent_s + 1e-5, last_s + 3e-4),
        "request_index": np.arange(n),
        "outcome": np.where(refused, "rejected", "completed"),
        "reject_stage": pa.array(np.full(n, "submit"), mask=~refused),
        "finish_reason": pa.array(np.full(n, "length"), mask=refused),
        "output_tokens": pa.array(np.full(n, TOKENS), mask=refused),
        "token_times_s": _lists(refused, times_s),
        "chunk_times_s": _lists(refused, times_s + 2e-4),
        "chunk_tokens": _lists(refused, np.ones((n, TOKENS), dtype=np.int64)),
    }
    constants = {
        "run_id": "at-size",
        "cell_id": f"inflight_{limit or 'none'}-prompt_32-output_{TOKENS}-rate_{rate:g}",
        "repeat": repeat,
        "target": "sim",
        "model": "none",
        "admission": "none" if limit is None else f"inflight:{limit}",
        "max_inflight": limit,
        "prompt_len": 32,
        "output_len": TOKENS,
        "arrival": "poisson",
        "request_rate": rate,
        "attempts": 1,
        "prompt_tokens": 32,
        "cached_tokens": 0,
    }
    arrays = [
        pa.array(columns[field.name], type=field.type)
        if field.name in columns
        else pa.repeat(pa.scalar(constants.get(field.name), field.type), n)
        for field in REQUEST_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=REQUEST_SCHEMA)


def _where(rows: NDArray[np.bool_], values: NDArray[np.float64]) -> pa.Array:
    return pa.array(values, mask=~rows)


def _lists(null: NDArray[np.bool_], values: NDArray[Any]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(np.where(null, 0, values.shape[1]))])
    return pa.ListArray.from_arrays(
        pa.array(offsets, type=pa.int32()), pa.array(values[~null].ravel()), mask=pa.array(null)
    )


if __name__ == "__main__":
    main()
