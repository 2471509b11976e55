"""A moment that an epoll wakes up at, to the microsecond: its own timeouts are whole milliseconds."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from roseinfer.errors import RunError

_MONOTONIC: Final = 1
_NON_BLOCKING: Final = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE: Final = 1

_libc: Final = ctypes.PyDLL(None)  # which keeps the interpreter: none of these waits


class Alarm:
    """A timer of Linux on the clock of `time.perf_counter`; its `fd` can be read from when it goes off until `clear`.

    Raises RunError where the process has no file descriptor left for it.
    """

    def __init__(self) -> None:
        self.fd: int = _libc.timerfd_create(_MONOTONIC, _NON_BLOCKING)
        if self.fd < 0:
            raise RunError("this process has no file descriptor left for a timer")
        self._times = (
            ctypes.c_long * 4
        )()  # the interval, which is nothing, and when: seconds and nanoseconds of each
        self._at_s: float | None = None

    def set(self, at_s: float) -> None:
        """To `at_s` (clock seconds), whatever it was set to."""
        if at_s != self._at_s:
            self._at_s = at_s
            self._times[2], self._times[3] = divmod(int(at_s * 1e9) + 1, 1_000_000_000)  # 0 would be never
            _libc.timerfd_settime(self.fd, _ABSOLUTE, self._times, None)

    def clear(self) -> None:
        """It went off."""
        self._at_s = None
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            pass  # it was set anew meanwhile

    def close(self) -> None:
        os.close(self.fd)
