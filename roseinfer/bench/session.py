"""A command that measures, from checked options to printed results: load, warm up, measure, conclude, draw."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import pandas as pd

from roseinfer.bench import measurement, report, shards
from roseinfer.bench.burst_report import burst_report
from roseinfer.bench.class_report import class_tables, refusal_lines
from roseinfer.bench.engine_bench import engine_bench
from roseinfer.bench.environment import REMOTE, describe_environment, public_command
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.goals import Goal, parse_goal
from roseinfer.bench.http.target import MOST_TOKENS, HttpTarget, tokenizer_of, told_of_lengths
from roseinfer.bench.http_options import BUILTIN_TOKENIZER
from roseinfer.bench.load_share import told_of_load
from roseinfer.bench.options import flag
from roseinfer.bench.progress import Progress
from roseinfer.bench.recommend import Recommendation, parse_slo, recommend
from roseinfer.bench.sim_target import SimTarget, outside_lines
from roseinfer.bench.store import RunFolder, check_name, check_writable, differences, new_run_id
from roseinfer.bench.workload import Workload, WorkloadSource
from roseinfer.errors import InputError
from roseinfer.model_source import SourceKind, check_model_source, known_context
from roseinfer.openmp import spin_briefly
from roseinfer.sim.cost_model import CostModel
from roseinfer.tokenization import FastTokenizer, builtin_tokenizer

FILE_FLAGS: Final = ("trace", "workload", "cost_model", "tokenizer", "target_cmd")
"""Fields that name a file; a run keeps the last part of its path only, which tells nobody where it was made."""


UNSAID: Final = "status_code finish_reason inflight_at_send waiting_at_send chunk_tokens".split()
"""Columns of requests that no sentence is made of."""

UNEXPLAINED: Final = (
    "step plan_start_s published_s prefill_tokens prefill_attention_pairs decode_requests context_tokens"
    " cached_tokens waiting running kv_tokens inflight_limit"
).split()
"""Columns of steps that say nothing of what a request waited for."""


class _Prepared(NamedTuple):
    """How to run cells, and what run.json says of it: `model` is what computes, `environment` where (None: here).

    `workload` gives the table of all requests in parts; `warm_up` is called before the first cell.
    """

    workload: Callable[[], Iterable[pd.DataFrame]]
    notes: list[str]
    model: dict[str, Any]
    run_cells: measurement.RunCells
    warm_up: Callable[[], None] = lambda: None
    environment: dict[str, object] | None = None


class Session:
    """One run of `run` or `sweep`. Whatever can be refused without a model is refused when it is made."""

    summary: pd.DataFrame
    conclusions: list[str]
    recommendations: list[Recommendation]

    def __init__(
        self,
        experiment: Experiment,
        *,
        default_name: str,
        resume: Path | None = None,
        command: str | None = None,
        bench_of: Callable[[Experiment], measurement.Bench] = engine_bench,
    ) -> None:
        """`command` is what run.json says that the run was started with; None: this process's command line.

        `bench_of` sets the engine up, where one in this process is measured.
        """
        if not experiment.is_http:  # a server that is started here waits as its own people want it to
            spin_briefly()  # part of the environment that a resumed run is compared with
        options = experiment.options
        self.experiment = experiment
        self._command = public_command(sys.argv) if command is None else command
        self.folder: RunFolder | None = None
        self._bench_of = bench_of
        self._progress = Progress(quiet=options.quiet)
        self._name = default_name if options.experiment_name is None else options.experiment_name
        self._slos = [parse_slo(text) for text in experiment.slos]
        for text in experiment.goals:
            parse_goal(text)
        self._simulated: SimTarget | None = None  # None: an engine
        if experiment.is_http:
            self._tokenizer = tokenizer_of(options.tokenizer)
            experiment.check_fits(MOST_TOKENS)
        elif options.target != "sim":
            self._check_model()
            if options.cost_model is not None:
                CostModel.read(options.cost_model)  # what is wrong with it is said before a model loads
        else:
            assert options.cost_model is not None
            self._simulated = SimTarget(CostModel.read(options.cost_model), experiment)
            experiment.check_fits(self._simulated.max_model_len)
            self._simulated.check_fitted()
        if resume is None:
            check_name("--experiment-name", self._name)
            self._run_id = new_run_id(datetime.now(UTC)) if options.run_id is None else options.run_id
            check_name("--run-id", self._run_id)
            check_writable(options.output_dir, self._name)
            if (options.output_dir / self._name / self._run_id).exists():
                raise InputError("--run-id", self._run_id, f"{self._name} has a run of this id")
        else:
            self.folder = RunFolder.open(resume, "--resume")
            known: dict[str, Any] = {"configuration": experiment.configuration()}
            if options.ray is None or self._simulated is not None:
                known["environment"] = describe_environment()
            self._check_same(self.folder, {**self.folder.manifest, **known})

    def _check_model(self) -> None:
        source = check_model_source(self.experiment.model)
        context = known_context(source)
        if context is not None:
            context = min(context, self.experiment.options.max_model_len or context)
            given = self.experiment.options.prompt
            given_tokens = None
            if given is not None and source.kind is SourceKind.BUILTIN:
                given_tokens = len(builtin_tokenizer().encode(given * self.experiment.options.prompt_repeats))
            self.experiment.check_fits(context, given_tokens)

    def plan(self) -> list[str]:
        """What `measure` would measure, a line per cell."""
        finished = set() if self.folder is None else self.folder.finished_cells()
        repeats = range(self.experiment.options.repeats)
        lines = []
        for cell in self.experiment.cells:
            left = sum((cell.cell_id, repeat) not in finished for repeat in repeats)
            lines.append(f"{cell.cell_id}: {self._offered(cell)}, {left} repeats")
        return lines

    def _offered(self, cell: Cell) -> str:
        load = self.experiment.load
        count = self.experiment.offered(cell)
        if count is not None:
            return f"{count} requests"
        if load.duration_s is not None:
            return f"requests for {load.duration_s:g} s"
        file = load.workload or load.trace
        assert file is not None
        return f"the requests of {file.name}"

    def measure(self) -> pd.DataFrame:
        """Measures whatever is missing, and returns the summary. The run is on disk when this returns."""
        experiment, options = self.experiment, self.experiment.options
        with self._progress as progress, ExitStack() as claims:
            prepared = self._set_up(progress, claims)
            manifest = measurement.manifest(
                experiment,
                prepared.model,
                prepared.workload(),
                prepared.notes,
                self._command,
                prepared.environment,
            )
            if self.folder is not None:
                self._check_same(self.folder, manifest)
                claims.enter_context(self.folder.claimed())
                self.folder.clear_leftovers()
            if self.folder is None or not self.folder.is_compacted:
                prepared.warm_up()
                if self.folder is None:  # not earlier: where the warm-up fails there is no run
                    self.folder = RunFolder.create(options.output_dir, self._name, self._run_id, manifest)
                    claims.enter_context(self.folder.claimed())
                measurement.measure(experiment, self.folder, progress, prepared.run_cells)
            progress("summing up")
            self._conclude(measurement.conclude(self.folder, prepared.workload()))
            if self._slos:
                self.recommendations = recommend(self._requests, self.summary, self._slos, seed=options.seed)
        return self.summary

    def conclude_interrupted(self) -> bool:
        """After an interrupt: sums up what is on disk of a run that is not over. False where that is nothing.

        What is there recommends nothing.
        """
        if self.folder is None or self.folder.is_compacted or not self.folder.read_facts():
            return False
        self._conclude(measurement.summary_of(self.folder))
        return True

    def _conclude(self, summary: pd.DataFrame) -> None:
        assert self.folder is not None
        self.summary = summary
        self._requests = self.folder.read_requests(without=UNSAID)
        self.conclusions = report.conclusions(summary)
        self.recommendations = []

    def _set_up(self, progress: Progress, claims: ExitStack) -> _Prepared:
        if self.experiment.is_http:
            return self._set_up_server(progress, claims)
        if self._simulated is not None:
            return self._set_up_simulation(claims, self._simulated)
        if self.experiment.options.ray is not None:
            return self._set_up_cluster(progress, claims, self.experiment.options.ray)
        progress("loading the model")
        bench = self._bench_of(self.experiment)
        return _Prepared(
            bench.source.table_blocks,
            bench.source.notes,
            bench.model,
            partial(measurement.run_cells, bench),
            partial(measurement.warm_up, self.experiment, bench.target, bench.source, progress),
        )

    def _set_up_simulation(self, claims: ExitStack, simulated: SimTarget) -> _Prepared:
        options = self.experiment.options
        source = WorkloadSource(self.experiment, None, vocab_size=0, max_model_len=simulated.max_model_len)
        source.notes += told_of_load(self.experiment)
        bench = measurement.Bench(simulated, source, simulated.describe())
        run_cells: measurement.RunCells
        if options.ray is not None:
            from roseinfer.bench import ray_shards

            cluster = claims.enter_context(ray_shards.Cluster(options.ray))
            run_cells = partial(ray_shards.run_cells, bench, cluster.cores())
        elif options.shards > 1:
            run_cells = partial(shards.run_cells, bench, options.shards)
        else:
            run_cells = partial(measurement.run_cells, bench)
        return _Prepared(source.table_blocks, source.notes, bench.model, run_cells)

    def _set_up_cluster(self, progress: Progress, claims: ExitStack, address: str) -> _Prepared:
        from roseinfer.bench.ray_shards import Cluster, machines

        progress("asking the cluster for a machine")
        cluster = claims.enter_context(Cluster(address))
        crew = claims.enter_context(machines(cluster, self.experiment, engine_bench))
        described, workload, notes = crew.draw()
        return _Prepared(
            lambda: [workload], notes, described.model, crew.run_cells, environment=described.environment
        )

    def _set_up_server(self, progress: Progress, claims: ExitStack) -> _Prepared:
        experiment = self.experiment
        tokenizer = self._tokenizer
        source = WorkloadSource(
            experiment,
            tokenizer,
            vocab_size=tokenizer.tokenizer.get_vocab_size() if isinstance(tokenizer, FastTokenizer) else 0,
            max_model_len=MOST_TOKENS,
        )
        source.notes += told_of_lengths(experiment)

        def warm_ups() -> list[Workload]:
            """Each server that is started gets them: it is as cold as the one before was."""
            return [burst for _, burst in measurement.warm_up_bursts(experiment, source)]

        target = claims.enter_context(HttpTarget(experiment, warm_ups))
        progress("asking the server" if experiment.options.target_cmd is None else "starting the server")
        model = target.describe(measurement.order(experiment)[0][0])
        bench = measurement.Bench(target, source, model)
        return _Prepared(source.table_blocks, source.notes, model, partial(measurement.run_cells, bench))

    @staticmethod
    def _check_same(folder: RunFolder, manifest: dict[str, Any]) -> None:
        found = differences(folder.manifest, manifest)
        if found:
            raise InputError("--resume", str(folder.path), "; ".join(found))

    def print_results(self, out: TextIO, *, reports: bool) -> None:
        """The reports of each repeat or the table, and what they say."""
        assert self.folder is not None
        manifest, facts = self.folder.manifest, self.folder.read_facts()
        width = shutil.get_terminal_size().columns if out.isatty() else None
        if reports:
            warmup_runs = self.experiment.warmup_runs if self._simulated is None else 0
            for run in range(warmup_runs):
                print(f"=== warmup {run + 1}/{warmup_runs} ===", file=out)
            model, device = manifest["model"]["model"], manifest["model"]["device"]
            for _, rows in self._requests.groupby("repeat", sort=True):
                print(burst_report(rows, self.experiment, model, device), end="\n\n", file=out)
        else:
            for table in report.tables(self.summary, width or report.TABLE_WIDTH):
                print(table, end="\n\n", file=out)
        goals = [parse_goal(text) for text in self.experiment.goals]
        goals = goals or [Goal(slo.metric, slo.limit_ms) for slo in self._slos]
        names = self.experiment.class_names
        for table in class_tables(self._requests, names, goals, width or report.TABLE_WIDTH):
            print(table, end="\n\n", file=out)
        for line in [
            f"{report.model_name(manifest)} on {report.machine_name(manifest)}",
            *self.conclusions,
            *refusal_lines(self._requests),
            *report.explain_lines(self._requests, self._steps_with_members()),
            *[recommendation.sentence() for recommendation in self.recommendations],
            *[f"Note: {note}" for note in manifest.get("workload_notes", ())],
            *report.slots_freed_lines(self._requests),
            *report.cached_lines(self._requests),
            *report.load_lines(manifest),
            *report.client_lines(facts),
            *outside_lines(facts.values()),
            *report.invalid_lines(self.summary),
        ]:
            print(line if width is None else textwrap.fill(line, width, subsequent_indent="  "), file=out)
        print(f"Run: {self.folder.path}", file=out, flush=True)

    def _steps_with_members(self) -> pd.DataFrame:
        """The steps that say whom a request waited for; without token times none does."""
        assert self.folder is not None
        if self.experiment.options.no_token_times:
            return pd.DataFrame()
        return self.folder.read_steps(without=UNEXPLAINED)

    def draw(self, out: TextIO) -> None:
        """Draws the figures and says where they are; a simulation does not wait for them, and says how to get them."""
        assert self.folder is not None
        if self._simulated is not None:
            print(f"Figures: roseinfer-bench plot {shlex.quote(str(self.folder.path))}", file=out)
            return
        with self._progress as progress:
            progress("drawing")
            files = draw_figures(self.folder, None)
        names = [path.stem for path in files if path.suffix == ".png"]
        print(f"Figures: {files[0].parent}: {', '.join(names)} (.png, .svg, .csv)", file=out)

    def interruption(self) -> str:
        """What an interrupted user needs to know."""
        if self.folder is None:
            return "interrupted before anything was measured"
        if self.folder.is_compacted:
            return f"interrupted; all is measured, in {self.folder.path}"
        files = [
            f" {flag(field)} {shlex.quote(str(getattr(self.experiment.options, field)))}"
            for field in unkept_files(self.folder.manifest)
        ]
        total = len(self.experiment.cells) * self.experiment.options.repeats
        in_part = ", and what there is of another, which is to be measured anew"
        return (
            f"interrupted; {len(self.folder.finished_cells())} of {total} cells are on disk"
            f"{in_part if self.folder.interrupted_cells() else ''}."
            f" To go on: roseinfer-bench sweep --resume {shlex.quote(str(self.folder.path))}{''.join(files)}"
        )


def unkept_files(manifest: dict[str, Any]) -> list[str]:
    """Fields that named a file or folder, whose place a run does not keep: who goes on with it names it again."""
    configuration = manifest["configuration"]
    files = [field for field in FILE_FLAGS if configuration.get(flag(field).removeprefix("--")) is not None]
    if configuration.get("tokenizer") == BUILTIN_TOKENIZER:
        files.remove("tokenizer")
    if str(configuration.get("target")).partition("://")[2].partition("/")[0] == REMOTE:
        files.append("target")
    if manifest["model"]["source"] in (SourceKind.FOLDER, SourceKind.GGUF):
        files.append("model")
    return files


def draw_figures(
    folder: RunFolder,
    output_dir: Path | None,
    *,
    explain: bool = True,
    prediction_errors: pd.DataFrame | None = None,
) -> list[Path]:
    """Draws a run's figures into `output_dir`, by default its own figures/; with `explain` the p99's parts too.

    With `prediction_errors` (of `prediction.errors`) what was predicted over what was measured.
    """
    from roseinfer.bench.figure_style import Caption
    from roseinfer.bench.plots import draw_all
    from roseinfer.bench.who_is_refused import WORKLOAD_COLUMNS

    requests = folder.read_requests()
    if requests.empty:
        raise InputError("RUN", str(folder.path), "holds no finished cell")
    caption = Caption(
        model=report.model_name(folder.manifest),
        machine=report.machine_name(folder.manifest),
        run_id=folder.run_id,
    )
    place = folder.path / "figures" if output_dir is None else output_dir
    steps = folder.read_steps() if explain else None
    summary = measurement.summary_of(folder)
    return draw_all(
        requests,
        summary,
        caption,
        place,
        steps=steps,
        attempts=folder.read_attempts(),
        workload=folder.read_workload(WORKLOAD_COLUMNS),
        prediction_errors=prediction_errors,
    )
