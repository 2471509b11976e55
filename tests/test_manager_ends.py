"""SchedulerManager: steps that raise, engines that die, idle times, and closing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from roseinfer.errors import InvariantError, ManagerClosedError, RequestFailedError
from roseinfer.executor import StepPlan, StepRecord, StepResult
from roseinfer.manager import LONGEST_WAIT_S, SchedulerManager
from roseinfer.pipeline import Pipeline
from roseinfer.request import FinishReason, Request, SamplingParams
from roseinfer.stream import RequestStream
from tests.manager_driver import assert_all_slots_are_free, by_hand, finish, run_in_thread, settle, turn
from tests.scripted import FakeClock, ScriptedEngine, ScriptedTokenizer, StepGate


def ending_of(stream: RequestStream) -> str:
    """The text, or the cause of the error that ended it."""
    try:
        return "".join(stream.text())
    except RequestFailedError as error:
        return repr(error.__cause__)


def threads_of(manager: SchedulerManager) -> list[threading.Thread]:
    """Those that are alive."""
    workers = [] if manager._pool is None else manager._pool._threads
    return [thread for thread in (manager._thread, *workers) if thread is not None and thread.is_alive()]


# ---- a step raises ----


def test_a_step_that_raises_ends_its_streams_and_the_manager_lives_on() -> None:  # case B16
    def compute(plan: StepPlan) -> None:
        if len(engine.plans) == 2:
            raise RuntimeError("out of memory")

    engine = ScriptedEngine(compute)
    manager = by_hand(engine, max_batch_size=8, max_inflight_requests=12)
    streams = [manager.submit([1], SamplingParams(3)) for _ in range(12)]
    finish(manager)
    assert [ending_of(stream) for stream in streams] == ["RuntimeError('out of memory')"] * 8 + ["abc"] * 4
    assert manager._core.scheduler.kv_cache.used_tokens == 0
    assert_all_slots_are_free(manager, 12)


def test_an_engine_that_always_raises_ends_all_streams_and_refuses_nobody() -> None:  # case B16
    def compute(plan: StepPlan) -> None:
        raise RuntimeError("broken")

    with SchedulerManager(ScriptedEngine(compute), max_inflight_requests=12, tokenize_workers=1) as manager:
        for _ in range(3):
            streams = [manager.submit("Hello") for _ in range(12)]
            assert [ending_of(stream) for stream in streams] == ["RuntimeError('broken')"] * 12
        assert_all_slots_are_free(manager, 12)


def test_a_launch_that_raises_is_a_step_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    manager = by_hand(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "launch", lambda plan: 1 / 0)
        stream = manager.submit([1])
        turn(manager)
    assert ending_of(stream) == "ZeroDivisionError('division by zero')"
    stream = manager.submit([1], SamplingParams(2))
    finish(manager)
    assert ending_of(stream) == "ab"


# ---- the core dies ----


class NoIds:
    """A step that answers with no ids at all."""

    def wait(self) -> StepResult:
        return StepResult([], 0.0, 0.0)


def bad_ids(manager: SchedulerManager, engine: ScriptedEngine) -> None:
    manager._pipeline = Pipeline(NoIdsExecutor(), depth=0)


class NoIdsExecutor:
    def launch(self, plan: StepPlan) -> NoIds:
        return NoIds()


def no_way_in(manager: SchedulerManager, engine: ScriptedEngine) -> None:
    manager._core.scheduler.kv_cache.can_allocate = lambda n_tokens, prefix=(): False  # type: ignore[method-assign]


def bad_listener(manager: SchedulerManager, engine: ScriptedEngine) -> None:
    def on_step(record: StepRecord) -> None:
        raise OSError("disk full")

    manager._on_step = on_step


def no_exception(manager: SchedulerManager, engine: ScriptedEngine) -> None:
    def compute(plan: StepPlan) -> None:
        raise SystemExit

    engine.compute = compute


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (bad_ids, ValueError),
        (no_way_in, InvariantError),
        (bad_listener, OSError),
        (no_exception, SystemExit),
    ],
)
def test_when_the_core_dies_no_reader_hangs_and_submit_refuses_with_the_cause(
    damage: Callable[[SchedulerManager, ScriptedEngine], None], kind: type[BaseException]
) -> None:  # cases A16, B16
    tokenising, go_on, gate = threading.Event(), threading.Event(), StepGate()

    class Slow(ScriptedTokenizer):
        def encode(self, text: str) -> list[int]:
            tokenising.set()
            go_on.wait()
            return super().encode(text)

    engine = ScriptedEngine()
    engine.make_tokenizer = Slow
    manager = SchedulerManager(engine, max_batch_size=1, max_inflight_requests=4, tokenize_workers=1)
    assert manager._command(lambda: gate(StepPlan([])) or [])  # type: ignore[func-returns-value]
    damage(manager, engine)
    streams = [manager.submit([1]), manager.submit([1]), manager.submit("Hello"), manager.submit([1])]
    tokenising.wait()
    ends: list[str] = []
    readers = [threading.Thread(target=lambda s=s: ends.append(ending_of(s))) for s in streams[:3]]
    for reader in readers:
        reader.start()
    gate.opened.set()
    for reader in readers:
        reader.join()
    go_on.set()
    assert [kind.__name__ in end for end in ends] == [True] * 3
    with pytest.raises(ManagerClosedError, match="the engine died") as caught:
        manager.submit([1])
    assert isinstance(caught.value.__cause__, kind)
    streams[3].close()  # one that nobody read
    assert manager.inflight == 0
    manager.close()
    assert threads_of(manager) == []


# ---- nothing to do ----


class NotedQueue(queue.SimpleQueue[Any]):
    """Tells how its reader waits."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []
        self.idle = threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.empty():
            self.waits.append(timeout)
            self.idle.set()
        return super().get(block, timeout)


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> NotedQueue:
    """The inbox of the manager that the test makes next."""
    made = NotedQueue()
    monkeypatch.setattr("roseinfer.manager.queue.SimpleQueue", lambda: made)
    return made


def test_an_idle_manager_waits_without_spinning_and_serves_when_asked(inbox: NotedQueue) -> None:  # case B18
    with SchedulerManager(ScriptedEngine()) as manager:
        inbox.idle.wait()
        assert inbox.waits == [None]  # until somebody comes, not for a while
        stream = manager.submit([1], SamplingParams(3))
        assert ending_of(stream) == "abc"
        assert len(inbox.waits) <= 3


def test_with_an_unread_stream_an_idle_manager_waits_for_its_timeout(inbox: NotedQueue) -> None:
    with SchedulerManager(ScriptedEngine(), clock=FakeClock(), unread_timeout_s=7.5) as manager:
        inbox.idle.wait()
        inbox.idle.clear()
        manager.submit([1], SamplingParams(1))
        inbox.idle.wait()
        assert inbox.waits == [None, 7.5]


def test_the_engine_thread_wakes_by_itself_to_free_unread_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    with SchedulerManager(ScriptedEngine(), max_inflight_requests=1, unread_timeout_s=0.01) as manager:
        expire = manager._core.expire

        def noted(now: float) -> list[Request]:
            expired = expire(now)
            if expired:
                freed.set()
            return expired

        monkeypatch.setattr(manager._core, "expire", noted)
        manager.submit([1], SamplingParams(1))
        freed.wait()
        assert_all_slots_are_free(manager, 1)


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300])
def test_a_timeout_longer_than_a_queue_can_wait_kills_nobody(inbox: NotedQueue, timeout_s: float) -> None:
    with SchedulerManager(ScriptedEngine(), unread_timeout_s=timeout_s) as manager:
        inbox.idle.wait()
        inbox.idle.clear()
        unread = manager.submit([1], SamplingParams(1))
        inbox.idle.wait()
        assert inbox.waits == [None, LONGEST_WAIT_S]
        assert ending_of(manager.submit([1], SamplingParams(2))) == "ab"
        assert ending_of(unread) == "a"


# ---- closing ----


def test_closing_aborts_what_runs_and_what_waits_and_readers_see_the_end() -> None:
    gate = StepGate()
    manager = SchedulerManager(ScriptedEngine(gate), max_batch_size=1, max_inflight_requests=3)
    streams = [manager.submit([1]) for _ in range(3)]
    ends: list[str] = []
    readers = [threading.Thread(target=lambda s=s: ends.append(ending_of(s))) for s in streams]
    for reader in readers:
        reader.start()
    gate.entered.wait()
    with run_in_thread(manager.close):
        while not manager._closed:  # close() has begun: it cannot end before the step does
            pass
        gate.opened.set()
    for reader in readers:
        reader.join()
    assert sorted(ends) == ["", "", "a"]  # the step that ran was committed
    assert {stream.finish_reason for stream in streams} == {FinishReason.ABORT}
    assert manager.inflight == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_with_drain_finishes_what_was_accepted(workers: int) -> None:
    manager = SchedulerManager(ScriptedEngine(), max_batch_size=2, tokenize_workers=workers)
    streams = [manager.submit("Hello", SamplingParams(5)) for _ in range(10)]
    manager.close(drain=True)
    assert [ending_of(stream) for stream in streams] == ["abcde"] * 10
    assert manager.inflight == 0


@pytest.mark.parametrize("drain", [False, True])
def test_a_closed_manager_refuses_and_holds_no_thread(drain: bool) -> None:
    manager = SchedulerManager(ScriptedEngine(), max_inflight_requests=1, tokenize_workers=2)
    manager.close(drain=drain)
    manager.close()
    for prompt in ("Hello", [1]):
        with pytest.raises(ManagerClosedError, match="the manager is closed"):
            manager.submit(prompt)
    assert manager.inflight == 0
    assert threads_of(manager) == []


def test_a_manager_driven_by_hand_closes_too() -> None:
    manager = by_hand(tokenize_workers=1)
    streams = [manager.submit(prompt, SamplingParams(3)) for prompt in ("Hello", [1])]
    manager.close(drain=True)
    assert [ending_of(stream) for stream in streams] == ["abc"] * 2
    manager = by_hand()
    stream = manager.submit([1])
    manager.close()
    assert ending_of(stream) == ""
    assert manager.inflight == 0


def test_any_number_of_threads_may_close_at_once() -> None:
    manager = SchedulerManager(ScriptedEngine(), tokenize_workers=1)
    streams = [manager.submit("Hello", SamplingParams(3)) for _ in range(4)]
    barrier = threading.Barrier(8)

    def close(drain: bool) -> None:
        barrier.wait()
        manager.close(drain=drain)

    threads = [threading.Thread(target=close, args=(i % 2 == 0,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stream in streams:
        ending_of(stream)
    assert manager.inflight == 0


def test_a_drain_that_takes_too_long_can_be_cut_short() -> None:
    gate, closed = StepGate(), threading.Event()

    def drain() -> None:
        manager.close(drain=True)
        closed.set()

    manager = SchedulerManager(ScriptedEngine(gate), max_batch_size=1)
    stream = manager.submit([1], SamplingParams(4000))
    gate.entered.wait()
    waiting = manager.submit([1], SamplingParams(4000))
    with run_in_thread(drain), run_in_thread(manager.close):
        while manager._inbox.qsize() < 3:  # the second request, and both ways of closing
            pass
        gate.opened.set()
        closed.wait()
    assert len(ending_of(stream)) == 1
    assert ending_of(waiting) == ""


def test_closing_cannot_overtake_a_text_on_its_way_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a drain would wait for ever for ids of a prompt that no worker was told of."""
    with SchedulerManager(ScriptedEngine(), tokenize_workers=1) as manager:
        assert manager._pool is not None
        encode, entered = manager._pool.encode, []

        def watched(*args: Any, **kwargs: Any) -> None:
            with run_in_thread(lambda: entered.append(manager._gate.acquire(blocking=False))):
                pass
            encode(*args, **kwargs)

        monkeypatch.setattr(manager._pool, "encode", watched)
        stream = manager.submit("Hello", SamplingParams(2))
        assert entered == [False]
        assert ending_of(stream) == "ab"


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_whoever_got_in_while_closing_gets_an_end(workers: int, drain: bool) -> None:
    for _ in range(20):
        manager = SchedulerManager(ScriptedEngine(), tokenize_workers=workers)
        barrier = threading.Barrier(5)
        ends: list[tuple[str, FinishReason | None]] = []

        def client(manager: SchedulerManager = manager, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                for _ in range(50):
                    stream = manager.submit("Hello", SamplingParams(3))
                    ends.append((ending_of(stream), stream.finish_reason))  # noqa: B023 - joined below
            except ManagerClosedError:
                pass

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        barrier.wait()
        manager.close(drain=drain)
        for thread in threads:
            thread.join()
        complete = ("abc", FinishReason.LENGTH)
        assert all(end == complete or (not drain and end[1] is FinishReason.ABORT) for end in ends)
        assert manager.inflight == 0


def test_the_loop_does_not_end_while_somebody_stands_at_its_door() -> None:
    manager = by_hand()
    manager.submit([1])
    manager._closed = True
    assert not manager._try_end()


def test_a_reader_that_leaves_after_the_end_still_gives_its_slot_back() -> None:
    manager = SchedulerManager(ScriptedEngine(), max_inflight_requests=1)
    stream = manager.submit([1], SamplingParams(1))
    manager.close(drain=True)
    assert manager.inflight == 1
    stream.close()
    assert manager.inflight == 0


def test_an_error_inside_a_with_block_closes_the_manager() -> None:
    manager = SchedulerManager(ScriptedEngine())

    def use() -> None:
        with manager:
            manager.submit([1], SamplingParams(4000))
            settle(manager)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert threads_of(manager) == []
