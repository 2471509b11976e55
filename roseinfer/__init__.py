"""roseinfer: what an admission limit does to the tail latency of an LLM server, with evidence."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roseinfer.engine import InferenceEngine
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

_MODULES = {
    "InferenceEngine": "engine",
    "SchedulerManager": "manager",
    "FinishReason": "request",
    "SamplingParams": "request",
    "RequestStream": "stream",
}
"""Where the names live that are not errors."""


def __getattr__(name: str) -> object:
    """Names are imported on first use: `roseinfer-bench --help` needs none of them, and the engine brings torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
