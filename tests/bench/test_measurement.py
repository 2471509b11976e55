"""A sweep on an engine without a model: the order of cells, what is on disk at every moment, resuming."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import roseinfer.bench as rb
from roseinfer.bench import measurement
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.records import TTFT_PARTS
from roseinfer.bench.rows import CellResult
from roseinfer.bench.store import RunFolder
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.workload import WARM_UP, Workload, WorkloadSource
from tests.bench.experiments import WORDS, WordTokenizer, experiment
from tests.bench.stored import cleared
from tests.scripted import ScriptedEngine


class Lab:
    """A sweep of three limits over two repeats, and what it did: (cell, workload) of each burst, words of progress."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        sizes = {
            "max_inflight": "0,2,4",
            "burst_size": "6",
            "prompt_len": "5",
            "repeats": 2,
            "max_batch_size": 3,
        }
        self.experiment = experiment(**(sizes | flags))
        self.engine = ScriptedEngine()
        self.engine.make_tokenizer = WordTokenizer
        self.source = WorkloadSource(
            self.experiment, WordTokenizer(), vocab_size=len(WORDS), max_model_len=4096
        )
        self.target = InProcessTarget(self.engine, self.experiment)
        self.folder = folder
        self.bursts: list[tuple[Cell, Workload]] = []
        self.progress: list[str] = []
        self.interrupt_at: int | None = None

    def create(self) -> RunFolder:
        manifest = {"configuration": self.experiment.configuration(), "seed": 0, "environment": {}}
        return RunFolder.create(self.folder, "sweep", "run", manifest)

    def tell(self, doing: str, done: int | None = None, total: int | None = None) -> None:
        if done is not None and done == self.interrupt_at:
            raise KeyboardInterrupt
        self.progress.append(doing if done is None else f"{done}/{total} {doing}")

    def measure(self, folder: RunFolder) -> None:
        bench = measurement.Bench(self.target, self.source, {})
        measurement.measure(self.experiment, folder, self.tell, partial(measurement.run_cells, bench))

    def measured(self) -> list[str]:
        return [cell.cell_id for cell, _ in self.bursts]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path)
    original = InProcessTarget.run

    def run(self: InProcessTarget, cell: Cell, workload: Workload) -> CellResult:
        made.bursts.append((cell, workload))
        return original(self, cell, workload)

    monkeypatch.setattr(InProcessTarget, "run", run)
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)  # slow where other tests have loaded torch
    return made


def many_cells(**flags: Any) -> Experiment:
    return experiment(**({"max_inflight": "0,1,2,3,4,5", "burst_size": "8,9", "repeats": 6} | flags))


def test_each_repeat_holds_every_cell_once() -> None:  # case H7
    made = many_cells()
    blocks = measurement.order(made)
    assert len(blocks) == 6
    assert all(Counter(block) == Counter(made.cells) for block in blocks)


def test_the_order_is_shuffled_anew_in_each_repeat() -> None:  # case H7
    blocks = measurement.order(many_cells())
    assert len({tuple(block) for block in blocks}) == 6


def test_the_order_follows_from_the_seed() -> None:
    assert measurement.order(many_cells(seed=3)) == measurement.order(many_cells(seed=3))
    assert measurement.order(many_cells(seed=3)) != measurement.order(many_cells(seed=4))


def test_drift_falls_on_all_cells_alike() -> None:  # case H7
    places = pd.DataFrame([[block.index(cell) for cell in block_cells] for block, block_cells in drifting()])
    assert (
        places.mean().between(3.5, 7.5).all()
    )  # of 0..11, over 100 repeats; grouped by cell it would be 0, 1, 2, ...


def drifting() -> Iterator[tuple[list[Cell], tuple[Cell, ...]]]:
    made = many_cells(repeats=100)
    for block in measurement.order(made):
        yield block, made.cells


def test_cells_are_measured_in_that_order(lab: Lab) -> None:
    lab.measure(lab.create())
    assert [cell for cell, _ in lab.bursts] == [
        cell for block in measurement.order(lab.experiment) for cell in block
    ]


def test_all_limits_of_a_repeat_get_the_same_requests_and_repeats_others(lab: Lab) -> None:  # case C5
    lab.measure(lab.create())
    prompts = [tuple(map(str, workload.prompts)) for _, workload in lab.bursts]
    assert len(set(prompts[:3])) == len(set(prompts[3:])) == 1
    assert not set(prompts[0]) & set(prompts[3])


def test_warm_up_is_not_recorded_and_its_prompts_are_not_measured(lab: Lab) -> None:  # case I3
    folder = lab.create()
    measurement.warm_up(lab.experiment, lab.target, lab.source, lab.tell)
    warm = {str(prompt) for _, workload in lab.bursts for prompt in workload.prompts}
    lab.bursts.clear()
    lab.measure(folder)
    assert len(warm) == 6
    assert not warm & {str(prompt) for _, workload in lab.bursts for prompt in workload.prompts}
    assert len(folder.read_requests()) == 3 * 2 * 6


@pytest.mark.parametrize(("flags", "limit"), [({}, 3), ({"max_active_requests": 2}, 2)])
def test_the_warm_up_fills_a_batch_but_no_more(
    lab: Lab, flags: dict[str, Any], limit: int
) -> None:  # case I4
    made = Lab(lab.folder, max_inflight="1", **flags)  # however low the limits are that will be measured
    measurement.warm_up(made.experiment, made.target, made.source, made.tell)
    assert [cell.max_inflight for cell, _ in lab.bursts] == [limit]


def test_every_shape_is_warmed_up_in_every_warm_up_run(tmp_path: Path, lab: Lab) -> None:
    made = Lab(tmp_path, burst_size="2,3", warmup_runs=2)
    measurement.warm_up(made.experiment, made.target, made.source, made.tell)
    assert [cell.burst_size for cell, _ in lab.bursts] == [2, 3, 2, 3]
    assert made.progress == ["warm-up 1/2", "warm-up 2/2"]
    seeds = [workload.prompt_seed for _, workload in lab.bursts]
    assert seeds[0] == seeds[1] != seeds[2]
    assert made.source.draw(lab.bursts[0][0], WARM_UP).prompt_seed == seeds[0]


def test_an_interrupted_sweep_has_whole_cells_on_disk_and_goes_on_with_the_missing_ones(lab: Lab) -> None:
    folder = lab.create()
    lab.interrupt_at = 4
    with pytest.raises(KeyboardInterrupt):
        lab.measure(folder)
    before = lab.measured()
    assert len(folder.finished_cells()) == len(before) == 4
    requests = folder.read_requests()

    lab.interrupt_at = None
    again = cleared(folder.path)
    lab.measure(again)
    order = [cell.cell_id for block in measurement.order(lab.experiment) for cell in block]
    assert before == order[:4]
    assert lab.measured()[4:] == order[4:]
    after = again.read_requests()
    kept = after.merge(requests[["cell_id", "repeat", "request_index"]])
    pd.testing.assert_frame_equal(kept, requests)  # what was measured is not measured again


def test_a_cell_that_is_interrupted_midway_is_measured_anew(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lab.create()

    def interrupted(self: InProcessTarget, cell: Cell, workload: Workload) -> CellResult:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(InProcessTarget, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.measure(folder)
    assert folder.finished_cells() == set()
    lab.measure(cleared(folder.path))
    assert len(lab.bursts) == 6


def test_progress_counts_cells_of_earlier_sittings_too(lab: Lab) -> None:
    folder = lab.create()
    lab.interrupt_at = 4
    with pytest.raises(KeyboardInterrupt):
        lab.measure(folder)
    lab.interrupt_at = None
    lab.progress.clear()
    lab.measure(cleared(folder.path))
    assert [line.split()[0] for line in lab.progress] == ["4/6", "5/6"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    made = Lab(tmp_path_factory.mktemp("results"))
    folder = made.create()
    made.measure(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S", 60.0)  # a loaded machine sends slowly
        measurement.conclude(folder, made.source.table_blocks())
    return folder


def test_a_finished_run_is_compacted_done_and_valid(finished: RunFolder) -> None:
    assert finished.is_done
    assert finished.is_compacted
    summary = rb.load_summary(finished.path)
    assert summary["valid"].all()
    assert summary["offered"].tolist() == [6, 6, 12] * 3
    assert summary["max_inflight"].dropna().tolist() == [2.0] * 3 + [4.0] * 3  # and no limit last
    assert len(pd.read_parquet(finished.path / "workload.parquet")) == 2 * 6


def test_the_collectors_pauses_are_kept_with_each_cell(finished: RunFolder) -> None:
    facts = finished.read_facts()
    assert all(cell["gc"].keys() == {"count", "total_s", "longest"} for cell in facts.values())
    assert all(cell["max_num_batched_tokens"] == 3 + 256 for cell in facts.values())


def test_a_notebook_reads_requests_with_their_derived_durations(finished: RunFolder) -> None:
    requests = rb.load_requests(str(finished.path))
    completed = requests[requests["outcome"] == "completed"]
    assert len(requests) == 36
    assert np.allclose(completed[list(TTFT_PARTS)].sum(axis=1), completed["ttft_s"], rtol=0, atol=1e-9)


def test_a_notebook_reads_steps(finished: RunFolder) -> None:
    steps = rb.load_steps(finished.path)
    assert set(steps["cell_id"]) == set(rb.load_requests(finished.path)["cell_id"])
    assert (steps["running"] <= 3).all()


def test_a_notebook_reads_what_is_there_of_an_unfinished_run(lab: Lab) -> None:
    folder = lab.create()
    lab.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        lab.measure(folder)
    assert len(rb.load_requests(folder.path)) == 2 * 6
    assert len(rb.load_summary(folder.path)) == 2 * 2  # a repeat and a pooled row of each cell
