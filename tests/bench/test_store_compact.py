"""Cells turned into files, whole at every moment."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from roseinfer.bench.store import RunFolder
from roseinfer.errors import InvariantError, RunError
from tests.bench.stored import (
    CELL,
    SUMMARY,
    cleared,
    content,
    create,
    for_every_kill,
    hidden_files,
    refuse_space,
    requests,
    steps,
    with_cells,
)


def test_compacting_changes_nothing_of_what_is_read(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    before = content(run)
    run.compact(SUMMARY, None)
    assert content(run) == before
    assert content(RunFolder.open(run.path)) == before


def test_a_compacted_run_is_its_files_alone(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    run.compact(SUMMARY, [pd.DataFrame({"arrival_s": [0.0, 1.0]})])
    assert sorted(path.name for path in run.path.iterdir()) == [
        "requests.parquet",
        "run.json",
        "steps.parquet",
        "summary.parquet",
        "workload.parquet",
    ]


def tries(repeat: int) -> pd.DataFrame:
    return pd.DataFrame({"request_index": [0, 0], "attempt": [1, 2], "sent_s": [0.25 + repeat, 0.5 + repeat]})


def with_tries(folder: Path) -> RunFolder:
    run = create(folder)
    for repeat in (0, 1):
        run.write_cell(CELL, repeat, requests(), steps(), {}, attempts=tries(repeat))
    return run


def test_tries_are_kept_where_there_are_any(tmp_path: Path) -> None:  # case J3
    run = with_tries(tmp_path / "retried")
    before = run.read_attempts()
    assert before["sent_s"].tolist() == [0.25, 0.5, 1.25, 1.5]
    run.compact(SUMMARY, None)
    assert RunFolder.open(run.path).read_attempts().equals(before)
    assert (run.path / "attempts.parquet").exists()
    other = with_cells(tmp_path / "other")
    assert other.read_attempts().empty
    other.compact(SUMMARY, None)
    assert RunFolder.open(other.path).read_attempts().empty


def test_a_kill_while_tries_are_compacted_loses_none(tmp_path: Path) -> None:
    whole = with_tries(tmp_path).read_attempts()

    def check(run: RunFolder) -> None:
        assert run.read_attempts().equals(whole)

    assert for_every_kill(
        RunFolder.open(tmp_path / "burst" / "run1"), lambda run: run.compact(SUMMARY, None), check
    )


def test_every_cell_is_one_row_group(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    run.compact(SUMMARY, None)
    file = pq.ParquetFile(run.path / "requests.parquet")
    assert [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)] == [2, 2]


def test_rows_are_ordered_by_cell_and_repeat_as_a_number(tmp_path: Path) -> None:
    run = create(tmp_path)
    for repeat in (10, 2):
        run.write_cell(CELL, repeat, requests(), steps(), {})
    assert list(run.read_requests()["repeat"]) == [2, 2, 10, 10]


def test_the_summary_comes_back_with_its_nulls_and_schema_version(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    assert run.read_summary() is None
    summary = SUMMARY.astype({"repeat": "Int64"})
    run.compact(summary, None)
    read = run.read_summary()
    assert read is not None
    pd.testing.assert_frame_equal(read, summary)
    assert pq.read_schema(run.path / "summary.parquet").metadata[b"schema_version"] == b"1"


def test_a_summary_can_be_replaced_after_compaction(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    run.compact(SUMMARY, None)
    before = content(run)
    run.compact(SUMMARY.head(1), None)
    read = run.read_summary()
    assert read is not None
    assert len(read) == 1
    assert content(run) == before


def test_no_cell_can_be_added_to_a_compacted_run(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    run.compact(SUMMARY, None)
    with pytest.raises(InvariantError, match="compacted"):
        run.write_cell("new", 0, requests(), steps(), {})


def test_a_full_disk_while_compacting_keeps_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_cells(tmp_path)
    before = content(run)
    refuse_space(monkeypatch)
    with pytest.raises(RunError, match=r"^run1: could not compact the cells: No space left on device$"):
        run.compact(SUMMARY, None)
    assert content(RunFolder.open(run.path)) == before
    assert hidden_files(run.path) == []


def test_a_compaction_killed_anywhere_loses_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    prepared = with_cells(tmp_path)
    expected = content(prepared)

    def compact(run: RunFolder) -> None:
        run.compact(SUMMARY, None)

    def check(found: RunFolder) -> None:
        assert content(found) == expected
        run = cleared(found.path)
        assert hidden_files(run.path) == []
        compact(run)
        assert content(RunFolder.open(run.path)) == expected

    # write, sync and rename of the summary; two writes, sync and rename of two tables; sync and rename of run.json;
    # the rename of cells/; the removal of two cells of three files, their folders and their parent
    assert for_every_kill(prepared, compact, check) == 3 + 2 * 4 + 2 + 1 + 9


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    run.compact(SUMMARY, None)
    (run.path / "requests.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(RunError, match=r"^run1: could not read requests\.parquet: [^\n]+$"):
        run.read_requests()


# --- resuming ---------------------------------------------------------------------------------------------
