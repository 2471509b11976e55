"""The overlapped loop: the plain one is its specification."""

from __future__ import annotations

from itertools import chain
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.executor import StepPlan, StepRecord
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams
from roseinfer.stream import RequestStream
from tests.manager_driver import by_hand, finish, turn
from tests.scripted import ScriptedEngine, ScriptedHandle, spans_of


def overlapped(engine: ScriptedEngine | None = None, **sizes: Any) -> SchedulerManager:
    return by_hand(engine, overlap_steps=True, **sizes)


class Noted(ScriptedEngine):
    """Writes down what is done to its steps, by their numbers."""

    def __init__(
        self, script: str = "abcdefghijklmnopqrstuvwxyz", fails: tuple[str, int] | None = None
    ) -> None:
        super().__init__(script=script)
        self.done: list[str] = []
        self.launched: list[list[tuple[int, int, int]]] = []
        self.fails = fails

    def note(self, what: str, number: int) -> None:
        self.done.append(f"{what} {number}")
        if self.fails == (what, number):
            raise RuntimeError("scripted failure")

    def launch(self, plan: StepPlan) -> ScriptedHandle:
        number = len(self.launched)
        self.launched.append(spans_of(plan))
        self.note("launch", number)
        return NotedHandle(self, plan, number)


class NotedHandle(ScriptedHandle):
    def __init__(self, engine: Noted, plan: StepPlan, number: int) -> None:
        super().__init__(engine, plan)
        self.noted, self.number = engine, number

    def wait(self) -> Any:
        self.noted.note("wait", self.number)
        return super().wait()


def ending_of(stream: RequestStream) -> str:
    try:
        return "".join(stream.text())
    except Exception as error:
        return type(error).__name__


def test_a_step_is_launched_before_the_one_before_it_is_taken_in() -> None:
    engine = Noted()
    manager = overlapped(engine)
    stream = manager.submit([1], SamplingParams(3))
    finish(manager)
    assert engine.done == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]
    assert ending_of(stream) == "abc"


def test_the_plain_loop_takes_each_step_in_before_the_next() -> None:
    engine = Noted()
    manager = by_hand(engine)
    manager.submit([1], SamplingParams(2))
    finish(manager)
    assert engine.done == ["launch 0", "wait 0", "launch 1", "wait 1"]


def test_no_step_computes_past_the_length_that_was_asked_for() -> None:
    engine = Noted()
    manager = overlapped(engine)
    manager.submit([1, 2], SamplingParams(3))
    finish(manager)
    assert engine.launched == [[(0, 0, 2)], [(0, 2, 1)], [(0, 3, 1)]]


def test_the_token_behind_an_end_of_sequence_is_dropped() -> None:  # case B6
    engine = Noted(script="a\0b")
    manager = overlapped(engine)
    stream = manager.submit([1], SamplingParams(8))
    finish(manager)
    assert len(engine.launched) == 3  # one more than the plain loop launches
    assert ending_of(stream) == "a"
    assert manager.inflight == 0


def test_an_abort_in_flight_frees_once_when_its_last_step_is_taken_in() -> None:  # cases B3, B6, B10
    engine = Noted()
    manager = overlapped(engine)
    stream = manager.submit([1], SamplingParams(100))
    for _ in range(3):
        turn(manager)
    stream.close()
    turn(manager)
    assert manager.inflight == 0
    assert manager._core.scheduler.kv_cache.used_tokens == 0
    finish(manager)
    assert engine.done[-2:] == ["wait 1", "wait 2"]


def test_a_stop_in_flight_frees_memory_once_and_keeps_its_slot_until_its_reader_leaves() -> None:  # case B6
    engine = Noted()
    manager = overlapped(engine)
    stream = manager.submit([1], SamplingParams(100))
    for _ in range(3):
        turn(manager)
    stream.stop()
    finish(manager)
    assert engine.done[-2:] == ["wait 1", "wait 2"]
    assert manager._core.scheduler.kv_cache.used_tokens == 0
    assert manager.inflight == 1
    stream.close()
    assert manager.inflight == 0


def test_closing_waits_for_what_is_launched() -> None:
    engine = Noted()
    manager = overlapped(engine)
    manager.submit([1], SamplingParams(100))
    turn(manager)
    manager.close()
    assert engine.done == ["launch 0", "wait 0"]
    assert manager.inflight == 0


def test_a_step_that_fails_takes_the_one_behind_it_along_and_no_more() -> None:  # case B16
    engine = Noted(fails=("wait", 1))
    manager = overlapped(engine)
    first = manager.submit([1], SamplingParams(8))
    for _ in range(3):
        turn(manager)
    assert engine.done == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]
    assert ending_of(first) == "RequestFailedError"
    second = manager.submit([1], SamplingParams(2))
    finish(manager)
    assert ending_of(second) == "ab"
    assert manager.inflight == 0


def test_a_launch_that_fails_leaves_the_step_before_it_its_tokens() -> None:  # case B16
    engine = Noted(fails=("launch", 1))
    manager = overlapped(engine)
    done, going_on = manager.submit([1], SamplingParams(1)), manager.submit([1], SamplingParams(8))
    finish(manager)
    assert engine.done == ["launch 0", "launch 1", "wait 0"]
    assert (ending_of(done), ending_of(going_on)) == ("a", "RequestFailedError")


def test_a_record_has_the_counts_of_its_own_planning() -> None:
    records: list[StepRecord] = []
    manager = overlapped(max_batch_size=1, on_step=records.append)
    for _ in range(3):
        manager.submit([1], SamplingParams(2))
    finish(manager)
    assert [record.waiting for record in records] == [2, 2, 1, 1, 0, 0]
    assert all(record.running == 1 for record in records)


def test_a_thread_of_its_own_serves_too() -> None:  # case B7
    with SchedulerManager(Noted(), overlap_steps=True) as manager:
        streams = [manager.submit([1] * (1 + n), SamplingParams(1 + n % 5)) for n in range(32)]
        assert [ending_of(stream) for stream in streams] == ["abcde"[: 1 + n % 5] for n in range(32)]
        assert manager.inflight == 0


prompts = st.integers(1, 3).map(lambda kind: [kind] * 16)
scripts = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(prompts, min_size=1, max_size=3), st.integers(1, 6)),
        st.tuples(st.sampled_from(["abort", "turn", "turn"]), st.just([[0]]), st.integers(0, 9)),
    ),
    max_size=30,
)


@given(scripts, st.integers(1, 4), st.sampled_from([5, 20, 200]), st.sampled_from([128, 1024]))
def test_both_loops_give_the_same_streams(
    script: list[tuple[str, list[list[int]], int]], batch: int, budget: int, kv_tokens: int
) -> None:  # cases B3, B6, B7
    ends = []
    for overlap_steps in (False, True):
        manager = by_hand(
            ScriptedEngine(script="abc\0d"),
            max_batch_size=batch,
            max_num_batched_tokens=budget,
            kv_cache_tokens=kv_tokens,
            overlap_steps=overlap_steps,
        )
        streams: list[RequestStream] = []
        aborted = set[int]()
        for what, blocks, n in script:
            match what:
                case "submit":
                    streams.append(
                        manager.submit([*chain.from_iterable(blocks), 7], SamplingParams(n, ignore_eos=n > 5))
                    )
                case "abort" if streams:
                    aborted.add(n % len(streams))
                    streams[n % len(streams)].close()
                case "turn":
                    turn(manager)
        finish(manager)
        ends.append({i: ending_of(s) for i, s in enumerate(streams) if i not in aborted})
        assert manager.inflight == 0
        assert manager._core.scheduler.kv_cache.used_tokens == 0
        manager.close()
    assert ends[0] == ends[1]
