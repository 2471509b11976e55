"""Everything that imports torch."""

from roseinfer.openmp import sleep_while_waiting

sleep_while_waiting()  # before torch is imported, below

from roseinfer.engine.engine import EngineDescription, InferenceEngine  # noqa: E402

__all__ = ["EngineDescription", "InferenceEngine"]
