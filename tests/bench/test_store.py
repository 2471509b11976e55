"""The run folder: whole at every moment, whatever interrupts it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roseinfer.bench.records import REQUEST_SCHEMA, SCHEMA_VERSION, STEP_SCHEMA
from roseinfer.bench.store import RunFolder, check_writable, new_run_id
from roseinfer.errors import InputError, InvariantError, RunError
from tests.bench.stored import (
    CELL,
    MANIFEST,
    SUMMARY,
    Killed,
    cleared,
    content,
    create,
    for_every_kill,
    hidden_files,
    killed_at,
    refuse_space,
    requests,
    steps,
    with_cells,
)


def test_a_new_run_is_running_and_holds_its_manifest(tmp_path: Path) -> None:
    create(tmp_path / "new" / "results")
    run = RunFolder.open(tmp_path / "new" / "results" / "burst" / "run1")
    assert (run.experiment, run.run_id, run.is_done, run.finished_cells()) == ("burst", "run1", False, set())
    assert run.manifest == MANIFEST


def test_run_json_carries_the_schema_version(tmp_path: Path) -> None:
    run = create(tmp_path)
    assert json.loads((run.path / "run.json").read_text())["schema_version"] == SCHEMA_VERSION


def test_an_existing_run_id_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    before = content(run)
    with pytest.raises(InputError, match=r"^--run-id 'run1': .*burst"):
        create(tmp_path)
    assert content(RunFolder.open(run.path)) == before


@pytest.mark.parametrize("run_id", ["", "..", ".hidden", "a/b", "two\nlines"])
def test_a_run_id_that_is_no_folder_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InputError, match=r"^--run-id "):
        RunFolder.create(tmp_path, "burst", run_id, MANIFEST)
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_name_that_leaves_the_output_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--experiment-name '../elsewhere': "):
        RunFolder.create(tmp_path, "../elsewhere", "run1", MANIFEST)


def test_a_manifest_cannot_overwrite_what_the_store_records(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match="status"):
        RunFolder.create(tmp_path, "burst", "run1", {"status": "done"})


@pytest.mark.parametrize("below", [".", "below", "deep/below"])
@pytest.mark.parametrize("attempt", [check_writable, create])
def test_an_output_folder_that_is_a_file_is_refused(
    tmp_path: Path, below: str, attempt: Callable[[Path], object]
) -> None:
    (tmp_path / "file").write_text("mine")
    output_dir = tmp_path / "file" / below
    with pytest.raises(InputError, match=f"^--output-dir '{re.escape(str(output_dir))}': .*directory"):
        attempt(output_dir)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_creation_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InputError, match=r"^--output-dir .*No space left on device$"):
        create(tmp_path / "new" / "results")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_creation_leaves_the_folders_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "burst").mkdir()

    def fsync(_: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InputError, match="Read-only"):
        create(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["burst"]


@pytest.mark.parametrize("nth_operation", [1, 2, 3, 4, 5])
def test_a_creation_that_is_killed_leaves_no_run_to_open(tmp_path: Path, nth_operation: int) -> None:
    # folders experiment, run and cells, then run.json: synced, renamed
    with killed_at(nth_operation), pytest.raises(Killed):
        create(tmp_path)
    with pytest.raises(InputError, match=r"^RUN .*no run to read here"):
        RunFolder.open(tmp_path / "burst" / "run1")


@pytest.mark.parametrize("output_dir", [".", "new", "new/deep"])
def test_checking_a_writable_folder_leaves_nothing_behind(tmp_path: Path, output_dir: str) -> None:
    check_writable(tmp_path / output_dir)
    assert list(tmp_path.iterdir()) == []


def test_checking_names_the_folder_where_writing_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryFile", forbid)
    with pytest.raises(InputError, match=r"^--output-dir '.*new': Permission denied$"):
        check_writable(tmp_path / "new")


def test_a_run_id_begins_with_its_utc_second() -> None:
    now = datetime(2026, 11, 30, 1, 15, tzinfo=timezone(timedelta(hours=2)))
    assert re.fullmatch(r"20261129T231500Z-[0-9a-f]{4}", new_run_id(now))


def test_two_runs_of_one_second_get_different_ids() -> None:
    now = datetime(2026, 11, 29, tzinfo=UTC)
    assert len({new_run_id(now) for _ in range(20)}) > 1


# --- opening ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run_json", "why"),
    [
        (None, "No such file"),
        ("{half", "not valid JSON"),
        ("[]", "schema version None"),
        ('{"schema_version": 999}', "schema version 999; this roseinfer reads 1"),
    ],
)
def test_what_is_no_run_cannot_be_resumed(tmp_path: Path, run_json: str | None, why: str) -> None:
    if run_json is not None:
        (tmp_path / "run.json").write_text(run_json)
    with pytest.raises(InputError, match=f"^--resume '{re.escape(str(tmp_path))}': .*{why}"):
        cleared(tmp_path)


def test_a_run_that_lost_its_cells_cannot_be_opened(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    shutil.rmtree(run.path / "cells")
    with pytest.raises(InputError, match="its cells are gone"):
        RunFolder.open(run.path)


def test_resuming_clears_what_a_killed_run_left_and_only_that(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    (run.path / ".ipynb_checkpoints").mkdir()
    (run.path / ".run.json.aside").write_text("{half")
    (run.path / "cells" / ".max_inflight=64@0.aside").mkdir()
    cleared(run.path)
    assert [path.name for path in hidden_files(run.path)] == [".ipynb_checkpoints"]


def test_reading_a_run_leaves_alone_what_its_process_is_writing(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    (run.path / "cells" / ".max_inflight=64@0.aside").mkdir()
    assert RunFolder.open(run.path).finished_cells() == {(CELL, 1), ("max_inflight=none", 0)}
    assert len(hidden_files(run.path)) == 1


def test_a_run_marked_done_is_recognised(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.mark_done()
    assert run.is_done
    assert RunFolder.open(run.path).is_done


# --- cells ------------------------------------------------------------------------------------------------


def test_finished_cells_survive_the_process_that_wrote_them(tmp_path: Path) -> None:  # case H8
    path = with_cells(tmp_path).path
    assert cleared(path).finished_cells() == {(CELL, 1), ("max_inflight=none", 0)}


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize(("name", "schema"), [("requests", REQUEST_SCHEMA), ("steps", STEP_SCHEMA)])
def test_parquet_files_have_the_schema_of_the_record(
    tmp_path: Path, compacted: bool, name: str, schema: pa.Schema
) -> None:
    run = with_cells(tmp_path)
    if compacted:
        run.compact(SUMMARY, None)
    folder = run.path if compacted else run.path / "cells" / f"{CELL}@1"
    file = pq.ParquetFile(folder / f"{name}.parquet")
    assert file.schema_arrow.remove_metadata() == schema
    assert file.schema_arrow.metadata[b"schema_version"] == b"1"
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_nulls_and_lists_of_requests_come_back(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.write_cell(CELL, 1, requests(), steps(), {})
    table = pq.ParquetFile(run.path / "cells" / f"{CELL}@1" / "requests.parquet").read()
    completed, refused = table.to_pylist()
    assert completed == dict.fromkeys(REQUEST_SCHEMA.names) | {
        "run_id": "run1",
        "cell_id": CELL,
        "repeat": 1,
        "request_index": 0,
        "max_inflight": 16,
        "scheduled_s": 0.0,
        "sent_s": 0.25,
        "first_token_s": 1.0,
        "outcome": "completed",
        "output_tokens": 2,
        "token_times_s": [1.0, 1.5],
        "chunk_times_s": [1.75],
        "chunk_tokens": [2],
    }
    assert refused["first_token_s"] is None
    assert refused["output_tokens"] is None
    assert refused["token_times_s"] is None
    assert (refused["rejected_s"], refused["reject_reason"]) == (0.625, "inflight")


def test_members_of_steps_come_back(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.write_cell(CELL, 0, requests(), steps(), {})
    table = pq.ParquetFile(run.path / "cells" / f"{CELL}@0" / "steps.parquet").read()
    assert table["members"].to_pylist() == [[{"request_index": 0, "start": 0, "n_tokens": 5}], []]
    assert table["exec_start_s"].to_pylist() == [0.5, None]
    assert table["kv_tokens"].to_pylist() == [None, None]


def test_a_column_without_a_single_value_reads_as_missing(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    read = run.read_requests()
    assert read[["error", "status_code", "model"]].isna().all(axis=None)


def test_a_target_without_steps_can_be_saved(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.write_cell(CELL, 0, requests(), pd.DataFrame(), {})
    run.compact(SUMMARY, None)
    assert run.read_steps().empty
    assert list(run.read_steps().columns) == STEP_SCHEMA.names


def test_a_column_that_the_record_does_not_know_is_refused(tmp_path: Path) -> None:
    run = create(tmp_path)
    with pytest.raises(InvariantError, match="ttft_s"):
        run.write_cell(CELL, 0, requests().assign(ttft_s=1.0), steps(), {})
    assert run.finished_cells() == set()


def test_a_cell_is_never_overwritten(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    before = content(run)
    with pytest.raises(InvariantError, match="saved already"):
        run.write_cell(CELL, 1, requests(99.0), steps(), {})
    assert content(run) == before


def test_a_cell_that_was_interrupted_is_there_but_not_finished(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    before = run.finished_cells()
    run.write_cell("new", 0, requests(), steps(), {"interrupted_s": 1.5})
    assert run.finished_cells() == before
    assert run.interrupted_cells() == {("new", 0)}
    assert "new" in set(run.read_requests()["cell_id"])


def test_a_cell_that_was_interrupted_is_replaced_by_the_whole_one(tmp_path: Path) -> None:
    prepared = with_cells(tmp_path)
    before = prepared.finished_cells()
    prepared.write_cell("new", 0, requests(), steps(), {"interrupted_s": 1.5})

    def write(run: RunFolder) -> None:
        run.write_cell("new", 0, requests(20.0), steps(), {"interrupted_s": None})

    def check(found: RunFolder) -> None:
        run = cleared(found.path)
        assert hidden_files(run.path) == []
        if run.finished_cells() == before:
            write(run)
        assert run.finished_cells() == before | {("new", 0)}
        assert run.interrupted_cells() == set()

    # as where there was none, the rename of what is replaced, and its removal
    for_every_kill(prepared, write, check)


def test_facts_come_back_as_json_has_them(tmp_path: Path) -> None:
    run = create(tmp_path)
    facts = {"peak": np.int64(16), "lag_s": np.nan, "pauses": [(0.5, np.float64(0.25), 2)], "ok": True}
    run.write_cell(CELL, 0, requests(), steps(), facts)
    assert run.read_facts() == {
        (CELL, 0): {"peak": 16, "lag_s": None, "pauses": [[0.5, 0.25, 2]], "ok": True}
    }


def test_a_full_disk_is_one_line_and_leaves_nothing_of_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_cells(tmp_path)
    before = content(run)
    refuse_space(monkeypatch)
    with pytest.raises(RunError, match=r"^run1: could not save new@0: No space left on device$"):
        run.write_cell("new", 0, requests(), steps(), {})
    assert content(run) == before
    assert hidden_files(run.path) == []


def test_a_cell_killed_anywhere_is_not_there_and_can_be_measured_again(tmp_path: Path) -> None:
    prepared = with_cells(tmp_path)
    before = prepared.finished_cells()

    def write(run: RunFolder) -> None:
        run.write_cell("new", 0, requests(20.0), steps(), {})

    def check(found: RunFolder) -> None:
        run = cleared(found.path)
        assert hidden_files(run.path) == []
        assert run.finished_cells() == before
        write(run)
        assert run.finished_cells() == before | {("new", 0)}

    # a folder; write, sync and rename of two tables; sync and rename of the facts; the rename of the folder
    assert for_every_kill(prepared, write, check) == 10


def test_a_cell_may_come_in_row_groups(tmp_path: Path) -> None:
    run = create(tmp_path)
    with run.cell(CELL, 0) as writer:
        for first in (0, 3, 6):
            writer.add("requests", pa.table({"request_index": [first, first + 1, first + 2]}))
        writer.facts = {"offered": 9}
    file = pq.ParquetFile(run.path / "cells" / f"{CELL}@0" / "requests.parquet")
    assert [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)] == [3, 3, 3]
    read = run.read_requests()
    assert read["request_index"].tolist() == list(range(9))
    assert read["run_id"].unique().tolist() == ["run1"]
    assert read["sent_s"].isna().all()
    assert run.read_steps().empty
    assert run.read_facts() == {(CELL, 0): {"offered": 9}}


def test_row_groups_stay_what_they_are_in_a_compacted_run(tmp_path: Path) -> None:
    run = create(tmp_path)
    with run.cell(CELL, 0) as writer:
        for first in (0, 3):
            writer.add("requests", pa.table({"request_index": [first, first + 1, first + 2]}))
        writer.facts = {}
    before = content(run)
    run.compact(SUMMARY, None)
    assert content(run) == before
    assert pq.ParquetFile(run.path / "requests.parquet").num_row_groups == 2


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_a_cell_that_is_interrupted_between_row_groups_leaves_nothing(
    tmp_path: Path, interruption: type[BaseException]
) -> None:
    run = with_cells(tmp_path)
    before = content(run)

    def write() -> None:
        with run.cell("new", 0) as writer:
            writer.add("requests", requests())
            raise interruption

    with pytest.raises((KeyboardInterrupt, RunError)):
        write()
    assert content(run) == before
    assert hidden_files(run.path) == []


# --- compacting -------------------------------------------------------------------------------------------


# --- files of other versions, and other processes ---------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True])
def test_a_column_that_an_older_file_lacks_reads_as_not_measured(tmp_path: Path, compacted: bool) -> None:
    run = with_cells(tmp_path)
    before = run.read_requests()
    if compacted:
        run.compact(SUMMARY, None)
    for path in run.path.rglob("requests.parquet"):
        old = pq.ParquetFile(path).read().drop_columns(["waiting_at_send", "chunk_tokens"])
        pq.write_table(old, path)
    read = RunFolder.open(run.path).read_requests()
    assert list(read.columns) == REQUEST_SCHEMA.names
    assert read[["waiting_at_send", "chunk_tokens"]].isna().all(axis=None)
    assert read["sent_s"].tolist() == before["sent_s"].tolist()


def test_cells_of_an_older_version_are_compacted_into_the_files_of_this_one(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    first = run.path / "cells" / f"{CELL}@1" / "requests.parquet"
    pq.write_table(pq.ParquetFile(first).read().drop_columns(["chunk_tokens"]), first)
    run.compact(SUMMARY, None)
    schema = pq.ParquetFile(run.path / "requests.parquet").schema_arrow
    assert schema.remove_metadata() == REQUEST_SCHEMA


def test_a_run_that_is_being_measured_cannot_be_claimed_again(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    other = RunFolder.open(run.path)
    with run.claimed():
        with pytest.raises(InputError, match=r"^--resume .*run1': another process is measuring it"):
            other.claimed().__enter__()
        assert other.finished_cells() == run.finished_cells()  # reading it is free
    with other.claimed():
        assert hidden_files(run.path) == []  # nothing is left for a killed process to leave behind


def test_a_claim_ends_with_what_was_done_under_it(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    with pytest.raises(KeyboardInterrupt), run.claimed():
        raise KeyboardInterrupt
    with run.claimed():
        pass
