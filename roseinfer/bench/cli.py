"""`roseinfer-bench`: the command line. Whatever is slow to import is imported when a command needs it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from roseinfer.bench.calibrate_cli import calibration
from roseinfer.bench.commands import with_flags
from roseinfer.bench.engine_sizes import (
    EngineSizes,
    KvCacheTokens,
    MaxBatchSize,
    MaxModelLen,
    MaxNumBatchedTokens,
    engine_sizes,
)
from roseinfer.bench.experiment import Experiment
from roseinfer.bench.gate_cli import gate
from roseinfer.bench.options import SWEPT, RunOptions, SweepOptions, flag, read_toml
from roseinfer.bench.recommendation_cli import recommendations
from roseinfer.bench.termination import Termination
from roseinfer.errors import InputError, RoseinferError

if TYPE_CHECKING:
    import pandas as pd

    from roseinfer.bench.session import Session
    from roseinfer.bench.store import RunFolder

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INVALID, EXIT_NOTHING, EXIT_INTERRUPTED, EXIT_TERMINATED = (
    *(1, 2, 4, 5),
    *(130, 143),  # as a shell counts the signals that ask for an end
)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="What does an admission limit do to the tail latency of an LLM server, and which limit should I set?",
)

_NOT_KEPT = {"target": "URL", "target_cmd": "CMD"}
"""What a run keeps only a part of, besides paths, and what stands there."""


@app.command("run")
@with_flags(RunOptions)
def run(options: RunOptions, given: Collection[str]) -> None:
    """Measure one cell, and print the report of each repeat."""
    for field in SWEPT:
        if "," in (getattr(options, field) or ""):
            raise InputError(
                flag(field), getattr(options, field), "run measures one cell: lists are for sweep"
            )
    experiment = Experiment.from_options(options, given)
    _finish(_session(experiment, "run"), reports=True)


@app.command("sweep")
@with_flags(SweepOptions)
def sweep(options: SweepOptions, given: Collection[str]) -> None:
    """Measure every combination of limits, burst sizes and lengths, and say what the limit did."""
    values = {name: getattr(options, name) for name in given}
    if options.resume is not None:
        for field in ("file", "output_dir", "experiment_name", "run_id", "metadata"):
            if field in given:
                value = str(values[field]) if isinstance(values[field], Path) else values[field]
                why = "contradicts --resume, which goes on with a run as it is"
                raise InputError("EXPERIMENT.toml" if field == "file" else flag(field), value, why)
        values = {**_saved_options(options.resume, given), **values}
    elif options.file is not None:
        values = {"experiment_name": options.file.stem, **read_toml(options.file), **values}
    options = replace(SweepOptions(), **values)
    experiment = Experiment.from_options(options, values.keys())
    session = _session(experiment, "sweep", resume=options.resume)
    if options.dry_run:
        print(json.dumps(session.plan(), indent=1) if options.json else "\n".join(session.plan()))
    else:
        _finish(session, reports=False)


@app.command("plot")
def plot(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Where the figures go. Default: RUN/figures.")
    ] = None,
    explain: Annotated[
        bool, typer.Option(help="Also draw what the p99 of TTFT is made of, and what it waited for.")
    ] = True,
    cost_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also simulate the run with this cost model, and draw and say how far off that is.",
        ),
    ] = None,
    max_batch_size: MaxBatchSize = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    kv_cache_tokens: KvCacheTokens = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Draw the figures of a run (PNG, SVG, and the CSV behind each)."""
    from roseinfer.bench.session import draw_figures
    from roseinfer.bench.store import RunFolder, check_writable

    if output_dir is not None:
        check_writable(output_dir)
    sizes = engine_sizes(max_batch_size, max_num_batched_tokens, kv_cache_tokens, max_model_len)
    if sizes is not None and cost_model is None:
        raise InputError("--max-batch-size", sizes.max_batch_size, "needs --cost-model, to predict with")
    folder = RunFolder.open(run)
    errors = None if cost_model is None else _prediction_errors(folder, cost_model, sizes)
    for path in draw_figures(folder, output_dir, explain=explain, prediction_errors=errors):
        print(path)


def _prediction_errors(folder: RunFolder, cost_model: Path, sizes: EngineSizes | None) -> pd.DataFrame:
    """Simulates a measured run, and says on stderr how far off that is: stdout has the names of files."""
    from roseinfer.bench.prediction import errors, verdict_lines
    from roseinfer.bench.resimulate import resimulated
    from roseinfer.sim.cost_model import CostModel

    simulated = resimulated(folder, CostModel.read(cost_model), sizes=sizes)
    found = errors(folder.finished_part().read_requests(), simulated.requests)
    for line in [*verdict_lines(found), *[f"Note: {note}" for note in simulated.notes]]:
        print(line, file=sys.stderr)
    return found


app.add_typer(gate)  # without a name: its commands are ours
app.add_typer(recommendations)
app.add_typer(calibration)


@app.command("doctor")
def doctor(
    model: Annotated[str, typer.Option(help="As for run.")] = "builtin:gpt2",
    device: Annotated[str, typer.Option(help="As for run.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for run.")] = "auto",
    num_threads: Annotated[int | None, typer.Option(help="As for run.")] = None,
) -> None:
    """Say what the engine would use here and why, and how near its ceilings it comes; the last line is JSON.

    Exit code 1 if two of the engine's paths give different tokens, or an attention kernel differs from SDPA.
    """
    from roseinfer.bench.doctor import examine, paths_differ
    from roseinfer.openmp import spin_briefly

    spin_briefly()
    found = examine(
        model, device=device, dtype=dtype, num_threads=num_threads, say=partial(print, flush=True)
    )
    print(json.dumps(found, allow_nan=False))
    if differ := paths_differ(found):
        raise typer.Exit(_say(f"these differ: {', '.join(differ)}", EXIT_FAILED))


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        print(f"roseinfer-bench {version('roseinfer')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 (its callback does it)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT)


def _saved_options(path: Path, given: Collection[str]) -> dict[str, Any]:
    """The fields that a run was started with."""
    from roseinfer.bench.session import unkept_files
    from roseinfer.bench.store import RunFolder

    saved = RunFolder.open(path, "--resume").manifest
    known = {field.name: field.default for field in fields(SweepOptions)}
    try:
        values = {name.replace("-", "_"): value for name, value in saved["configuration"].items()}
        values["slo"] = saved["slos"] or None
        values["goodput"] = saved.get("goodput") or None
        unkept = unkept_files(saved)
        names = {field: values[field] for field in unkept}
    except (KeyError, AttributeError, TypeError) as error:
        raise InputError("--resume", str(path), f"its run.json is not whole ({error})") from error
    if unknown := values.keys() - known.keys():
        raise InputError(
            "--resume", str(path), f"was made with flags unknown here: {', '.join(sorted(unknown))}"
        )
    if missing := [field for field in unkept if field not in given]:
        hosts = " and no hosts" if "target" in missing else ""
        made_with = " and ".join(f"{flag(field)} {names[field]}" for field in missing)
        again = " ".join(f"{flag(field)} {_NOT_KEPT.get(field, 'PATH')}" for field in missing)
        why = f"was made with {made_with}, and a run keeps no places of files{hosts}: add {again}"
        raise InputError("--resume", str(path), why)
    return {name: value for name, value in values.items() if value != known[name]}


def _session(experiment: Experiment, name: str, *, resume: Path | None = None) -> Session:
    from roseinfer.bench.session import Session

    return Session(experiment, default_name=name, resume=resume)


def _finish(session: Session, *, reports: bool) -> None:
    """Measures, prints, and ends with the exit code that the outcome has."""
    options = session.experiment.options
    out = sys.stderr if options.json else sys.stdout
    try:
        summary = session.measure()
        session.print_results(out, reports=reports)
        _print_json(session, is_interrupted=False)
        session.draw(out)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # nor does a second one wait for this
            if session.conclude_interrupted():
                session.print_results(out, reports=reports)
                _print_json(session, is_interrupted=True)
        raise typer.Exit(_say(session.interruption(), EXIT_INTERRUPTED)) from None
    if not summary["completed"].sum():
        raise typer.Exit(EXIT_NOTHING)
    if not summary["valid"].all():
        raise typer.Exit(EXIT_INVALID)


def _print_json(session: Session, *, is_interrupted: bool) -> None:
    """If it was asked for."""
    if session.experiment.options.json:
        text = json.dumps({"interrupted": is_interrupted, **_json(session)}, indent=1, allow_nan=False)
        print(text, flush=True)


def _json(session: Session) -> dict[str, Any]:
    import pyarrow as pa

    from roseinfer.bench.summary import SUMMARY_SCHEMA

    assert session.folder is not None
    rows = pa.Table.from_pandas(session.summary, schema=SUMMARY_SCHEMA, preserve_index=False).to_pylist()
    return {
        "run": str(session.folder.path),
        "valid": bool(session.summary["valid"].all()),
        "model": session.folder.manifest["model"],
        "summary": [_jsonable(row) for row in rows],
        "conclusions": session.conclusions,
        "recommendations": [
            {
                "factors": dict(one.factors),
                "qualifies": one.chosen is not None,
                "admission": None if one.chosen is None else one.chosen.limit,
                "max_inflight": None if one.chosen is None else one.chosen.max_inflight,
                "served_share": None if one.chosen is None else one.chosen.served_share,
                "sentence": one.sentence(),
            }
            for one in session.recommendations
        ],
    }


def _jsonable(row: dict[str, Any]) -> dict[str, Any]:
    """NaN and unbounded are null: JSON knows neither."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def main() -> None:
    """Entry point: one clear line for what went wrong, and the exit code that says what kind it is."""
    with Termination() as termination:
        code = _ended()
    sys.exit(EXIT_TERMINATED if termination.came and code == EXIT_INTERRUPTED else code)


def _ended() -> int | None:
    """Runs the command line; the exit code, None for a success."""
    code: int | None
    try:
        code = app(prog_name="roseinfer-bench", standalone_mode=False)
    except TyperException as error:
        code = _say(error.format_message(), EXIT_BAD_INPUT)
    except InputError as error:
        name = (
            flag(error.name) if error.name in {field.name for field in fields(SweepOptions)} else error.name
        )
        value = "" if error.value is None else f" {error.value!r}"
        code = _say(f"{name}{value}: {error.why}", EXIT_BAD_INPUT)
    except RoseinferError as error:
        code = _say(str(error), EXIT_FAILED)
    except OSError as error:
        code = _say(str(error), EXIT_FAILED)
    return code


def _say(message: str, code: int) -> int:
    print(f"roseinfer-bench: {' '.join(message.split())}", file=sys.stderr)
    return code
