"""How OpenMP's threads wait: settled before torch loads, and before a run describes its environment."""

from __future__ import annotations

import os


def sleep_while_waiting() -> None:
    """Lets idle OpenMP threads sleep, unless the user chose otherwise.

    By default they spin. As soon as anything else wants one of the cores (the client of a benchmark does) every
    product of a step then waits for a descheduled thread: beside one busy thread on 2 cores a step of 8 decodes
    took 1400 ms spinning and 200 to 320 ms sleeping. OpenMP reads the variable once, when torch loads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
