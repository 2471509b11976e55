"""Traces of requests that real services had: when each came, and its tokens. Three formats, told by their header.

    Azure LLM 2023    CSV: TIMESTAMP (wall time), ContextTokens, GeneratedTokens
    Mooncake          JSON lines: timestamp (ms), input_length, output_length; or CSV with timestamp_ms
    BurstGPT          CSV: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type

A row with 0 output tokens is a failure of its day: it is left out, and said.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
from numpy.typing import NDArray

from roseinfer.bench.flag_values import LARGEST
from roseinfer.bench.load import Load
from roseinfer.bench.seeds import BLOCK_ROWS, Stream, block_rngs
from roseinfer.errors import InputError

_TICK_QUANTILE: Final = 0.01


class _Format(NamedTuple):
    """Names of the columns; `unit_s` is what a time stamp counts in, None for wall time."""

    arrived: str
    prompt_tokens: str
    output_tokens: str
    unit_s: float | None


_CSV: Final = (
    _Format("TIMESTAMP", "ContextTokens", "GeneratedTokens", None),
    _Format("timestamp_ms", "input_length", "output_length", 1e-3),
    _Format("Timestamp", "Request tokens", "Response tokens", 1.0),
)
_JSON: Final = _Format("timestamp", "input_length", "output_length", 1e-3)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival, the first at 0; `lines` are where they stand in the file.

    `tick_s` is what the time stamps jump by where several requests share one, else None. `notes` say what the
    reader left out or put in order.
    """

    path: Path
    arrived_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    lines: NDArray[np.int64]
    tick_s: float | None
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.arrived_s)

    def arrival_times(self, load: Load, *, seed: int, repeat: int) -> NDArray[np.float64]:
        """The arrivals as they are played: out of their ticks, stretched by the time scale, the first at 0."""
        times = self.arrived_s
        if self.tick_s is not None and not load.keep_ticks:
            times = self._out_of_ticks(self.tick_s, seed, repeat)
        played: NDArray[np.float64] = (times - times[0]) * load.time_scale
        until = len(self) if load.duration_s is None else int(np.searchsorted(played, load.duration_s))
        return played[: min(until, load.num_requests or until)]

    def _out_of_ticks(self, tick_s: float, seed: int, repeat: int) -> NDArray[np.float64]:
        """Each request at a random time of its tick, those of one tick in the order of the file."""
        stamps, tick_of = np.unique(self.arrived_s, return_inverse=True)
        width_s = np.minimum(np.diff(stamps, append=stamps[-1] + tick_s), tick_s)
        rngs = block_rngs(seed, repeat, Stream.TICKS)
        n_blocks = -(-len(self) // BLOCK_ROWS)
        share = np.concatenate([rng.random(BLOCK_ROWS) for rng in islice(rngs, n_blocks)])[: len(self)]
        share = share[np.lexsort((share, tick_of))]
        times: NDArray[np.float64] = stamps[tick_of] + width_s[tick_of] * share
        return times

    def told(self, load: Load) -> list[str]:
        """What a reader of the results has to know, in sentences."""
        name, played = self.path.name, f"{len(self)} requests"
        if load.num_requests is not None:
            played = f"the first {load.num_requests} of {played}"
        if load.duration_s is not None:
            played += f", as far as they are due within {load.duration_s:g} s"
        scales = (("time", load.time_scale), ("token counts", load.length_scale))
        said = [
            ", ".join([f"{name}: {played}", *(f"{what} times {x:g}" for what, x in scales if x != 1)]) + "."
        ]
        said += [f"{name}: {note}" for note in self.notes]
        if self.tick_s is not None:
            most = int(np.unique(self.arrived_s, return_counts=True)[1].max())
            ticks = (
                f"{name}: its clock ticks every {self.tick_s:.3g} s, with up to {most} requests on a stamp;"
            )
            if load.keep_ticks:
                said.append(f"{ticks} they are sent at once, as --keep-ticks asks.")
            else:
                said.append(f"{ticks} each is sent at a random time (seeded) of its tick.")
        return said


def read_trace(path: Path) -> Trace:
    """The trace in a file. Raises InputError naming the file, and the line where one is wrong."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            header = next((line.strip() for line in file if line.strip()), "")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "is no text"
        raise InputError("--trace", str(path), why) from error
    if not header:
        raise InputError("--trace", str(path), "is empty")
    if header.startswith("{"):
        names, table = _JSON, _read_json(path)
    else:
        known = set(header.split(","))
        found = [one for one in _CSV if {one.arrived, one.prompt_tokens, one.output_tokens} <= known]
        if not found:
            why = "its header is none of an Azure LLM 2023, Mooncake or BurstGPT trace"
            raise InputError("--trace", str(path), why)
        names, table = found[0], _read_csv(path, found[0])
    if not len(table):
        raise InputError("--trace", str(path), "has no requests")
    return _trace(path, names, table)


def _trace(path: Path, names: _Format, table: pd.DataFrame) -> Trace:
    is_json = names is _JSON
    arrived_s = _seconds(table[names.arrived], names.unit_s)
    prompts, outputs = (
        pd.to_numeric(table[name], errors="coerce").to_numpy(np.float64) for name in names[1:3]
    )
    for name, values, least in (
        (names.arrived, arrived_s, None),
        (names.prompt_tokens, prompts, 1),
        (names.output_tokens, outputs, 0),
    ):
        wrong = ~np.isfinite(values)
        what = "no time"
        if least is not None:
            wrong |= (values < least) | (values > LARGEST) | (values != np.floor(values))
            what = f"no whole number from {least}"
        if wrong.any():
            row = int(np.argmax(wrong))
            line = _lines(path, is_json)[row]
            (shown,) = table[name].iloc[[row]].tolist()
            raise InputError("--trace", str(path), f"line {line}: {name} {shown!r} is {what}")
    notes = []
    served = outputs > 0
    if not served.all():
        notes.append(
            f"{int((~served).sum())} of {len(served)} rows have 0 output tokens, failures: left out."
        )
    if not served.any():
        raise InputError("--trace", str(path), "has no request with output tokens")
    rows = np.flatnonzero(served)
    backwards = int((np.diff(arrived_s[rows]) < 0).sum())
    if backwards:
        notes.append(f"time goes back {backwards} times from one row to the next: put in order of time.")
        rows = rows[np.argsort(arrived_s[rows], kind="stable")]
    arrived_s = arrived_s[rows] - arrived_s[rows[0]]
    return Trace(
        path=path,
        arrived_s=arrived_s,
        prompt_tokens=prompts[rows].astype(np.int64),
        output_tokens=outputs[rows].astype(np.int64),
        lines=_lines(path, is_json)[rows],
        tick_s=_tick_s(arrived_s),
        notes=tuple(notes),
    )


def _seconds(stamps: pd.Series[Any], unit_s: float | None) -> NDArray[np.float64]:
    """Seconds from the first stamp; NaN for what is none."""
    if unit_s is not None:
        numbers = pd.to_numeric(stamps, errors="coerce").to_numpy(np.float64)
        seconds: NDArray[np.float64] = (numbers - numbers[0]) * unit_s
        return seconds
    times = pd.to_datetime(stamps, errors="coerce", utc=True, format="ISO8601")
    return np.asarray((times - times.iloc[0]).dt.total_seconds(), np.float64)


def _tick_s(arrived_s: NDArray[np.float64]) -> float | None:
    """What the clock of the stamps jumps by, or None where no two requests share a stamp.

    It is the lowest percentile of the gaps between stamps: a coarse clock has most of its gaps there, and a fine
    one in which two requests met by chance has a small one.
    """
    stamps = np.unique(arrived_s)
    if not 1 < len(stamps) < len(arrived_s):
        return None
    return float(np.quantile(np.diff(stamps), _TICK_QUANTILE, method="inverted_cdf"))


def _read_csv(path: Path, names: _Format) -> pd.DataFrame:
    columns = names[:3]
    for numbers in (pa.float64(), pa.string()):  # text is slow, but keeps the field that is no number
        types = dict.fromkeys(columns, numbers)
        if names.unit_s is None:
            types[names.arrived] = pa.string()
        convert = pa.csv.ConvertOptions(include_columns=columns, column_types=types)
        with suppress(pa.ArrowInvalid):
            frame: pd.DataFrame = pa.csv.read_csv(path, convert_options=convert).to_pandas()
            return frame
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        lines = [(number, line.count(",") + 1) for number, line in enumerate(file, 1) if line.strip()]
    width = lines[0][1]
    for number, fields in lines:
        if fields != width:
            why = f"line {number}: {fields} fields where the header has {width}"
            raise InputError("--trace", str(path), why)
    raise InputError("--trace", str(path), "cannot be read as CSV")


def _read_json(path: Path) -> pd.DataFrame:
    schema = pa.schema([(name, pa.float64()) for name in _JSON[:3]])
    parse = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = pa.json.read_json(path, parse_options=parse)
    except pa.ArrowInvalid as error:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (why := _not_a_request(line)):
                    raise InputError("--trace", str(path), f"line {number}: {why}") from error
        raise InputError("--trace", str(path), str(error)) from error
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _not_a_request(line: str) -> str | None:
    try:
        row = json.loads(line)
    except ValueError:
        return "is no JSON"
    if not isinstance(row, dict):
        return "is no JSON object"
    for name in _JSON[:3]:
        value = row.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"{name} {value!r} is no number"
    return None


def _lines(path: Path, is_json: bool) -> NDArray[np.int64]:
    """The line of each row: blank lines are none, nor is the header."""
    with path.open("rb") as file:
        lines = [number for number, line in enumerate(file, 1) if line.strip()]
    return np.array(lines if is_json else lines[1:], np.int64)
