"""Steps between their launch and their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from roseinfer.executor import Executor, StepHandle, StepPlan, StepResult
from roseinfer.nvtx import NoRanges, Ranges

Counts = tuple[int, int, int, int | None]
"""Waiting, running, tokens of KV, and a limit that moves: those of a StepRecord."""


class Launched(NamedTuple):
    """A step that runs, or waits for the one before it."""

    plan: StepPlan
    handle: StepHandle
    plan_start_s: float
    counts: Counts


class StepFailed(Exception):  # noqa: N818 (nobody outside sees it)
    """A step raised `cause`; no step is launched any more."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Pipeline:
    """Launches steps on an executor, in order. Up to `depth` run on while the next is planned; with 0 none does."""

    def __init__(self, executor: Executor, depth: int, ranges: Ranges = NoRanges()) -> None:  # noqa: B008 (it holds no state)
        self._executor = executor
        self._ranges = ranges
        self._depth = depth
        self._launched: deque[Launched] = deque()

    def __len__(self) -> int:
        """Steps that are launched and not yet taken in."""
        return len(self._launched)

    def turn(
        self, plan: StepPlan | None, plan_start_s: float, counts: Counts
    ) -> Iterator[tuple[Launched, StepResult]]:
        """Launches a step, then waits for those that are due: all, where there was none to launch.

        Raises StepFailed where one fails. What was launched before it is still handed out. What was launched behind
        it went on from what it left, and is dropped.
        """
        failure = None
        if plan is not None:
            try:
                with self._ranges.phase("launch"):
                    handle = self._executor.launch(plan)
                self._launched.append(Launched(plan, handle, plan_start_s, counts))
            except Exception as error:
                failure = error
        most_left = self._depth if plan is not None and failure is None else 0
        while len(self._launched) > most_left:
            step = self._launched.popleft()
            try:
                with self._ranges.phase("wait"):
                    result = step.handle.wait()
            except Exception as error:
                failure = error
                break
            yield step, result
        if failure is not None:
            while self._launched:
                with suppress(Exception):
                    self._launched.popleft().handle.wait()
            raise StepFailed(failure)
