"""What the virtual clock says: of steps, of the time between them, of a sender who does one thing at a time."""

from __future__ import annotations

import gc
import random
import time

import pytest

from roseinfer.errors import (
    InvariantError,
    PromptTooLongError,
    RoseinferError,
    SchedulerManagerOverloadedError,
)
from roseinfer.executor import StepPlan, StepRecord
from roseinfer.request import FinishReason, Request
from roseinfer.sim.client import ClientRules
from roseinfer.sim.virtual import Arrival, SimLimits, SimRun, simulate
from tests.scripted import spans_of
from tests.sim.scripted_costs import Scripted, a_second_a_token, burst, one_second, served


def fates(run: SimRun) -> list[Request | RoseinferError]:
    """What became of every request."""
    return [sent.fate for sent in run.sent]


def step_spans(run: SimRun) -> list[list[tuple[int, int, int]]]:
    return [spans_of(step.plan) for step in run.steps]


# ---- what the virtual clock says ----


def test_requests_wait_for_those_before_them() -> None:
    run = simulate(burst(3, max_new_tokens=2), SimLimits(max_batch_size=1), one_second)
    assert [r.first_scheduled_s for r in served(run)] == [0.0, 2.0, 4.0]
    assert [r.token_times_s for r in served(run)] == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert [r.ticket.released_s for r in served(run)] == [2.0, 4.0, 6.0]


def test_a_step_lasts_as_long_as_its_plan_says_and_later_arrivals_wait_for_its_end() -> None:
    arrivals = [Arrival(0.0, 10, 1), Arrival(4.0, 5, 1)]
    run = simulate(arrivals, SimLimits(), a_second_a_token)
    assert [r.first_token_s for r in served(run)] == [10.0, 15.0]


def test_an_idle_server_sleeps_until_the_next_arrival() -> None:
    run = simulate([Arrival(5.0, 4, 1), Arrival(100.0, 4, 1)], SimLimits(), one_second)
    assert [r.first_scheduled_s for r in served(run)] == [5.0, 100.0]


def test_tokenising_delays_its_own_request_alone_and_keeps_its_place() -> None:
    arrivals = [Arrival(0.0, 5, 1), *burst(3)]
    costs = Scripted(one_second, tokenize=lambda n: 1.5 if n == 5 else 0.0)
    run = simulate(arrivals, SimLimits(max_batch_size=1), costs)
    assert step_spans(run) == [[(1, 0, 4)], [(2, 0, 4)], [(0, 0, 5)], [(3, 0, 4)]]
    assert [r.tokenized_s for r in served(run)] == [1.5, None, None, None]


@pytest.mark.parametrize(("workers", "tokenized_s"), [(1, [1.0, 2.0, 3.0]), (2, [1.0, 1.0, 2.0])])
def test_workers_tokenise_one_prompt_each_at_a_time(workers: int, tokenized_s: list[float]) -> None:
    costs = Scripted(one_second, tokenize=lambda n: 1.0)
    run = simulate(burst(3), SimLimits(tokenize_workers=workers), costs)
    assert [r.tokenized_s for r in served(run)] == tokenized_s


def test_a_prompt_that_nobody_waits_for_any_more_costs_no_worker_its_time() -> None:
    costs = Scripted(one_second, tokenize=lambda n: 2.0)
    run = simulate([*burst(2), Arrival(1.9, 4, 1)], SimLimits(), costs, ClientRules(timeout_s=1.5))
    assert [r.tokenized_s for r in served(run)] == [None, None, None]
    late = simulate([*burst(2), Arrival(1.9, 4, 1)], SimLimits(), costs, ClientRules(timeout_s=3.5))
    assert [r.tokenized_s for r in served(late)] == [2.0, None, None]
    assert late.timed_out == {1, 2}


def test_without_workers_the_sender_tokenises_and_its_request_enters_when_that_is_done() -> None:
    costs = Scripted(one_second, submit=lambda n: 0.25)
    run = simulate(burst(2), SimLimits(tokenize_workers=0), costs)
    assert [r.tokenized_s for r in served(run)] == [0.25, 0.5]
    assert [r.reserved_s for r in served(run)] == [0.0, 0.25]


def test_a_text_that_can_never_fit_ends_with_an_error_once_it_is_tokenised() -> None:  # case A15
    costs = Scripted(one_second, tokenize=lambda n: 0.5)
    run = simulate(burst(1, 100, 100), SimLimits(max_model_len=128), costs)
    (sent,) = run.sent
    assert isinstance(sent.error, PromptTooLongError)
    assert served(run)[0].finish_reason is FinishReason.ERROR
    assert (sent.ended_s, run.admission.counts().inflight) == (0.5, 0)


# ---- a sender who does one thing at a time, and the time between steps ----


def test_a_burst_is_sent_one_after_another() -> None:
    costs = Scripted(one_second, submit=lambda n: 0.1 * n)
    run = simulate(burst(3, 2), SimLimits(max_batch_size=1), costs)
    assert [sent.sent_s for sent in run.sent] == pytest.approx([0.0, 0.2, 0.4])
    assert [sent.returned_s for sent in run.sent] == pytest.approx([0.2, 0.4, 0.6])
    assert [sent.permitted_s for sent in run.sent] == [0.0, 0.0, 0.0]
    assert [r.reserved_s for r in served(run)] == pytest.approx([0.0, 0.2, 0.4])
    assert [r.first_scheduled_s for r in served(run)] == pytest.approx([0.2, 1.2, 2.2])


def test_a_refusal_takes_the_sender_its_own_time() -> None:
    costs = Scripted(one_second, submit=lambda n: 0.5, refuse_seconds=0.125)
    run = simulate(burst(4), SimLimits(max_inflight_requests=1), costs)
    assert [sent.sent_s for sent in run.sent] == [0.0, 0.5, 0.625, 0.75]
    assert run.sent[3].returned_s == 0.875
    assert len(served(run)) == 1


def test_a_slot_is_taken_when_submitting_begins() -> None:
    costs = Scripted(one_second, submit=lambda n: 5.0)
    run = simulate([Arrival(0.0, 4, 1), Arrival(1.0, 4, 1)], SimLimits(max_inflight_requests=1), costs)
    assert run.sent[1].sent_s == 5.0
    assert isinstance(run.sent[1].fate, SchedulerManagerOverloadedError)


def test_a_deadline_counts_from_sending_but_is_not_met_while_submitting() -> None:
    costs = Scripted(one_second, submit=lambda n: 2.0)
    run = simulate(burst(1), SimLimits(), costs, ClientRules(timeout_s=1.0))
    assert run.sent[0].gave_up_s == 2.0
    assert run.admission.counts().inflight == 0


def test_tokens_are_stamped_at_the_end_of_a_step_and_received_when_they_are_published() -> None:
    costs = Scripted(one_second, between=lambda plan: 0.25)
    run = simulate(burst(1, max_new_tokens=3), SimLimits(), costs)
    assert served(run)[0].token_times_s == [1.0, 2.25, 3.5]
    assert run.sent[0].received_s == [1.25, 2.5, 3.75]
    assert served(run)[0].ticket.released_s == 3.75
    assert [(step.plan_start_s, step.published_s) for step in run.steps] == [
        (0.0, 1.25),
        (1.25, 2.5),
        (2.5, 3.75),
    ]


def test_who_arrives_between_steps_is_in_the_next() -> None:
    costs = Scripted(one_second, between=lambda plan: 0.25)
    run = simulate([*burst(1, max_new_tokens=3), Arrival(1.125, 4, 1)], SimLimits(), costs)
    assert served(run)[1].first_scheduled_s == 1.25


# ---- what is handed out as it ends ----


def test_requests_and_steps_are_handed_out_as_they_end() -> None:
    order: list[int | str] = []
    arrivals = [Arrival(0.0, 4, 3), Arrival(0.0, 4, 1), Arrival(0.5, 4, 1)]
    run = simulate(
        arrivals,
        SimLimits(max_inflight_requests=2),
        one_second,
        on_request=lambda sent: order.append(sent.index),
        on_step=lambda step: order.append("step"),
    )
    assert order == [2, 1, "step", "step", 0, "step"]
    assert (run.sent, run.steps) == ([], [])


def test_memory_is_what_is_in_flight() -> None:
    """However many requests there are, alive are those in flight and the workload's next one."""
    alive: list[int] = []

    def on_step(step: StepRecord) -> None:
        if step.plan_start_s % 100 == 0:  # looking through all objects takes long
            alive.append(sum(type(one) in (Request, Arrival) for one in gc.get_objects()))

    gc.collect()  # what other tests left
    before = sum(type(one) in (Request, Arrival) for one in gc.get_objects())
    made = (Arrival(0.5 * n, 4, 2) for n in range(600))
    simulate(made, SimLimits(max_batch_size=4), one_second, on_request=lambda sent: None, on_step=on_step)
    assert len(alive) > 2
    assert max(alive) - before < 50


def test_arrivals_that_are_not_in_order_are_refused() -> None:
    with pytest.raises(InvariantError, match="order of their times"):
        simulate([Arrival(1.0, 4, 1), Arrival(0.5, 4, 1)], SimLimits(), one_second)


@pytest.mark.parametrize("limit", [1, 16, 64, 256, None])
@pytest.mark.parametrize("size", [1, 16, 17, 64, 200])
def test_a_burst_of_b_at_limit_m_has_b_minus_m_refused(size: int, limit: int | None) -> None:
    run = simulate(burst(size), SimLimits(max_inflight_requests=limit), one_second)
    refused = [fate for fate in fates(run) if isinstance(fate, SchedulerManagerOverloadedError)]
    assert len(refused) == (0 if limit is None else max(0, size - limit))
    assert len(served(run)) == size - len(refused)
    assert all(isinstance(fate, Request) for fate in fates(run)[: len(served(run))])  # the first get in
    assert run.admission.counts().peak_inflight == size - len(refused)


def test_an_arrival_at_the_moment_that_a_slot_comes_free_is_refused() -> None:
    """The order of events at equal times is part of the answer."""
    run = simulate([Arrival(0.0, 4, 1), Arrival(1.0, 4, 1)], SimLimits(max_inflight_requests=1), one_second)
    assert isinstance(fates(run)[1], SchedulerManagerOverloadedError)
    later = [Arrival(0.0, 4, 1), Arrival(1.0 + 1e-9, 4, 1)]
    assert len(served(simulate(later, SimLimits(max_inflight_requests=1), one_second))) == 2


def test_a_limit_bounds_the_wait_and_changes_no_throughput_of_those_who_get_in() -> None:
    """What the project is about, in the small: 256 at once, one at a time, a second each."""
    free = served(simulate(burst(256), SimLimits(max_batch_size=1), one_second))
    bound = served(simulate(burst(256), SimLimits(max_batch_size=1, max_inflight_requests=64), one_second))
    assert max(r.first_token_s or 0.0 for r in free) == 256.0
    assert max(r.first_token_s or 0.0 for r in bound) == 64.0


def test_an_arrival_that_can_never_be_served_fails_and_gives_its_slot_back() -> None:  # case A15
    arrivals = [Arrival(0.0, 100, 100), Arrival(0.0, 4, 1)]
    run = simulate(arrivals, SimLimits(max_model_len=128, max_inflight_requests=1), one_second)
    assert isinstance(fates(run)[0], PromptTooLongError)
    assert [r.request_id for r in served(run)] == [1]


def test_the_answer_does_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:  # case C15
    """A loaded machine and an idle one agree, since no clock is read and nothing sleeps."""
    rng = random.Random(1)
    arrivals = sorted(Arrival(rng.random() * 50, rng.randint(1, 90), rng.randint(1, 9)) for _ in range(200))
    limits = SimLimits(max_inflight_requests=20, max_num_batched_tokens=64, kv_cache_tokens=512)

    def slow(plan: StepPlan) -> float:
        sum(range(20_000))
        return a_second_a_token(plan)

    idle = simulate(arrivals, limits, a_second_a_token)
    with monkeypatch.context() as patch:
        for name in (
            "time",
            "monotonic",
            "perf_counter",
            "process_time",
            "sleep",
            "time_ns",
            "perf_counter_ns",
        ):
            patch.setattr(time, name, lambda *args: 1 / 0)
        loaded = simulate(arrivals, limits, slow)
    for one, other in zip(idle.sent, loaded.sent, strict=True):
        assert (one.index, one.sent_s, one.received_s) == (other.index, other.sent_s, other.received_s)
    assert step_spans(idle) == step_spans(loaded)
