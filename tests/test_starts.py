"""Mailboxes that ask to hear when a request is first scheduled, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams, TokenEvent
from roseinfer.stream import Mailbox
from tests.scripted import FakeClock, ScriptedEngine

TWO = SamplingParams(2)


def a_manager(**options: Any) -> SchedulerManager:
    """Turned by hand; the time is 1.0."""
    clock = FakeClock()
    clock.now = 1.0
    return SchedulerManager(ScriptedEngine(), start=False, clock=clock, **options)


def taken(box: Mailbox) -> list[TokenEvent]:
    return box.take(timeout_s=0.0)


def test_a_start_comes_before_the_first_step_is_computed() -> None:
    boxes: list[Mailbox] = []
    found: list[list[TokenEvent]] = []
    with SchedulerManager(
        ScriptedEngine(lambda plan: found.append(taken(boxes[0]))), start=False, clock=FakeClock()
    ) as manager:
        boxes.append(manager.new_mailbox(wants_starts=True))
        manager.submit([1], TWO, mailbox=boxes[0])
        manager.step()
        manager.step()
    assert found == [[TokenEvent(0, None, 0.0)], [TokenEvent(0, ord("a"), 0.0)]]


def test_a_request_that_waits_has_not_started() -> None:
    with a_manager(max_batch_size=1) as manager:
        first, second = (manager.new_mailbox(wants_starts=True) for _ in range(2))
        manager.submit([1], TWO, mailbox=first)
        manager.submit([1], TWO, mailbox=second)
        manager.step()
        manager.step()
        assert taken(second) == []
        manager.step()
        assert taken(second)[0] == TokenEvent(1, None, 1.0)


def test_a_prompt_in_chunks_starts_once() -> None:
    with a_manager(max_batch_size=1, max_num_batched_tokens=4) as manager:
        box = manager.new_mailbox(wants_starts=True)
        manager.submit([1] * 10, TWO, mailbox=box)
        while manager.step():
            pass
        assert [event.token_id for event in taken(box)] == [None, ord("a"), ord("b")]


def test_others_hear_of_tokens_alone() -> None:
    with a_manager() as manager:
        asking, other = manager.new_mailbox(wants_starts=True), manager.new_mailbox()
        manager.submit([1], TWO, mailbox=asking)
        manager.submit([1], TWO, mailbox=other)
        stream = manager.submit([1], TWO)
        while manager.step():
            pass
        assert [event.token_id for event in taken(other)] == [ord("a"), ord("b")]
        assert "".join(stream.text()) == "ab"
        assert len(taken(asking)) == 3


def test_starts_that_nobody_asks_for_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.executor.StepPlan.started_ids", None)
    with a_manager() as manager:
        stream = manager.submit([1], TWO)
        while manager.step():
            pass
        assert "".join(stream.text()) == "ab"


def test_a_prompt_that_is_cached_in_part_starts_too() -> None:
    with a_manager() as manager:
        manager.submit([1] * 40, TWO)
        while manager.step():
            pass
        box = manager.new_mailbox(wants_starts=True)
        manager.submit([1] * 40, TWO, mailbox=box)
        while manager.step():
            pass
        assert [event.token_id for event in taken(box)] == [None, ord("a"), ord("b")]
