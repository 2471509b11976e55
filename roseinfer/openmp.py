"""How OpenMP's threads wait: settled before torch loads, and before a run describes its environment."""

from __future__ import annotations

import os
from typing import Final

_GNU: Final = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1000"}  # turns: tens of us
_INTEL_AND_LLVM: Final = {"KMP_BLOCKTIME": "0"}  # which do not know so short a time but none
WAITING: Final = _GNU | _INTEL_AND_LLVM


def spin_briefly() -> None:
    """Lets idle OpenMP threads wait for the next operator awake, and fall asleep soon; what the user chose stays.

    Waking one up takes 50 us, and a step has hundreds of operators: with 1,000 turns a decode takes 0.65 to 0.75 of the
    time, on 2 cores with AVX-512. Beside a process that keeps one core busy it takes 1.1 to 1.3 times as long for it,
    with 5,000 turns 1.9 to 2.4; unbounded, as ACTIVE has it by itself, 1400 ms a step in place of 200 to 320. With
    PASSIVE GNU's threads sleep at once, whatever the count says, where more of them live than there are cores: each
    thread of ours that ever computed keeps its own. OpenMP reads the variables once, when torch loads.
    """
    if not _GNU.keys() & os.environ.keys():
        os.environ.update(_GNU)
        for name, value in _INTEL_AND_LLVM.items():
            os.environ.setdefault(name, value)
