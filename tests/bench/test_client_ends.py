"""The client of the in-process target when something else ends: an engine that dies, a deadline that passes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from roseinfer.bench import client
from roseinfer.errors import InvariantError
from roseinfer.executor import StepPlan
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams, TokenEvent
from roseinfer.stream import Collector, Mailbox
from tests.bench.experiments import workload
from tests.bench.test_client import HELLO, assert_set, closed, played
from tests.scripted import FakeClock, ScriptedEngine


class Death(BaseException):
    """Not for the manager to survive."""


@pytest.mark.parametrize("kind", ["burst", "cap", "closed", "timeout"])
def test_an_engine_that_dies_inside_a_submission_leaves_rows_of_all(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    dies, taken, calls = threading.Event(), threading.Event(), iter(range(100))
    opened, take = Collector.open, Mailbox.take

    def dies_at_the_fourth(self: Collector, request_id: int, box: Mailbox) -> None:
        opened(self, request_id, box)
        if next(calls) == 3:
            dies.set()
            assert_set(taken)

    def noted(self: Mailbox, timeout_s: float | None = None) -> list[TokenEvent]:
        events = take(self, timeout_s)
        if events:
            taken.set()
        return events

    def death(plan: StepPlan) -> None:
        assert_set(dies)
        raise Death

    monkeypatch.setattr(Collector, "open", dies_at_the_fourth)
    monkeypatch.setattr(Mailbox, "take", noted)
    load = closed(6) if kind == "closed" else workload([HELLO] * 6)
    kinds: dict[str, dict[str, Any]] = {
        "burst": {},
        "cap": {"burst_size": "6", "max_concurrency": 6},
        "closed": {"max_concurrency": 6},
        "timeout": {"timeout": 60.0},
    }
    result = played(ScriptedEngine(death), load, num_requests=6, **kinds[kind])
    assert result.requests["outcome"].tolist() == ["error"] * 6
    assert result.requests["reserved_s"].notna().tolist() == [True] * 3 + [False] * 3
    assert result.facts.peak_outstanding in (None, 4, 5, 6)


@pytest.mark.parametrize("flags", [{}, {"burst_size": "6", "max_concurrency": 2}])
def test_what_the_consumer_dies_of_is_raised(monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]) -> None:
    def acknowledge(self: SchedulerManager, request_id: int) -> None:
        raise InvariantError("scripted")

    monkeypatch.setattr(SchedulerManager, "acknowledge", acknowledge)
    with pytest.raises(InvariantError, match="scripted"):
        played(ScriptedEngine(), workload([HELLO] * 6), num_requests=6, **flags)


@pytest.mark.parametrize(("read_s", "gave_up_s"), [(5.0, {}), (5.1, {0: 5.1})])
def test_what_is_read_after_its_deadline_came_too_late(
    monkeypatch: pytest.MonkeyPatch, read_s: float, gave_up_s: dict[int, float]
) -> None:
    now = FakeClock()
    monkeypatch.setattr(client, "clock", now)
    manager = SchedulerManager(ScriptedEngine(), start=False)
    consumer = client._Consumer(manager, 5.0, None, None)
    stream = manager.submit(HELLO, SamplingParams(1), mailbox=consumer.mailbox)
    consumer.expect(stream.request_id, 5.0, lambda at_s, failure, is_served=False: None)
    while manager.step():
        pass
    now.now = read_s
    consumer.start()
    consumer.finish(1)
    manager.close()
    assert consumer.gave_up_s == gave_up_s
