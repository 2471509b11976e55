"""How OpenMP's threads wait: settled before torch loads, and before a run describes its environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

T = TypeVar("T")

_GNU: Final = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "5000"}  # 50 to 200 us
_INTEL_AND_LLVM: Final = {"KMP_BLOCKTIME": "0"}  # which do not know so short a time but none
WAITING: Final = _GNU | _INTEL_AND_LLVM


def spin_briefly() -> None:
    """Lets idle OpenMP threads wait for the next operator awake, and fall asleep soon; what the user chose stays.

    Waking one up takes 50 us, and a step has hundreds of operators: with bounded spinning a decode takes 0.75 of the
    time, on 2 cores with AVX-512. Unbounded, as ACTIVE has it by itself, every product waits for a descheduled thread
    as soon as anything else wants one of the cores, as the client of a benchmark does: 1400 ms a step in place of 200
    to 320. OpenMP reads the variables once, when torch loads.
    """
    if not _GNU.keys() & os.environ.keys():
        os.environ.update(_GNU)
        for name, value in _INTEL_AND_LLVM.items():
            os.environ.setdefault(name, value)


def in_passing(work: Callable[[], T]) -> T:
    """Returns what `work` does, done in a thread that is gone then, and with it those that helped it.

    OpenMP keeps helpers for every thread that ever needed some, as long as it lives, and GNU's lets all of them spin
    1,000 turns at most when together they are more than cores. So who loads a model leaves none to whoever runs it.
    Ctrl-C comes out at once; the process then ends when the thread has.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # No daemon: Python stops those where they come back from torch as it ends, and C++ aborts the process for it.
    thread = threading.Thread(target=run, name="roseinfer-passing")
    thread.start()
    wait([future])
    thread.join()
    return future.result()
