"""How OpenMP's threads wait: settled before torch loads, and before a run describes its environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

WAITING: Final = {
    "OMP_WAIT_POLICY": "ACTIVE",
    "GOMP_SPINCOUNT": "5000",  # GNU's, 50 to 200 us
    "KMP_BLOCKTIME": "0",  # of Intel's and LLVM's, which do not know so short a time but none
}


def spin_briefly() -> None:
    """Lets idle OpenMP threads wait for the next operator awake, and fall asleep soon; unless the user chose anything.

    Waking one up takes 50 us, and a step has hundreds of operators: with bounded spinning a decode takes 0.75 of the
    time, on 2 cores with AVX-512. Unbounded, as ACTIVE has it by itself, every product waits for a descheduled thread
    as soon as anything else wants one of the cores, as the client of a benchmark does: 1400 ms a step in place of 200
    to 320. OpenMP reads the variables once, when torch loads.
    """
    if not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)


def in_passing(work: Callable[[], T]) -> T:
    """Returns what `work` does, done in a thread that is gone then, and with it those that helped it.

    OpenMP keeps helpers for every thread that ever needed some, as long as it lives, and GNU's lets all of them spin
    1,000 turns at most when together they are more than cores. So who loads a model leaves none to whoever runs it.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(work).result()
