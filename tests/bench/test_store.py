"""The run folder: whole at every moment, whatever interrupts it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roseinfer.bench.records import REQUEST_SCHEMA, SCHEMA_VERSION, STEP_SCHEMA, Outcome
from roseinfer.bench.store import RunFolder, check_writable, differences, new_run_id
from roseinfer.errors import InputError, InvariantError, RunError

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
        RunFolder.resume(tmp_path)


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
    RunFolder.resume(run.path)
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
    assert RunFolder.resume(path).finished_cells() == {(CELL, 1), ("max_inflight=none", 0)}


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
        run = RunFolder.resume(found.path)
        assert hidden_files(run.path) == []
        assert run.finished_cells() == before
        write(run)
        assert run.finished_cells() == before | {("new", 0)}

    # a folder; write, sync and rename of two tables; sync and rename of the facts; the rename of the folder
    assert for_every_kill(prepared, write, check) == 10


# --- compacting -------------------------------------------------------------------------------------------


def test_compacting_changes_nothing_of_what_is_read(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    before = content(run)
    run.compact(SUMMARY, None)
    assert content(run) == before
    assert content(RunFolder.open(run.path)) == before


def test_a_compacted_run_is_its_files_alone(tmp_path: Path) -> None:
    run = with_cells(tmp_path)
    run.compact(SUMMARY, pd.DataFrame({"arrival_s": [0.0, 1.0]}))
    assert sorted(path.name for path in run.path.iterdir()) == [
        "requests.parquet",
        "run.json",
        "steps.parquet",
        "summary.parquet",
        "workload.parquet",
    ]


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
        run = RunFolder.resume(found.path)
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


def manifest(**changes: object) -> dict[str, Any]:
    environment = {
        "cpu_model": "A CPU",
        "cores_usable": 2,
        "load_average": [0.5, 0.5, 0.5],
        "gpus": None,
        "versions": {"roseinfer": "0.1", "torch": "2.13"},
        "git": {"commit": "aaaa", "dirty": False},
        "source_sha256": "1111",
        "thread_env": {"OMP_NUM_THREADS": "2"},
    }
    return {
        "configuration": {"burst_size": 128, "max_inflight": [None, 16], "slo": ("p99_ttft:250",)},
        "workload_sha256": "abcd",
        "model": {"name": "builtin:gpt2", "dtype": "float32"},
        "environment": environment | changes.pop("environment", {}),  # type: ignore[operator]
    } | changes


def test_a_run_may_go_on_as_it_began(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "burst", "run1", manifest())
    assert differences(RunFolder.open(run.path).manifest, manifest()) == []


def test_a_busier_machine_does_not_keep_a_run_from_going_on() -> None:
    busier = {"load_average": [9.0, 9.0, 9.0], "gpus": ["A GPU"]}
    assert differences(manifest(), manifest(environment=busier)) == []


def test_a_commit_that_left_the_sources_alone_does_not_keep_a_run_from_going_on() -> None:
    assert differences(manifest(), manifest(environment={"git": {"commit": "bbbb", "dirty": True}})) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"configuration": {"burst_size": 64, "max_inflight": [None, 16], "slo": ["p99_ttft:250"]}},
            "--burst-size was 128, now 64",
        ),
        (
            {"configuration": {"burst_size": 128, "max_inflight": [16], "slo": ["p99_ttft:250"]}},
            "--max-inflight was not set,16, now 16",
        ),
        (
            {"configuration": {"burst_size": 128, "max_inflight": [None, 16]}},
            "--slo was p99_ttft:250, now not set",
        ),
        ({"workload_sha256": "ffff"}, "the workload is another one (other arrivals, lengths or prompts)"),
        (
            {"model": {"name": "builtin:gpt2", "dtype": "bfloat16"}},
            "model dtype was float32, now bfloat16",
        ),
        ({"environment": {"source_sha256": "2222"}}, "the code of roseinfer changed"),
        (
            {"environment": {"source_sha256": "2222", "git": {"commit": "bbbb", "dirty": False}}},
            "the code of roseinfer changed (git commit aaaa, now bbbb)",
        ),
        (
            {"environment": {"versions": {"roseinfer": "0.2", "torch": "2.13"}}},
            "version of roseinfer was 0.1, now 0.2",
        ),
        ({"environment": {"cores_usable": 1}}, "machine's cores-usable was 2, now 1"),
        ({"environment": {"thread_env": {}}}, "machine's thread-env was OMP_NUM_THREADS=2, now not set"),
    ],
)
def test_a_difference_is_said_in_plain_words(changes: dict[str, Any], said: str) -> None:
    assert differences(manifest(), manifest(**changes)) == [said]


def test_all_differences_are_said_at_once() -> None:
    other = manifest(workload_sha256="ffff", model={"name": "elsewhere", "dtype": "float32"})
    assert len(differences(manifest(), other)) == 2
