"""The client of the in-process target that comes back: what it sends, what it records, what it gives back."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from roseinfer.admission import Admission
from roseinfer.bench.records import ATTEMPT_SCHEMA, Outcome, derive
from roseinfer.bench.retries import BUDGET_RESERVE, MOST_TRIES, Retrier
from roseinfer.bench.rows import CellInterrupted, CellResult
from roseinfer.bench.validity import check_cell
from roseinfer.executor import StepPlan
from roseinfer.manager import SchedulerManager
from tests.bench.experiments import workload
from tests.bench.test_client import HELLO, after_calls, assert_set, closed, played
from tests.scripted import ScriptedEngine


@pytest.fixture(autouse=True)
def _slow_senders_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a loaded machine sends is not what these tests ask."""
    monkeypatch.setattr("roseinfer.bench.pacing._BURST_SPREAD_S", 60.0)


def waiting_for(event: threading.Event) -> ScriptedEngine:
    """No step ends before."""
    return ScriptedEngine(lambda plan: assert_set(event))


def burst(n: int, engine: ScriptedEngine, **flags: Any) -> CellResult:
    return played(engine, workload([HELLO] * n), num_requests=n, **flags)


def test_whoever_is_refused_comes_back_until_its_tries_are_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # cases J3, J4
    all_sent = after_calls(monkeypatch, SchedulerManager, "submit", 1 + MOST_TRIES)
    result = burst(2, waiting_for(all_sent), max_inflight="1", retry="immediate")
    rows, tries = result.requests, result.attempts
    assert tries is not None
    assert set(tries.columns) <= set(ATTEMPT_SCHEMA.names)
    assert rows["outcome"].tolist() == ["completed", "rejected"]
    assert rows["attempts"].tolist() == [1, MOST_TRIES]
    assert tries["request_index"].tolist() == [0, *[1] * MOST_TRIES]
    assert tries["attempt"].tolist() == [1, *range(1, MOST_TRIES + 1)]
    assert tries["outcome"].tolist() == ["completed", *["rejected"] * MOST_TRIES]
    assert tries["sent_s"].tolist()[1] == rows["sent_s"][1]
    assert tries["sent_s"].tolist()[-1] == rows["last_sent_s"][1]
    assert rows["last_sent_s"].isna().tolist() == [True, False]
    assert check_cell(rows, result.facts) == []


def test_the_stamps_are_those_of_the_last_try_and_latency_counts_from_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # case J3
    refused_twice = after_calls(monkeypatch, SchedulerManager, "submit", 3)
    has_room = after_calls(monkeypatch, Admission, "release", 1)

    def until_there_is_room(self: Retrier, request_index: int, n_tries: int, **_: Any) -> float:
        if n_tries == 2:
            assert_set(has_room)
        return 0.0

    monkeypatch.setattr(Retrier, "delay_s", until_there_is_room)
    result = burst(2, waiting_for(refused_twice), max_inflight="1", retry="immediate")
    row = derive(result.requests).iloc[1]
    assert (row["outcome"], row["attempts"]) == ("completed", 3)
    assert row["sent_s"] < row["last_sent_s"] <= row["reserved_s"]
    assert row["retry_wait_s"] == row["last_sent_s"] - row["sent_s"]
    assert row["ttft_s"] == row["received_first_s"] - row["scheduled_s"]
    assert row["inflight_at_send"] == 1  # what its first try met
    assert check_cell(result.requests, result.facts) == []


def test_a_try_that_takes_too_long_is_sent_again_and_its_slots_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_given_up = after_calls(monkeypatch, SchedulerManager, "abort", MOST_TRIES)
    result = burst(1, waiting_for(all_given_up), retry="immediate", per_try_timeout=0.01)
    assert result.requests["outcome"].tolist() == ["timeout"]
    assert result.requests["attempts"].tolist() == [MOST_TRIES]
    assert result.attempts is not None
    assert result.attempts["outcome"].tolist() == ["timeout"] * MOST_TRIES
    lasted_s = result.attempts["ended_s"] - result.attempts["sent_s"]
    assert (lasted_s >= 0.01).all()
    assert result.facts.earlier_slots == MOST_TRIES - 1
    assert check_cell(result.requests, result.facts) == []
    members = [member["request_index"] for step in result.steps["members"] for member in step]
    assert set(members) <= {0}


def test_the_deadline_of_the_request_is_over_all_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = after_calls(monkeypatch, SchedulerManager, "abort", 2)
    monkeypatch.setattr(Retrier, "delay_s", lambda self, *_, left_s, **__: 0.0 if left_s > 0 else None)
    result = burst(1, waiting_for(given_up), retry="immediate", per_try_timeout=0.02, timeout=0.03)
    assert result.attempts is not None
    sent_s, ended_s = result.attempts["sent_s"], result.attempts["ended_s"]
    assert (sent_s - sent_s[0] <= 0.03).all()
    assert (ended_s - sent_s[0]).iloc[-1] >= 0.03
    assert result.requests["outcome"].tolist() == ["timeout"]


def test_a_budget_bounds_the_retries_of_all_requests_together(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 30
    all_sent = after_calls(monkeypatch, SchedulerManager, "submit", n + BUDGET_RESERVE)
    result = burst(n, waiting_for(all_sent), max_inflight="1", retry="immediate", retry_budget=0.1)
    assert BUDGET_RESERVE <= (result.requests["attempts"] - 1).sum() <= BUDGET_RESERVE + 0.1 * n


def test_a_request_keeps_its_permit_over_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    all_sent = after_calls(monkeypatch, SchedulerManager, "submit", 1 + MOST_TRIES)
    flags = {"max_inflight": "1", "retry": "immediate", "max_concurrency": 2}
    result = played(waiting_for(all_sent), closed(4), num_requests=4, **flags)
    assert result.facts.peak_outstanding == 2
    assert (result.requests["scheduled_s"] == result.requests["sent_s"]).all()
    assert len(result.requests) == 4
    assert check_cell(result.requests, result.facts) == []


def test_an_interrupt_does_not_wait_for_whoever_would_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupted(self: Retrier, *_: Any, **__: Any) -> float:
        signal.pthread_kill(main, signal.SIGINT)
        return 3600.0

    monkeypatch.setattr(Retrier, "delay_s", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    both_sent = after_calls(monkeypatch, SchedulerManager, "submit", 2)
    try:
        with pytest.raises(CellInterrupted) as caught:
            burst(2, waiting_for(both_sent), max_inflight="1", retry="immediate")
    finally:
        signal.signal(signal.SIGINT, before)
    rows = caught.value.result.requests
    assert rows["attempts"].tolist() == [1, 1]
    assert (rows["outcome"][1], rows["error"][1]) == (
        Outcome.INCOMPLETE,
        "interrupted",
    )  # not refused for good
    assert rows["ended_s"][1] >= rows["sent_s"][1]


def test_a_sender_that_dies_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    both_sent = after_calls(monkeypatch, SchedulerManager, "submit", 2)
    submit = SchedulerManager.submit

    def fails_at_last(self: SchedulerManager, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "roseinfer-resender":
            raise ZeroDivisionError("scripted")
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(SchedulerManager, "submit", fails_at_last)
    with pytest.raises(ZeroDivisionError, match="scripted"):
        burst(2, waiting_for(both_sent), max_inflight="1", retry="immediate")


def test_a_failed_engine_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(plan: StepPlan) -> None:
        raise ValueError("scripted")

    result = burst(2, ScriptedEngine(compute), retry="immediate", max_error_share=1.0)
    assert result.requests["outcome"].tolist() == [Outcome.ERROR] * 2
    assert result.requests["attempts"].tolist() == [1, 1]
