"""Rows on their way to a file: taken one by one, handed on as tables; there may be millions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

ROW_GROUP_ROWS: Final = 65_536
ROW_GROUP_BYTES: Final = 64 << 20
"""What a row group holds at most, but for the last rows that came to it: as arrow holds it, before it is compressed."""

CHUNK_ROWS: Final = 1024
CHUNK_ITEMS: Final = 1 << 18
"""Rows, and items of their lists, that are held as Python objects: those take many times the room, and the garbage
collector goes through them again and again.
"""


class RowGroups:
    """Takes rows one by one, and hands them on as tables of ROW_GROUP_ROWS rows or ROW_GROUP_BYTES, the last one of
    what is left.

    A row is a tuple in the order of `names`; where it has lists, none is longer than the one that ends it.
    `constants` are columns that are the same in all rows.
    """

    def __init__(
        self,
        schema: pa.Schema,
        names: Sequence[str],
        constants: Mapping[str, Any],
        hand_on: Callable[[pa.Table], None],
    ) -> None:
        self._varying = pa.schema([schema.field(name) for name in names])
        self._constants = [(schema.field(name), value) for name, value in constants.items()]
        self._hand_on = hand_on
        self._rows: list[tuple[Any, ...]] = []
        self._items = 0
        self._chunks: list[pa.RecordBatch] = []
        self._chunk_rows = self._chunk_bytes = 0

    def add(self, row: tuple[Any, ...]) -> None:
        rows = self._rows
        rows.append(row)
        if row[-1] is not None:
            self._items += len(row[-1])
        if len(rows) == CHUNK_ROWS or self._items >= CHUNK_ITEMS:
            self._end_chunk()

    def finish(self) -> None:
        """Hands the rest on."""
        if self._rows:
            self._end_chunk()
        if self._chunks:
            self._flush()

    def _end_chunk(self) -> None:
        columns = zip(self._varying, zip(*self._rows, strict=True), strict=True)
        chunk = pa.record_batch(
            [pa.array(column, type=field.type) for field, column in columns], schema=self._varying
        )
        self._rows.clear()
        self._items = 0
        self._chunks.append(chunk)
        self._chunk_rows += chunk.num_rows
        self._chunk_bytes += chunk.nbytes
        if self._chunk_rows + CHUNK_ROWS > ROW_GROUP_ROWS or self._chunk_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._chunks).combine_chunks()
        self._chunks.clear()
        self._chunk_rows = self._chunk_bytes = 0
        for field, value in self._constants:
            table = table.append_column(field, pa.repeat(pa.scalar(value, field.type), len(table)))
        self._hand_on(table)
