"""What a run prints: the seed's report of one burst, the table of a sweep, and what it says in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.records import FACTORS, Outcome, derive, token_gaps_s
from roseinfer.bench.stats import percentile, percentile_label, ratio_interval
from roseinfer.bench.summary import limit_label, pooled
from roseinfer.bench.validity import slots_freed_during_burst

PERCENTILES: Final = (50, 95, 99)
FACTOR_NAMES: Final = {"burst_size": "burst", "prompt_len": "prompt tokens", "output_len": "new tokens"}
METRIC_NAMES: Final = {"queue_wait": "queue wait", "ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL"}
TABLE_WIDTH: Final = 100
BUSY_LOAD_PER_CORE: Final = 1.5

Line = tuple[str, list[str]]
"""A label and a figure per limit."""


def burst_report(requests: pd.DataFrame, experiment: Experiment, device: str) -> str:
    """One cell and repeat in the lines of the streaming benchmark that this project grew from."""
    options = experiment.options
    rows = derive(requests)
    accepted = rows[rows["reserved_s"].notna()]
    done = rows[rows["outcome"] == Outcome.COMPLETED]
    returned_s = rows["admitted_s"].fillna(rows["rejected_s"])
    duration_s = rows["received_last_s"].max() - rows["sent_s"].min()
    tokens = int(done["output_tokens"].sum())
    lines = [
        "=== streaming benchmark ===",
        f"Model: {experiment.model_name}",
        f"Device: {device}",
        f"Pretok: {options.pretok}",
        f"Tokenize workers: {experiment.tokenize_workers}",
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


def tables(summary: pd.DataFrame, width: int = TABLE_WIDTH) -> Iterator[str]:
    """A table per combination of the other factors, a column per limit, pooled over repeats.

    Limits that do not fit into `width` characters go on in a table below.
    """
    others = [factor for factor in FACTORS if factor != "max_inflight"]
    for _, cells in pooled(summary).groupby(others, dropna=False, sort=True):
        first = cells.iloc[0]
        factors = [f"{FACTOR_NAMES[o]} {int(first[o])}" for o in others if not pd.isna(first[o])]
        limits = [limit_label(limit) for limit in cells["max_inflight"]]
        lines = [("max inflight", limits), *_lines(cells.to_dict("records"))]
        repeats = _spread([int(count) for count in cells["repeats"]])
        note = f"Pooled over {repeats} repeats. Intervals are 95 %, from resampling whole repeats."
        yield "\n".join([", ".join(factors), *_layout(lines, width), note])


def _layout(lines: list[Line], width: int) -> Iterator[str]:
    """Columns side by side, as many as fit, and the rest below."""
    label_width = max(len(label) for label, _ in lines)
    widths = [
        max(map(len, column)) for column in zip(*(figures for _, figures in lines if figures), strict=True)
    ]
    first = 0
    while first < len(widths):
        last = first + 1
        while last < len(widths) and label_width + sum(w + 2 for w in widths[first : last + 1]) <= width:
            last += 1
        for number, (label, figures) in enumerate(lines):
            cells = zip(figures[first:last], widths[first:last], strict=False)
            yield (label.ljust(label_width) + "".join("  " + figure.rjust(w) for figure, w in cells)).rstrip()
            if number == 0:
                yield "-" * (label_width + sum(w + 2 for w in widths[first:last]))
        first = last
        if first < len(widths):
            yield ""


def _lines(cells: list[dict[Any, Any]]) -> Iterator[Line]:
    """A line without figures is the heading of those below it."""
    yield "offered", [_count(c["offered"]) for c in cells]
    yield "completed (n)", [_count(c["completed"]) for c in cells]
    yield "rejected", [_count(c["rejected"]) for c in cells]
    yield "reject rate", [f"{100 * c['reject_rate']:.1f} %" for c in cells]
    for outcome in ("error", "timeout", "cancelled", "incomplete"):
        if any(c[outcome] for c in cells):
            yield outcome, [_count(c[outcome]) for c in cells]
    for metric, name in METRIC_NAMES.items():
        yield from _metric_lines(cells, metric, name)
    yield "reject p99 (ms)", [_percentile_of(c, "reject", 99, decimals=4) for c in cells]
    yield "throughput (tokens/s)", [_number(c["output_throughput"]) for c in cells]
    yield "throughput (requests/s)", [_number(c["request_throughput"]) for c in cells]


def _metric_lines(cells: list[dict[Any, Any]], metric: str, name: str) -> Iterator[Line]:
    if not any(c[f"n_{metric}"] for c in cells):
        yield f"{name} (ms)", ["n/a"] * len(cells)
        return
    yield f"{name} (ms)", []
    if any(c[f"n_{metric}"] != c["completed"] for c in cells):
        yield "  n", [_count(c[f"n_{metric}"]) for c in cells]
    for p in PERCENTILES:
        yield f"  p{p}", [_percentile_of(c, metric, p) for c in cells]
    yield "  p99, interval", [_bounds(c, f"p99_{metric}_ms") for c in cells]
    if metric == "ttft":
        yield "  p99 of a repeat, median", [_number(c["median_p99_ttft_ms"]) for c in cells]
        yield "  p99 of a repeat, interval", [_bounds(c, "median_p99_ttft_ms") for c in cells]


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

    Compared is with the loosest limit of the same cells, repeat by repeat: these had the same requests.
    """
    others = [factor for factor in FACTORS if factor != "max_inflight"]
    varied = [factor for factor in others if summary[factor].nunique() > 1]
    sentences = []
    for _, cells in summary.groupby(others, dropna=False, sort=True):
        totals = pooled(cells).sort_values("max_inflight", na_position="last").to_dict("records")
        for total in totals[:-1]:
            where = ", ".join(f"{FACTOR_NAMES[factor]} {int(total[factor])}" for factor in varied)
            sentences.append(
                (f"At {where}: with " if where else "With ") + _conclusion(cells, total, totals[-1])
            )
    return sentences


def _conclusion(cells: pd.DataFrame, total: dict[Any, Any], loosest: dict[Any, Any]) -> str:
    limits = (
        f"max inflight {limit_label(total['max_inflight'])} instead of {limit_label(loosest['max_inflight'])}"
    )
    throughput = (
        f"throughput went from {_number(loosest['output_throughput'])}"
        f" to {_number(total['output_throughput'])} tokens/s{_paired_ratio(cells, total, loosest)}"
    )
    tails = [
        f"p99 {METRIC_NAMES[metric]} from {_tail(loosest, metric)} to {_tail(total, metric)} ms"
        for metric in ("queue_wait", "ttft")
    ]
    price = f"{_count(total['rejected'])} of {_count(total['offered'])} requests refused"
    if total["rejected"]:
        price += f", p99 of a refusal {_tail(total, 'reject', 4)} ms"
    return f"{limits}, {', '.join([throughput, *tails])}; the price: {price}."


def _tail(cell: dict[Any, Any], metric: str, decimals: int = 2) -> str:
    """The p99, and what else it is where the sample is small: 65.04 (max of 12)."""
    n = int(cell[f"n_{metric}"])
    figure = _number(cell[f"p99_{metric}_ms"], decimals)
    return figure if percentile_label(99, n) in ("p99", "n/a") else f"{figure} (max of {n})"


def _paired_ratio(cells: pd.DataFrame, total: dict[Any, Any], loosest: dict[Any, Any]) -> str:
    """How throughput changed within repeats, in brackets; "" where no repeat has both."""
    by_repeat = cells.dropna(subset=["repeat"]).pivot(
        index="repeat", columns="cell_id", values="output_throughput"
    )
    pairs = by_repeat[[total["cell_id"], loosest["cell_id"]]].dropna()
    if pairs.empty:
        return ""
    ratio = ratio_interval(pairs[total["cell_id"]], pairs[loosest["cell_id"]])
    return f" (x{ratio.point:.3f}, 95 % {_interval(ratio.lo, ratio.hi, 3)} over {len(pairs)} paired repeats)"


def slots_freed_lines(requests: pd.DataFrame) -> list[str]:
    """For each cell whose refusals do not follow from the limit alone, how many slots came free meanwhile.

    These are the bursts larger than their limit during which a slot came free: the burst law does not judge them.
    """
    lines = []
    limited = requests[requests["burst_size"] > requests["max_inflight"]]
    for cell_id, cell in limited.groupby("cell_id", sort=False):
        freed = [slots_freed_during_burst(burst) or 0 for _, burst in cell.groupby("repeat")]
        if any(freed):
            lines.append(
                f"Note: {cell_id}: {_spread(freed)} slots came free while a burst was being sent,"
                " so more than the limit may have been admitted."
            )
    return lines


def invalid_lines(summary: pd.DataFrame) -> list[str]:
    """Why cells are invalid, a line each, with the reasons of the first such repeat."""
    repeats = summary[summary["repeat"].notna()]
    lines = []
    for cell_id, cell in repeats.groupby("cell_id", sort=False):
        bad = cell[~cell["valid"].astype(bool)]
        if len(bad):
            first = bad.iloc[0]
            lines.append(
                f"INVALID: {cell_id}: {len(bad)} of {len(cell)} repeats, the first is"
                f" repeat {int(first['repeat']) + 1}: {first['invalid_reasons']}"
            )
    return lines


def load_lines(manifest: Mapping[str, Any]) -> list[str]:
    """A warning where the machine was busy with something else when the run began."""
    environment = manifest["environment"]
    load, cores = environment["load_average"][0], environment["cores_usable"]
    if load <= BUSY_LOAD_PER_CORE * cores:
        return []
    return [
        f"Warning: load average {load:g} at the start on {cores} usable cores: other work may have slowed this run"
    ]


def model_name(manifest: Mapping[str, Any]) -> str:
    """What computed, in a few words, from a run's manifest."""
    model = manifest["model"]
    return f"{model['model']} ({model['parameters'] / 1e6:.0f} M, {model['weights']}, {model['dtype']})"


def machine_name(manifest: Mapping[str, Any]) -> str:
    """What it computed on, in a few words, from a run's manifest."""
    model, environment = manifest["model"], manifest["environment"]
    threads = "1 thread" if model["num_threads"] == 1 else f"{model['num_threads']} threads"
    return f"{model['device_name']}, {threads} on {environment['cores_usable']} cores"


def _spread(counts: list[int]) -> str:
    """One number where they are the same, else from the least to the most."""
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


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
