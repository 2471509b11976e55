"""What `run` prints of one cell and repeat: the report of the streaming benchmark that this project grew from."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.goals import met, parse_goal
from roseinfer.bench.records import Outcome, derive, gaps_s
from roseinfer.bench.report import OF_ITSELF, PERCENTILES
from roseinfer.bench.stats import percentile, percentile_label
from roseinfer.bench.steady_state import warm_up

MOST_KINDS: Final = 5
"""Of errors, that are named."""


def burst_report(requests: pd.DataFrame, experiment: Experiment, model: str, device: str) -> str:
    """One cell and repeat in the lines of the streaming benchmark that this project grew from.

    Below them, where they have something to say: what the warm-up cut left out of the latencies, and goodput.
    """
    options = experiment.options
    rows = derive(requests)
    is_remote = experiment.is_http
    refused = rows["outcome"] == Outcome.REJECTED
    accepted = rows[rows["sent_s"].notna() & ~refused if is_remote else rows["reserved_s"].notna()]
    cut = warm_up(rows)
    counted = rows if cut is None else rows[cut[1]]
    completed = rows[rows["outcome"] == Outcome.COMPLETED]
    done = counted[counted["outcome"] == Outcome.COMPLETED]
    duration_s = rows["received_last_s"].max() - rows["sent_s"].min()
    tokens = int(completed["output_tokens"].sum())
    throughput = f"{tokens / duration_s:.2f}" if tokens and duration_s > 0 else "n/a"
    lines = [
        "=== streaming benchmark ===",
        f"Model: {model}",
        f"Device: {device}",
        *(
            [f"API: {options.api}", f"Retry: {options.retry}"]
            if is_remote
            else [
                f"Pretok: {options.pretok}",
                f"Tokenize workers: {experiment.tokenize_workers}",
                "Paged attention: False",
                "CUDA Graph: False",
                "NVTX: False",
            ]
        ),
        f"Requests: {len(accepted)}",
        f"Rejected: {refused.sum()}",
        *_other_ends(rows),
        f"Prompt tokens (total): {int(accepted['prompt_tokens'].sum())}",
        f"Completion tokens (total): {int(accepted['output_tokens'].sum())}",
        *(_remote_stages if is_remote else _stages)(rows, counted, done),
        _percentiles("TTFT", done["ttft_s"]),
        _percentiles("TPOT", done["tpot_s"], unit="ms/token"),
        _percentiles("Chunk gap", pd.Series(gaps_s(done["chunk_times_s"])))
        if is_remote
        else _percentiles("ITL", pd.Series(gaps_s(done["token_times_s"]))),
        _percentiles("Latency", done["e2el_s"]),
        f"Throughput (completion,total): {throughput} tokens/s",
    ]
    if cut is not None:
        found = cut[0]
        lines.append(
            f"Warm-up cut (MSER-5): {found.cut} of {len(completed)}{'' if found.steady else ', no steady part found'}"
        )
    if experiment.goals:
        good = int(np.count_nonzero(met(rows, [parse_goal(goal) for goal in experiment.goals])))
        share = f"{100 * good / len(rows):.1f} % of {len(rows)} offered"
        lines.append(f"Goodput ({' '.join(experiment.goals)}): {good} requests, {share}")
    return "\n".join(lines)


def _stages(rows: pd.DataFrame, counted: pd.DataFrame, done: pd.DataFrame) -> list[str]:
    returned_s = rows["admitted_s"].fillna(rows["rejected_s"])
    return [
        f"Submit wall: {returned_s.max() - rows['sent_s'].min():.6f} s",
        _percentiles("add_request latency", counted["add_request_s"], decimals=4),
        _percentiles("reject latency", counted["reject_s"], decimals=4),
        _percentiles("Tokenize", done["tokenize_s"]),
        _percentiles("Queue wait (post-tok)", done["queue_wait_s"]),
        _percentiles("Prefill->first token", done["prefill_s"]),
    ]


def _remote_stages(rows: pd.DataFrame, counted: pd.DataFrame, done: pd.DataFrame) -> list[str]:
    """What a client sees of them, and what the server says of itself, if it does."""
    return [
        f"Send wall: {rows['sent_s'].max() - rows['sent_s'].min():.6f} s",
        _percentiles("Send lag", counted["send_lag_s"]),
        _percentiles("reject latency", counted["reject_s"]),
        *[
            _percentiles(f"Server's own {name}", done[f"{metric}_s"])
            for metric, name in OF_ITSELF.items()
            if done[f"{metric}_s"].notna().any()
        ],
        _percentiles("TTFT from sending", done["ttft_from_send_s"]),
    ]


def _other_ends(rows: pd.DataFrame) -> list[str]:
    """How many ended in another way, and of the errors what they were."""
    lines = []
    for outcome in (Outcome.ERROR, Outcome.TIMEOUT, Outcome.CANCELLED, Outcome.INCOMPLETE):
        ended = rows.loc[rows["outcome"] == outcome, "error"]
        if len(ended):
            kinds = ended.dropna().str.split(": ").str[0].value_counts().head(MOST_KINDS)
            named = ", ".join(f"{kind} x {n}" for kind, n in kinds.items())
            lines.append(f"{outcome.capitalize()}: {len(ended)}{f' ({named})' if named else ''}")
    return lines


def _percentiles(label: str, values_s: pd.Series[float], *, decimals: int = 2, unit: str = "ms") -> str:
    values_ms = 1e3 * values_s.dropna().to_numpy(dtype=np.float64)
    if not values_ms.size:
        return f"{label} p50/p95/p99: n/a"
    names = "/".join(percentile_label(p, values_ms.size) for p in PERCENTILES)
    figures = "/".join(f"{percentile(values_ms, p):.{decimals}f}" for p in PERCENTILES)
    return f"{label} {names}: {figures} {unit}"
