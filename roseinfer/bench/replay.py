"""A workload that is played again: the workload.parquet of a run, or a table that somebody wrote.

It needs `scheduled_s` (all null: a closed loop), `output_tokens`, and `prompt_tokens` or `prompt` (text). A run's
own table also says to which repeat and which shape of cell a row belongs, how the requests arrived, and what
their texts follow from (`prompt_seed`, `prefix_tokens`). Where requests have classes, `priority` is the name of each
one's and `priority_rank` its place, 0 for the highest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.classes import Classes
from roseinfer.bench.experiment import Cell
from roseinfer.bench.flag_values import LARGEST, LARGEST_NUMBER
from roseinfer.bench.load import CLOSED
from roseinfer.bench.load_options import ARRIVALS
from roseinfer.bench.priorities import MOST_CLASSES, is_class_name
from roseinfer.bench.prompts import Encoder
from roseinfer.errors import InputError

_SHAPE: Final = ("burst_size", "prompt_len", "output_len", "request_rate")

_LARGEST_SEED: Final = 2**32 - 1
_LONGEST_S: Final = 1e9


_ARRIVALS: Final = (*ARRIVALS, CLOSED)
_WHOLE: Final = {
    "output_tokens": (1, LARGEST, False),
    "prompt_tokens": (1, LARGEST, False),
    "prefix_tokens": (0, LARGEST, False),
    "repeat": (0, LARGEST, False),
    "burst_size": (1, LARGEST, True),
    "prompt_len": (1, LARGEST, True),
    "output_len": (1, LARGEST, True),
    "prompt_seed": (0, _LARGEST_SEED, True),
    "priority_rank": (0, MOST_CLASSES - 1, False),
}
"""Columns of whole numbers: the least, the most, and whether nothing is said by null."""


class Requests(NamedTuple):
    """The requests of a shape in a repeat, in the order of their arrival, the first at 0.

    None: a closed loop (`scheduled_s`); texts follow from the seed (`texts`); nobody said it yet (`prompt_seed`).
    `prompt_tokens` is 0 for a text that was not counted yet.
    """

    scheduled_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    texts: list[str] | None
    prompt_seed: int | None
    prefix_tokens: int
    arrival: str
    classes: Classes | None = None

    def before(self, end_s: float) -> Requests:
        """Those that are due before `end_s`."""
        if self.scheduled_s is None:
            return self
        n = int(np.searchsorted(self.scheduled_s, end_s))
        return self._replace(
            scheduled_s=self.scheduled_s[:n],
            prompt_tokens=self.prompt_tokens[:n],
            output_tokens=self.output_tokens[:n],
            texts=None if self.texts is None else self.texts[:n],
            classes=None if self.classes is None else self.classes.rows(slice(n)),
        )


@dataclass(frozen=True, eq=False)
class Replay:
    """The tables of a file by (shape, repeat). `repeats` is None where the file has one table for all repeats."""

    path: Path
    shapes: tuple[Cell, ...]
    repeats: int | None
    tables: dict[tuple[Cell, int], Requests]

    @property
    def is_closed(self) -> bool:
        return any(table.scheduled_s is None for table in self.tables.values())

    @property
    def is_counted(self) -> bool:
        """The length of every prompt is known."""
        return all(table.prompt_tokens.all() for table in self.tables.values())

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the classes of its requests, the highest first; empty where all are alike."""
        classes = next(iter(self.tables.values())).classes
        return () if classes is None else classes.names

    @property
    def has_texts(self) -> bool:
        return all(table.texts is not None for table in self.tables.values())

    def counted(self, tokenizer: Encoder) -> Replay:
        """With the length of every text. Raises InputError where the file says another one."""
        tables = dict(self.tables)
        for key, table in tables.items():
            if table.texts is not None:
                lengths = {text: len(tokenizer.encode(text)) for text in dict.fromkeys(table.texts)}
                tokens = np.array([lengths[text] for text in table.texts], np.int64)
                wrong = np.flatnonzero((table.prompt_tokens > 0) & (table.prompt_tokens != tokens))
                if wrong.size:
                    first = wrong[0]
                    why = f"has a prompt of {table.prompt_tokens[first]} tokens that are {tokens[first]} here"
                    raise _wrong(self.path, why)
                tables[key] = table._replace(prompt_tokens=tokens)
        return replace(self, tables=tables)

    def requests(self, shape: Cell, repeat: int) -> Requests:
        """Those of a repeat; of the first where the table does not tell them apart."""
        return self.tables[shape, repeat if self.repeats is not None else 0]


def read_replay(path: Path) -> Replay:
    """The workload in a file. Raises InputError naming the file, and the row (counted from 0) where one is wrong."""
    try:
        with path.open("rb") as file:
            table: pd.DataFrame = pq.read_table(file).to_pandas()
    except (OSError, pa.ArrowException) as error:
        raise _wrong(path, getattr(error, "strerror", None) or "is no parquet file") from error
    for names in (["scheduled_s"], ["output_tokens"], ["prompt_tokens", "prompt"]):
        if not set(names) & set(table.columns):
            raise _wrong(path, f"has no column {' or '.join(names)}")
    if table.empty:
        raise _wrong(path, "has no requests")
    for name in table.columns:
        _check_column(path, table[name])
    keys = [name for name in ("repeat", *_SHAPE) if name in table.columns]
    class_names = _class_names(path, table)
    tables: dict[tuple[Cell, int], Requests] = {}
    groups: Iterable[tuple[Any, pd.DataFrame]] = [((), table)]
    if keys:
        groups = table.groupby(keys, sort=False, dropna=False)
    for key, rows in groups:
        factors = {name: value for name, value in zip(keys, key, strict=True) if not pd.isna(value)}
        burst_size, prompt_len, output_len = (_whole_or_none(factors.get(name)) for name in _SHAPE[:3])
        shape = Cell(AdmissionSpec(), burst_size, prompt_len, output_len, factors.get("request_rate"))
        tables[shape, int(factors.get("repeat", 0))] = _requests(path, rows, class_names)
    shapes = tuple(dict.fromkeys(shape for shape, _ in tables))
    repeats = 1 + max(repeat for _, repeat in tables)
    if len(tables) != len(shapes) * repeats:
        raise _wrong(path, f"does not have each of repeats 0 to {repeats - 1} of each shape of cell")
    if len({shape.cell_id for shape in shapes}) != len(shapes):
        raise _wrong(path, "has shapes of cells that differ in the seventh digit of their rate")
    if len({table.scheduled_s is None for table in tables.values()}) > 1:
        raise _wrong(path, "has times of arrival for some cells and none for others")
    return Replay(path, shapes, repeats if "repeat" in keys else None, tables)


def _class_names(path: Path, table: pd.DataFrame) -> tuple[str, ...] | None:
    """The names of the classes by their rank, None where there are none; a rank that no request has gets one too."""
    for name, other in (("priority", "priority_rank"), ("priority_rank", "priority")):
        if name in table and other not in table:
            raise _wrong(path, f"has a {name} and no {other}")
    if "priority" not in table:
        return None
    by_rank: dict[int, str] = {}
    for name, rank in table[["priority", "priority_rank"]].drop_duplicates().itertuples(index=False):
        if by_rank.setdefault(int(rank), name) != name:
            raise _wrong(path, f"has two names of rank {rank}")
    if len(set(by_rank.values())) < len(by_rank):
        twice = [name for name in by_rank.values() if list(by_rank.values()).count(name) > 1]
        raise _wrong(path, f"calls two ranks {twice[0]}")
    return tuple(by_rank.get(rank, f"rank-{rank}") for rank in range(max(by_rank) + 1))


def _requests(path: Path, rows: pd.DataFrame, class_names: tuple[str, ...] | None) -> Requests:
    times: NDArray[np.float64] | None = None
    n = len(rows)
    unscheduled = rows["scheduled_s"].isna()
    if not unscheduled.all():
        times = _numbers(rows["scheduled_s"])
        _check(path, rows["scheduled_s"], ~np.isfinite(times), "no time")
        too_late = times - times.min() > _LONGEST_S
        _check(path, rows["scheduled_s"], too_late, f"more than {_LONGEST_S:g} s after the first")
        order = np.argsort(times, kind="stable")
        rows, times = rows.iloc[order], times[order] - times[order[0]]
    texts: list[str] | None = None
    if "prompt" in rows and not rows["prompt"].isna().all():
        no_text = np.array([not isinstance(text, str) or not text for text in rows["prompt"]])
        _check(path, rows["prompt"], no_text, "no text")
        texts = rows["prompt"].tolist()
    elif "prompt_tokens" not in rows:
        raise _wrong(path, "has no prompt and no prompt_tokens")
    arrival = str(_only(path, rows, "arrival", CLOSED if times is None else "trace"))
    if arrival not in ((CLOSED,) if times is None else ARRIVALS):
        raise _wrong(path, f"has arrival {arrival!r}, and {'no ' if times is None else ''}times of arrival")
    seed = _only(path, rows, "prompt_seed", None)
    return Requests(
        scheduled_s=times,
        prompt_tokens=rows["prompt_tokens"].to_numpy(np.int64)
        if "prompt_tokens" in rows
        else np.zeros(n, np.int64),
        output_tokens=rows["output_tokens"].to_numpy(np.int64),
        texts=texts,
        prompt_seed=None if pd.isna(seed) else int(seed),
        prefix_tokens=int(_only(path, rows, "prefix_tokens", 0)),
        arrival=arrival,
        classes=None
        if class_names is None
        else Classes(class_names, rows["priority_rank"].to_numpy(np.int64)),
    )


def _check_column(path: Path, column: pd.Series[Any]) -> None:
    """What can be said of each of its values alone; a column that is not ours may hold anything."""
    name = str(column.name)
    if name == "arrival":
        _check(path, column, ~column.isin(_ARRIVALS).to_numpy(), f"none of {', '.join(_ARRIVALS)}")
    elif name == "priority":
        is_name = [isinstance(value, str) and is_class_name(value) for value in column]
        _check(path, column, ~np.array(is_name), "no name of a class (a-z, 0-9, _ and -)")
    elif name == "request_rate":
        numbers = _numbers(column)
        is_rate = (numbers > 0) & (numbers <= LARGEST_NUMBER)
        _check(path, column, ~(is_rate | column.isna().to_numpy()), "no number of requests per second > 0")
    elif name in _WHOLE:
        least, most, may_be_null = _WHOLE[name]
        numbers = _numbers(column)
        is_whole = (numbers >= least) & (numbers <= most) & (numbers == np.floor(numbers))
        is_nothing = column.isna().to_numpy() & may_be_null
        _check(path, column, ~(is_whole | is_nothing), f"no whole number from {least} to {most}")


def _numbers(column: pd.Series[Any]) -> NDArray[np.float64]:
    """Its values, NaN for what is none: a text, a list, a date, a truth value."""
    if not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        return np.full(len(column), np.nan)
    numbers: NDArray[np.float64] = column.to_numpy(np.float64, na_value=np.nan)
    return numbers


def _check(path: Path, column: pd.Series[Any], wrong: NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        (shown,) = column.iloc[[row]].tolist()
        raise _wrong(path, f"row {column.index[row]}: {column.name} {shown!r} is {what}")


def _only(path: Path, rows: pd.DataFrame, name: str, default: Any) -> Any:
    """The one value that a column has within a group."""
    if name not in rows:
        return default
    values = rows[name].unique()
    if len(values) > 1:
        raise _wrong(path, f"has several values of {name} within one cell and repeat")
    return values[0]


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else int(value)


def _wrong(path: Path, why: str) -> InputError:
    return InputError("--workload", str(path), why)
