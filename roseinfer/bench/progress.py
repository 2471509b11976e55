"""Progress on stderr: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status


class Progress:
    """Called with what starts now."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._start_s = time.monotonic()
        console = Console(stderr=True)
        self._status = Status("", console=console) if console.is_terminal and not quiet else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, doing: str) -> None:
        line = f"{time.monotonic() - self._start_s:6.1f} s  {doing}"
        if self._status is not None:
            self._status.update(line)
        elif not self._quiet:
            print(line, file=sys.stderr, flush=True)
