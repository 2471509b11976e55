"""A command that measures, from checked options to printed results: load, warm up, measure, conclude, draw."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from roseinfer.bench import report, sweep
from roseinfer.bench.environment import describe_environment, public_command
from roseinfer.bench.experiment import Experiment
from roseinfer.bench.progress import Progress
from roseinfer.bench.recommend import Recommendation, parse_slo, recommend
from roseinfer.bench.store import RunFolder, check_name, check_writable, differences, new_run_id
from roseinfer.bench.workload import WorkloadSource
from roseinfer.errors import InputError
from roseinfer.model_source import SourceKind, check_model_source, known_context
from roseinfer.openmp import sleep_while_waiting
from roseinfer.tokenization import builtin_tokenizer


class Session:
    """One run of `run` or `sweep`. Whatever can be refused without a model is refused when it is made."""

    summary: pd.DataFrame
    conclusions: list[str]
    recommendations: list[Recommendation]

    def __init__(self, experiment: Experiment, *, default_name: str, resume: Path | None) -> None:
        sleep_while_waiting()  # part of the environment that a resumed run is compared with
        options = experiment.options
        self.experiment = experiment
        self.folder: RunFolder | None = None
        self._progress = Progress(quiet=options.quiet)
        self._name = default_name if options.experiment_name is None else options.experiment_name
        self._slos = [parse_slo(text) for text in experiment.slos]
        self._check_model()
        if resume is None:
            check_name("--experiment-name", self._name)
            self._run_id = new_run_id(datetime.now(UTC)) if options.run_id is None else options.run_id
            check_name("--run-id", self._run_id)
            check_writable(options.output_dir, self._name)
            if (options.output_dir / self._name / self._run_id).exists():
                raise InputError("--run-id", self._run_id, f"{self._name} has a run of this id")
        else:
            self.folder = RunFolder.open(resume, "--resume")
            known = {"configuration": experiment.configuration(), "environment": describe_environment()}
            self._check_same(self.folder, {**self.folder.manifest, **known})

    def _check_model(self) -> None:
        source = check_model_source(self.experiment.options.model)
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
            lines.append(f"{cell.cell_id}: {self.experiment.offered(cell)} requests, {left} repeats")
        return lines

    def measure(self) -> pd.DataFrame:
        """Measures whatever is missing, and returns the summary. The run is on disk when this returns."""
        experiment, options = self.experiment, self.experiment.options
        with self._progress as progress:
            progress("loading the model")
            from roseinfer.engine import InferenceEngine

            engine = InferenceEngine.from_pretrained(
                options.model,
                device=options.device,
                dtype=options.dtype,
                max_model_len=options.max_model_len,
                num_threads=options.num_threads,
            )
            source = WorkloadSource(
                experiment,
                engine.make_tokenizer(),
                vocab_size=engine.vocab_size,
                max_model_len=engine.max_model_len,
            )
            workload = source.table()
            manifest = sweep.manifest(experiment, engine.description, workload, public_command(sys.argv))
            if self.folder is not None:
                self._check_same(self.folder, manifest)
            if self.folder is not None:
                self.folder.clear_leftovers()
            if self.folder is None or not self.folder.is_compacted:
                sweep.warm_up(experiment, engine, source, progress)
                if self.folder is None:  # not earlier: where the warm-up fails there is no run
                    self.folder = RunFolder.create(options.output_dir, self._name, self._run_id, manifest)
                sweep.measure(experiment, engine, source, self.folder, progress)
            progress("summing up")
            self.summary = sweep.conclude(self.folder, workload)
            self._requests = self.folder.read_requests()
            self.conclusions = report.conclusions(self.summary)
            if self._slos:
                self.recommendations = recommend(self._requests, self.summary, self._slos, seed=options.seed)
            else:
                self.recommendations = []
        return self.summary

    @staticmethod
    def _check_same(folder: RunFolder, manifest: dict[str, Any]) -> None:
        found = differences(folder.manifest, manifest)
        if found:
            raise InputError("--resume", str(folder.path), "; ".join(found))

    def print_results(self, out: TextIO, *, reports: bool) -> None:
        """The reports of each repeat or the table, and what they say."""
        assert self.folder is not None
        manifest = self.folder.manifest
        width = shutil.get_terminal_size().columns if out.isatty() else None
        if reports:
            for run in range(self.experiment.options.warmup_runs):
                print(f"=== warmup {run + 1}/{self.experiment.options.warmup_runs} ===", file=out)
            for _, rows in self._requests.groupby("repeat", sort=True):
                print(
                    report.burst_report(rows, self.experiment, manifest["model"]["device"]),
                    end="\n\n",
                    file=out,
                )
        else:
            for table in report.tables(self.summary, width or report.TABLE_WIDTH):
                print(table, end="\n\n", file=out)
        for line in [
            f"{report.model_name(manifest)} on {report.machine_name(manifest)}",
            *self.conclusions,
            *[recommendation.sentence() for recommendation in self.recommendations],
            *report.slots_freed_lines(self._requests),
            *report.load_lines(manifest),
            *report.invalid_lines(self.summary),
        ]:
            print(line if width is None else textwrap.fill(line, width, subsequent_indent="  "), file=out)
        print(f"Run: {self.folder.path}", file=out, flush=True)

    def draw(self, out: TextIO) -> None:
        """Draws the figures and says where they are."""
        assert self.folder is not None
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
        model = ""
        if is_local(self.folder.manifest):
            model = f" --model {shlex.quote(self.experiment.options.model)}"
        total = len(self.experiment.cells) * self.experiment.options.repeats
        return (
            f"interrupted; {len(self.folder.finished_cells())} of {total} cells are on disk."
            f" To go on: roseinfer-bench sweep --resume {shlex.quote(str(self.folder.path))}{model}"
        )


def is_local(manifest: dict[str, Any]) -> bool:
    """The model was a folder or file, whose place a run does not keep."""
    return manifest["model"]["source"] in (SourceKind.FOLDER, SourceKind.GGUF)


def draw_figures(folder: RunFolder, output_dir: Path | None) -> list[Path]:
    """Draws a run's figures into `output_dir`, by default its own figures/."""
    from roseinfer.bench.figure_style import Caption
    from roseinfer.bench.plots import draw_all

    requests = folder.read_requests()
    if requests.empty:
        raise InputError("RUN", str(folder.path), "holds no finished cell")
    caption = Caption(
        model=report.model_name(folder.manifest),
        machine=report.machine_name(folder.manifest),
        run_id=folder.run_id,
    )
    place = folder.path / "figures" if output_dir is None else output_dir
    return draw_all(requests, sweep.summary_of(folder), caption, place)
