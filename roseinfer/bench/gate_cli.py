"""The commands that judge runs: `compare`, `check`, `ab`. The app of `roseinfer-bench` takes them in."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from roseinfer.errors import InputError, RunError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from roseinfer.bench.checkouts import Checkout
    from roseinfer.bench.figure_style import Caption
    from roseinfer.bench.sides import Side
    from roseinfer.bench.thresholds import Rule

gate: Final = typer.Typer()

EXIT_NOTHING, EXIT_INTERRUPTED = 5, 130

_UNKNOWN_CODES: Final = {None: 3, "pass": 0, "fail": 1}

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")]
Markdown = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Also write the table as Markdown, for a CI step's summary; - is stdout instead of it.",
    ),
]
Thresholds = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML with [[rule]] tables. Default: p99_ttft_ms at most x1.10 and output_throughput at least x1/1.10.",
    ),
]
Unknown = Annotated[
    str | None,
    typer.Option(metavar="pass|fail", help="What UNKNOWN counts as. Default: neither, exit code 3."),
]


@gate.command("compare")
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of the run that is compared with it.")],
    margin: Annotated[float, typer.Option(help="SAME means: certainly within a factor of 1 + this.")] = 0.10,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Where the figure goes. Default: B/figures.")
    ] = None,
    as_json: Json = False,
    markdown: Markdown = None,
) -> None:
    """Show what differs between two runs, and how sure that is. Judges nothing: exit code 0.

    Of a measured and a simulated run: how far the prediction was off.
    """
    from roseinfer.bench import verdicts
    from roseinfer.bench.compare import compare as compare_sides
    from roseinfer.bench.sides import Side
    from roseinfer.bench.store import check_writable

    _check_output(as_json, markdown)
    sides = Side.open(a, "A"), Side.open(b, "B")
    if output_dir is not None:
        check_writable(output_dir)
    for side in sides:
        if side.is_empty:
            print(f"roseinfer-bench: {side.name} has no rows: nothing was measured", file=sys.stderr)
            raise typer.Exit(EXIT_NOTHING)
    place = b / "figures" if output_dir is None else output_dir
    if sides[0].is_simulated != sides[1].is_simulated:
        figure = _compare_prediction(*sides, margin, place, as_json, markdown)
    else:
        found = compare_sides(*sides, margin=margin)
        _print(
            as_json,
            markdown,
            lambda: verdicts.compare_table(found),
            lambda: verdicts.compare_json(found),
            lambda: verdicts.compare_markdown(found),
        )
        figure = _draw_shift(*sides, margin, place)
    print(f"Figure: {figure}", file=sys.stderr if as_json or markdown == "-" else sys.stdout)


@gate.command("check")
def check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run that is judged.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run that ratios are to.")
    ] = None,
    thresholds: Thresholds = None,
    unknown: Unknown = None,
    allow_other_machine: Annotated[
        bool,
        typer.Option(
            "--allow-other-machine", help="Compare with a baseline from another machine, wrong as it may be."
        ),
    ] = False,
    as_json: Json = False,
    markdown: Markdown = None,
) -> None:
    """Judge a run: exit code 0 PASS, 1 FAIL, 3 UNKNOWN, 4 the run is invalid, 5 nothing was measured."""
    from roseinfer.bench.sides import Side

    _check_output(as_json, markdown)
    _check_unknown(unknown)
    rules = _rules(thresholds)
    sides = Side.open(run, "RUN"), None if baseline is None else Side.open(baseline, "--baseline")
    _judge(*sides, rules, unknown, as_json, markdown, allow_other_machine=allow_other_machine)


@gate.command("ab", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ab(
    ctx: typer.Context,
    a: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_REV",
            help="The baseline's code: a folder that holds the package, or a git revision; or a TOML file for `sweep`,"
            " with this code. Default: this code.",
        ),
    ] = None,
    b: Annotated[
        str | None, typer.Option(metavar="PATH_OR_REV", help="The same of the side that is judged.")
    ] = None,
    a_flags: Annotated[
        str, typer.Option(metavar="FLAGS", help="Flags of sweep for side A only, as one word.")
    ] = "",
    b_flags: Annotated[str, typer.Option(metavar="FLAGS", help="The same for side B.")] = "",
    blocks: Annotated[int, typer.Option(help="Blocks of one process a side: A B, B A, A B ...")] = 10,
    seed: Annotated[int, typer.Option(help="Of the first block; the next has one more.")] = 0,
    thresholds: Thresholds = None,
    unknown: Unknown = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Where the two runs are kept.")
    ] = Path("results"),
    experiment_name: Annotated[str, typer.Option(help="Folder of the runs below --output-dir.")] = "ab",
    run_id: Annotated[
        str | None, typer.Option(help="The runs are called this with -a and -b. Default: time and a suffix.")
    ] = None,
    as_json: Json = False,
    markdown: Markdown = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Measure two checkouts or configurations in turn on this machine, and judge B against A as `check` does.

    All other words are flags of `sweep`, for both sides. Both need the same cells: flags that `sweep` takes lists of,
    such as --max-inflight, cannot differ between the sides; sweep both values instead.
    """
    from datetime import UTC, datetime

    from roseinfer.bench.ab import BlockedRuns, Variant
    from roseinfer.bench.sides import Side
    from roseinfer.bench.store import new_run_id

    _check_output(as_json, markdown)
    _check_unknown(unknown)
    rules = _rules(thresholds)
    with tempfile.TemporaryDirectory(prefix="roseinfer-ab-") as aside:
        made = [_checkout(f"--{side}", text, Path(aside) / side) for side, text in (("a", a), ("b", b))]
        flags = [
            _words(argument, text) for argument, text in (("--a-flags", a_flags), ("--b-flags", b_flags))
        ]
        runs = BlockedRuns(
            variants=(
                Variant("a", made[0][0], [*made[0][1], *flags[0]]),
                Variant("b", made[1][0], [*made[1][1], *flags[1]]),
            ),
            flags=ctx.args,
            blocks=blocks,
            seed=seed,
            output_dir=output_dir,
            name=experiment_name,
            run_id=new_run_id(datetime.now(UTC)) if run_id is None else run_id,
            say=(lambda _: None) if quiet else (lambda doing: print(doing, file=sys.stderr, flush=True)),
        )
        try:
            runs.check()
            folders = runs.measure()
        except KeyboardInterrupt:
            print(f"roseinfer-bench: interrupted; {runs.so_far()}", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except RunError as error:
            raise RunError(f"{error}; {runs.so_far()}") from error
    print(f"Runs: {folders[0].path} and {folders[1].path}", file=sys.stderr)
    _judge(Side(folders[1]), Side(folders[0]), rules, unknown, as_json, markdown)


def _judge(
    run: Side,
    baseline: Side | None,
    rules: list[Rule],
    unknown: str | None,
    as_json: bool,
    markdown: str | None,
    *,
    allow_other_machine: bool = False,
) -> None:
    from roseinfer.bench import verdicts
    from roseinfer.bench.check import check as judge

    report = judge(run, baseline, rules, allow_other_machine=allow_other_machine)
    code = _UNKNOWN_CODES[unknown]
    _print(
        as_json,
        markdown,
        lambda: verdicts.check_table(report, code),
        lambda: verdicts.check_json(report, code),
        lambda: verdicts.check_markdown(report, code),
    )
    raise typer.Exit(report.exit_code(code))


def _print(
    as_json: bool,
    markdown: str | None,
    table: Callable[[], str],
    data: Callable[[], dict[str, Any]],
    page: Callable[[], str],
) -> None:
    if markdown not in (None, "-"):
        Path(markdown).write_text(page(), encoding="utf-8")
    if as_json:
        print(json.dumps(data(), indent=1, allow_nan=False), flush=True)
    else:
        print(page() if markdown == "-" else table(), flush=True)


def _rules(path: Path | None) -> list[Rule]:
    from roseinfer.bench.thresholds import DEFAULT_RULES, read_thresholds

    return list(DEFAULT_RULES) if path is None else read_thresholds(path)


def _check_output(as_json: bool, markdown: str | None) -> None:
    if as_json and markdown == "-":
        raise InputError("--markdown", "-", "contradicts --json: both would go to stdout")
    if markdown not in (None, "-") and not Path(markdown).absolute().parent.is_dir():
        raise InputError("--markdown", markdown, "no such folder")


def _check_unknown(unknown: str | None) -> None:
    if unknown not in _UNKNOWN_CODES:
        raise InputError("--unknown", unknown, "must be pass or fail")


def _checkout(argument: str, text: str | None, place: Path) -> tuple[Checkout, list[str]]:
    """The code of a side, and the flags that its argument stands for."""
    from roseinfer.bench.checkouts import checkout, own_folder

    is_experiment = text is not None and text.endswith(".toml")
    code = checkout(argument, str(own_folder()) if text is None or is_experiment else text, place)
    return code, [text] if text is not None and is_experiment else []


def _words(argument: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(argument, text, str(error)) from error


def _compare_prediction(
    a: Side, b: Side, margin: float, folder: Path, as_json: bool, markdown: str | None
) -> Path:
    """Prints how far the simulated one of two runs is from the measured one, and draws it."""
    from roseinfer.bench import prediction
    from roseinfer.bench.compare import check_margin, common_cells, notes_on_each
    from roseinfer.bench.prediction_figure import draw_prediction, prediction_figure_data

    check_margin(margin)
    common_cells(a, b)
    measured, simulated = (b, a) if a.is_simulated else (a, b)
    errors = prediction.errors(measured.requests, simulated.requests)
    notes = notes_on_each(a, b)
    if measured.manifest.get("workload_sha256") != simulated.manifest.get("workload_sha256"):
        notes.append("the runs have other workloads (arrivals, lengths or prompts)")
    names = measured.name, simulated.name
    _print(
        as_json,
        markdown,
        lambda: prediction.compare_table(errors, *names, notes),
        lambda: prediction.compare_json(errors, *names, notes),
        lambda: prediction.compare_markdown(errors, *names, notes),
    )
    data = prediction_figure_data(errors)
    figure = draw_prediction(data, _caption(measured, f"{names[0]}, predicted by {names[1]}"), margin=margin)
    return _save(figure, data, folder, f"prediction_of_{measured.name}")


def _draw_shift(a: Side, b: Side, margin: float, folder: Path) -> Path:
    """Draws where TTFT moved."""
    from roseinfer.bench.shift import draw_shift, shift_data
    from roseinfer.bench.sides import share_blocks

    data = shift_data(a.requests, b.requests, paired=share_blocks(a, b), seed=int(a.manifest["seed"]))
    figure = draw_shift(data, _caption(b, f"{a.name} and {b.name}"), names=("A", "B"), margin=1 + margin)
    return _save(figure, data, folder, f"shift_from_{a.name}")


def _caption(side: Side, runs: str) -> Caption:
    from roseinfer.bench import report
    from roseinfer.bench.figure_style import Caption

    return Caption(
        model=report.model_name(side.manifest), machine=report.machine_name(side.manifest), run_id=runs
    )


def _save(figure: Figure, data: pd.DataFrame, folder: Path, name: str) -> Path:
    """Keeps a figure, and what is behind it as CSV; the place of the PNG."""
    from roseinfer.bench.figure_style import save

    folder.mkdir(parents=True, exist_ok=True)
    data.to_csv(folder / f"{name}.csv", index=False)
    return save(figure, folder, name)[0]
