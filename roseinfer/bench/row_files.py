"""Files of a run: each is made aside, under a hidden name, and renamed once when it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from roseinfer.bench.records import ATTEMPT_SCHEMA, REQUEST_SCHEMA, SCHEMA_VERSION, STEP_SCHEMA
from roseinfer.bench.row_groups import ROW_GROUP_ROWS
from roseinfer.errors import InvariantError
from roseinfer.whole_files import written

ATTEMPTS: Final = "attempts.parquet"
SCHEMAS: Final = {
    "requests.parquet": REQUEST_SCHEMA,
    "steps.parquet": STEP_SCHEMA,
    ATTEMPTS: ATTEMPT_SCHEMA,
}
METADATA: Final = {"schema_version": str(SCHEMA_VERSION)}


class CellWriter:
    """Takes what one cell and repeat leaves. `facts` are set before its end."""

    facts: Mapping[str, object]

    def __init__(self, folder: Path, key: Mapping[str, Any], files: ExitStack) -> None:
        self._folder = folder
        self._key = key
        self._files = files  # closes them
        self._writers: dict[str, Any] = {}

    def add(self, name: str, rows: pd.DataFrame | pa.Table) -> None:
        """A row group of "requests", "steps" or "attempts", with columns of its schema but for the key."""
        schema = SCHEMAS[f"{name}.parquet"]
        if isinstance(rows, pd.DataFrame):
            table = record_table(rows.assign(**self._key), schema)
        else:
            for column, value in self._key.items():
                field = schema.field(column)
                rows = rows.append_column(field, pa.repeat(pa.scalar(value, field.type), len(rows)))
            table = conformed(rows, schema)
        self._writer(f"{name}.parquet").write_table(table)

    def complete(self) -> None:
        """Nothing more will be added: what there always is is there, with or without rows."""
        for name in ("requests.parquet", "steps.parquet"):
            self._writer(name)

    def _writer(self, name: str) -> Any:
        if name not in self._writers:
            writing = parquet_writer(self._folder / name, SCHEMAS[name].with_metadata(METADATA))
            self._writers[name] = self._files.enter_context(writing)
        return self._writers[name]


def record_table(frame: pd.DataFrame, schema: Any) -> Any:
    """`frame` as a table of `schema`: a missing column is null, as NaN is. Raises InvariantError for an unknown one."""
    if unknown := set(frame.columns) - set(schema.names):
        raise InvariantError(f"columns that the record does not know: {sorted(unknown)}")
    columns = [
        # Column by column: arrow takes no missing column, and NaN alone for no string or list.
        pa.nulls(len(frame), field.type)
        if field.name not in frame or frame[field.name].isna().all()
        else pa.Array.from_pandas(frame[field.name], type=field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(METADATA))


def plain(value: Any) -> Any:
    """`value` as JSON would give it back: NaN is null, tuples are lists, numpy scalars are numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float) and np.isnan(value):
        return None
    return value


def write_json(path: Path, value: Mapping[str, object]) -> None:
    text = json.dumps(plain(value), indent=1, allow_nan=False)
    with written(path) as file:
        file.write(text.encode())


def write_parquet(path: Path, schema: Any, tables: Iterable[Any]) -> None:
    """One row group a table, so that one cell of a long run can be read alone."""
    with parquet_writer(path, schema) as writer:
        for table in tables:
            writer.write_table(table)


def write_frames(path: Path, frames: Iterable[pd.DataFrame]) -> None:
    """Frames of the same columns, one after another, as one table; small ones share a row group."""
    tables = (pa.Table.from_pandas(frame, preserve_index=False) for frame in frames)
    first = next(tables)
    schema = first.schema.with_metadata({**first.schema.metadata, **METADATA})
    write_parquet(path, schema, _in_groups(table.cast(schema) for table in chain([first], tables)))


def _in_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Put together until they have ROW_GROUP_ROWS rows."""
    group: list[pa.Table] = []
    n_rows = 0
    for table in tables:
        group.append(table)
        n_rows += len(table)
        if n_rows >= ROW_GROUP_ROWS:
            yield pa.concat_tables(group)
            group, n_rows = [], 0
    if group:
        yield pa.concat_tables(group)


@contextmanager
def parquet_writer(path: Path, schema: Any) -> Iterator[Any]:
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    # Stamps hardly ever repeat, so that a dictionary of them is long, and made in vain.
    numbers = [field.name for field in schema if pa.types.is_float64(field.type)]
    with (
        written(path) as file,
        pq.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=texts, use_byte_stream_split=numbers
        ) as writer,
    ):
        yield writer
    pa.default_memory_pool().release_unused()  # what it took to write is not needed soon


def row_groups(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group)


def read_parquet(path: Path) -> Any:
    with pq.ParquetFile(path) as file:
        return file.read()


def conformed(table: Any, schema: Any) -> Any:
    """`table` with the columns of `schema`: null where an older version of the tool did not know them yet."""
    known = set(table.column_names)
    columns = [
        table[field.name].cast(field.type) if field.name in known else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
