"""What a server says of itself at /metrics: before, during and after a cell, as a few numbers a gauge.

During a cell it is kept as it came: understanding it takes the interpreter for milliseconds, which would hold up sends.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from math import isfinite
from typing import Any, Final, NamedTuple, Self

from roseinfer.bench.environment import public_text
from roseinfer.bench.http.address import Address
from roseinfer.bench.http.asking import UnreachableError, ask

EVERY_S: Final = 1.0
MOST_SERIES: Final = 64
"""A server has hundreds; those about requests, queues and the cache are few."""

MOST_KEPT_BYTES: Final = 64 * 1024 * 1024
"""Of the scrapes within a cell, the last: a few hundred where each has a hundred KiB."""

_SAMPLE: Final = re.compile(rb"([A-Za-z_:][\w:]*(?:\{.*?\})?)[ \t]+([-+\w.]+)")
_LABEL_VALUE: Final = re.compile(r'(?<==")(?:[^"\\]|\\.)*(?=")')
_NAMED: Final = re.compile(
    rb"(?i)waiting|running|inflight|in_flight|queue|reject|refus|preempt|cache_usage|request|first_token"
)
_NOT_NAMED: Final = re.compile(rb"_(?:bucket|created)\b|^http_")
"""Parts of histograms, and what a web framework counts about itself."""


def read_metrics(body: bytes) -> dict[str, float]:
    """The series of Prometheus' text whose names are about requests, without those of histograms: name to value.

    Of a path in a label, that of a model say, only the last part is kept.
    """
    found: dict[str, float] = {}
    for line in body.split(b"\n"):
        # Most lines are comments and histograms, and looking into them is what takes long.
        sample = None if line.startswith(b"#") or b"_bucket{" in line else _SAMPLE.match(line)
        if sample is None:
            continue
        series, said = sample.groups()
        name = series.partition(b"{")[0]
        if not _NAMED.search(name) or _NOT_NAMED.search(name):
            continue
        try:
            value = float(said)
        except ValueError:
            continue
        if isfinite(value):  # "no limit" is +Inf there
            text = series.decode("utf-8", "replace")
            found[_LABEL_VALUE.sub(lambda label: public_text(label[0]), text)] = value
        if len(found) == MOST_SERIES:
            break
    return found


class _Range(NamedTuple):
    """`before` is None for a series that came up later: a counter is there once it has counted something."""

    before: float | None
    least: float
    most: float
    after: float


class Scrape:
    """Asks once a second within its `with`, on a thread of its own; a server that has no /metrics is asked once."""

    def __init__(self, address: Address, api_key: str | None = None, every_s: float = EVERY_S) -> None:
        self._address = address
        self._api_key = api_key
        self._every_s = every_s
        self._first = b""
        self._bodies: deque[bytes] = deque()
        self._kept_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roseinfer-scrape", daemon=True)

    def __enter__(self) -> Self:
        first = self._ask()
        if read_metrics(first):
            self._first = first
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._take()

    def notes(self) -> dict[str, Any] | None:
        """Of each series the value before, after, and the least and the most seen; None where there is nothing.

        To be called after its `with`.
        """
        series: dict[str, _Range] = {}
        scrapes = [values for body in (self._first, *self._bodies) if (values := read_metrics(body))]
        for number, values in enumerate(scrapes):
            for name, value in values.items():
                seen = series.get(name, _Range(None if number else value, value, value, value))
                series[name] = _Range(seen.before, min(seen.least, value), max(seen.most, value), value)
        if not series:
            return None
        return {"scrapes": len(scrapes), "series": {name: seen._asdict() for name, seen in series.items()}}

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._take()

    def _take(self) -> None:
        body = self._ask()
        self._bodies.append(body)
        self._kept_bytes += len(body)
        while self._kept_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._bodies.popleft())

    def _ask(self) -> bytes:
        """Empty where there is no answer."""
        try:
            answer = ask(self._address, f"{self._address.root}/metrics", self._api_key)
        except UnreachableError:
            return b""
        return answer.body if answer.status == 200 else b""
