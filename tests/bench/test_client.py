"""The client of the in-process target: when it sends, what it holds back, when it gives up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench import client
from roseinfer.bench.load import CLOSED_LOOP_REFUSED_PAUSE_S
from roseinfer.bench.permits import Permits
from roseinfer.bench.records import REQUEST_SCHEMA, derive
from roseinfer.bench.row_files import record_table
from roseinfer.bench.rows import CellResult
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.validity import check_cell
from roseinfer.bench.workload import Workload
from roseinfer.executor import StepPlan
from roseinfer.manager import SchedulerManager
from roseinfer.prompt import Prompt
from roseinfer.request import TokenEvent
from roseinfer.stream import Mailbox, RequestStream
from tests.bench.experiments import experiment, workload
from tests.manager_driver import run_in_thread
from tests.scripted import FakeClock, ScriptedEngine, StepGate

HELLO = "hello"


def played(engine: ScriptedEngine, load: Workload, **flags: Any) -> CellResult:
    """The result of one cell, its requests as a reader gets them from their file."""
    made = experiment(**({"max_batch_size": 4, "tokenize_workers": 0} | flags))
    result = InProcessTarget(engine, made).run(made.cells[0], load)
    requests: pd.DataFrame = record_table(result.requests, REQUEST_SCHEMA).to_pandas()
    return result._replace(requests=requests)


def constant(n: int, interval_s: float, **sizes: int) -> Workload:
    return workload([HELLO] * n, interval_s=interval_s, **sizes)


def closed(n: int, *, output_tokens: int = 2) -> Workload:
    load = workload([HELLO] * n, output_tokens=output_tokens)
    return load._replace(scheduled_s=None, arrival="closed")


def after_calls(patch: pytest.MonkeyPatch, owner: type, name: str, n: int) -> threading.Event:
    """Set when the n-th call of this method is over, whether it returned or raised."""
    event, lock, original = threading.Event(), threading.Lock(), getattr(owner, name)
    calls = 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        try:
            return original(self, *args, **kwargs)
        finally:
            with lock:
                calls += 1
                if calls == n:
                    event.set()

    patch.setattr(owner, name, counted)
    return event


def most_outstanding(rows: pd.DataFrame) -> int:
    """From the rows alone: the most that had been sent and not ended at any moment."""
    sent = rows[rows["sent_s"].notna()]
    moments = [(at_s, 1) for at_s in sent["sent_s"]] + [(at_s, -1) for at_s in sent["ended_s"]]
    return int(max(np.cumsum([change for _, change in sorted(moments)])))


class MadeWhenAsked(Sequence[Prompt]):
    """Prompts that are noted in `log` when they are made."""

    def __init__(self, n: int, log: list[str]) -> None:
        self.n, self.log = n, log

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        assert isinstance(index, int)
        if index >= self.n:
            raise IndexError
        self.log.append(f"made {index}")
        return HELLO


def log_sends(patch: pytest.MonkeyPatch, log: list[str]) -> None:
    submit = SchedulerManager.submit

    def logged(self: SchedulerManager, *args: Any, **kwargs: Any) -> RequestStream:
        log.append("sent")
        return submit(self, *args, **kwargs)

    patch.setattr(SchedulerManager, "submit", logged)


# --- on schedule


def test_due_times_are_the_same_with_a_fast_and_a_slow_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # case C3
    load = constant(6, 0.003)
    fast = played(ScriptedEngine(), load, submit_interval_ms=3.0, num_requests=6).requests
    all_sent = after_calls(monkeypatch, SchedulerManager, "submit", 6)
    engine = ScriptedEngine(lambda plan: assert_set(all_sent))  # serves nothing before all were sent
    slow = played(engine, load, submit_interval_ms=3.0, num_requests=6).requests
    assert load.scheduled_s is not None
    assert fast["scheduled_s"].tolist() == slow["scheduled_s"].tolist() == load.scheduled_s.tolist()
    assert (slow["permitted_s"] == slow["scheduled_s"]).all()
    assert (slow["sent_s"] >= slow["scheduled_s"]).all()


def test_a_late_send_does_not_shift_the_next(monkeypatch: pytest.MonkeyPatch) -> None:  # case C2
    now = FakeClock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now.now += seconds + (0.004 if len(slept) == 2 else 0.0)  # the second sleep lasts too long

    monkeypatch.setattr(client, "clock", now)
    monkeypatch.setattr(time, "sleep", sleep)
    rows = played(ScriptedEngine(), constant(5, 0.003), submit_interval_ms=3.0, num_requests=5).requests
    assert rows["sent_s"].tolist() == pytest.approx([0.0, 0.007, 0.007, 0.009, 0.012])


def test_a_sender_that_was_blocked_says_so(monkeypatch: pytest.MonkeyPatch) -> None:  # case C16
    now = FakeClock()

    def sleep(seconds: float) -> None:
        now.now += seconds

    class BlockedFor200Ms(list[Prompt]):
        def __iter__(self) -> Iterator[Prompt]:
            for index, prompt in enumerate(super().__iter__()):
                now.now += 0.2 if index == 30 else 0.0
                yield prompt

    monkeypatch.setattr(client, "clock", now)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", now)
    load = constant(100, 0.01)._replace(prompts=BlockedFor200Ms([HELLO] * 100))
    result = played(ScriptedEngine(), load, submit_interval_ms=10.0, num_requests=100)
    rows = derive(result.requests)
    lag_s = rows["send_lag_s"].to_numpy()
    assert lag_s[:30] == pytest.approx(0.0, abs=1e-9)
    assert lag_s[30:50] == pytest.approx(np.arange(0.19, -0.001, -0.01), abs=1e-9)  # and no longer than that
    assert lag_s[50:] == pytest.approx(0.0, abs=1e-9)
    assert rows["ttft_s"].to_numpy()[30] >= 0.19 - 1e-9  # from the due time
    assert any("p99 send lag" in reason for reason in check_cell(rows, result.facts))


def test_prompts_of_a_schedule_are_made_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    log_sends(monkeypatch, log)
    load = constant(3, 0.001)._replace(prompts=MadeWhenAsked(3, log))
    played(ScriptedEngine(), load, submit_interval_ms=1.0, num_requests=3)
    assert log == ["made 0", "made 1", "made 2", "sent", "sent", "sent"]


# --- a cap on a schedule


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_cap_keeps_the_schedule_and_holds_back_in_order() -> None:
    flags = {"submit_interval_ms": 1.0, "num_requests": 8, "max_concurrency": 2}
    rows = derive(
        played(ScriptedEngine(lambda plan: time.sleep(0.002)), constant(8, 0.001), **flags).requests
    )
    assert rows["scheduled_s"].tolist() == pytest.approx([0.001 * i for i in range(8)])
    assert (rows["cap_wait_s"] > 0).any()
    assert rows["permitted_s"].is_monotonic_increasing
    assert most_outstanding(rows) == 2
    assert (rows["ttft_s"] >= rows["ttft_from_send_s"] + rows["cap_wait_s"]).all()


def test_a_permit_comes_when_a_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(ScriptedEngine(), workload([HELLO] * 3), num_requests=3, max_concurrency=1).requests
    assert rows.loc[0, "permitted_s"] == 0.0
    assert rows["permitted_s"].tolist()[1:] == rows["ended_s"].tolist()[:-1]


def test_what_the_cap_held_back_until_the_end_has_a_row_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # cases C11, D9, K7
    gave_up = after_calls(monkeypatch, Permits, "take", 2)
    flags = {"submit_interval_ms": 2.0, "duration": 0.01, "max_concurrency": 1}
    result = played(ScriptedEngine(lambda plan: assert_set(gave_up)), constant(5, 0.002), **flags)
    rows = result.requests
    assert rows["outcome"].tolist() == ["completed"] + ["incomplete"] * 4
    unsent = rows[1:]
    reason = "not sent: --max-concurrency 1 was reached until --duration ended"
    assert (unsent["error"] == reason).all()
    assert unsent[["permitted_s", "sent_s", "reserved_s", "received_first_s"]].isna().all(axis=None)
    assert (unsent["ended_s"] >= 0.01).all()  # case D6
    assert (unsent["attempts"] == 0).all()
    assert result.facts.offered == 5
    assert check_cell(rows, result.facts) == [
        f"0 of 5 requests ended in error and 4 stayed incomplete (4 {reason}), more than 1 % together"
    ]


# --- closed loop


def failing(plan: StepPlan) -> None:
    raise ValueError("scripted failure")


@pytest.mark.parametrize(
    ("compute", "flags"),
    [
        (lambda plan: None, {}),
        (failing, {}),
        (lambda plan: None, {"max_inflight": "2"}),
        (lambda plan: None, {"ramp": 0.02}),
        (lambda plan: time.sleep(0.003), {"timeout": 0.001}),
    ],
    ids=["completed", "errors", "refusals", "ramp", "timeouts"],
)
def test_a_closed_loop_is_never_above_its_level(
    compute: Callable[[StepPlan], None], flags: dict[str, Any]
) -> None:  # case C7
    result = played(ScriptedEngine(compute), closed(40), max_concurrency=4, num_requests=40, **flags)
    assert len(result.requests) == result.facts.offered == 40
    assert most_outstanding(result.requests) <= 4
    assert result.facts.max_concurrency == 4
    assert result.facts.peak_outstanding is not None
    assert result.facts.peak_outstanding <= 4


def test_a_closed_loop_reaches_its_level_and_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:  # case K2
    four_sent = after_calls(monkeypatch, SchedulerManager, "submit", 4)
    engine = ScriptedEngine(lambda plan: assert_set(four_sent))
    result = played(engine, closed(12), max_concurrency=4, num_requests=12)
    assert result.facts.peak_outstanding == 4
    assert check_cell(derive(result.requests), result.facts) == []


def test_in_a_closed_loop_the_schedule_is_when_it_was_sent() -> None:
    rows = played(ScriptedEngine(), closed(9), max_concurrency=3, num_requests=9).requests
    assert (rows["scheduled_s"] == rows["sent_s"]).all()
    assert (rows["permitted_s"] == rows["sent_s"]).all()
    assert (rows["arrival"] == "closed").all()


def test_a_closed_loop_is_refilled_per_completion() -> None:
    rows = played(ScriptedEngine(), closed(6), max_concurrency=1, num_requests=6).requests
    assert (rows["sent_s"].to_numpy()[1:] >= rows["ended_s"].to_numpy()[:-1]).all()


def test_prompts_of_a_closed_loop_that_is_counted_are_made_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    log_sends(monkeypatch, log)
    load = closed(5)._replace(prompts=MadeWhenAsked(5, log))
    played(ScriptedEngine(), load, max_concurrency=2, num_requests=5)
    assert log == ["made 0", "made 1", "made 2", "made 3", "made 4", *["sent"] * 5]


def test_prompts_of_a_closed_loop_that_a_duration_ends_are_made_while_no_user_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fifth_made = threading.Event()

    class Log(list[str]):
        def append(self, entry: str) -> None:
            super().append(entry)
            if entry == "made 4":
                fifth_made.set()

    log = Log()
    log_sends(monkeypatch, log)
    load = closed(6)._replace(prompts=MadeWhenAsked(6, log))
    engine = ScriptedEngine(lambda plan: assert_set(fifth_made))  # so it is made while the only user waits
    result = played(engine, load, max_concurrency=1, duration=9.0)
    assert log[:6] == ["made 0", "made 1", "made 2", "made 3", "sent", "made 4"]
    assert len(result.requests) == 6


def test_how_long_users_waited_for_their_client_is_recorded() -> None:
    result = played(ScriptedEngine(), closed(3), max_concurrency=1, num_requests=3)
    rows = result.requests
    lags_s = (rows["sent_s"].to_numpy() - [0.0, *rows["ended_s"].to_numpy()[:-1]]).tolist()
    assert result.notes["refill_lag_s"]["max"] == pytest.approx(max(lags_s), abs=1e-9)
    assert result.notes["refill_lag_s"]["p50"] == pytest.approx(sorted(lags_s)[1], abs=1e-9)
    assert played(ScriptedEngine(), workload([HELLO]), num_requests=1).notes["refill_lag_s"] is None


def test_a_closed_loop_that_runs_out_of_requests_is_invalid() -> None:
    result = played(ScriptedEngine(), closed(5), max_concurrency=1, duration=60.0)
    (fault,) = check_cell(derive(result.requests), result.facts)
    assert fault.startswith("the closed loop had sent all its 5 requests at 0")
    counted = played(ScriptedEngine(), closed(5), max_concurrency=1, num_requests=5, duration=60.0)
    assert check_cell(derive(counted.requests), counted.facts) == []


def test_a_closed_loop_sends_one_request_however_short_it_is() -> None:
    result = played(ScriptedEngine(), closed(5), max_concurrency=2, duration=1e-6)
    assert result.requests["outcome"].tolist() == ["completed"]


def test_a_refused_user_sends_the_next_request_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CLOSED_LOOP_REFUSED_PAUSE_S", CLOSED_LOOP_REFUSED_PAUSE_S / 5)
    all_sent = after_calls(monkeypatch, SchedulerManager, "submit", 6)
    engine = ScriptedEngine(lambda plan: assert_set(all_sent))
    result = played(engine, closed(6), max_concurrency=3, num_requests=6, max_inflight="2")
    rows = result.requests
    assert rows["outcome"].tolist() == ["completed"] * 2 + ["rejected"] * 4
    assert check_cell(derive(rows), result.facts) == []
    pauses_s = rows["sent_s"].to_numpy()[3:] - rows["ended_s"].to_numpy()[2:-1]
    assert (pauses_s >= CLOSED_LOOP_REFUSED_PAUSE_S / 5 - 1e-9).all()


def test_a_refusal_under_a_cap_costs_a_schedule_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CLOSED_LOOP_REFUSED_PAUSE_S", 3600.0)
    all_sent = after_calls(monkeypatch, SchedulerManager, "submit", 6)
    engine = ScriptedEngine(lambda plan: assert_set(all_sent))
    flags = {"num_requests": 6, "burst_size": "6", "max_concurrency": 3, "max_inflight": "2"}
    rows = played(engine, workload([HELLO] * 6), **flags).requests
    assert rows["outcome"].tolist() == ["completed"] * 2 + ["rejected"] * 4


def test_a_ramp_lets_each_user_in_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    all_sent = after_calls(monkeypatch, SchedulerManager, "submit", 4)
    engine = ScriptedEngine(lambda plan: assert_set(all_sent))
    rows = played(engine, closed(4), max_concurrency=4, num_requests=4, ramp=0.02).requests
    assert (rows["sent_s"].to_numpy() >= np.array([0.0, 0.01, 0.015, 0.02]) - 1e-9).all()


def test_a_closed_loop_sends_nothing_after_its_duration(
    now: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = SchedulerManager.submit

    def a_second_long(self: SchedulerManager, *args: Any, **kwargs: Any) -> RequestStream:
        now.now += 1.0
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(SchedulerManager, "submit", a_second_long)
    monkeypatch.setattr(client, "LEAD_S", 0.0)
    monkeypatch.setattr(time, "perf_counter", now)
    result = played(ScriptedEngine(), closed(50), max_concurrency=2, duration=3.0)
    assert result.requests["sent_s"].tolist() == [0.0, 1.0, 2.0]
    assert result.facts.offered == 3
    assert (result.requests["outcome"] == "completed").all()  # what was outstanding was waited for


# --- deadlines


def test_a_request_that_waits_past_its_deadline_is_aborted_before_any_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # case A18
    both_aborted = after_calls(monkeypatch, SchedulerManager, "abort", 2)
    steps = iter(range(100))

    def second_step_hangs(plan: StepPlan) -> None:
        if next(steps) == 1:
            assert_set(both_aborted)

    flags = {"num_requests": 2, "timeout": 0.01, "max_batch_size": 1}
    result = played(ScriptedEngine(second_step_hangs), workload([HELLO] * 2, output_tokens=5), **flags)
    running, waiting = result.requests.to_dict("records")
    assert (running["outcome"], waiting["outcome"]) == ("timeout", "timeout")
    assert {member["request_index"] for members in result.steps["members"] for member in members} == {0}
    assert waiting["output_tokens"] == 0
    assert pd.isna(waiting["first_scheduled_s"])
    assert pd.isna(waiting["received_first_s"])
    assert running["output_tokens"] == len(running["token_times_s"]) == 1  # what it had received is kept
    assert running["last_token_s"] == running["first_token_s"]
    for row in (running, waiting):
        assert row["ended_s"] - row["sent_s"] >= 0.01
        assert row["released_s"] >= row["ended_s"]
        assert row["finish_reason"] == "abort"
    assert check_cell(result.requests, result.facts) == []


def test_a_permit_of_a_request_that_timed_out_comes_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    second_sent = after_calls(monkeypatch, SchedulerManager, "submit", 2)
    engine = ScriptedEngine(lambda plan: assert_set(second_sent))  # the first step, with the first request
    flags = {"num_requests": 2, "timeout": 0.01, "max_concurrency": 1}
    first, second = played(engine, workload([HELLO] * 2), **flags).requests.to_dict("records")
    assert first["outcome"] == "timeout"
    assert second["permitted_s"] == first["ended_s"]


def test_a_deadline_that_was_met_changes_nothing() -> None:
    rows = played(ScriptedEngine(), workload([HELLO] * 4), num_requests=4, timeout=60.0).requests
    assert (rows["outcome"] == "completed").all()


@pytest.mark.parametrize("flags", [{}, {"timeout": 3000.0}])
def test_an_idle_client_sleeps(monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]) -> None:  # case K4
    gate, patience_s = StepGate(), list[float]()
    take = Mailbox.take

    def noted(self: Mailbox, timeout_s: float | None = None) -> list[TokenEvent]:
        assert timeout_s is not None
        patience_s.append(timeout_s)
        return take(self, timeout_s)

    monkeypatch.setattr(Mailbox, "take", noted)
    finished = after_calls(monkeypatch, Mailbox, "wake", 1)
    result: list[CellResult] = []
    load = workload([HELLO])

    def run() -> None:
        result.append(played(ScriptedEngine(gate), load, num_requests=1, **flags))

    with run_in_thread(run):
        assert_set(finished)
        gate.opened.set()
    assert result[0].requests["outcome"].tolist() == ["completed"]
    assert len(patience_s) <= 4  # it looked for each of two deliveries, and at the end
    assert min(patience_s) > 2000


# --- permits


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(client, "clock", fake)
    monkeypatch.setattr("roseinfer.bench.permits.clock", fake)
    return fake


def test_permits_say_when_they_came(now: FakeClock) -> None:
    permits = Permits()
    permits.hand_out([0.0, 0.0])
    now.now = 3.0
    assert [permits.take(10.0), permits.take(10.0)] == [0.0, 0.0]
    permits.give_back(2.5)
    assert permits.take(10.0) == 2.5
    assert permits.peak_outstanding == 2


def test_no_permit_comes_once_the_time_is_over(now: FakeClock) -> None:
    permits = Permits()
    permits.hand_out([0.0, 6.0])
    now.now = 4.9
    assert permits.take(5.0) == 0.0
    permits.give_back(4.9)
    now.now = 5.0
    assert permits.take(5.0) is None  # though it came free before
    now.now = 7.0
    assert permits.take(5.0) is None
    assert permits.peak_outstanding == 1


def test_permits_that_are_closed_make_nobody_wait(now: FakeClock) -> None:
    permits = Permits()
    permits.close()
    assert permits.take(float("inf")) is None
