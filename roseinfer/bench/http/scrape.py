"""What a server says of itself at /metrics: before, during and after a cell, as a few numbers a gauge."""

from __future__ import annotations

import re
import threading
from math import isfinite
from typing import Any, Final, NamedTuple, Self

from roseinfer.bench.http.address import Address
from roseinfer.bench.http.asking import UnreachableError, ask

EVERY_S: Final = 1.0
MOST_SERIES: Final = 64
"""A server has hundreds; those about requests, queues and the cache are few."""

_SAMPLE: Final = re.compile(rb"^([A-Za-z_:][\w:]*(?:\{[^\n]*?\})?)[ \t]+([-+\w.]+)[^\n]*$", re.MULTILINE)
_NAMED: Final = re.compile(
    rb"(?i)waiting|running|inflight|in_flight|queue|reject|refus|preempt|cache_usage|request|first_token"
)
_NOT_NAMED: Final = re.compile(rb"_(?:bucket|created)\b|^http_")
"""Parts of histograms, and what a web framework counts about itself."""


def read_metrics(body: bytes) -> dict[str, float]:
    """The series of Prometheus' text whose names are about requests, without those of histograms: name to value."""
    found: dict[str, float] = {}
    for series, text in _SAMPLE.findall(body):
        name = series.partition(b"{")[0]
        if not _NAMED.search(name) or _NOT_NAMED.search(name):
            continue
        try:
            value = float(text)
        except ValueError:
            continue
        if isfinite(value):  # "no limit" is +Inf there
            found[series.decode("utf-8", "replace")] = value
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
        self._series: dict[str, _Range] = {}
        self._samples = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roseinfer-scrape", daemon=True)

    def __enter__(self) -> Self:
        if self._take():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._take()

    def notes(self) -> dict[str, Any] | None:
        """Of each series the value before, after, and the least and the most seen; None where there is nothing."""
        if not self._series:
            return None
        return {
            "scrapes": self._samples,
            "series": {name: seen._asdict() for name, seen in self._series.items()},
        }

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._take()

    def _take(self) -> bool:
        try:
            answer = ask(self._address, f"{self._address.root}/metrics", self._api_key)
        except UnreachableError:
            return False
        values = read_metrics(answer.body) if answer.status == 200 else {}
        for name, value in values.items():
            seen = self._series.get(name, _Range(None if self._samples else value, value, value, value))
            self._series[name] = _Range(seen.before, min(seen.least, value), max(seen.most, value), value)
        self._samples += bool(values)
        return bool(values)
