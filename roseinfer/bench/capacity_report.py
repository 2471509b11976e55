"""What `capacity` prints: every probe in a table, the answer in plain words, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roseinfer.bench.bracket import Edge
from roseinfer.bench.capacity import NO_LIMIT, LimitSearch, RateSearch
from roseinfer.bench.probe import WORDS, Probe
from roseinfer.bench.recommend import Slo
from roseinfer.bench.recommend_report import (
    about_intervals,
    bounds_json,
    finite,
    percentile_cells,
    percentile_columns,
    percentiles_json,
)
from roseinfer.bench.verdicts import Row, aligned, number_text

Search = RateSearch | LimitSearch


def goal_text(slos: Sequence[Slo], max_reject_rate: float) -> str:
    """What has to be kept."""
    bounds = " and ".join(str(slo) for slo in slos)
    return f"{bounds} with at most {100 * max_reject_rate:g} % not served"


def lines(searches: Sequence[Search], goal: str, *, is_complete: bool) -> list[str]:
    """The table of all probes, what was measured and what simulated, and the answer of the last search."""
    probes = [probe for search in searches for probe in search.every]
    if not probes:
        return ["Nothing is known yet."]
    columns = ["probe", *percentile_columns(judgement.slo for judgement in probes[0].judgements)]
    columns += ["not served", "completed/s", "verdict"]
    table = aligned(columns, [_row(probe) for probe in probes])
    simulated, long = (sum(getattr(p, kind) for p in probes) for kind in ("is_simulated", "is_long"))
    counts = f"{len(probes) - simulated} probes were measured"
    counts += f", {long} of them at length" if long else ""
    counts += f", {simulated} were simulated." if simulated else "."
    if simulated == len(probes):
        counts = f"All {simulated} probes were simulated."
    is_unconfirmed = searches[-1].is_answered and not (simulated == len(probes) or probes[-1].is_long)
    repeats = min(len(probe.offered) for probe in probes)
    return [
        *table,
        f"Note: not served: refused, timed out or failed, of the offered; {about_intervals(repeats)}",
        "",
        *([] if is_complete else ["What is known so far:"]),
        *searches[-1].sentences(goal),
        *(["Not confirmed at length."] if is_unconfirmed else []),
        counts,
        f"Runs: {probes[-1].folder.parent}",
    ]


def _row(probe: Probe) -> Row:
    cells = [probe.name, *percentile_cells(probe.judgements)]
    cells += [f"{100 * probe.not_served.point:.1f} %", number_text(probe.throughput)]
    cells.append(WORDS[probe.verdict] if probe.decides else "")
    return cells, "" if probe.invalid is None else f"INVALID: {probe.invalid}"


def to_json(searches: Sequence[Search], goal: str, *, is_complete: bool) -> dict[str, Any]:
    """As `lines`; unbounded, not known and no limit are null."""
    answer: dict[str, Any] = {"goal": goal, "complete": is_complete}
    if not searches:
        return {**answer, "decided": False, "sentences": [], "probes": []}
    last = searches[-1]
    answer["decided"] = last.is_decided
    if isinstance(last, RateSearch):
        answer["request_rate"] = _edge(last.edge)
        answer["possible"] = not last.is_impossible
    else:
        answer["smallest_limit"], answer["largest_limit"] = _edge(last.smallest), _edge(last.largest)
        answer["possible"] = last.largest.holds is not None
    answer["confirmed"] = last.prober.is_long and last.is_answered
    probes = [_probe(probe) for search in searches for probe in search.every]
    return {**answer, "sentences": last.sentences(goal), "probes": probes}


def _edge(edge: Edge) -> dict[str, Any]:
    return {name: "no limit" if value == NO_LIMIT else value for name, value in edge._asdict().items()}


def _probe(probe: Probe) -> dict[str, Any]:
    return {
        "probe": probe.name,
        "simulated": probe.is_simulated,
        "at_length": probe.is_long,
        "verdict": str(probe.verdict),
        "percentiles": percentiles_json(probe.judgements),
        "not_served": bounds_json(probe.not_served),
        "throughput": finite(probe.throughput),
        "invalid": probe.invalid,
        "run": str(probe.folder),
    }
