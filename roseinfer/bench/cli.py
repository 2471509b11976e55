"""`roseinfer-bench`: the command line. Whatever is slow to import is imported when a command needs it."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from roseinfer.bench.options import Experiment, RunOptions, SweepOptions, flag, read_toml
from roseinfer.errors import InputError, RoseinferError

if TYPE_CHECKING:
    import pandas as pd

    from roseinfer.bench.session import Session

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_UNKNOWN, EXIT_INVALID, EXIT_NOTHING, EXIT_INTERRUPTED = (
    *range(6),
    130,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="What does an admission limit do to the tail latency of an LLM server, and which limit should I set?",
)

Options = TypeVar("Options", bound=RunOptions)


def _with_flags(kind: type[Options]) -> Callable[[Callable[[Options, Collection[str]], None]], Callable[..., None]]:
    """Makes a command out of a function of (options, names of the fields that the user set)."""

    def decorate(function: Callable[[Options, Collection[str]], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **values: Any) -> None:
            given = {name for name in values if (source := ctx.get_parameter_source(name)) and source.name != "DEFAULT"}
            function(kind(**values), given)

        hints = get_type_hints(kind, include_extras=True)
        parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in fields(kind)
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {"ctx": typer.Context, **hints}
        command.__doc__ = function.__doc__
        return command

    return decorate


@app.command("run")
@_with_flags(RunOptions)
def run(options: RunOptions, given: Collection[str]) -> None:
    """Measure one cell, and print the report of each burst."""
    experiment = Experiment.from_options(options, given)
    if len(experiment.cells) > 1:
        raise InputError(
            "run", ", ".join(cell.cell_id for cell in experiment.cells), "takes one cell: comma lists are for sweep"
        )
    _finish(_session(experiment, "run"), reports=True)


@app.command("sweep")
@_with_flags(SweepOptions)
def sweep(options: SweepOptions, given: Collection[str]) -> None:
    """Measure every combination of limits, burst sizes and lengths, and say what the limit did."""
    values = {name: getattr(options, name) for name in given}
    if options.resume is not None:
        values = {**_saved_options(options.resume), **values}
    elif options.file is not None:
        values = {**read_toml(options.file), "experiment_name": options.file.stem, **values}
    options = replace(SweepOptions(), **values)
    experiment = Experiment.from_options(options, values.keys())
    if options.dry_run:
        _dry_run(experiment)
        return
    _finish(_session(experiment, "sweep", resume=options.resume), reports=False)


@app.command("plot")
def plot(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Where the figures go. Default: RUN/figures.")
    ] = None,
) -> None:
    """Draw the figures of a run (PNG, SVG, and the CSV behind each)."""
    from roseinfer.bench.session import draw_figures
    from roseinfer.bench.store import RunFolder

    for path in draw_figures(RunFolder.open(run), output_dir):
        print(path)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        print(f"roseinfer-bench {version('roseinfer')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def _saved_options(path: Path) -> dict[str, Any]:
    """The fields that a run was started with."""
    from roseinfer.bench.store import RunFolder

    saved = RunFolder.open(path, "--resume").manifest
    known = {field.name: field.default for field in fields(SweepOptions)}
    values = {name.replace("-", "_"): value for name, value in saved["configuration"].items()}
    values |= {"slo": saved["slos"] or None, "metadata": [f"{k}={v}" for k, v in saved["metadata"].items()] or None}
    if unknown := values.keys() - known.keys():
        raise InputError("--resume", str(path), f"was made with flags unknown here: {', '.join(sorted(unknown))}")
    return {name: value for name, value in values.items() if value != known[name]}


def _session(experiment: Experiment, name: str, *, resume: Path | None = None) -> Session:
    from roseinfer.bench.session import Session

    return Session(experiment, default_name=name, resume=resume)


def _dry_run(experiment: Experiment) -> None:
    for cell in experiment.cells:
        print(f"{cell.cell_id}: {experiment.offered(cell)} requests, {experiment.options.repeats} repeats")


def _finish(session: Session, *, reports: bool) -> None:
    """Measures, prints, and ends with the exit code that the outcome has."""
    options = session.experiment.options
    out = sys.stderr if options.json else sys.stdout
    summary = session.measure()
    session.print_results(out, reports=reports)
    if options.json:
        print(json.dumps(_json(session), indent=1))
    if not summary["completed"].sum():
        raise typer.Exit(EXIT_NOTHING)
    if not summary["valid"].all():
        raise typer.Exit(EXIT_INVALID)


def _json(session: Session) -> dict[str, Any]:
    return {
        "run": str(session.folder.path),
        "finished_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "valid": bool(session.summary["valid"].all()),
        "model": session.folder.manifest["model"],
        "summary": [_jsonable(row) for row in session.summary.to_dict("records")],
        "conclusions": session.conclusions,
        "recommendations": [recommendation.sentence() for recommendation in session.recommendations],
    }


def _jsonable(row: dict[Any, Any]) -> dict[str, Any]:
    """NaN and unbounded are null: JSON knows neither."""
    return {
        str(key): None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }


def main() -> None:
    """Entry point: one clear line for what went wrong, and the exit code that says what kind it is."""
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        code = app(standalone_mode=False)
    except usage_error as error:
        code = _say(error.format_message(), EXIT_BAD_INPUT)  # type: ignore[attr-defined]
    except InputError as error:
        is_field = error.name in {field.name for field in fields(SweepOptions)}
        code = _say(f"{flag(error.name) if is_field else error.name} {error.value!r}: {error.why}", EXIT_BAD_INPUT)
    except RoseinferError as error:
        code = _say(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        code = _say("interrupted; finished cells are on disk", EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output is gone, and so is the reason to complain
        code = EXIT_FAILED
    sys.exit(code)


def _say(message: str, code: int) -> int:
    print(f"roseinfer-bench: {message}", file=sys.stderr)
    return code
