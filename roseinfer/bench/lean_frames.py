"""Tables on disk as frames that take little memory: one row group at a time, straight into the columns of the frame."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray


def lean_frame(files: Sequence[Path], schema: pa.Schema, without: Collection[str]) -> pd.DataFrame:
    """All rows of `files`, in their order, with the columns of `schema` but for `without`.

    As `records.as_frame` has it, but that texts are categories. A column in which all is the same takes no room, and
    is not to be written to.
    """
    fields = [field for field in schema if field.name not in without]
    n = sum(pq.read_metadata(file).num_rows for file in files)
    columns = [_column(field.type, n) for field in fields]
    for group in _groups(files, fields):
        for field, column in zip(fields, columns, strict=True):
            known = field.name in group.column_names
            column.add(group[field.name].combine_chunks() if known else pa.nulls(len(group), field.type))
    data = {field.name: column.finish() for field, column in zip(fields, columns, strict=True)}
    pa.default_memory_pool().release_unused()  # what it took to read
    return pd.DataFrame(data, copy=False)


def _groups(files: Sequence[Path], fields: Sequence[pa.Field]) -> Iterator[pa.Table]:
    for path in files:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            there = set(file.schema_arrow.names)
            names = [field.name for field in fields if field.name in there]
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns=names, use_threads=False)


def _column(kind: pa.DataType, n: int) -> _Numbers | _Texts | _Lists:
    if pa.types.is_list(kind):
        return _Lists(kind)
    return _Texts(n) if pa.types.is_string(kind) else _Numbers(kind, n)


class _Numbers:
    """n of them, which come in parts; nulls are NaN. Whole numbers without a null stay whole."""

    def __init__(self, kind: pa.DataType, n: int) -> None:
        self._dtype = kind.to_pandas_dtype()
        self._n = n
        self._at = 0
        self._same: float = np.nan
        self._values: NDArray[np.float64] | None = None  # None: all so far are the same

    def add(self, part: pa.Array) -> None:
        values = part.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
        if not self._at:
            self._same = values[0] if len(values) else np.nan
        if self._values is None and not np.array_equal(
            values, np.full(len(values), self._same), equal_nan=True
        ):
            self._values = np.full(self._n, self._same)
        if self._values is not None:
            self._values[self._at : self._at + len(values)] = values
        self._at += len(values)

    def finish(self) -> NDArray[Any]:
        values = np.broadcast_to(np.float64(self._same), (self._n,)) if self._values is None else self._values
        if not self._n or not np.issubdtype(self._dtype, np.integer) or np.isnan(values).any():
            return values
        if self._values is None:
            return np.broadcast_to(self._dtype(self._same), (self._n,))
        return values.astype(self._dtype)


class _Texts:
    """n of them, each text held once."""

    def __init__(self, n: int) -> None:
        self._places: dict[str, int] = {}
        self._codes = _Numbers(pa.int32(), n)

    def add(self, part: pa.Array) -> None:
        encoded = part.dictionary_encode()
        places = [self._places.setdefault(text, len(self._places)) for text in encoded.dictionary.to_pylist()]
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        self._codes.add(pa.array(np.array([*places, -1])[codes]))

    def finish(self) -> Any:
        codes: NDArray[np.int32] = self._codes.finish()
        return pd.Categorical.from_codes(codes, pd.Index(list(self._places), dtype="str"))


class _Lists:
    """Left to arrow: an object a list is slow and large."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._parts: list[pa.Array] = []

    def add(self, part: pa.Array) -> None:
        self._parts.append(part)

    def finish(self) -> Any:
        return pd.array(pa.chunked_array(self._parts, type=self._kind), dtype=pd.ArrowDtype(self._kind))
