"""Ties a process to the one that started it, which may be killed without a word: run by its path, before a command.

`python -I -S parent.py PARENT_PID COMMAND WORDS...` becomes COMMAND, which gets SIGTERM when its parent dies (to be
exact, the thread that started it). Linux only. What the command starts is for the command to end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def tied(command: Sequence[str]) -> list[str]:
    """The words that start `command`, tied to this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def tie_to(parent_pid: int, end: signal.Signals = signal.SIGTERM) -> None:
    """This process gets the signal `end` when its parent dies; ends it if that one is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, end)
    if os.getppid() != parent_pid:
        sys.exit("the process that started this one is gone")


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
