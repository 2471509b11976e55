"""Ctrl-C in the middle of a cell on an engine of this process: what has ended is kept, the rest is incomplete."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest

from roseinfer.bench.client import _Consumer
from roseinfer.bench.measurement import Bench, CellRun, run_and_save
from roseinfer.bench.records import REQUEST_SCHEMA
from roseinfer.bench.row_files import record_table
from roseinfer.bench.rows import CellInterrupted, CellResult
from roseinfer.bench.store import RunFolder
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.termination import held
from roseinfer.bench.validity import check_cell
from roseinfer.bench.workload import Workload, WorkloadSource
from roseinfer.executor import StepPlan
from tests.bench.experiments import WORDS, WordTokenizer, experiment, workload
from tests.bench.test_client import HELLO, closed
from tests.scripted import ScriptedEngine


@pytest.fixture(autouse=True)
def _a_foreground_process() -> Iterator[None]:
    """A shell that puts us into the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Callable[[StepPlan], None]:
    """An engine that interrupts the client in its third step, and goes on once that has given up."""
    has_given_up, steps = threading.Event(), iter(range(100))
    give_up = _Consumer._give_up

    def noted(self: _Consumer, request_id: int, now: float) -> None:
        give_up(self, request_id, now)
        has_given_up.set()

    def step(plan: StepPlan) -> None:
        if next(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert has_given_up.wait(20)

    monkeypatch.setattr(_Consumer, "_give_up", noted)
    monkeypatch.setattr("roseinfer.bench.pacing._SEND_LAG_S", 60.0)
    return step


def interrupted(compute: Callable[[StepPlan], None], load: Workload, **flags: Any) -> CellResult:
    made = experiment(**({"max_batch_size": 1, "num_requests": len(load.prompt_tokens)} | flags))
    with pytest.raises(CellInterrupted) as error:
        InProcessTarget(ScriptedEngine(compute), made).run(made.cells[0], load)
    result = error.value.result
    rows: pd.DataFrame = record_table(result.requests, REQUEST_SCHEMA).to_pandas()
    return result._replace(requests=rows)


def test_what_had_ended_is_kept_and_the_rest_is_incomplete(compute: Callable[[StepPlan], None]) -> None:
    load = workload([HELLO] * 4)
    load.scheduled_s[-1] = 60.0  # type: ignore[index]
    result = interrupted(compute, load)
    rows = result.requests
    assert rows["outcome"].tolist() == ["completed"] + ["incomplete"] * 3
    assert rows["error"].fillna("").tolist() == [""] + ["interrupted"] * 3
    assert rows["sent_s"].notna().tolist() == [True] * 3 + [False]
    assert rows["received_last_s"].notna().tolist() == [True] + [False] * 3
    assert rows["scheduled_s"].tolist() == [0.0] * 3 + [60.0]


def test_all_that_is_amiss_with_it_is_that_it_was_interrupted(compute: Callable[[StepPlan], None]) -> None:
    result = interrupted(compute, workload([HELLO] * 3))
    reasons = check_cell(result.requests, result.facts)
    assert len(reasons) == 1, reasons
    (reason,) = reasons  # every slot was given back, for one
    assert reason.startswith("interrupted at ")
    assert reason.endswith(" s, when 1 of 3 requests had ended")


def test_of_a_closed_loop_there_is_what_was_sent(compute: Callable[[StepPlan], None]) -> None:
    result = interrupted(compute, closed(9), max_concurrency=1)
    assert result.requests["outcome"].tolist() == ["completed", "incomplete"]
    (reason,) = check_cell(result.requests, result.facts)
    assert "1 of 2 requests" in reason


def test_a_cap_that_all_wait_for_lets_the_interrupt_through(compute: Callable[[StepPlan], None]) -> None:
    result = interrupted(compute, workload([HELLO] * 4), burst_size="4", max_concurrency=1)
    assert result.requests["outcome"].tolist() == ["completed"] + ["incomplete"] * 3
    assert result.requests["sent_s"].notna().sum() == 2


class Lab:
    """One cell of three requests, measured into `folder`."""

    def __init__(self, folder: RunFolder, compute: Callable[[StepPlan], None]) -> None:
        self.folder = folder
        made = experiment(num_requests=3, max_batch_size=1, prompt_len="1", max_new_tokens="2", pretok=True)
        engine = ScriptedEngine(compute)
        engine.make_tokenizer = WordTokenizer
        source = WorkloadSource(made, WordTokenizer(), vocab_size=len(WORDS), max_model_len=4096)
        self._bench = Bench(InProcessTarget(engine, made), source, {})
        self._run = CellRun(made.cells[0], 0)

    def measure(self) -> None:
        run_and_save(self._run, self._bench, self.folder)

    def outcomes(self) -> list[str]:
        return list(self.folder.read_requests()["outcome"])


def test_it_is_saved_and_then_measured_anew(compute: Callable[[StepPlan], None], folder: RunFolder) -> None:
    lab = Lab(folder, compute)
    with pytest.raises(KeyboardInterrupt):
        lab.measure()
    assert lab.outcomes() == ["completed", "incomplete", "incomplete"]
    assert folder.finished_cells() == set()
    lab.measure()
    assert lab.outcomes() == ["completed"] * 3
    assert len(folder.finished_cells()) == 1


def test_an_interrupt_after_the_last_answer_waits_until_all_is_saved(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = InProcessTarget.run

    def late(self: InProcessTarget, *args: Any) -> CellResult:
        result = run(self, *args)
        os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(InProcessTarget, "run", late)
    lab = Lab(folder, lambda plan: None)
    with pytest.raises(KeyboardInterrupt):
        lab.measure()
    assert lab.outcomes() == ["completed"] * 3
    assert len(folder.finished_cells()) == 1


def test_a_second_interrupt_does_not_wait_for_the_first_to_be_saved(
    compute: Callable[[StepPlan], None], folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saves_slowly(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("roseinfer.bench.measurement.save", saves_slowly)
    with pytest.raises(KeyboardInterrupt) as error, held():
        Lab(folder, compute).measure()
    assert type(error.value) is KeyboardInterrupt
    assert folder.finished_cells() == folder.interrupted_cells() == set()


@pytest.fixture
def folder(tmp_path: Any) -> RunFolder:
    return RunFolder.create(tmp_path, "run", "r", {"environment": {}})
