from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.invariants import Watched, check_drained, watch_all

# The same examples in every run, and no verdict on a machine that is busy.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the timeout of a test does not count the wait
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What measures real time is marked `alone`: no other worker of pytest-xdist runs a test meanwhile."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    here = Path(__file__)
    with here.open() as room, here.with_name("invariants.py").open() as door:
        fcntl.flock(door, fcntl.LOCK_EX)  # whoever waits for an empty room lets nobody else in
        fcntl.flock(room, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            # Closing is not enough: a child of the test may have it open still.
            fcntl.flock(room, fcntl.LOCK_UN)


@pytest.fixture(autouse=True, scope="session")
def thawed_at_the_end() -> Iterator[None]:
    """So that pytest sees all garbage before it ends."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """What imports left, torch above all, is no garbage: else each collection goes through it, for 0.2 s and more.

    For every file anew: measuring an engine thaws the heap.
    """
    gc.collect(1)
    gc.freeze()


@pytest.fixture(autouse=True)
def invariants() -> Iterator[Watched]:
    """Every core and every manager of every test keeps its invariants."""
    # A patch of its own: a test may undo the one that it shares with others.
    with pytest.MonkeyPatch.context() as patch:
        found = watch_all(patch)
        yield found
    assert found.violations == []
    for manager in found.managers:
        if manager._died_of is None and manager._ended:
            check_drained(manager)
