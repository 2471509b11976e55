"""A target whose process dies, or that fails, in chosen cells: for workers, which import it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.measurement import Bench
from roseinfer.bench.sim_target import RowTaker, SimTarget
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.validity import CellFacts
from roseinfer.bench.workload import Workload, WorkloadSource
from roseinfer.errors import InputError, RunError
from roseinfer.sim.cost_model import CostModel, StepCost
from tests.bench.experiments import WORDS, ScriptedInferenceEngine, WordTokenizer

COST = CostModel("tenth of a second a step", StepCost(0.1, 0.0, 0.0, 0.0, 0.0))


class Fault(NamedTuple):
    """What happens in the cell `cell_id`, the first `times` that it is run.

    `how`: "exit", "killed", "killed after saving", "run error", "input error" or "bug".
    """

    cell_id: str
    how: str
    times: int = 1


class MortalTarget(SimTarget):
    """A simulated engine with a fault. `tally` is a folder that the processes count in, `run` that of the run."""

    def __init__(self, experiment: Experiment, fault: Fault, tally: Path, run: Path) -> None:
        super().__init__(COST, experiment)
        self._fault = fault
        self._tally = tally
        self._run = run

    def record(
        self, cell: Cell, blocks: Iterable[Workload], taker: RowTaker
    ) -> tuple[CellFacts, dict[str, Any]]:
        recorded = super().record(cell, blocks, taker)
        if cell.cell_id == self._fault.cell_id:
            began = len(list(self._tally.iterdir()))
            (self._tally / str(began)).touch()
            if began < self._fault.times:
                self._fail(cell)
        return recorded

    def _fail(self, cell: Cell) -> None:
        how = self._fault.how
        if how == "run error":
            raise RunError("the engine is out of coal")
        if how == "input error":
            raise InputError("--burst-size", 6, "is not to our taste")
        if how == "bug":
            raise ZeroDivisionError("nothing to share")
        if how == "exit":
            os._exit(3)
        if how == "killed after saving":
            aside = self._run / "cells" / f".{cell.cell_id}@0.aside"
            (aside / "facts.json").write_text("{}")
            aside.rename(self._run / "cells" / f"{cell.cell_id}@0")
        os.kill(os.getpid(), signal.SIGKILL)


def simulated(experiment: Experiment) -> Bench:
    target = SimTarget(COST, experiment)
    source = WorkloadSource(experiment, None, vocab_size=0, max_model_len=target.max_model_len)
    return Bench(target, source, target.describe())


def mortal(experiment: Experiment, fault: Fault, tally: Path, run: Path) -> Bench:
    bench = simulated(experiment)
    tally.mkdir()
    return bench._replace(target=MortalTarget(experiment, fault, tally, run))


def scripted(experiment: Experiment) -> Bench:
    """An engine without a model, as a worker loads it."""
    engine = ScriptedInferenceEngine()
    source = WorkloadSource(experiment, WordTokenizer(), vocab_size=len(WORDS), max_model_len=4096)
    return Bench(InProcessTarget(engine, experiment), source, asdict(engine.description))
