"""SIGTERM as a user's Ctrl-C: what a scheduler, a container or `timeout` sends must not leave a server running."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class Termination:
    """Within its `with`, on the main thread, SIGTERM raises KeyboardInterrupt; `came` says that it did."""

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt
