"""A command that measures, from checked options to printed results: load, warm up, measure, conclude, draw."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import pandas as pd
from rich.console import Console

from roseinfer.bench import report
from roseinfer.bench.environment import public_command
from roseinfer.bench.options import Experiment
from roseinfer.bench.progress import Progress
from roseinfer.bench.recommend import Recommendation, parse_slo, recommend
from roseinfer.bench.store import RunFolder, check_writable, differences, new_run_id
from roseinfer.errors import InputError
from roseinfer.model_source import check_model_source, known_context


class Session:
    """One run of `run` or `sweep`. Everything that can be refused without a model is refused at once."""

    def __init__(self, experiment: Experiment, *, default_name: str, resume: Path | None) -> None:
        self.experiment = experiment
        options = experiment.options
        self._name = options.experiment_name or default_name
        self._slos = [parse_slo(text) for text in experiment.slos]
        self._resumed = None if resume is None else RunFolder.resume(resume)
        source = check_model_source(options.model)
        context = known_context(source)
        if context is not None:
            experiment.check_context(context)
        if self._resumed is None:
            check_writable(options.output_dir)
            self._run_id = options.run_id or new_run_id(datetime.now(UTC))
            if (options.output_dir / self._name / self._run_id).exists():
                raise InputError("--run-id", self._run_id, f"{self._name} has a run of this id")

    def measure(self) -> pd.DataFrame:
        """Measures whatever is missing, and returns the summary. The run is on disk when this returns."""
        from roseinfer.bench import sweep
        from roseinfer.bench.workload import WorkloadSource
        from roseinfer.engine import InferenceEngine

        experiment, options = self.experiment, self.experiment.options
        with Progress(quiet=options.quiet) as progress:
            progress("loading the model")
            engine = InferenceEngine.from_pretrained(
                options.model, device=options.device, dtype=options.dtype, num_threads=options.num_threads
            )
            experiment.check_context(engine.max_model_len)
            self._engine = engine
            source = WorkloadSource(experiment, engine.make_tokenizer(), engine.vocab_size)
            workload = source.table()
            manifest = sweep.manifest(experiment, engine, workload, public_command(sys.argv))
            self.folder = self._open_folder(manifest)
            if not self.folder.is_compacted:
                sweep.warm_up(experiment, engine, source, progress)
                sweep.measure(experiment, engine, source, self.folder, progress)
            progress("summing up")
            self.summary = sweep.conclude(experiment, self.folder, workload)
            self._requests = self.folder.read_requests()
            self.conclusions = report.conclusions(self.summary)
            self.recommendations = self._recommend()
            progress("drawing")
            self._figures = draw_figures(self.folder, None)
        return self.summary

    def _open_folder(self, manifest: dict[str, object]) -> RunFolder:
        if self._resumed is None:
            return RunFolder.create(self.experiment.options.output_dir, self._name, self._run_id, manifest)
        found = differences(self._resumed.manifest, manifest)
        if found:
            raise InputError("--resume", str(self._resumed.path), "; ".join(found))
        return self._resumed

    def _recommend(self) -> list[Recommendation]:
        if not self._slos:
            return []
        return recommend(self._requests, self.summary, self._slos, seed=self.experiment.options.seed)

    def print_results(self, out: TextIO, *, reports: bool) -> None:
        """The reports of each burst or the table, what they say, and where the files are."""
        console = Console(file=out, highlight=False, width=None if out.isatty() else 160)
        description = self._engine.description
        if reports:
            for _, rows in self._requests.groupby("repeat", sort=True):
                print(report.burst_report(rows, self.experiment, description.device), file=out)
        else:
            for table in report.tables(self.summary):
                console.print(table)
        manifest = self.folder.manifest
        print(f"{report.model_name(manifest)} on {report.machine_name(manifest)}", file=out)
        for line in [*self.conclusions, *(r.sentence() for r in self.recommendations)]:
            print(line, file=out)
        for line in report.invalid_lines(self.summary):
            print(line, file=out)
        print(f"Run: {self.folder.path}", file=out)
        print(f"Figures: {', '.join(path.name for path in self._figures if path.suffix == '.png')}", file=out)


def draw_figures(folder: RunFolder, output_dir: Path | None) -> list[Path]:
    """Draws a run's figures into `output_dir`, by default its own figures/."""
    from roseinfer.bench.plots import Caption, draw_all
    from roseinfer.bench.summary import sort_cells, summarise
    from roseinfer.bench.sweep import read_facts

    requests = folder.read_requests()
    if requests.empty:
        raise InputError("RUN", str(folder.path), "holds no finished cell")
    summary = folder.read_summary()
    if summary is None:
        summary = sort_cells(summarise(requests, read_facts(folder), seed=int(folder.manifest["seed"])))
    caption = Caption(model=report.model_name(folder.manifest), machine=report.machine_name(folder.manifest), run_id=folder.run_id)
    return draw_all(requests, summary, caption, folder.path / "figures" if output_dir is None else output_dir)
