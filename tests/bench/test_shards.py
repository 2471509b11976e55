"""Cells of a simulation in several processes: the same tables for any number of them, and what becomes of the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import roseinfer.bench as rb
from roseinfer.bench import measurement, shards
from roseinfer.bench.measurement import CellRun
from roseinfer.bench.shards import Lost, share_out
from roseinfer.bench.store import RunFolder
from roseinfer.errors import InputError, RunError
from roseinfer.sim.noise import Noise
from tests.bench.asking import Ask
from tests.bench.experiments import experiment
from tests.bench.mortal_target import COST, Fault, mortal, simulated

SWEEP = {"burst_size": "6", "prompt_len": "8", "max_new_tokens": "3", "max_batch_size": 2, "repeats": 1}
CELL = "inflight_4-burst_6-prompt_8-output_3"


@pytest.fixture(scope="module")
def cost_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost") / "tenth.json"
    COST.write(path)
    return path


class Sweep:
    """Two limits, one repeat, in two processes, with a fault in the cell of limit 4."""

    def __init__(self, path: Path, cost_file: Path, fault: Fault) -> None:
        self.experiment = experiment(target="sim", cost_model=cost_file, max_inflight="2,4", **SWEEP)
        manifest = {"configuration": self.experiment.configuration(), "seed": 0, "environment": {}}
        self.folder = RunFolder.create(path, "sweep", "run", manifest)
        self.tally = path / "tally"
        self.bench = mortal(self.experiment, fault, self.tally, self.folder.path)
        self.told: list[str] = []

    def tell(self, doing: str, done: int | None = None, total: int | None = None) -> None:
        self.told.append(f"{done}/{total} {doing}")

    def measure(self) -> None:
        run_cells = partial(shards.run_cells, self.bench, 2)
        measurement.measure(self.experiment, self.folder, self.tell, run_cells)

    def times_run(self) -> int:
        return len(list(self.tally.iterdir()))


def undisturbed(path: Path, cost_file: Path) -> pd.DataFrame:
    made = experiment(target="sim", cost_model=cost_file, max_inflight="2,4", **SWEEP)
    manifest = {"configuration": made.configuration(), "seed": 0, "environment": {}}
    folder = RunFolder.create(path, "undisturbed", "run", manifest)
    run_cells = partial(measurement.run_cells, simulated(made))
    measurement.measure(made, folder, lambda *_: None, run_cells)
    return folder.read_requests()


# ---- the same for any number of processes ----


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same sweep in one, two and three processes, with arrivals, lengths and noise that are drawn."""
    noisy = tmp_path_factory.mktemp("cost") / "noisy.json"
    replace(COST, noise=Noise((0.8, 1.0, 1.3), 0.05, (0.5,))).write(noisy)
    flags: dict[str, Any] = {
        **SWEEP,
        "burst_size": None,
        "request_rate": "5,9",
        "num_requests": 40,
        "max_inflight": "0,3",
        "output_len_dist": "uniform:0.5",
        "repeats": 2,
        "seed": 5,
        "target": "sim",
        "cost_model": noisy,
        "output_dir": tmp_path_factory.mktemp("results"),
    }
    return [rb.sweep(**flags, shards=n) for n in (1, 2, 3)]


@pytest.mark.parametrize("table", ["requests", "steps", "workload", "summary"])
def test_tables_are_equal_for_any_number_of_shards(runs: list[Path], table: str) -> None:
    one, *others = [pd.read_parquet(run / f"{table}.parquet") for run in runs]
    for other in others:
        pd.testing.assert_frame_equal(
            one.drop(columns="run_id", errors="ignore"), other.drop(columns="run_id", errors="ignore")
        )


def test_manifests_and_facts_are_equal_for_any_number_of_shards(runs: list[Path]) -> None:
    one, *others = [RunFolder.open(run) for run in runs]
    for other in others:
        assert one.read_facts() == other.read_facts()
        own = ("command", "environment")  # its load, and --shards
        assert {k: v for k, v in one.manifest.items() if k not in own} == {
            k: v for k, v in other.manifest.items() if k not in own
        }


# ---- a worker that dies ----


@pytest.mark.parametrize("how", ["exit", "killed"])
def test_the_cell_of_a_worker_that_died_is_run_again(tmp_path: Path, cost_file: Path, how: str) -> None:
    sweep = Sweep(tmp_path, cost_file, Fault(CELL, how))
    sweep.measure()
    assert sweep.times_run() == 2
    pd.testing.assert_frame_equal(sweep.folder.read_requests(), undisturbed(tmp_path, cost_file))
    assert not list(sweep.folder.path.glob("cells/.*"))


def test_progress_counts_a_cell_once_however_often_it_is_run(tmp_path: Path, cost_file: Path) -> None:
    sweep = Sweep(tmp_path, cost_file, Fault(CELL, "exit"))
    sweep.measure()
    assert [line.split()[0] for line in sweep.told] == ["0/2", "1/2"]


def test_what_was_saved_before_its_worker_died_is_not_run_again(tmp_path: Path, cost_file: Path) -> None:
    sweep = Sweep(tmp_path, cost_file, Fault(CELL, "killed after saving"))
    sweep.measure()
    assert sweep.times_run() == 1
    assert len(sweep.folder.finished_cells()) == 2


def test_a_cell_that_two_workers_died_of_is_named(tmp_path: Path, cost_file: Path) -> None:
    sweep = Sweep(tmp_path, cost_file, Fault(CELL, "exit", times=2))
    with pytest.raises(RunError, match=rf"^{CELL}, repeat 1: its worker died.*\(exit code 3\)$"):
        sweep.measure()
    assert sweep.times_run() == 2


class LosesMachines:
    """One worker at a time; the first `n_lost` never begin the cell that they are given."""

    def __init__(self, n_lost: int) -> None:
        self.n_lost = n_lost
        self.begun: list[CellRun] = []

    def has_room(self) -> bool:
        return len(self.begun) == 0

    def begin(self, run: CellRun) -> None:
        self.begun.append(run)

    def wait(self) -> tuple[CellRun, Lost | None]:
        self.n_lost -= 1
        return self.begun.pop(), Lost("no such node", began=False) if self.n_lost >= 0 else None


def test_a_cell_that_never_began_does_not_count_as_run(cost_file: Path) -> None:
    made = experiment(target="sim", cost_model=cost_file, **SWEEP)
    todo = [CellRun(cell, 0) for cell in made.cells]
    told: list[CellRun] = []
    share_out(todo, LosesMachines(3), told.append)
    assert told == todo


# ---- errors ----


@pytest.mark.parametrize(
    ("how", "kind", "line"),
    [
        ("run error", RunError, "the engine is out of coal"),
        ("input error", InputError, "--burst-size 6: is not to our taste"),
        ("bug", RunError, f"{CELL}, repeat 1: ZeroDivisionError: nothing to share"),
    ],
)
def test_an_error_in_a_worker_is_the_one_line_that_it_is_elsewhere(
    tmp_path: Path, cost_file: Path, how: str, kind: type[Exception], line: str
) -> None:
    sweep = Sweep(tmp_path, cost_file, Fault(CELL, how))
    with pytest.raises(kind) as raised:
        sweep.measure()
    assert str(raised.value) == line
    assert not list(sweep.folder.path.glob("cells/.*"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            "--shards 2",
            "--shards 2: needs --target sim: an engine or a server is one machine, which measured cells may not share",
        ),
        (
            "--target http://localhost:1/v1 --shards 2",
            "--shards 2: needs --target sim: an engine or a server is one machine, which measured cells may not share",
        ),
        ("--shards 0", "--shards 0: must be a whole number from 1 to 2147483647"),
    ],
)
def test_measured_cells_do_not_share_a_machine(ask: Ask, words: str, complaint: str) -> None:
    answer = ask("sweep", *words.split())
    assert (answer.code, answer.complaint) == (2, complaint)


# ---- Ctrl-C, and a driver that is killed ----

INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell that puts us into the background ignores
from roseinfer.bench.cli import main
if __name__ == "__main__":
    main()
"""


def stopped_by(signal_number: int, path: Path, cost_file: Path, *, whole_group: bool) -> tuple[int, str, int]:
    """A sweep of 60 cells in two processes that gets this signal in its fifth: exit code, stderr, its group."""
    words = f"sweep --target sim --max-inflight 2,4 --repeats 30 --burst-size 64 --cost-model {cost_file}"
    command = [sys.executable, "-c", INTERRUPTIBLE, *words.split(), "--shards", "2"]
    command += ["-o", str(path), "--run-id", "run"]
    told = ""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            told += line
            if "cell 5 of 60" in line:
                (os.killpg if whole_group else os.kill)(process.pid, signal_number)
    return process.returncode, told, process.pid


def is_gone(group: int) -> bool:
    """No process of the group is left, or comes to its end in time."""
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, cost_file: Path) -> tuple[Path, int, str, int]:
    path = tmp_path_factory.mktemp("interrupted")
    return path / "sweep" / "run", *stopped_by(signal.SIGINT, path, cost_file, whole_group=True)


def test_ctrl_c_ends_all_processes_with_130_and_one_line(interrupted: tuple[Path, int, str, int]) -> None:
    _, code, told, group = interrupted
    assert code == 130
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith("roseinfer-bench: interrupted; ")
    assert is_gone(group)


def test_ctrl_c_keeps_what_was_finished_and_nothing_half_written(
    interrupted: tuple[Path, int, str, int],
) -> None:
    path, *_ = interrupted
    assert 1 <= len(RunFolder.open(path).finished_cells()) < 60
    assert not list(path.glob("cells/.*"))


def test_an_interrupted_run_goes_on_with_any_number_of_processes(
    interrupted: tuple[Path, int, str, int], ask: Ask, cost_file: Path
) -> None:
    path, *_ = interrupted
    before = RunFolder.open(path).read_requests()
    answer = ask("sweep", "--resume", str(path), "--cost-model", str(cost_file), "--quiet", "--shards", "3")
    assert answer.code == 0
    after = RunFolder.open(path).read_requests()
    assert len(after) == 60 * 64
    pd.testing.assert_frame_equal(after.merge(before[["cell_id", "repeat", "request_index"]]), before)


def test_processes_end_with_the_one_that_started_them(tmp_path: Path, cost_file: Path) -> None:
    code, _, group = stopped_by(signal.SIGKILL, tmp_path, cost_file, whole_group=False)
    assert code == -signal.SIGKILL
    assert is_gone(group)
    assert RunFolder.open(tmp_path / "sweep" / "run").finished_cells()
