"""Runs on disk to test with, and kills at any operation."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from roseinfer.bench.records import Outcome
from roseinfer.bench.store import RunFolder

MANIFEST = {"seed": 7, "configuration": {"burst_size": 128}}
CELL = "max_inflight=16"  # `=` on purpose: arrow takes such a folder for a column where it reads a data set


def requests(start_s: float = 0.0) -> pd.DataFrame:
    """One completed request, one refused."""
    return pd.DataFrame(
        {
            "request_index": [0, 1],
            "max_inflight": [16, 16],
            "scheduled_s": [start_s, start_s],
            "sent_s": [start_s + 0.25, start_s + 0.5],
            "first_token_s": [start_s + 1.0, np.nan],
            "rejected_s": [np.nan, start_s + 0.625],
            "outcome": [Outcome.COMPLETED, Outcome.REJECTED],
            "reject_reason": [None, "inflight"],
            "error": [np.nan, np.nan],
            "output_tokens": [2, None],
            "token_times_s": [[start_s + 1.0, start_s + 1.5], None],
            "chunk_times_s": [np.array([start_s + 1.75]), None],
            "chunk_tokens": [[2], None],
        }
    )


def steps() -> pd.DataFrame:
    members = [[{"request_index": 0, "start": 0, "n_tokens": 5}], []]
    return pd.DataFrame({"step": [0, 1], "exec_start_s": [0.5, np.nan], "members": members})


def create(output_dir: Path) -> RunFolder:
    return RunFolder.create(output_dir, "burst", "run1", MANIFEST)


def with_cells(output_dir: Path) -> RunFolder:
    """A run of two cells and repeats, not compacted."""
    run = create(output_dir)
    run.write_cell(CELL, 1, requests(), steps(), {"machine_load": 0.5})
    run.write_cell("max_inflight=none", 0, requests(10.0), steps(), {"machine_load": 1.5})
    return run


def stopped(run: RunFolder, output_dir: Path) -> RunFolder:
    """The run as if its user had stopped it in its last cell and repeat; its workload is on disk all the same."""
    copy = RunFolder.create(output_dir, run.experiment, run.run_id, run.manifest)
    requests, steps, facts = run.read_requests(), run.read_steps(), run.read_facts()
    *_, last = facts
    facts[last] |= {"interrupted_s": 0.5}
    for (cell_id, repeat), said in facts.items():
        rows, own_steps = (
            frame[(frame["cell_id"] == cell_id) & (frame["repeat"] == repeat)] for frame in (requests, steps)
        )
        n = len(rows) // 2 if (cell_id, repeat) == last else len(rows)
        copy.write_cell(cell_id, repeat, rows.iloc[:n], own_steps, said)
    shutil.copy(run.path / "workload.parquet", copy.path)
    return copy


def cells_in(rows: pd.DataFrame) -> set[tuple[str, int]]:
    """The cells and repeats of these rows."""
    return set(zip(rows["cell_id"], rows["repeat"], strict=True))


SUMMARY = pd.DataFrame({"cell_id": [CELL, CELL], "repeat": [1.0, np.nan], "p50_ttft_ms": [1.5, 2.5]})


def content(run: RunFolder) -> tuple[object, ...]:
    """All that a run holds but its summary, comparable by ==."""
    return (
        run.read_requests().to_json(),
        run.read_steps().to_json(),
        run.read_facts(),
        run.finished_cells(),
    )


def hidden_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".")]


class Killed(BaseException):
    """The process is gone: from here on nothing reaches the disk, clean-up least of all."""


@contextmanager
def killed_at(nth_operation: int) -> Iterator[None]:
    """The nth change of the file system, and all that follow, do not happen."""
    count = 0

    def fragile(operation: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count >= nth_operation:
                raise Killed
            return operation(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, fragile(getattr(os, name)))
        patch.setattr(pq.ParquetWriter, "write_table", fragile(pq.ParquetWriter.write_table))
        yield


def for_every_kill(
    prepared: RunFolder, action: Callable[[RunFolder], None], check: Callable[[RunFolder], None]
) -> int:
    """Run `action` on a copy of `prepared`, killed at its first, second ... operation, until it comes through.

    `check` gets the folder as the next process finds it. Returns how many kills there were.
    """
    for nth in range(1, 100):
        path = prepared.path.with_name(f"killed{nth}")
        shutil.copytree(prepared.path, path)
        run = RunFolder.open(path)
        try:
            with killed_at(nth):
                action(run)
        except Killed:
            check(RunFolder.open(path))
        else:
            return nth - 1
    raise AssertionError("it never came through")


def refuse_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_table(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq.ParquetWriter, "write_table", write_table)


# --- creating ---------------------------------------------------------------------------------------------


def cleared(path: Path) -> RunFolder:
    """The run, as somebody who goes on with it opens it."""
    folder = RunFolder.open(path, "--resume")
    folder.clear_leftovers()
    return folder
