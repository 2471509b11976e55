"""Each invariant that is checked after every step: a state that breaks it is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roseinfer.admission import TicketState
from roseinfer.core import Core
from roseinfer.errors import InvariantError
from roseinfer.executor import StepPlan, StepResult
from roseinfer.manager import SchedulerManager
from roseinfer.request import FinishReason, Request, SamplingParams, TokenEvent
from tests.invariants import Watch, Watched, check_drained, check_request, watch_all
from tests.manager_driver import by_hand, finish
from tests.scripted import CoreDriver, ScriptedEngine


class Scene:
    """A core with a request in every state that there is."""

    def __init__(self) -> None:
        driver = CoreDriver(limit=6, batch=2, budget=10)
        self.unread = driver.add(70, 1)
        driver.steps()
        self.decoding, self.half = driver.add(4, 8), driver.add(25, 8)
        driver.step()
        self.waiting, self.tokenising = driver.add(4, 8), driver.add(4, 8, text=True)
        self.core = driver.core
        self.scheduler, self.kv_cache, self.admission = (
            driver.core.scheduler,
            driver.core.scheduler.kv_cache,
            driver.core.admission,
        )


BROKEN: dict[str, Callable[[Scene], object]] = {
    "a block is lost": lambda s: s.kv_cache._free.pop(),
    "a block is free twice": lambda s: s.kv_cache._free.append(s.kv_cache._free[0]),
    "a block is none of the cache's": lambda s: s.kv_cache._free.__setitem__(0, -1),
    "a block is past the last one": lambda s: s.kv_cache._free.__setitem__(0, s.kv_cache.num_blocks),
    "a block was handed out, to nobody": lambda s: vars(s.kv_cache).update(_num_touched=6),
    "an owned block was never handed out": lambda s: s.half.block_table.__setitem__(0, 5),
    "a block is free and owned": lambda s: s.kv_cache._free.append(s.decoding.block_table[0]),
    "a block has two owners": lambda s: s.half.block_table.__setitem__(0, s.decoding.block_table[0]),
    "one that ended owns blocks": lambda s: s.kv_cache.allocate(s.unread.request_id, 16),
    "one that waits owns blocks": lambda s: s.kv_cache.allocate(s.waiting.request_id, 16),
    "one that runs has none": lambda s: s.kv_cache.free(s.decoding.request_id),
    "its table is not the cache's": lambda s: setattr(s.decoding, "block_table", []),
    "more was computed than is known": lambda s: setattr(s.decoding, "num_scheduled", 7),
    "more was computed than was asked for": lambda s: setattr(s.decoding, "num_to_schedule", 3),
    "a step was committed twice": lambda s: setattr(s.decoding, "num_pending", -1),
    "two are half-prefilled": lambda s: setattr(s.scheduler, "_half_prefilled", None),
    "one waits and runs": lambda s: s.scheduler.waiting.update({s.decoding.request_id: s.decoding}),
    "a live one neither waits nor runs": lambda s: s.scheduler.waiting.pop(s.waiting.request_id),
    "one that ended waits": lambda s: s.scheduler.waiting.update({s.unread.request_id: s.unread}),
    "one would wait for ever": lambda s: s.scheduler._ready._heap.clear(),
    "more run than there are seats": lambda s: setattr(
        s.scheduler, "limits", s.scheduler.limits._replace(max_active_requests=1)
    ),
    "an aborted one lingers": lambda s: setattr(s.waiting, "aborted", True),
    "a waiting one has no slot": lambda s: s.admission.release(s.waiting.ticket, 9.0),
    "a running one has no slot": lambda s: s.admission.release(s.decoding.ticket, 9.0),
    "a running one counts as waiting": lambda s: setattr(s.decoding.ticket, "state", TicketState.RESERVED),
    "a slot was given back that was not": lambda s: setattr(s.admission, "_inflight", 4),
    "an unread one is not counted": lambda s: vars(s.admission).update(_inflight=4, _released=1),
    "more are in flight than the limit": lambda s: setattr(s.admission, "limit", 4),
    "the backlog is negative": lambda s: setattr(s.admission, "_backlog_tokens", -1),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_broken_books_are_found(damage: str) -> None:
    scene = Scene()
    scene.core.check()
    BROKEN[damage](scene)
    with pytest.raises(InvariantError):
        scene.core.check()


# ---- what only shows over time ----


def test_an_event_after_the_terminal_one_is_found() -> None:
    driver, watch = CoreDriver(), Watch()
    watch.open[0] = driver.add(4, 2)
    driver.step()
    events = driver.commit(driver.plan() or pytest.fail("no step"))
    watch.saw(driver.core, events)
    with pytest.raises(InvariantError, match="after the terminal one"):
        watch.saw(driver.core, events)


def test_an_end_without_a_terminal_event_is_found() -> None:
    driver, watch = CoreDriver(), Watch()
    watch.open[0] = driver.add(4, 1)
    driver.step()
    with pytest.raises(InvariantError, match="has had none"):
        watch.saw(driver.core, [])


def test_a_terminal_event_of_a_live_request_is_found() -> None:
    driver, watch = CoreDriver(), Watch()
    watch.open[0] = driver.add(4, 2)
    with pytest.raises(InvariantError, match="a live request has had its terminal event"):
        watch.saw(driver.core, [TokenEvent(0, None, 0.0, FinishReason.ABORT)])


def a_request(**state: object) -> Request:
    driver = CoreDriver()
    request = driver.add(4, 3)
    driver.steps()
    for name, value in state.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"output_ids": [1] * 4, "token_times_s": [1.0] * 4}, "4 tokens"),
        ({"output_ids": [1]}, "1 tokens, 3 stamps"),
        ({"token_times_s": [1.0, 3.0, 2.0]}, "a stage before"),
        ({"first_scheduled_s": 1.5}, "a stage before"),
        ({"tokenized_s": 0.5}, "a stage before"),
        ({"reserved_s": 0.5}, "a stage before"),
        ({"finished_s": 2.5}, "a stage before"),
    ],
)
def test_tokens_and_stamps_that_cannot_be_are_found(state: dict[str, object], complaint: str) -> None:
    check_request(a_request())
    with pytest.raises(InvariantError, match=complaint):
        check_request(a_request(**state))


# ---- after a drain ----


@pytest.mark.parametrize(
    ("leak", "complaint"),
    [
        (lambda m: m._collector.open(7, m.new_mailbox()), "a mailbox"),
        (lambda m: m._streams.clear(), "1 slots for 0 streams"),
        (lambda m: m.admission.reserve(9.0, 1), "2 slots for 1 streams"),
        (lambda m: m._core.scheduler.kv_cache.allocate(7, 1), "KV blocks"),
    ],
)
def test_what_stays_after_a_drain_is_found(
    leak: Callable[[SchedulerManager], object], complaint: str
) -> None:  # case B9
    manager = by_hand()
    manager.submit([1], SamplingParams(2))
    finish(manager)
    check_drained(manager)
    leak(manager)
    with pytest.raises(InvariantError, match=complaint):
        check_drained(manager)


# ---- and all tests look ----


def test_the_books_of_every_manager_are_checked_after_each_step(invariants: Watched) -> None:
    def compute(plan: StepPlan) -> None:
        manager._core.scheduler.kv_cache._num_touched += 1

    manager = by_hand(ScriptedEngine(compute))
    manager.submit([1])
    with pytest.raises(InvariantError):
        manager.step()
    assert "KV blocks" in str(invariants.violations.pop())  # else this test would fail when it ends


def test_a_core_that_ends_a_request_twice_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Core.commit

    def twice(core: Core, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        return commit(core, plan, result, now) * 2

    with monkeypatch.context() as patch:
        patch.setattr(Core, "commit", twice)
        found = watch_all(patch)
        driver = CoreDriver()
        driver.add(4, 1)
        with pytest.raises(InvariantError):
            driver.step()
    assert len(found.violations) == 1
