"""SIGTERM as a user's Ctrl-C, and both held back while something is done that must not be cut short anywhere.

What a scheduler, a container or `timeout` sends must not leave a server running; and what was measured until then is
worth keeping. So a cell is measured in a `held`, where a signal has to wait for a wait.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, ClassVar, Final, Self

LONGEST_WAIT_S: Final = 0.5
"""Of a wait in an `interruptible`: a signal that comes just before the system begins it does not end it."""

_BOTH: Final = (signal.SIGINT, signal.SIGTERM)


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


class Interruption(KeyboardInterrupt):
    """Raised in an `interruptible` alone: whoever catches it finds everything else as it is between two lines."""


class _Hold:
    """The signals that would raise KeyboardInterrupt, taken for a while. The first waits, a second does not.

    Signals are the process's: there is one at most, the `current`.
    """

    current: ClassVar[_Hold | None] = None

    def __init__(self, numbers: tuple[signal.Signals, ...]) -> None:
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {
            number: handler for number, handler in handlers.items() if callable(handler)
        }
        self._pending: int | None = None
        self._came = False
        self.thread = threading.get_ident()
        self.is_holding = True

    def take(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pending is not None and not self._came:
            self._before[self._pending](self._pending, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._came or self._pending is not None:
            self._came = True
            self._before[number](number, frame)
            return
        self._pending = number
        if not self.is_holding:
            self._interrupt(frame)

    def _interrupt(self, frame: FrameType | None) -> None:
        assert self._pending is not None
        self._came = True
        try:
            self._before[self._pending](self._pending, frame)
        except KeyboardInterrupt:
            raise Interruption from None

    def open(self) -> bool:
        """Returns whether it was holding."""
        was_holding, self.is_holding = self.is_holding, False
        if self._pending is not None and not self._came:
            self._interrupt(None)
        return was_holding

    def hold_on(self) -> bool:
        """Holds, also within an `interruptible`; returns whether it was holding."""
        was_holding, self.is_holding = self.is_holding, True
        return was_holding


@contextmanager
def held(numbers: tuple[signal.Signals, ...] = _BOTH) -> Iterator[None]:
    """In its `with` a first signal raises Interruption in the next `interruptible`, or KeyboardInterrupt at the end.

    A second one raises KeyboardInterrupt wherever it comes. On other threads than the main one, which signals never
    interrupt, nothing changes; nor for a signal that is ignored, or that ends the process. A hold within a hold is the
    same one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if (outer := _Hold.current) is not None:
        was_holding = outer.hold_on()
        try:
            yield
        finally:
            outer.is_holding = was_holding
        if not was_holding:
            outer.open()
        return
    hold = _Hold.current = _Hold(numbers)
    hold.take()
    try:
        yield
    finally:
        _Hold.current = None
        hold.give_back()


class interruptible:  # noqa: N801 (a context manager, and cheap: a loop is in it at every turn)
    """A wait, or whatever may be cut short: a signal that is held, or comes within, raises Interruption here."""

    __slots__ = ("_hold", "_was_holding")

    def __enter__(self) -> None:
        hold = _Hold.current
        self._hold = None
        if hold is not None and hold.thread == threading.get_ident():
            self._hold = hold
            self._was_holding = hold.open()

    def __exit__(self, *_: object) -> None:
        if self._hold is not None:
            self._hold.is_holding = self._was_holding


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """A process that is started in its `with` never gets the SIGINT that a terminal sends to all; we get it after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
