"""What a run prints: the table of a sweep, and what it says in a sentence."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from roseinfer.admission_spec import parse_admission
from roseinfer.bench.explain import explain, explain_sentence
from roseinfer.bench.load import CLOSED
from roseinfer.bench.pacing import slots_freed_during_burst
from roseinfer.bench.ratios import paired_ratio
from roseinfer.bench.records import FACTORS, HTTP, cached_share
from roseinfer.bench.stats import percentile_label, smallest_sample, trusted_sample
from roseinfer.bench.steady_state import OPEN_LOOP
from roseinfer.bench.summary import factor_text, limit_label, pooled, sort_cells

PERCENTILES: Final = (50, 95, 99)
METRIC_NAMES: Final = {"queue_wait": "queue wait", "ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL"}
OF_ITSELF: Final = {"server_queue": "queue", "server_prefill": "prefill"}
"""Durations that a remote server may say of itself."""

OTHERS: Final = FACTORS[1:]
TABLE_WIDTH: Final = 100
NARROWEST: Final = 40
BUSY_LOAD_PER_CORE: Final = 1.5
BUSY_CLIENT: Final = 0.8
"""Share of the time of the one thread that sends to a server and reads what it answers."""

HELD_BACK: Final = 0.05
"""Share of the p99 by which the two clocks must differ to be worth a line."""
FEW_REPEATS: Final = 10
"""Under so many the bootstrap of a p99 covers far less than 95 %: so few do not show how far runs can lie apart."""

Line = tuple[str, list[str]]
"""A label and a figure per limit."""


def tables(summary: pd.DataFrame, width: int = TABLE_WIDTH) -> Iterator[str]:
    """A table per combination of the other factors, a column per limit, pooled over repeats, and notes below it.

    Limits that do not fit into `width` characters go on in a table below.
    """
    each = summary.loc[summary["repeat"].notna() & (summary["n_ttft"] > 0)].groupby("cell_id")["n_ttft"]
    totals = pooled(summary)
    totals = totals.assign(
        **{f"{which}_n": totals["cell_id"].map(each.agg(which)) for which in ("min", "max")}
    )
    for _, cells in totals.groupby(list(OTHERS), dropna=False, sort=True):
        records = cells.to_dict("records")
        lines = [limits_line(cells["admission"]), *_lines(records)]
        yield "\n".join([heading(cells.iloc[0]), *layout(lines, width), *wrapped(_notes(records), width)])


def limits_line(admissions: Iterable[str]) -> Line:
    """Numbers alone where all limits are of requests, else every limit as it is typed."""
    limits = list(admissions)
    if not all(parse_admission(limit).is_count_alone for limit in limits):
        return "admission", limits
    return "max inflight", [limit_label(limit) for limit in limits]


def heading(cell: pd.Series[Any]) -> str:
    factors = [factor_text(factor, cell[factor]) for factor in OTHERS if not pd.isna(cell[factor])]
    arrival = "closed loop" if cell["arrival"] == CLOSED else f"{cell['arrival']} arrivals"
    return ", ".join(factors if cell["arrival"] == "burst" else [arrival, *factors])


def wrapped(notes: Iterable[str], width: int) -> Iterator[str]:
    for note in notes:
        yield from textwrap.wrap(note, max(width, NARROWEST), subsequent_indent="  ")


def _notes(cells: list[dict[Any, Any]]) -> Iterator[str]:
    counts = [int(cell["repeats"]) for cell in cells]
    yield f"Pooled over {_spread(counts)} repeat{'' if set(counts) == {1} else 's'}."
    if max(counts) > 1:
        much_less = f", under {FEW_REPEATS} repeats far less" if min(counts) < FEW_REPEATS else ""
        yield (
            "p99, interval: 95 % by resampling whole repeats. It never ends above the slowest request seen, so it"
            f" covers less than 95 %{much_less}."
        )
        yield "p99 of a repeat, interval: at least 95 %, by rank; it is about the median over repeats."
    if any(map(_client_held_back, cells)):
        yield (
            "TTFT counts from the schedule; from sending it leaves out the time for which the client itself held"
            " requests back, which their users would have waited too."
        )
    if any(not pd.isna(cell["repeats_needed"]) for cell in cells):
        yield "Repeats to compare: on each side, for +15 % in p99 TTFT to be told from +10 % nine times in ten."
    empty = [limit_label(cell["admission"]) for cell in cells if not cell["completed"]]
    if empty:
        yield f"NOTHING COMPLETED at limit {', '.join(empty)}: there is no latency and no throughput."
    enough = trusted_sample(99)
    few = [limit_label(cell["admission"]) for cell in cells if 0 < cell["n_ttft"] < enough]
    if few:
        yield (
            f"Warning: under {enough} requests behind p99 TTFT at limit {', '.join(few)}: more than once in 20"
            " the true p99 lies above all that was seen."
        )


def layout(lines: list[Line], width: int) -> Iterator[str]:
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
    yield "reject rate", [percent(c["reject_rate"]) for c in cells]
    for outcome in ("error", "timeout", "cancelled", "incomplete"):
        if any(c[outcome] for c in cells):
            yield outcome, [_count(c[outcome]) for c in cells]
    if any(not pd.isna(c["good"]) for c in cells):
        yield "good (within the goals)", [_count(c["good"]) for c in cells]
        yield "goodput, share of offered", [percent(c["good_share"]) for c in cells]
        yield "goodput (requests/s)", [_number(c["request_goodput"]) for c in cells]
    if any(not pd.isna(c["warmup_cut"]) for c in cells):
        yield "warm-up cut (MSER-5)", [_warm_up(c) for c in cells]
    if any(c["attempts"] > c["offered"] for c in cells):
        yield "tries", [_count(c["attempts"]) for c in cells]
        yield "tries per request", [_number(c["amplification"]) for c in cells]
        yield "never succeeded", [percent(c["unserved_rate"]) for c in cells]
        for p in (50, 99):
            times_ms = [percentile_of(c, "time_to_success", p) for c in cells]
            yield f"time to success p{p} (ms)", times_ms
    is_remote = all(pd.isna(c["peak_inflight"]) for c in cells)
    for metric, name in METRIC_NAMES.items():
        if not (is_remote and metric == "queue_wait"):
            yield from _metric_lines(cells, metric, name)
    for metric, name in OF_ITSELF.items():
        if any(c[f"n_{metric}"] for c in cells):
            yield f"{name} p99, server's own (ms)", [percentile_of(c, metric, 99) for c in cells]
    if is_remote and any(c["n_chunk_gap"] for c in cells):
        yield (
            "largest gap of chunks (ms)",
            [_with_n(_number(c["max_chunk_gap_ms"]), c["n_chunk_gap"]) for c in cells],
        )
    if any(c["n_largest_itl"] for c in cells):
        yield "largest gap of tokens (ms)", [_with_n(_number(c["max_itl_ms"]), c["n_itl"]) for c in cells]
    yield "reject p99 (ms)", [percentile_of(c, "reject", 99, decimals=4) for c in cells]
    if any(c["n_time_to_drop"] for c in cells):
        yield "dropped from the queue", [_count(c["n_time_to_drop"]) for c in cells]
        for p in (50, 99):
            yield f"time to drop p{p} (ms)", [percentile_of(c, "time_to_drop", p) for c in cells]
    for failure in ("error", "timeout"):
        if any(c[f"n_time_to_{failure}"] for c in cells):
            yield f"time to {failure} p99 (ms)", [percentile_of(c, f"time_to_{failure}", 99) for c in cells]
    if any(c["arrival"] in OPEN_LOOP and not pd.isna(c["burst_size"]) for c in cells):
        yield "recovery from a burst (s)", [_with_n(_recovery(c), c["n_recovery"]) for c in cells]
    yield "throughput (tokens/s)", [_number(c["output_throughput"]) for c in cells]
    yield "throughput (requests/s)", [_number(c["request_throughput"]) for c in cells]


def _metric_lines(cells: list[dict[Any, Any]], metric: str, name: str) -> Iterator[Line]:
    """The percentiles of the admitted, never without what was refused and what share of the offered was served."""
    if not any(c[f"n_{metric}"] for c in cells):
        yield f"{name} (ms)", ["n/a"] * len(cells)
        return
    yield f"{name} (ms)", []
    yield "  n, repeats", [f"{_count(c[f'n_{metric}'])}, {_count(c['repeats'])}" for c in cells]
    for p in PERCENTILES:
        yield f"  p{p}", [percentile_of(c, metric, p) for c in cells]
    yield "  p99, interval", [_bounds(c, f"p99_{metric}_ms") for c in cells]
    if metric == "ttft":
        if any(map(_client_held_back, cells)):
            yield "  p99 from sending", [percentile_of(c, "ttft_from_send", 99) for c in cells]
        yield "  p99 of a repeat, median", [_of_a_repeat(c) for c in cells]
        yield "  p99 of a repeat, interval", [_bounds(c, "median_p99_ttft_ms") for c in cells]
        if any(c["n_ttft_after_start"] for c in cells):
            yield "  n after the start", [_count(c["n_ttft_after_start"]) for c in cells]
            yield "  p99 after the start", [percentile_of(c, "ttft_after_start", 99) for c in cells]
        if any(not pd.isna(c["repeats_needed"]) for c in cells):
            yield "  repeats to compare", [_number(c["repeats_needed"], 0) for c in cells]
    share = "served" if all(pd.isna(c["good"]) for c in cells) else "good"
    yield (
        f"  refused, {share}",
        [f"{percent(c['reject_rate'])}, {percent(_served_share(c))}" for c in cells],
    )


def _client_held_back(cell: dict[Any, Any]) -> bool:
    """The clock that starts at the schedule and the one that starts at the sending tell different stories."""
    return bool(cell["p99_ttft_from_send_ms"] < (1 - HELD_BACK) * cell["p99_ttft_ms"])


def _served_share(cell: dict[Any, Any]) -> float:
    """Of the offered requests: served within the goals, or, where there are none, served."""
    good = cell["completed"] if pd.isna(cell["good"]) else cell["good"]
    return float(good / cell["offered"]) if cell["offered"] else np.nan


def _warm_up(cell: dict[Any, Any]) -> str:
    if pd.isna(cell["warmup_cut"]):
        return "n/a"
    return _count(cell["warmup_cut"]) if cell["steady"] else f"{_count(cell['warmup_cut'])}, not steady"


def percentile_of(cell: dict[Any, Any], metric: str, p: int, decimals: int = 2) -> str:
    n = int(cell[f"n_{metric}"])
    if n == 0:
        return "n/a"
    figure = _number(cell[f"p{p}_{metric}_ms"], decimals)
    label = percentile_label(p, n)
    return figure if label == f"p{p}" else f"{label} {figure}"


def _of_a_repeat(cell: dict[Any, Any]) -> str:
    """The median of the p99s of the repeats; where repeats are small it is one of their maxima, and says so."""
    figure, enough = _number(cell["median_p99_ttft_ms"]), smallest_sample(99)
    if pd.isna(cell["min_n"]) or cell["min_n"] >= enough:
        return figure
    least_to_most = _spread([int(cell["min_n"]), int(cell["max_n"])])
    return f"{'max' if cell['max_n'] < enough else 'max or p99'} (n={least_to_most}) {figure}"


def _recovery(cell: dict[Any, Any]) -> str:
    return "never" if np.isinf(cell["recovery_s"]) else _number(cell["recovery_s"])


def _with_n(figure: str, n: float) -> str:
    return figure if figure == "n/a" else f"{figure} (n={int(n)})"


def _bounds(cell: dict[Any, Any], name: str) -> str:
    if pd.isna(cell[name]):
        return "n/a"
    return _interval(cell[f"{name}_lo"], cell[f"{name}_hi"])


def conclusions(summary: pd.DataFrame) -> list[str]:
    """For each limit a sentence: what it did to throughput and to the p99s, and at what price in refusals.

    Compared is with the loosest limit of the same cells (no limit, or the last in the table), repeat by repeat: these
    had the same requests.
    """
    varied = [factor for factor in OTHERS if summary[factor].nunique() > 1]
    sentences = []
    for _, cells in summary.groupby(list(OTHERS), dropna=False, sort=True):
        totals = sort_cells(pooled(cells)).to_dict("records")
        for total in totals[:-1]:
            where = ", ".join(factor_text(factor, total[factor]) for factor in varied)
            sentences.append(
                (f"At {where}: with " if where else "With ") + _conclusion(cells, total, totals[-1])
            )
    return sentences


def _conclusion(cells: pd.DataFrame, total: dict[Any, Any], loosest: dict[Any, Any]) -> str:
    tight, loose = parse_admission(total["admission"]), parse_admission(loosest["admission"])
    if tight.is_count_alone and loose.is_count_alone:
        limits = f"max inflight {tight.label} instead of {loose.label}"
    else:
        limits = f"admission {tight} instead of {loose}"
    throughput = (
        f"throughput went from {_number(loosest['output_throughput'])}"
        f" to {_number(total['output_throughput'])} tokens/s{_paired_ratio(cells, total, loosest)}"
    )
    tails = [
        f"p99 {METRIC_NAMES[metric]} from {_tail(loosest, metric)} to {_tail(total, metric)} ms"
        for metric in ("queue_wait", "ttft")
        if metric == "ttft" or loosest[f"n_{metric}"] or total[f"n_{metric}"]
    ]
    price = f"{_count(total['rejected'])} of {_count(total['offered'])} requests refused"
    if total["timeout"]:
        price += f", {_count(total['timeout'])} timed out"
    if total["n_reject"]:
        price += f", p99 of a refusal {_tail(total, 'reject', 4)} ms"
    if total["attempts"] > total["offered"]:
        price += f", {_number(total['amplification'])} tries per request"
    if not pd.isna(total["good"]):
        shares = [percent(_served_share(cell)) for cell in (loosest, total)]
        price += f"; served within the goals: {' to '.join(shares)} of the offered"
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
    ratio = paired_ratio(pairs[total["cell_id"]], pairs[loosest["cell_id"]])
    return f" (x{ratio.point:.3f}, 95 % {_interval(ratio.lo, ratio.hi, 3)} over {len(pairs)} paired repeats)"


def explain_lines(requests: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
    """For each cell a sentence on what its p99 TTFT was made of, from raw rows; a server does not say it."""
    if (requests["target"] == HTTP).all():
        return []
    return [
        f"p99 explained: {row['cell_id']}: {explain_sentence(row)}."
        for _, row in explain(requests, steps).iterrows()
    ]


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


def cached_lines(requests: pd.DataFrame) -> list[str]:
    """For each cell that found something in a prefix cache, what share of its prompt tokens that was."""
    lines = []
    for cell_id, cell in requests.groupby("cell_id", sort=False):
        share = cached_share(cell)
        if share:
            lines.append(f"Prefix cache: {cell_id}: {percent(share)} of the prompt tokens were in it.")
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
    """A warning where the machine was busy with something else when the run began. A simulated run knows no machine."""
    environment = manifest["environment"]
    load, cores = environment["load_average"][0], environment["cores_usable"]
    if manifest.get("target") == "sim" or load <= BUSY_LOAD_PER_CORE * cores:
        return []
    return [
        f"Warning: load average {load:g} at the start on {cores} usable cores: other work may have slowed this run"
    ]


def client_lines(facts: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[str]:
    """For each cell whose client was busy most of the time, when the server may not be what was slow, or sent again."""
    busiest: dict[str, float] = {}
    longest_s: dict[str, float] = {}
    resent: dict[str, int] = {}
    for (cell_id, _), known in facts.items():
        client = known.get("client") or {}
        # Of its busiest tenth of a second: what waited then waited, however idle the rest was.
        busiest[cell_id] = max(busiest.get(cell_id, 0.0), client.get("busy_share_max_100ms", 0.0))
        longest_s[cell_id] = max(longest_s.get(cell_id, 0.0), client.get("longest_turn_s", 0.0))
        resent[cell_id] = resent.get(cell_id, 0) + client.get("resent", 0)
    return [
        f"Warning: {cell_id}: the client was busy for {100 * share:.0f} % of its busiest 100 ms, and did not look for"
        f" what came for up to {1e3 * longest_s[cell_id]:.1f} ms: its own queue is in the latencies of then"
        " (--client-workers)"
        for cell_id, share in busiest.items()
        if share > BUSY_CLIENT
    ] + [
        f"{cell_id}: {n} {'requests were' if n > 1 else 'request was'} sent again: the server closed an idle connection"
        " as it went out"
        for cell_id, n in resent.items()
        if n
    ]


def model_name(manifest: Mapping[str, Any]) -> str:
    """What computed, in a few words, from a run's manifest; what it does not hold (of a simulation) is left out."""
    model = manifest["model"]
    parameters = model.get("parameters")
    weights = model.get("weights")
    facts = [
        None if parameters is None else f"{parameters / 1e6:.0f} M",
        "no weights" if weights == "none" else weights,
        "float16 weights" if model.get("dtype") == "float16" else model.get("dtype"),
    ]
    known = ", ".join(fact for fact in facts if fact)
    return f"{model['model']} ({known})" if known else str(model["model"])


def machine_name(manifest: Mapping[str, Any]) -> str:
    """What it computed on, in a few words, from a run's manifest."""
    model, environment = manifest["model"], manifest["environment"]
    device, threads = model.get("device_name") or model["device"], model.get("num_threads")
    if threads is None:
        return str(device)
    named = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{device}, {named} on {environment['cores_usable']} cores"


def _spread(counts: list[int]) -> str:
    """One number where they are the same, else from the least to the most."""
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def _count(value: float) -> str:
    return str(int(value))


def _number(value: float, decimals: int = 2) -> str:
    return "n/a" if pd.isna(value) else f"{value:.{decimals}f}"


def percent(share: float) -> str:
    """Only a true 0 or 1 reads 0 or 100 %."""
    if np.isnan(share):
        return "n/a"
    if 0 < share < 0.0005 or 0.9995 <= share < 1:
        return "< 0.1 %" if share < 0.5 else "> 99.9 %"
    return f"{100 * share:.1f} %"


def _interval(lo: float, hi: float, decimals: int = 2) -> str:
    """Bounds; "unbounded" where the repeats cannot give one."""
    if not np.isfinite(lo) and not np.isfinite(hi):
        return "unbounded"
    return f"[{_bound(lo, decimals)}, {_bound(hi, decimals)}]"


def _bound(value: float, decimals: int) -> str:
    return "unbounded" if not np.isfinite(value) else f"{value:.{decimals}f}"
