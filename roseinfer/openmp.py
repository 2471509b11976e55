"""How OpenMP's threads wait: settled before torch loads, and before a run describes its environment."""

from __future__ import annotations

import os
from typing import Final

WAITING: Final = {
    "OMP_WAIT_POLICY": "ACTIVE",
    "GOMP_SPINCOUNT": "1000",  # GNU's, 10 to 40 us
    "KMP_BLOCKTIME": "0",  # of Intel's and LLVM's, which do not know a shorter time but none
}


def spin_briefly() -> None:
    """Lets idle OpenMP threads wait for the next operator awake, and fall asleep soon; unless the user chose anything.

    Waking one up takes 50 us, and a step has a hundred operators: with bounded spinning a decode takes 0.75 of the
    time, on 2 cores with AVX-512. Unbounded, as ACTIVE has it by itself, every product waits for a descheduled thread
    as soon as anything else wants one of the cores, as the client of a benchmark does: 1400 ms a step in place of 200
    to 320. GNU's OpenMP spins but 100 turns, or none where PASSIVE is set, as soon as there are more of its threads
    than cores, and every thread of ours that computes has its own: hence ACTIVE. It reads them once, when torch loads.
    """
    if not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)
