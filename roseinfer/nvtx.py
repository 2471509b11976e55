"""Ranges for Nsight Systems: what the engine's thread does in a step, and the stage that each request is in.

Off, they cost a call that does nothing. torch is imported only where they are on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from roseinfer.errors import InputError
from roseinfer.executor import StepPlan
from roseinfer.request import TokenEvent

TOKENIZE: Final = "tokenize"
QUEUE: Final = "queue"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
"""Stages of a request, in order; one whose prompt came as token ids begins with `queue`."""


class NoRanges:
    """Marks nothing."""

    _nothing: Final = nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._nothing

    def enter(self, request_id: int, stage: str) -> None:
        pass

    def advance(self, request_id: int, stage: str) -> None:
        pass

    def started(self, plan: StepPlan) -> None:
        pass

    def published(self, events: Sequence[TokenEvent]) -> None:
        pass


class NvtxRanges:
    """Marks phases of the calling thread, nested, and stages of requests, which begin in one thread and end in another.

    Raises InputError where torch has no NVTX: that is every build without CUDA.
    """

    def __init__(self) -> None:
        import torch
        from torch.cuda import nvtx

        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise InputError("nvtx", True, "this torch was built without CUDA, and so without NVTX")
        self._nvtx: Any = nvtx  # without types
        self._lock = threading.Lock()
        self._stages: dict[int, tuple[str, int]] = {}  # and the handle of its range, of every request in one

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What this thread is at."""
        self._nvtx.range_push(name)
        try:
            yield
        finally:
            self._nvtx.range_pop()

    def enter(self, request_id: int, stage: str) -> None:
        """The first stage of a request."""
        with self._lock:
            self._stages[request_id] = stage, self._nvtx.range_start(_label(request_id, stage))

    def advance(self, request_id: int, stage: str) -> None:
        """The next stage of a request; ignored if it has ended, or is in it."""
        with self._lock:
            before = self._stages.get(request_id)
            if before is not None and before[0] != stage:
                self._nvtx.range_end(before[1])
                self._stages[request_id] = stage, self._nvtx.range_start(_label(request_id, stage))

    def started(self, plan: StepPlan) -> None:
        """Requests of which nothing was planned before are in their prefill."""
        for request_id in plan.started_ids():
            self.advance(request_id, PREFILL)

    def published(self, events: Sequence[TokenEvent]) -> None:
        """Who has a token decodes, who has ended is in no stage any more."""
        for event in events:
            if event.finish_reason is None:
                self.advance(event.request_id, DECODE)
                continue
            with self._lock:
                last = self._stages.pop(event.request_id, None)
            if last is not None:
                self._nvtx.range_end(last[1])


Ranges = NoRanges | NvtxRanges


def ranges(nvtx: bool) -> Ranges:
    """Raises InputError where they are wanted and cannot be had."""
    return NvtxRanges() if nvtx else NoRanges()


def _label(request_id: int, stage: str) -> str:
    return f"request {request_id} {stage}"
