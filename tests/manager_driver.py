"""Drives a manager: by hand, without its thread, or from beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.manager import SchedulerManager
from tests.scripted import FakeClock, ScriptedEngine


def by_hand(engine: ScriptedEngine | None = None, **sizes: Any) -> SchedulerManager:
    """A manager without a thread: `turn` and `finish` drive it."""
    sizes.setdefault("clock", FakeClock())
    return SchedulerManager(engine or ScriptedEngine(), start=False, **sizes)


def turn(manager: SchedulerManager) -> bool:
    worked = manager.step()
    manager._core.check()
    return worked


def finish(manager: SchedulerManager) -> None:
    while turn(manager):
        pass


def settle(manager: SchedulerManager) -> None:
    """Returns once the engine thread has done all that it was told so far."""
    done = threading.Event()
    assert manager._command(lambda: done.set() or [])  # type: ignore[func-returns-value]
    done.wait()


def refused(manager: SchedulerManager, prompt: Any = "x") -> SchedulerManagerOverloadedError:
    with pytest.raises(SchedulerManagerOverloadedError) as caught:
        manager.submit(prompt)
    return caught.value


def assert_all_slots_are_free(manager: SchedulerManager, limit: int) -> None:
    """Not by asking a counter alone: the limit is filled again."""
    assert manager.inflight == 0
    streams = [manager.submit([1]) for _ in range(limit)]
    assert refused(manager).inflight == limit
    for stream in streams:
        stream.close()


@contextmanager
def run_in_thread(target: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=target)
    thread.start()
    yield thread
    thread.join()
