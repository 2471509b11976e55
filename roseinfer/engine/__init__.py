"""Everything that imports torch."""

from roseinfer.engine.engine import EngineDescription, InferenceEngine

__all__ = ["EngineDescription", "InferenceEngine"]
