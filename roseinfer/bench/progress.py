"""Progress on stderr: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Called with what starts now, and, where that is known, how many of how many cells are done."""

    def __init__(self, *, quiet: bool) -> None:
        self._start_s = time.monotonic()
        console = Console(stderr=True)
        self._is_live = console.is_terminal
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        # Drawn between cells only: a thread that refreshes it would disturb what is measured.
        self._bar = Bar(
            *columns,
            console=console,
            transient=True,
            auto_refresh=False,
            disable=quiet or not self._is_live,
        )
        self._task = self._bar.add_task("", total=None)
        self._total: int | None = None  # cells, once it is known
        self._quiet = quiet

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, doing: str, done: int | None = None, total: int | None = None) -> None:
        if self._quiet:
            return
        self._total = total or self._total
        if self._is_live:
            self._bar.update(
                self._task,
                description=doing,
                completed=self._total if done is None else done,
                total=self._total,
                refresh=True,
            )
        else:
            count = "" if done is None else f"cell {done + 1} of {total}, "
            print(f"{time.monotonic() - self._start_s:6.1f} s  {count}{doing}", file=sys.stderr, flush=True)
