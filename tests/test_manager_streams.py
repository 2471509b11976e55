"""SchedulerManager: streams, and slots that come back."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import pytest

from roseinfer.errors import InputError, ManagerClosedError, SchedulerManagerOverloadedError
from roseinfer.executor import StepPlan, StepRecord
from roseinfer.manager import SchedulerManager
from roseinfer.request import FinishReason, SamplingParams
from roseinfer.stream import Mailbox, RequestStream, Token
from tests.manager_driver import (
    assert_all_slots_are_free,
    by_hand,
    finish,
    refused,
    run_in_thread,
    settle,
    turn,
)
from tests.scripted import FakeClock, ScriptedEngine, StepGate

LETTERS = "abcdefghijklmnopqrstuvwxyz"

# ---- slots come back ----


def drain(manager: SchedulerManager) -> None:
    for stream in [manager.submit("Hello", SamplingParams(3)) for _ in range(8)]:
        assert "".join(stream.text()) == "abc"


def cancel_storm(manager: SchedulerManager) -> None:
    for _ in range(20):
        streams = [manager.submit("Hello", SamplingParams(100)) for _ in range(8)]
        for stream in streams[::2]:
            next(stream.tokens(), None)
        for stream in streams:
            manager.abort(stream.request_id)
            stream.close()
        settle(manager)


def leave_before_the_first_token(manager: SchedulerManager) -> None:
    for _ in range(20):
        for _ in range(8):
            with manager.submit("Hello"):
                pass
        settle(manager)


def leave_after_the_first_token(manager: SchedulerManager) -> None:
    for stream in [manager.submit("Hello", SamplingParams(100)) for _ in range(8)]:
        for _ in stream.tokens():
            break
    settle(manager)


def cancel_tasks(manager: SchedulerManager) -> None:
    async def read(stream: RequestStream) -> None:
        async for _ in stream.tokens_async():
            pass

    async def main() -> None:
        for n_turns in range(4):
            tasks = [
                asyncio.ensure_future(read(manager.submit("Hello", SamplingParams(100)))) for _ in range(8)
            ]
            for _ in range(1 + n_turns):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            settle(manager)

    asyncio.run(main())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "trouble",
    [drain, cancel_storm, leave_before_the_first_token, leave_after_the_first_token, cancel_tasks],
)
def test_every_slot_comes_back(trouble: Any, workers: int) -> None:  # cases A3, A4, B9, B10
    with SchedulerManager(ScriptedEngine(), max_inflight_requests=8, tokenize_workers=workers) as manager:
        trouble(manager)
        assert len(manager._collector) == len(manager._streams) == len(manager._core) == 0
        assert manager.counts().backlog_tokens == 0
        assert_all_slots_are_free(manager, 8)


def test_a_stream_that_is_never_opened_gives_its_slot_back_after_the_timeout() -> None:  # case A3
    clock = FakeClock()
    manager = by_hand(clock=clock, max_inflight_requests=2, unread_timeout_s=60.0)
    ids = [manager.add_request([1], 1), manager.submit([1], SamplingParams(2)).request_id]
    finish(manager)
    clock.now = 59.9
    turn(manager)
    assert manager.inflight == 2
    clock.now = 60.0
    turn(manager)
    assert manager.inflight == len(manager._streams) == 0
    for request_id in ids:
        with pytest.raises(InputError, match="given up unread"):
            manager.stream_text(request_id)
    assert_all_slots_are_free(manager, 2)


def test_a_running_request_is_not_given_up_however_long_nobody_reads() -> None:
    clock = FakeClock()
    manager = by_hand(clock=clock, unread_timeout_s=1.0)
    stream = manager.submit([1], SamplingParams(3))
    for _ in range(3):
        clock.now += 100.0
        turn(manager)
    assert manager.inflight == 1
    assert "".join(stream.text()) == "abc"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("has_ended", [False, True])
def test_an_abandoned_iteration_may_be_collected_inside_of_anything(has_ended: bool) -> None:
    """A generator in a cycle is closed by the garbage collector, in whatever thread, whatever it holds."""
    manager = by_hand(max_inflight_requests=1)
    gc.disable()
    try:
        tokens = manager.submit([1], SamplingParams(3)).tokens()
        turn(manager)
        if has_ended:
            finish(manager)
        next(tokens)
        cycle: list[Any] = [tokens]
        cycle.append(cycle)
        del tokens, cycle
        with manager._gate, manager.admission._lock, manager._collector._condition:
            assert gc.collect(0)  # the youngest: all of them were made here
    finally:
        gc.enable()
    turn(manager)
    assert_all_slots_are_free(manager, 1)


# ---- streams ----


def test_many_streams_at_once_each_get_all_of_their_text() -> None:  # case B7
    with SchedulerManager(ScriptedEngine(), max_batch_size=5, tokenize_workers=2) as manager:
        streams = [manager.submit("x" * (1 + i % 7), SamplingParams(1 + i % 26)) for i in range(32)]
        assert ["".join(stream.text()) for stream in streams] == [LETTERS[: 1 + i % 26] for i in range(32)]


def test_closing_a_stream_in_the_middle_stops_its_tokens_and_frees_its_kv_cache() -> None:  # case B10
    engine = ScriptedEngine()
    manager = by_hand(engine)
    stream, other = manager.submit([1], SamplingParams(50)), manager.submit([1], SamplingParams(50))
    turn(manager)
    stream.close()
    turn(manager)
    assert engine.plans[1:] == [[(other.request_id, 1, 1)]]
    assert manager._core.scheduler.kv_cache.owners() == {other.request_id}
    assert manager.inflight == 1


def test_closing_during_a_step_frees_the_slot_after_the_step() -> None:  # case B3
    gate = StepGate()
    with SchedulerManager(ScriptedEngine(gate), max_inflight_requests=1) as manager:
        stream = manager.submit([1])
        gate.entered.wait()
        stream.close()
        assert refused(manager).inflight == 1
        gate.opened.set()
        settle(manager)
        assert_all_slots_are_free(manager, 1)
    assert list(stream.tokens()) == []


def test_a_stop_string_ends_the_generation_within_two_steps() -> None:  # cases B10, B11
    engine = ScriptedEngine()
    manager = by_hand(engine)
    stream = manager.submit([1], SamplingParams(26, stop=("cd",)))
    text = stream.text()
    for _ in range(4):
        turn(manager)
    assert "".join(text) == "ab"
    finish(manager)
    assert len(engine.plans) <= 6
    assert (stream.finish_reason, manager.inflight) == (FinishReason.STOP, 0)


def test_closing_from_another_thread_lets_a_blocked_reader_go() -> None:
    gate = StepGate()
    seen: list[Token] = []
    with SchedulerManager(ScriptedEngine(gate)) as manager:
        stream = manager.submit([1])
        with run_in_thread(lambda: seen.extend(stream.tokens())):
            gate.entered.wait()
            stream.close()
            gate.opened.set()
        assert seen == []


def test_tokens_come_by_id_with_the_engines_time() -> None:
    clock = FakeClock()

    def compute(plan: StepPlan) -> None:
        clock.now += 2.0

    manager = by_hand(ScriptedEngine(compute), clock=clock)
    request_id = manager.add_request([1], 2)
    finish(manager)
    assert list(manager.stream_tokens(request_id)) == [Token(ord("a"), 2.0), Token(ord("b"), 4.0)]
    with pytest.raises(InputError, match="already read"):
        manager.stream_tokens(request_id)


@pytest.mark.parametrize("state", ["waiting", "running", "ended", "over"])
def test_abort_ends_a_request_in_any_state_and_frees_its_slot(state: str) -> None:
    manager = by_hand(max_inflight_requests=1)
    stream = manager.submit([1], SamplingParams(2))
    if state != "waiting":
        turn(manager)
    if state in ("ended", "over"):
        finish(manager)
    if state == "over":
        list(stream.tokens())
    manager.abort(stream.request_id)
    manager.abort(stream.request_id)
    turn(manager)
    assert len(manager._streams) == 0
    assert_all_slots_are_free(manager, 1)


def test_abort_knows_no_strangers() -> None:
    manager = by_hand()
    manager.abort(99)
    assert not turn(manager)


# ---- a mailbox for many ----


def test_a_shared_mailbox_gets_the_events_of_all_and_acknowledging_frees_the_slots() -> None:
    manager = by_hand(max_inflight_requests=2)
    box = manager.new_mailbox()
    streams = [manager.submit([1], SamplingParams(2), mailbox=box) for _ in range(2)]
    finish(manager)
    events = box.take(timeout_s=0.0)
    assert [(e.request_id, chr(e.token_id or 0)) for e in events] == [(0, "a"), (1, "a"), (0, "b"), (1, "b")]
    assert manager.inflight == 2
    for stream in streams:
        manager.acknowledge(stream.request_id)
        manager.acknowledge(stream.request_id)
    assert len(manager._streams) == 0
    assert_all_slots_are_free(manager, 2)


def test_acknowledging_a_request_that_still_runs_is_refused_and_harmless() -> None:
    manager = by_hand()
    box = manager.new_mailbox()
    stream = manager.submit([1], SamplingParams(2), mailbox=box)
    with pytest.raises(InputError, match="has not ended"):
        manager.acknowledge(stream.request_id)
    turn(manager)
    with pytest.raises(InputError, match="has not ended"):
        manager.acknowledge(stream.request_id)
    finish(manager)
    manager.acknowledge(stream.request_id)
    assert manager.inflight == 0


def test_an_unread_shared_mailbox_gives_the_slots_back_and_forgets_the_streams() -> None:
    clock = FakeClock()
    manager = by_hand(clock=clock, unread_timeout_s=1.0)
    stream = manager.submit([1], SamplingParams(1), mailbox=manager.new_mailbox())
    finish(manager)
    clock.now = 1.0
    turn(manager)
    assert (manager.inflight, len(manager._streams)) == (0, 0)
    manager.acknowledge(stream.request_id)  # late, and harmless


def test_a_mailbox_of_another_manager_is_refused() -> None:
    """Its reader would wait for ever at the wrong door."""
    manager = by_hand()
    with pytest.raises(InputError, match="another manager"):
        manager.submit([1], mailbox=by_hand().new_mailbox())
    assert manager.inflight == 0


# ---- stamps and accounts ----


def test_every_stage_has_its_stamp_and_a_slot_is_released_when_it_is_free() -> None:
    clock = FakeClock()

    def compute(plan: StepPlan) -> None:
        clock.now += 1.0

    manager = by_hand(ScriptedEngine(compute), clock=clock, max_batch_size=1)
    first, second = manager.submit("ab", SamplingParams(2)), manager.submit([1], SamplingParams(1))
    clock.now = 0.5
    finish(manager)
    clock.now = 10.0
    assert second.timings.released_s is None
    list(first.tokens())
    assert first.timings == (0.0, 0.0, 0.5, 1.5, 2.5, 2.5, 10.0)
    list(second.tokens())
    assert second.timings == (0.0, None, 2.5, 3.5, 3.5, 3.5, 10.0)
    assert (first.inflight_before, second.inflight_before) == (0, 1)


def test_a_step_is_recorded_as_it_was_planned() -> None:
    clock = FakeClock()
    records: list[StepRecord] = []

    def compute(plan: StepPlan) -> None:
        clock.now += 1.0

    manager = by_hand(ScriptedEngine(compute), clock=clock, max_batch_size=2, on_step=records.append)
    for _ in range(3):
        manager.submit([1] * 20, SamplingParams(1))
    finish(manager)
    (first, second) = records
    assert (first.waiting, first.running, first.kv_tokens) == (1, 2, 64)
    assert (second.waiting, second.running, second.kv_tokens) == (0, 1, 32)
    assert (first.plan_start_s, first.result.exec_end_s, second.plan_start_s) == (0.0, 1.0, 1.0)


def test_slots_held_over_time_add_up_and_each_stream_ends_once() -> None:
    """Six impatient clients against a limit; afterwards the account must balance to the last slot."""
    with SchedulerManager(
        ScriptedEngine(), max_batch_size=3, max_inflight_requests=5, tokenize_workers=2, kv_cache_tokens=512
    ) as manager:
        streams: list[RequestStream] = []
        ends: list[int] = []

        def client(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                prompt: Any = "x" * rng.randint(1, 30) if rng.random() < 0.5 else [1] * rng.randint(1, 30)
                try:
                    stream = manager.submit(prompt, SamplingParams(rng.randint(1, 20)))
                except SchedulerManagerOverloadedError:
                    continue
                streams.append(stream)
                for n, _ in enumerate(stream.tokens()):
                    if n == rng.randint(0, 25):
                        break
                if rng.random() < 0.2:
                    manager.abort(stream.request_id)
                ends.append(stream.request_id)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settle(manager)
        counts = manager.counts()
        assert sorted(ends) == sorted(stream.request_id for stream in streams)
        assert (counts.inflight, counts.backlog_tokens, counts.reserved) == (0, 0, len(streams))
        assert counts.peak_inflight <= 5
        held = sum((s.timings.released_s or 0.0) - s.timings.reserved_s for s in streams)
        assert counts.inflight_integral_s == pytest.approx(held, abs=1e-6)
        manager._core.check()


def test_a_request_enters_the_collector_outside_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock's holder may close an abandoned stream, and so wait for the gate: the reverse must never be."""
    manager = by_hand()
    free: list[bool] = []
    opened = manager._collector.open

    def open_and_look(request_id: int, mailbox: Mailbox) -> None:
        def look() -> None:
            free.append(manager._gate.acquire(blocking=False))
            if free[-1]:
                manager._gate.release()

        with run_in_thread(look):
            pass
        opened(request_id, mailbox)

    monkeypatch.setattr(manager._collector, "open", open_and_look)
    manager.submit([1])
    assert free == [True]
    manager.close()


def test_a_request_that_the_closed_manager_refuses_leaves_no_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = by_hand()
    opened = manager._collector.open

    def open_and_close(request_id: int, mailbox: Mailbox) -> None:
        opened(request_id, mailbox)
        manager.close()

    monkeypatch.setattr(manager._collector, "open", open_and_close)
    with pytest.raises(ManagerClosedError):
        manager.submit([1])
    assert len(manager._collector) == 0
    assert manager.inflight == 0
