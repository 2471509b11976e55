"""What a run prints: the seed's report of one burst, the table of a sweep, and what it says in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from roseinfer.bench.options import Experiment
from roseinfer.bench.records import FACTORS, Outcome, derive, token_gaps_s
from roseinfer.bench.stats import Interval, percentile, percentile_label, ratio_interval
from roseinfer.bench.summary import limit_label, pooled

PERCENTILES: Final = (50, 95, 99)
NAMES: Final = {"burst_size": "burst", "prompt_len": "prompt tokens", "output_len": "new tokens"}


def burst_report(requests: pd.DataFrame, experiment: Experiment, device: str) -> str:
    """One cell and repeat in the lines of the streaming benchmark that this project grew from."""
    options = experiment.options
    rows = derive(requests)
    accepted = rows[rows["reserved_s"].notna()]
    done = rows[rows["outcome"] == Outcome.COMPLETED]
    returned_s = rows["admitted_s"].fillna(rows["rejected_s"])
    duration_s = done["received_last_s"].max() - rows["sent_s"].min()
    tokens = int(done["output_tokens"].sum())
    lines = [
        "=== streaming benchmark ===",
        f"Model: {options.model}",
        f"Device: {device}",
        f"Pretok: {options.pretok}",
        f"Tokenize workers: {options.tokenize_workers}",
        "Paged attention: False",
        "CUDA Graph: False",
        "NVTX: False",
        f"Requests: {len(accepted)}",
        f"Rejected: {(rows['outcome'] == Outcome.REJECTED).sum()}",
        f"Prompt tokens (total): {int(accepted['prompt_tokens'].sum())}",
        f"Completion tokens (total): {int(accepted['output_tokens'].sum())}",
        f"Submit wall: {returned_s.max() - rows['sent_s'].min():.6f} s",
        _percentiles("add_request latency", rows["add_request_s"], decimals=4),
        _percentiles("reject latency", rows["reject_s"], decimals=4),
        _percentiles("Tokenize", done["tokenize_s"]),
        _percentiles("Queue wait (post-tok)", done["queue_wait_s"]),
        _percentiles("Prefill->first token", done["prefill_s"]),
        _percentiles("TTFT", done["ttft_s"]),
        _percentiles("TPOT", done["tpot_s"], unit="ms/token"),
        _percentiles("ITL", pd.Series(token_gaps_s(done["token_times_s"]))),
        _percentiles("Latency", done["e2el_s"]),
        f"Throughput (completion,total): {_number(tokens / duration_s if tokens else np.nan)} tokens/s",
    ]
    return "\n".join(lines)


def _percentiles(label: str, values_s: pd.Series[float], *, decimals: int = 2, unit: str = "ms") -> str:
    values_ms = 1e3 * values_s.dropna().to_numpy(dtype=np.float64)
    if not values_ms.size:
        return f"{label} p50/p95/p99: n/a"
    names = "/".join(percentile_label(p, values_ms.size) for p in PERCENTILES)
    figures = "/".join(f"{percentile(values_ms, p):.{decimals}f}" for p in PERCENTILES)
    return f"{label} {names}: {figures} {unit}"


def tables(summary: pd.DataFrame) -> Iterator[Table]:
    """A table per combination of the other factors, a column per limit, pooled over repeats."""
    others = [factor for factor in FACTORS if factor != "max_inflight"]
    for key, cells in pooled(summary).groupby(others, dropna=False, sort=True):
        factors = ", ".join(f"{NAMES[o]} {int(v)}" for o, v in zip(others, key, strict=True) if not pd.isna(v))
        table = Table(title=factors, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("max inflight", no_wrap=True)
        for limit in cells["max_inflight"]:
            table.add_column(limit_label(limit), justify="right", no_wrap=True)
        for label, figures in _lines(cells.to_dict("records")):
            table.add_row(label, *figures)
        yield table


def _lines(cells: list[dict[Any, Any]]) -> Iterator[tuple[str, list[str]]]:
    yield "repeats", [_count(c["repeats"]) for c in cells]
    yield "offered", [_count(c["offered"]) for c in cells]
    yield "completed", [_count(c["completed"]) for c in cells]
    yield "rejected", [f"{_count(c['rejected'])} ({100 * c['reject_rate']:.1f} %)" for c in cells]
    for outcome in ("error", "timeout", "cancelled", "incomplete"):
        if any(c[outcome] for c in cells):
            yield outcome, [_count(c[outcome]) for c in cells]
    for metric, name in {"queue_wait": "queue wait", "ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL"}.items():
        for p in PERCENTILES:
            yield f"{name} p{p} (ms)", [_percentile_of(c, metric, p) for c in cells]
        if any(np.isfinite(c[f"p99_{metric}_ms"]) for c in cells):
            yield "  95 % interval of it", [_bounds(c, f"p99_{metric}_ms") for c in cells]
        if metric == "ttft":
            yield "  median over bursts of p99", [_number(c["median_p99_ttft_ms"]) for c in cells]
            yield "  95 % interval of it", [_bounds(c, "median_p99_ttft_ms") for c in cells]
    yield "reject p99 (ms)", [_percentile_of(c, "reject", 99, decimals=4) for c in cells]
    yield "throughput (tokens/s)", [_number(c["output_throughput"]) for c in cells]
    yield "throughput (requests/s)", [_number(c["request_throughput"]) for c in cells]


def _percentile_of(cell: dict[Any, Any], metric: str, p: int, decimals: int = 2) -> str:
    n = int(cell[f"n_{metric}"])
    if n == 0:
        return "n/a"
    figure = _number(cell[f"p{p}_{metric}_ms"], decimals)
    label = percentile_label(p, n)
    return figure if label == f"p{p}" else f"{label} {figure}"


def _bounds(cell: dict[Any, Any], name: str) -> str:
    if pd.isna(cell[name]):
        return "n/a"
    return _interval(cell[f"{name}_lo"], cell[f"{name}_hi"])


def conclusions(summary: pd.DataFrame) -> list[str]:
    """For each limit a sentence: what it did to throughput and to the p99s, and at what price in refusals.

    Compared is with the loosest limit of the same cells, burst by burst where the bursts are the same.
    """
    others = [factor for factor in FACTORS if factor != "max_inflight"]
    sentences = []
    for _, cells in summary.groupby(others, dropna=False, sort=True):
        totals = pooled(cells).sort_values("max_inflight", na_position="last").to_dict("records")
        varied = [o for o in others if summary[o].nunique() > 1]
        for total in totals[:-1]:
            where = "".join(f"{NAMES[o]} {int(total[o])}, " for o in varied)
            sentences.append(where + _conclusion(cells, total, totals[-1]))
    return sentences


def _conclusion(cells: pd.DataFrame, total: dict[Any, Any], loosest: dict[Any, Any]) -> str:
    ratio = _throughput_ratio(cells, total["cell_id"], loosest["cell_id"])
    loose_name = limit_label(loosest["max_inflight"])
    with_limit = f"With max inflight {limit_label(total['max_inflight'])} instead of {loose_name}"
    changes = ", ".join(
        f"{_p99_name(total, loosest, metric)} {name} from {_number(loosest[column])} to {_number(total[column])} ms"
        for metric, name in (("queue_wait", "queue wait"), ("ttft", "TTFT"))
        for column in [f"p99_{metric}_ms"]
    )
    price = f"{_count(total['rejected'])} of {_count(total['offered'])} requests refused"
    if total["rejected"]:
        label = percentile_label(99, int(total["n_reject"]))
        price += f" in {_number(total['p99_reject_ms'], 4)} ms ({label})"
    return (
        f"{with_limit}, throughput went from {_number(loosest['output_throughput'])} to"
        f" {_number(total['output_throughput'])} tokens/s (x{ratio.point:.3f}, 95 % {_interval(ratio.lo, ratio.hi, 3)},"
        f" {_count(total['repeats'])} paired bursts), {changes}; the price: {price}."
    )


def _throughput_ratio(cells: pd.DataFrame, cell_id: str, loosest_id: str) -> Interval:
    by_repeat = cells.dropna(subset=["repeat"]).pivot(index="repeat", columns="cell_id", values="output_throughput")
    pairs = by_repeat[[cell_id, loosest_id]].dropna()
    return ratio_interval(pairs[cell_id], pairs[loosest_id])


def _p99_name(total: dict[Any, Any], loosest: dict[Any, Any], metric: str) -> str:
    names = {percentile_label(99, int(cell[f"n_{metric}"])) for cell in (total, loosest)}
    return "p99" if names == {"p99"} else "p99 (of few)"


def invalid_lines(summary: pd.DataFrame) -> list[str]:
    """Why cells are invalid, a line each."""
    bad = summary[summary["repeat"].notna() & ~summary["valid"].astype(bool)]
    return [f"INVALID {c.cell_id} repeat {int(c.repeat)}: {c.invalid_reasons}" for c in bad.itertuples()]


def model_name(manifest: Mapping[str, Any]) -> str:
    """What computed, in a few words, from a run's manifest."""
    model = manifest["model"]
    return f"{model['model']} ({model['parameters'] / 1e6:.0f} M, {model['weights']}, {model['dtype']})"


def machine_name(manifest: Mapping[str, Any]) -> str:
    """What it computed on, in a few words, from a run's manifest."""
    model, environment = manifest["model"], manifest["environment"]
    return f"{model['device_name']}, {model['num_threads']} threads of {environment['cores_usable']} cores"


def _count(value: float) -> str:
    return str(int(value))


def _number(value: float, decimals: int = 2) -> str:
    return "n/a" if pd.isna(value) else f"{value:.{decimals}f}"


def _interval(lo: float, hi: float, decimals: int = 2) -> str:
    """Bounds; "unbounded" where the repeats cannot give one."""
    if not np.isfinite(lo) and not np.isfinite(hi):
        return "unbounded"
    return f"[{_bound(lo, decimals)}, {_bound(hi, decimals)}]"


def _bound(value: float, decimals: int) -> str:
    return "unbounded" if not np.isfinite(value) else f"{value:.{decimals}f}"
