"""The folder of a run: `results/<experiment>/<run_id>/`.

    run.json             the manifest, schema_version, status ("running" or "done"); once compacted, the facts
    cells/<cell>@<n>/    while it runs: requests.parquet, steps.parquet, facts.json of one cell and repeat
    requests.parquet, steps.parquet, summary.parquet, workload.parquet        once compacted
    attempts.parquet     beside requests.parquet, where clients retry

Whatever is written is first written aside, under a hidden name, and renamed once when it is whole. As long as
`cells/` exists it is the truth and the compacted files are not read; it goes last, by one rename. So a run
that is killed at any moment is whole, but for the cell that was running. One that was interrupted is there with what
it had come to, and is not finished: to go on is to measure it anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa

from roseinfer.bench.lean_frames import lean_frame
from roseinfer.bench.records import SCHEMA_VERSION, as_frame
from roseinfer.bench.row_files import (
    ATTEMPTS,
    METADATA,
    SCHEMAS,
    CellWriter,
    conformed,
    plain,
    read_parquet,
    row_groups,
    write_frames,
    write_json,
    write_parquet,
)
from roseinfer.errors import InputError, InvariantError, RunError
from roseinfer.whole_files import made_aside

CellKey = tuple[str, int]
"""(cell_id, repeat)"""

INTERRUPTED_S: Final = "interrupted_s"
"""Of the facts of a cell: null, or when it was interrupted."""

_OWN_KEYS: Final = ("schema_version", "run_id", "experiment", "status", "facts")
_LONGEST_NAME_BYTES: Final = 200
_MACHINE_KEYS: Final = ("cpu_model", "cores_usable", "thread_env")


def new_run_id(now: datetime) -> str:
    """The UTC second of `now` and four random hex digits, e.g. `20261129T231500Z-3fa9`."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def check_writable(output_dir: Path, experiment: str = "") -> None:
    """Raise InputError if no run could be written to `output_dir`/`experiment`. Leaves nothing behind, not even it."""
    place = output_dir / experiment
    try:
        nearest = next((folder for folder in (place, *place.parents) if folder.exists()), place)
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(bytes(4096))  # a full disk still hands out empty files
    except OSError as error:
        raise InputError("--output-dir", str(output_dir), _reason(error)) from error


class RunFolder:
    """One run on disk. `path` is its folder, `run_id` and `experiment` are its names."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        self._run = run

    @classmethod
    def create(
        cls, output_dir: Path, experiment: str, run_id: str, manifest: Mapping[str, object]
    ) -> RunFolder:
        """A new folder that holds run.json and no cells.

        Raises InputError for a name that is no folder name, an existing run id, or an output folder that
        cannot be written; then nothing that was made here is left.
        """
        check_name("--experiment-name", experiment)
        check_name("--run-id", run_id)
        if taken := manifest.keys() & set(_OWN_KEYS):
            raise InvariantError(f"the manifest may not set {sorted(taken)}")
        names = {"schema_version": SCHEMA_VERSION, "run_id": run_id, "experiment": experiment}
        run = {**names, "status": "running", **plain(manifest)}
        path = output_dir / experiment / run_id
        try:
            with ExitStack() as undo:
                for folder in reversed(path.parents):
                    if not folder.exists():
                        folder.mkdir(exist_ok=True)
                        undo.callback(_remove_if_empty, folder)
                try:
                    path.mkdir()  # never exist_ok: of two runs with one id the second must stop here
                except FileExistsError:
                    raise InputError("--run-id", run_id, f"{experiment} has a run of this id") from None
                undo.callback(shutil.rmtree, path, ignore_errors=True)
                (path / "cells").mkdir()
                write_json(path / "run.json", run)
                undo.pop_all()
        except OSError as error:
            raise InputError("--output-dir", str(output_dir), _reason(error)) from error
        return cls(path, run)

    @classmethod
    def open(cls, path: Path, name: str = "RUN") -> RunFolder:
        """The run at `path`, to read it; it may still be running elsewhere.

        Raises InputError(name, path) where there is no run.json of a schema that this version knows.
        """
        try:
            run = json.loads((path / "run.json").read_bytes())
        except OSError as error:
            raise InputError(name, str(path), f"no run to read here: run.json: {_reason(error)}") from error
        except ValueError as error:
            raise InputError(name, str(path), "its run.json is not valid JSON") from error
        version = run.get("schema_version") if isinstance(run, dict) else None
        if version != SCHEMA_VERSION:
            raise InputError(
                name, str(path), f"schema version {version!r}; this roseinfer reads {SCHEMA_VERSION}"
            )
        folder = cls(path, run)
        if folder.is_compacted and "facts" not in run:
            raise InputError(name, str(path), "its cells are gone and it was never compacted")
        return folder

    def clear_leftovers(self, of: CellKey | None = None) -> None:
        """Removes what a killed process left half-written: of one cell and repeat, or, before going on, of any."""
        with self._reported("could not remove what a killed run left"):
            for leftover in [*self.path.glob(".*.aside"), *self.path.glob("cells/.*.aside")]:
                if of is not None and leftover.name != ".{}@{}.aside".format(*of):
                    continue
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """In its `with` no other process may claim this run. Raises InputError("--resume", ...) where one does.

        The lock is on the folder itself and ends with the process, however that ends.
        """
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if not isinstance(error, BlockingIOError):
                raise
            raise InputError("--resume", str(self.path), "another process is measuring it") from None
        try:
            yield
        finally:
            os.close(handle)

    @property
    def run_id(self) -> str:
        return str(self._run["run_id"])

    @property
    def experiment(self) -> str:
        return str(self._run["experiment"])

    @property
    def is_done(self) -> bool:
        return bool(self._run["status"] == "done")

    @property
    def is_compacted(self) -> bool:
        return not (self.path / "cells").is_dir()

    @property
    def manifest(self) -> dict[str, Any]:
        """What `create` was given, as JSON holds it."""
        return {key: value for key, value in self._run.items() if key not in _OWN_KEYS}

    def finished_cells(self) -> set[CellKey]:
        """The cells and repeats that are on disk, whole: not those that were interrupted, as their facts say."""
        if self.is_compacted:
            return {(entry["cell_id"], entry["repeat"]) for entry in self._run["facts"]}
        facts = self.read_facts()
        return {key for key, said in facts.items() if said.get(INTERRUPTED_S) is None}

    def interrupted_cells(self) -> set[CellKey]:
        """The cells and repeats of which a part is on disk. `cell` replaces them."""
        return set(self.read_facts()) - self.finished_cells()

    def write_cell(
        self,
        cell_id: str,
        repeat: int,
        requests: pd.DataFrame,
        steps: pd.DataFrame,
        facts: Mapping[str, object],
        attempts: pd.DataFrame | None = None,
    ) -> None:
        """Save one cell and repeat, all of it or nothing.

        `requests`, `steps` and, where clients retry, `attempts` hold columns of their schemas. The key columns (run_id,
        cell_id, repeat) are set here; a missing column was not measured and becomes null, as NaN does.
        `facts` is any JSON, numpy numbers included. Raises RunError where the disk does not take it,
        InvariantError for an unknown column or for a cell that is there already.
        """
        with self.cell(cell_id, repeat) as writer:
            for name, frame in {"requests": requests, "steps": steps, "attempts": attempts}.items():
                if frame is not None:
                    writer.add(name, frame)
            writer.facts = facts

    @contextmanager
    def cell(self, cell_id: str, repeat: int) -> Iterator[CellWriter]:
        """Save one cell and repeat row group by row group: at the end of the `with` all of it is there, or nothing.

        One that was interrupted is replaced, by then. Raises what `write_cell` raises.
        """
        check_name("cell_id", cell_id)
        cell = self.path / "cells" / f"{cell_id}@{repeat}"
        is_there = cell.exists()
        if self.is_compacted or (is_there and (cell_id, repeat) not in self.interrupted_cells()):
            raise InvariantError(f"{cell.name} is saved already, or its run is compacted")
        key: dict[str, Any] = {"run_id": self.run_id, "cell_id": cell_id, "repeat": repeat}
        with self._reported(f"could not save {cell.name}"), made_aside(cell) as aside:
            aside.mkdir()
            with ExitStack() as files:
                writer = CellWriter(aside, key, files)
                yield writer
                writer.complete()
            write_json(aside / "facts.json", writer.facts)
            if is_there:
                replaced = cell.with_name(f".{cell.name}.replaced.aside")
                cell.replace(replaced)
        if is_there:
            shutil.rmtree(replaced, ignore_errors=True)  # `clear_leftovers` finds what stays

    def compact(self, summary: pd.DataFrame, workload: Iterable[pd.DataFrame] | None) -> None:
        """Turn the cells into one file a kind, and add `summary` and `workload`, in parts (None: there is none).

        Memory holds one row group at a time. Repeating it, after a kill or to replace the summary, is harmless.
        Afterwards no cell can be added. Raises RunError where the disk does not take it; the cells are still
        there then.
        """
        with self._reported("could not compact the cells"):
            write_frames(self.path / "summary.parquet", [summary])
            if workload is not None:
                write_frames(self.path / "workload.parquet", workload)
            if self.is_compacted:
                return
            cells = self._cell_folders()
            for name, schema in SCHEMAS.items():
                if name == ATTEMPTS and not any((cell / name).exists() for cell in cells):
                    continue
                groups = (conformed(group, schema) for cell in cells for group in row_groups(cell / name))
                write_parquet(self.path / name, schema.with_metadata(METADATA), groups)
            facts = [
                {"cell_id": cell_id, "repeat": repeat, "facts": facts}
                for (cell_id, repeat), facts in self.read_facts().items()
            ]
            self._rewrite({"facts": facts})
            removed = self.path / ".cells.aside"
            (self.path / "cells").replace(removed)
            shutil.rmtree(
                removed, ignore_errors=True
            )  # the run is whole without: `clear_leftovers` finds what stays

    def mark_done(self) -> None:
        """Nothing is left to measure."""
        with self._reported("could not mark the run as done"):
            self._rewrite({"status": "done"})

    def read_requests(self, *, without: Collection[str] = ()) -> pd.DataFrame:
        """One row per offered request, by (cell_id, repeat). Integer columns with nulls come as float64.

        `without` some columns it is a `lean_frame`: a million rows take a tenth of the memory.
        """
        return self._read("requests.parquet", without)

    def read_steps(self, *, without: Collection[str] = ()) -> pd.DataFrame:
        """One row per engine step, by (cell_id, repeat). `without`: as of requests."""
        return self._read("steps.parquet", without)

    def read_attempts(self) -> pd.DataFrame:
        """One row per try, by (cell_id, repeat); none where clients did not retry."""
        return self._read(ATTEMPTS)

    def read_workload(self, columns: Collection[str]) -> pd.DataFrame | None:
        """These columns of the workload given to `compact`, of all cells and repeats; None before, or without one."""
        path = self.path / "workload.parquet"
        if not path.exists():
            return None
        with self._reported("could not read workload.parquet"):
            return pd.read_parquet(path, columns=list(columns))

    def read_summary(self) -> pd.DataFrame | None:
        """The summary given to `compact`; None before: make it from `read_requests` then."""
        if not self.is_compacted:
            return None
        with self._reported("could not read summary.parquet"):
            summary: pd.DataFrame = read_parquet(self.path / "summary.parquet").to_pandas()
            return summary

    def read_facts(self) -> dict[CellKey, dict[str, Any]]:
        """The facts of every cell and repeat on disk, ordered by (cell_id, repeat)."""
        if self.is_compacted:
            return {(entry["cell_id"], entry["repeat"]): entry["facts"] for entry in self._run["facts"]}
        with self._reported("could not read the facts"):
            cells = self._cell_folders()
            return {_cell_key(cell): json.loads((cell / "facts.json").read_bytes()) for cell in cells}

    def _cell_folders(self) -> list[Path]:
        return sorted((cell for cell in self.path.glob("cells/[!.]*@*")), key=_cell_key)

    def _read(self, name: str, without: Collection[str] = ()) -> pd.DataFrame:
        with self._reported(f"could not read {name}"):
            files = (
                [self.path / name] if self.is_compacted else [cell / name for cell in self._cell_folders()]
            )
            if name == ATTEMPTS:
                files = [file for file in files if file.exists()]
            if without:
                return lean_frame(files, SCHEMAS[name], without)
            tables = [conformed(read_parquet(file), SCHEMAS[name]) for file in files]
            return as_frame(pa.concat_tables([SCHEMAS[name].empty_table(), *tables]))

    def _rewrite(self, changes: Mapping[str, object]) -> None:
        run = {**self._run, **changes}
        write_json(self.path / "run.json", run)
        self._run = run

    @contextmanager
    def _reported(self, failure: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{self.path.name}: {failure}: {_reason(error)}") from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What keeps a run begun as `old` from going on as `new`, in plain words; empty when it may.

    Compared of the two manifests: `configuration` (flag name to value), `workload_sha256`, `model` (a
    mapping), and of `environment` (as `describe_environment` gives it) the code and what of the machine
    decides how fast it computes, which on a virtual clock is nothing.
    """
    before, after = plain(old), plain(new)
    environments = before.get("environment", {}), after.get("environment", {})
    found = _changed("--{}", before.get("configuration", {}), after.get("configuration", {}))
    if before.get("workload_sha256") != after.get("workload_sha256"):
        found.append("the workload is another one (other arrivals, lengths or prompts)")
    found += _changed("model {}", before.get("model", {}), after.get("model", {}))
    # The sources decide, not the commit: uncommitted edits count, a commit that only touched a text does not.
    codes = [environment.get("source_sha256") for environment in environments]
    if codes[0] != codes[1]:
        commits = [(environment.get("git") or {}).get("commit") for environment in environments]
        known = f" (git commit {commits[0]}, now {commits[1]})" if commits[0] != commits[1] else ""
        found.append(f"the code of roseinfer changed{known}")
    found += _changed("version of {}", *(environment.get("versions", {}) for environment in environments))
    if before.get("target") == "sim":
        return found
    machines = [{key: environment.get(key) for key in _MACHINE_KEYS} for environment in environments]
    return found + _changed("machine's {}", *machines)


def _changed(wording: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{wording.format(key.replace('_', '-'))} was {_shown(old.get(key))}, now {_shown(new.get(key))}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    if isinstance(value, dict):
        return " ".join(f"{key}={_shown(part)}" for key, part in value.items()) or "not set"
    return str(value)


def check_name(name: str, value: str) -> None:
    """Raise InputError unless `value` can be the name of a folder."""
    if not value or value.startswith(".") or "/" in value or "\\" in value or not value.isprintable():
        raise InputError(name, value, "not a plain folder name")
    if len(value.encode()) > _LONGEST_NAME_BYTES:
        raise InputError(name, value, f"longer than {_LONGEST_NAME_BYTES} bytes")


def _cell_key(cell: Path) -> CellKey:
    cell_id, _, repeat = cell.name.rpartition("@")
    return cell_id, int(repeat)


def _reason(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return strerror or str(error).partition("\n")[0] or type(error).__name__


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
