"""roseinfer: what an admission limit does to the tail latency of an LLM server, with evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.errors import (
    InputError,
    InvariantError,
    ManagerClosedError,
    ModelError,
    PromptTooLongError,
    RequestFailedError,
    RoseinferError,
    RunError,
    SchedulerManagerOverloadedError,
)
from roseinfer.manager import SchedulerManager
from roseinfer.request import FinishReason, SamplingParams
from roseinfer.stream import RequestStream

if TYPE_CHECKING:
    from roseinfer.engine import InferenceEngine

__all__ = [
    "FinishReason",
    "InferenceEngine",
    "InputError",
    "InvariantError",
    "ManagerClosedError",
    "ModelError",
    "PromptTooLongError",
    "RequestFailedError",
    "RequestStream",
    "RoseinferError",
    "RunError",
    "SamplingParams",
    "SchedulerManager",
    "SchedulerManagerOverloadedError",
]


def __getattr__(name: str) -> object:
    """InferenceEngine is imported on first use: it brings torch along, which takes seconds."""
    if name == "InferenceEngine":
        from roseinfer.engine import InferenceEngine

        return InferenceEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
