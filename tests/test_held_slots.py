"""Requests that a reader stops although it does not leave: what they compute on is free at once, their slot is not."""

from __future__ import annotations

import pytest

from roseinfer.manager import SchedulerManager
from roseinfer.request import FinishReason, SamplingParams
from roseinfer.stream import RequestStream
from tests.scripted import FakeClock, ScriptedEngine


@pytest.fixture
def manager() -> SchedulerManager:
    """Turned by hand."""
    return SchedulerManager(ScriptedEngine(), start=False, clock=FakeClock(), max_inflight_requests=1)


def stopped(manager: SchedulerManager) -> RequestStream:
    """A request that was stopped after its first token."""
    stream = manager.submit([1], SamplingParams(100))
    manager.step()
    stream.stop()
    manager.step()
    return stream


def test_a_stopped_request_holds_its_slot_and_nothing_else(manager: SchedulerManager) -> None:
    stream = stopped(manager)
    assert not manager.step()
    assert manager.running == manager._core.scheduler.kv_cache.used_tokens == 0
    assert manager.inflight == 1
    manager._core.check()
    stream.close()
    manager.step()
    assert manager.inflight == 0


def test_a_stopped_request_that_nobody_closes_expires(manager: SchedulerManager) -> None:
    stopped(manager)
    assert isinstance(manager._clock, FakeClock)
    manager._clock.now = 61.0
    manager.step()
    assert manager.inflight == 0


def test_a_reader_that_leaves_before_its_stop_was_seen_frees_its_slot(manager: SchedulerManager) -> None:
    stream = manager.submit([1], SamplingParams(100))
    manager.step()
    stream.stop()
    stream.close()
    manager.step()
    assert manager.inflight == 0
    manager._core.check()


def test_a_stop_behind_the_end_changes_nothing(manager: SchedulerManager) -> None:
    stream = manager.submit([1], SamplingParams(1))
    manager.step()
    stream.stop()
    manager.step()
    assert "".join(stream.text()) == "a"
    assert stream.finish_reason is FinishReason.LENGTH
    assert manager.inflight == 0
