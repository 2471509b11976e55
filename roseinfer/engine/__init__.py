"""Everything that imports torch."""

import os

# By default OpenMP's threads spin while they wait. As soon as anything else wants one of the cores (the client of a
# benchmark does) every product of a step then waits for a descheduled thread: beside one busy thread on 2 cores a
# step of 8 decodes took 1400 ms spinning and 200 to 320 ms sleeping. Read once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from roseinfer.engine.engine import EngineDescription, InferenceEngine

__all__ = ["EngineDescription", "InferenceEngine"]
