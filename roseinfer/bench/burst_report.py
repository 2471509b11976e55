"""What `run` prints of one cell and repeat: the report of the streaming benchmark that this project grew from."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.goals import met, parse_goal
from roseinfer.bench.records import Outcome, derive, gaps_s
from roseinfer.bench.report import OF_ITSELF, PERCENTILES
from roseinfer.bench.retries import RetryPolicy
from roseinfer.bench.stats import percentile, percentile_label
from roseinfer.bench.steady_state import warm_up

MOST_KINDS: Final = 5
"""Of errors, that are named."""


def burst_report(requests: pd.DataFrame, experiment: Experiment, model: str, device: str) -> str:
    """One cell and repeat in the lines of the streaming benchmark that this project grew from.

    Below them, where they have something to say: what the warm-up cut left out of the latencies, and goodput.
    """
    options, retries = experiment.options, experiment.load.retries
    rows = requests
    goals = [parse_goal(goal) for goal in experiment.goals]
    is_remote = experiment.is_http
    refused = rows["outcome"] == Outcome.REJECTED
    accepted = rows["sent_s"].notna() & ~refused if is_remote else rows["reserved_s"].notna()
    cut = warm_up(derive(rows, ["ttft_s"]))
    completed = rows["outcome"] == Outcome.COMPLETED
    counted = pd.Series(True, index=rows.index) if cut is None else pd.Series(cut[1], index=rows.index)
    done = completed & counted
    duration_s = rows["received_last_s"].max() - rows["sent_s"].min()
    tokens = int(rows.loc[completed, "output_tokens"].sum())
    throughput = f"{tokens / duration_s:.2f}" if tokens and duration_s > 0 else "n/a"
    lines = [
        "=== streaming benchmark ===",
        f"Model: {model}",
        f"Device: {device}",
        *(
            [f"API: {options.api}"]
            if is_remote
            else [
                f"Pretok: {options.pretok}",
                f"Tokenize workers: {experiment.tokenize_workers}",
                "Paged attention: False",
                "CUDA Graph: False",
                "NVTX: False",
            ]
        ),
        *([f"Retry: {_policy_text(retries)}"] if is_remote or retries.is_on else []),
        f"Requests: {accepted.sum()}",
        f"Rejected: {refused.sum()}",
        *_other_ends(rows),
        *(_tries(rows, done) if retries.is_on else []),
        f"Prompt tokens (total): {int(rows.loc[accepted, 'prompt_tokens'].sum())}",
        f"Completion tokens (total): {int(rows.loc[accepted, 'output_tokens'].sum())}",
        *(_remote_stages if is_remote else _stages)(rows, counted, done),
        _percentiles("TTFT", _of(rows, "ttft_s", done)),
        _percentiles("TPOT", _of(rows, "tpot_s", done), unit="ms/token"),
        _percentiles("Chunk gap", pd.Series(gaps_s(rows.loc[done, "chunk_times_s"])))
        if is_remote
        else _percentiles("ITL", pd.Series(gaps_s(rows.loc[done, "token_times_s"]))),
        _percentiles("Latency", _of(rows, "e2el_s", done)),
        f"Throughput (completion,total): {throughput} tokens/s",
    ]
    if cut is not None:
        found = cut[0]
        lines.append(
            f"Warm-up cut (MSER-5): {found.cut} of {completed.sum()}{'' if found.steady else ', no steady part found'}"
        )
    if goals:
        judged = derive(rows, [f"{goal.metric}_s" for goal in goals])
        good = int(np.count_nonzero(met(judged, goals)))
        share = f"{100 * good / len(rows):.1f} % of {len(rows)} offered"
        lines.append(f"Goodput ({' '.join(experiment.goals)}): {good} requests, {share}")
    return "\n".join(lines)


def _of(rows: pd.DataFrame, name: str, which: pd.Series[bool]) -> pd.Series[float]:
    """A derived duration of some rows. One at a time: of a million requests all of them together are large."""
    values: pd.Series[float] = derive(rows, [name]).loc[which, name]
    return values


def _stages(rows: pd.DataFrame, counted: pd.Series[bool], done: pd.Series[bool]) -> list[str]:
    returned_s = rows["admitted_s"].fillna(rows["rejected_s"])
    return [
        f"Submit wall: {returned_s.max() - rows['sent_s'].min():.6f} s",
        _percentiles("add_request latency", _of(rows, "add_request_s", counted), decimals=4),
        _percentiles("reject latency", _of(rows, "reject_s", counted), decimals=4),
        _percentiles("Tokenize", _of(rows, "tokenize_s", done)),
        _percentiles("Queue wait (post-tok)", _of(rows, "queue_wait_s", done)),
        _percentiles("Prefill->first token", _of(rows, "prefill_s", done)),
    ]


def _remote_stages(rows: pd.DataFrame, counted: pd.Series[bool], done: pd.Series[bool]) -> list[str]:
    """What a client sees of them, and what the server says of itself, if it does."""
    return [
        f"Send wall: {rows['sent_s'].max() - rows['sent_s'].min():.6f} s",
        _percentiles("Send lag", _of(rows, "send_lag_s", counted)),
        _percentiles("reject latency", _of(rows, "reject_s", counted)),
        *[
            _percentiles(f"Server's own {name}", rows.loc[done, f"{metric}_s"])
            for metric, name in OF_ITSELF.items()
            if rows.loc[done, f"{metric}_s"].notna().any()
        ],
        _percentiles("TTFT from sending", _of(rows, "ttft_from_send_s", done)),
    ]


def _policy_text(policy: RetryPolicy) -> str:
    parts = [policy.name]
    if policy.budget is not None:
        parts.append(f"budget {policy.budget:g}")
    if policy.per_try_timeout_s is not None:
        parts.append(f"{policy.per_try_timeout_s:g} s a try")
    return ", ".join(parts)


def _tries(rows: pd.DataFrame, done: pd.Series[bool]) -> list[str]:
    n_tries, n = int(rows["attempts"].sum()), len(rows)
    never = n - int((rows["outcome"] == Outcome.COMPLETED).sum())
    return [
        f"Tries: {n_tries} ({n_tries / n:.2f} per request)",
        f"Never succeeded: {100 * never / n:.1f} % of {n} offered",
        _percentiles("Time to success", _of(rows, "time_to_success_s", done)),
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
