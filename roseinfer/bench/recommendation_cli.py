"""The commands that say what to set: `capacity` and `recommend`. The app of `roseinfer-bench` takes them in."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from roseinfer.bench.commands import with_flags
from roseinfer.bench.engine_sizes import (
    KvCacheTokens,
    MaxBatchSize,
    MaxModelLen,
    MaxNumBatchedTokens,
    engine_sizes,
)
from roseinfer.bench.load_options import decimal_option, whole_option
from roseinfer.bench.options import SWEPT, RunOptions, SweepOptions, flag, is_url
from roseinfer.bench.target_flags import (
    NOT_OF_SERVERS,
    OF_ENGINES,
    OF_SERVERS,
    engine_reads_cost_model,
)
from roseinfer.errors import InputError, RunError

if TYPE_CHECKING:
    from roseinfer.bench.capacity_report import Search
    from roseinfer.bench.predicted_limits import Prediction
    from roseinfer.bench.probe import Prober

recommendations: Final = typer.Typer()

EXIT_UNKNOWN, EXIT_INVALID, EXIT_NOTHING, EXIT_INTERRUPTED = 3, 4, 5, 130

DEFAULT_NUM_REQUESTS: Final = 200
"""Of a probe at a rate, in each repeat."""

AT_LENGTH: Final = "-at_length"
"""Ends the names of runs that confirm the answer."""

_GIVEN_LOADS: Final = ("request_rate", "load", "submit_interval_ms", "burst_size", "trace", "workload")
"""Fields that say how much load there is: then limits are searched, else rates."""

_NOT_SIMULATED: Final = ("prompt", "prompt_repeats", "prefix_len", "stop_at_eos")
"""Flags that change what a server does in a way that no simulation shows."""


@dataclass(frozen=True, kw_only=True)
class CapacityOptions(RunOptions):
    """What `capacity` takes beside the flags of `run`."""

    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="p99_ttft:250", help="What must hold, in ms; several must all hold."),
    ] = None
    max_reject_rate: Annotated[
        float,
        decimal_option(help="Share of the offered requests that may be refused, time out or fail."),
    ] = 0.05
    tolerance: Annotated[
        float, decimal_option(help="How close the two ends of the answer are to each other: 0.05 is 5 %.")
    ] = 0.05
    repeats: Annotated[
        int, whole_option("--repeats", "--repeat-runs", help="Times that each probe is measured.")
    ] = 8


@recommendations.command("capacity")
@with_flags(CapacityOptions)
def capacity(options: CapacityOptions, given: Collection[str]) -> None:
    """Find the largest request rate that keeps the SLOs or, at a given load (--request-rate, --burst-size, --trace),
    the limits that do.

    Every rate or limit that is tried is a run of its own; the same flags with its --run-id go on. On another target
    than sim the ends of the answer are measured once more, at length; with --cost-model a simulation proposes what to
    measure, of a server with the sizes that --max-batch-size and the like say.
    """
    from roseinfer.bench import capacity_report as report
    from roseinfer.bench.store import new_run_id

    _check(options)
    run_id = new_run_id(datetime.now(UTC)) if options.run_id is None else options.run_id
    is_at_given_load = options.arrival in ("burst", "trace") or any(field in given for field in _GIVEN_LOADS)
    probers = _probers(options, given, run_id, is_at_given_load)
    searches = _searches(probers, options.tolerance, is_at_given_load)
    goal = report.goal_text(probers[0].slos, options.max_reject_rate)

    def begun() -> list[Search]:
        return [search for search in searches if search.every]

    def tell(*, is_complete: bool) -> None:
        text = "\n".join(report.lines(begun(), goal, is_complete=is_complete))
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)
        if options.json:
            print(
                json.dumps(report.to_json(begun(), goal, is_complete=is_complete), indent=1, allow_nan=False)
            )

    try:
        for search in searches:
            if search.prober.is_long and search.proposal is not None and not search.proposal.is_answered:
                break  # there is nothing to confirm
            search.run()
    except KeyboardInterrupt:
        tell(is_complete=False)
        why = f"interrupted. To go on: the same command with --run-id {run_id}"
        print(f"roseinfer-bench: {why}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (InputError, RunError):
        tell(is_complete=False)
        raise
    tell(is_complete=True)
    last = begun()[-1]
    probes = last.every
    if not any(probe.completed for probe in probes):
        raise typer.Exit(EXIT_NOTHING)
    if any(probe.invalid for probe in probes):
        raise typer.Exit(EXIT_INVALID)
    if not last.is_decided:
        raise typer.Exit(EXIT_UNKNOWN)


def _check(o: CapacityOptions) -> None:
    """What no other flag has to do with."""
    for field in SWEPT:
        if "," in (getattr(o, field) or ""):
            raise InputError(flag(field), getattr(o, field), "capacity takes one value: lists are for sweep")
    if not o.slo:
        raise InputError("--slo", None, "is needed, such as p99_ttft:250")
    if not 0 <= o.max_reject_rate < 1:
        raise InputError("--max-reject-rate", o.max_reject_rate, "must lie in [0, 1)")
    if not 0 < o.tolerance <= 1:
        raise InputError("--tolerance", o.tolerance, "must lie in (0, 1]")
    if o.repeats < 2:
        raise InputError("--repeats", o.repeats, "one repeat gives no interval: at least 2")


def _probers(o: CapacityOptions, given: Collection[str], run_id: str, is_at_given_load: bool) -> list[Prober]:
    """What measures in short and at length, and before them, where a cost model is to propose, what simulates.

    All flags are checked here.
    """
    from roseinfer.bench.engine_bench import OneEngine
    from roseinfer.bench.probe import Prober, longer

    for field in ("max_inflight", "admission"):
        if is_at_given_load and field in given:
            raise InputError(flag(field), getattr(o, field), "is what is searched for at a given load")
    values = {field.name: getattr(o, field.name) for field in fields(RunOptions)}
    options = SweepOptions(**values, slo=o.slo)
    # A bar is worth seeing; a line a cell would hide the line a probe.
    is_silent = o.quiet or not sys.stderr.isatty()
    options = replace(options, experiment_name=o.experiment_name or "capacity", quiet=is_silent)
    at_a_rate = not is_at_given_load or o.request_rate is not None or o.load is not None
    if at_a_rate and o.num_requests is None and o.duration is None:
        options = replace(options, num_requests=DEFAULT_NUM_REQUESTS)
    named = {field for field in given if getattr(options, field, None) is not None} | {"num_requests"}
    kinds = {"": (options, named)}
    if o.target != "sim":
        kinds = {} if o.cost_model is None else {"-simulated": _simulated(options, named)}
        measured, named = kinds[""] = _measured(options, named)
        at_length = longer(measured, is_spaced=at_a_rate or o.burst_interval is not None)
        if at_length is not None:
            kinds[AT_LENGTH] = at_length, named
    one_engine = OneEngine()
    probers = [
        Prober(
            options,
            named,
            run_id=f"{run_id}{suffix}",
            max_not_served=o.max_reject_rate,
            say=partial(_say, quiet=o.quiet),
            bench_of=one_engine,
            is_long=suffix == AT_LENGTH,
        )
        for suffix, (options, named) in kinds.items()
    ]
    for prober in probers:
        prober.check({"max_inflight": "0,1"} if is_at_given_load else {"request_rate": "1"})
    return probers


def _simulated(options: SweepOptions, named: Collection[str]) -> tuple[SweepOptions, set[str]]:
    """The flags of the same load on a simulated engine, which knows neither texts nor servers."""
    for field in _NOT_SIMULATED:
        if field in named:
            why = f"contradicts --cost-model {options.cost_model}: no simulation shows what it does"
            raise InputError(flag(field), str(getattr(options, field)), why)
    left_out = {*OF_ENGINES, *OF_SERVERS, "target"}
    # What its text costs is asked of it all the same; as flags they would contradict it.
    is_text = {"pretok": options.pretok, "tokenize_workers": options.tokenize_workers}
    if is_url(options.target):
        is_text["pretok"] = options.tokenizer is not None and options.api == "completions"
    usual = _usual(left_out)
    return replace(options, **{**usual, **is_text, "target": "sim"}), (set(named) - left_out) | {"target"}


def _measured(options: SweepOptions, named: Collection[str]) -> tuple[SweepOptions, set[str]]:
    """The flags without what they say to the simulation alone."""
    if is_url(options.target):
        left_out = {"cost_model"}
        if options.cost_model is not None:
            left_out |= {*NOT_OF_SERVERS} - {*OF_ENGINES}
    else:
        left_out = set() if engine_reads_cost_model(options, named) else {"cost_model"}
    return replace(options, **_usual(left_out)), set(named) - left_out


def _usual(names: Collection[str]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(SweepOptions) if field.name in names}


def _searches(probers: list[Prober], tolerance: float, is_at_given_load: bool) -> list[Search]:
    """One for each prober; what the first finds is proposed to the second."""
    from roseinfer.bench.capacity import LimitSearch, RateSearch

    if is_at_given_load:
        limits = [LimitSearch(prober, tolerance) for prober in probers]
        for first, second in pairwise(limits):
            second.proposal = first
        return [*limits]
    rates = [RateSearch(prober, tolerance) for prober in probers]
    for before, after in pairwise(rates):
        after.proposal = before
    return [*rates]


def _say(line: str, *, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr, flush=True)


@recommendations.command("recommend")
def recommend(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a sweep over limits.")],
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="p99_ttft:250", help="What must hold, in ms; several must all hold. Default: the run's."
        ),
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also say what limits between those measured would have done, simulated."
        ),
    ] = None,
    max_batch_size: MaxBatchSize = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    kv_cache_tokens: KvCacheTokens = None,
    max_model_len: MaxModelLen = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead.")] = False,
) -> None:
    """Say which limit to set, on what evidence, at what price, and how sure that is."""
    from roseinfer.bench import recommend_report as report
    from roseinfer.bench.predicted_limits import predictions
    from roseinfer.bench.recommend import parse_slo
    from roseinfer.bench.recommend import recommend as recommended
    from roseinfer.bench.resimulate import cache_notes
    from roseinfer.bench.sides import Side
    from roseinfer.sim.cost_model import CostModel

    side = Side.open(run, "RUN")
    slos = [parse_slo(text) for text in slo or side.manifest["slos"]]
    if not slos:
        raise InputError("--slo", None, "is needed, such as p99_ttft:250: the run was measured without one")
    model = None if cost_model is None else CostModel.read(cost_model)
    sizes = engine_sizes(max_batch_size, max_num_batched_tokens, kv_cache_tokens, max_model_len)
    if sizes is not None and model is None:
        raise InputError("--max-batch-size", sizes.max_batch_size, "needs --cost-model, to predict with")
    if side.is_empty:
        raise InputError("RUN", str(run), "holds no finished cell: nothing was measured")
    if (reason := side.invalid_reason()) is not None:
        print(f"roseinfer-bench: INVALID: {side.name}: {reason}", file=sys.stderr)
        raise typer.Exit(EXIT_INVALID)
    seed = int(side.manifest["seed"])
    found = recommended(side.requests, side.summary, slos, seed=seed)
    predicted: list[Prediction | None] = [None] * len(found)
    if model is not None:
        predicted = [*predictions(side.folder, model, found, slos, seed=seed, sizes=sizes)]
    pairs = list(zip(found, predicted, strict=True))
    notes = [note for note in [side.unfinished()] if note is not None]
    if model is not None:
        notes += cache_notes(side.requests)
    if as_json:
        answers = [report.to_json(one, prediction) for one, prediction in pairs]
        print(
            json.dumps(
                {"run": side.name, "recommendations": answers, "notes": notes}, indent=1, allow_nan=False
            )
        )
        return
    text = ["\n".join(report.lines(one, prediction)) for one, prediction in pairs]
    print("\n\n".join(text))
    repeats = min(len(evidence.repeats) for one in found for evidence in one.evidence)
    for note in [*notes, f"{report.LEGEND}; {report.about_intervals(repeats)}"]:
        print(f"Note: {note}")
