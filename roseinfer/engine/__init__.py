"""Everything that imports torch."""

from roseinfer.openmp import spin_briefly

spin_briefly()  # before torch is imported, below

from roseinfer.engine.engine import EngineDescription, InferenceEngine  # noqa: E402

__all__ = ["EngineDescription", "InferenceEngine"]
