"""The simulated client: schedules that are kept, caps, closed loops, durations and deadlines, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.request import FinishReason, Request
from roseinfer.sim.client import ClientRules
from roseinfer.sim.virtual import Arrival, SimLimits, SimRun, simulate
from tests.sim.scripted_costs import Scripted, one_second

ALONE = SimLimits(max_batch_size=1)


def play(
    times_s: Sequence[float], rules: ClientRules, limits: SimLimits = ALONE, *, new_tokens: int = 1
) -> SimRun:
    """Requests of one step a token, each a second long."""
    return simulate([Arrival(time_s, 4, new_tokens) for time_s in times_s], limits, one_second, rules)


def users(
    n: int,
    requests: int,
    limits: SimLimits = ALONE,
    *,
    new_tokens: int = 1,
    starts_s: tuple[float, ...] | None = None,
    pause_s: float = 0.0,
    duration_s: float | None = None,
) -> SimRun:
    """A closed loop."""
    rules = ClientRules(n, starts_s or (0.0,) * n, pause_s, duration_s)
    return play([0.0] * requests, rules, limits, new_tokens=new_tokens)


def sent_s(run: SimRun) -> list[float | None]:
    """Of every request that was sent, and None for what was held back to the end."""
    return [*(sent.sent_s for sent in run.sent), *(None for _ in run.unsent)]


def request(run: SimRun, index: int) -> Request:
    fate = run.sent[index].fate
    assert isinstance(fate, Request)
    return fate


# ---- a cap on a schedule ----


def test_without_a_cap_every_request_is_sent_when_it_is_due() -> None:  # case C3
    run = play([0.0, 0.1, 0.2], ClientRules())
    assert sent_s(run) == [0.0, 0.1, 0.2]
    assert run.peak_outstanding == 3


def test_a_cap_holds_back_and_lets_go_in_order_as_requests_end() -> None:
    run = play([0.0, 0.1, 0.2, 0.3], ClientRules(max_concurrency=2), SimLimits(max_batch_size=1))
    assert sent_s(run) == [0.0, 0.1, 1.0, 2.0]
    assert run.peak_outstanding == 2


def test_a_cap_of_one_on_ten_a_second_gives_the_known_latencies() -> None:  # case C1
    times_s = [0.1 * n for n in range(8)]
    run = simulate(
        [Arrival(time_s, 4, 1) for time_s in times_s], ALONE, lambda plan: 0.5, ClientRules(max_concurrency=1)
    )
    ends_s = [request(run, n).finished_s or 0.0 for n in range(8)]
    from_schedule_s = [end_s - due_s for end_s, due_s in zip(ends_s, times_s, strict=True)]
    assert sum(from_schedule_s) / 8 == pytest.approx(1.9)
    assert max(from_schedule_s) == pytest.approx(3.3)
    assert [end_s - (sent or 0.0) for end_s, sent in zip(ends_s, sent_s(run), strict=True)] == pytest.approx(
        [0.5] * 8
    )


def test_a_refused_request_gives_its_permit_back_at_once() -> None:
    run = play([0.0, 0.1, 0.2, 0.3], ClientRules(max_concurrency=2), SimLimits(max_inflight_requests=1))
    assert sent_s(run) == [0.0, 0.1, 0.2, 0.3]


def test_what_a_cap_held_back_until_the_end_is_never_sent() -> None:  # case C11
    run = play([0.0, 0.1, 0.2, 0.3], ClientRules(max_concurrency=1, duration_s=1.5))
    assert sent_s(run) == [0.0, 1.0, None, None]
    assert request(run, 1).finish_reason is FinishReason.LENGTH  # what was outstanding is waited for


def test_nothing_is_sent_at_the_very_moment_that_the_duration_ends() -> None:
    assert sent_s(play([0.0, 0.1], ClientRules(max_concurrency=1, duration_s=1.0))) == [0.0, None]


# ---- a closed loop ----


def test_users_send_their_next_request_when_the_last_has_ended() -> None:
    run = users(2, 5)
    assert sent_s(run) == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert run.peak_outstanding == 2


@pytest.mark.parametrize("n", [1, 3, 45])
def test_a_closed_loop_reaches_its_level_and_never_exceeds_it(n: int) -> None:  # cases C7, K2
    rng = random.Random(n)
    arrivals = [Arrival(0.0, rng.randint(1, 40), rng.randint(1, 5)) for _ in range(300)]
    rules = ClientRules(n, (0.0,) * n)
    run = simulate(arrivals, SimLimits(), lambda plan: 0.1 * len(plan.spans), rules)
    assert run.peak_outstanding == run.admission.counts().peak_inflight == n
    assert run.is_exhausted


def test_a_user_who_is_refused_pauses_before_the_next() -> None:
    run = users(2, 6, SimLimits(max_batch_size=1, max_inflight_requests=1), pause_s=0.4)
    assert sent_s(run) == pytest.approx(
        [0.0, 0.0, 0.4, 0.8, 1.0, 1.2]
    )  # one served for a second, one refused
    assert run.admission.counts().refused == 4
    assert run.peak_outstanding == 2


def test_a_user_who_pauses_sends_nothing_after_the_duration() -> None:
    run = users(2, 9, SimLimits(max_batch_size=1, max_inflight_requests=1), pause_s=0.4, duration_s=0.8)
    assert sent_s(run) == pytest.approx([0.0, 0.0, 0.4])
    assert not run.is_exhausted


def test_a_ramp_lets_users_start_one_after_another() -> None:  # case C7
    run = users(4, 8, SimLimits(max_batch_size=8), new_tokens=100, starts_s=(0.0, 4.0, 6.0, 8.0))
    assert sent_s(run)[:4] == [0.0, 4.0, 6.0, 8.0]
    assert run.peak_outstanding == 4


def test_a_closed_loop_stops_at_its_duration() -> None:
    run = users(1, 10, duration_s=2.5)
    assert sent_s(run) == [0.0, 1.0, 2.0]
    assert (run.last_sent_s, run.is_exhausted, run.unsent) == (2.0, False, [])


# ---- deadlines ----


def test_a_request_that_waits_past_its_deadline_costs_no_prefill() -> None:  # case A18
    run = play([0.0, 0.0], ClientRules(timeout_s=2.5), new_tokens=4)
    assert run.timed_out == {0, 1}
    assert request(run, 1).first_scheduled_s is None
    assert request(run, 1).ticket.released_s == 3.0  # the engine hears of it when its step is over
    assert {span.request.request_id for step in run.steps for span in step.plan.spans} == {0}


def test_a_request_that_runs_ends_with_its_step_and_keeps_the_tokens_before() -> None:
    run = play([0.0], ClientRules(timeout_s=2.5), new_tokens=4)
    assert run.sent[0].received_s == [1.0, 2.0]  # the engine has the third, as one with threads has
    assert request(run, 0).finish_reason is FinishReason.ABORT
    assert request(run, 0).ticket.released_s == 3.0
    assert len(run.steps) == 3


def test_an_answer_that_comes_at_its_deadline_has_come_in_time() -> None:
    assert play([0.0], ClientRules(timeout_s=2.0), new_tokens=2).timed_out == set()


def test_a_deadline_lets_the_next_request_go() -> None:
    run = play([0.0, 0.1], ClientRules(max_concurrency=1, timeout_s=2.5), new_tokens=4)
    assert sent_s(run) == [0.0, 2.5]
    assert request(run, 1).first_scheduled_s == 3.0  # the abandoned step has to end first


def test_a_prompt_that_is_still_tokenised_at_its_deadline_is_given_up() -> None:
    costs = Scripted(one_second, tokenize=lambda n: 5.0)
    run = simulate([Arrival(0.0, 4, 1)], ALONE, costs, ClientRules(timeout_s=2.0))
    assert run.timed_out == {0}
    assert run.steps == []
    assert run.admission.counts().inflight == 0


# ---- whatever happens ----


@given(
    times_s=st.lists(st.integers(0, 20).map(lambda n: n / 2), max_size=25).map(sorted),
    limit=st.sampled_from([None, 1, 3]),
    cap=st.sampled_from([None, 1, 2, 5]),
    timeout_s=st.sampled_from([None, 0.5, 2.0, 7.0]),
    duration_s=st.sampled_from([None, 3.0]),
    closed=st.booleans(),
)
def test_every_slot_and_every_permit_comes_back(
    times_s: list[float],
    limit: int | None,
    cap: int | None,
    timeout_s: float | None,
    duration_s: float | None,
    closed: bool,
) -> None:
    starts_s = tuple(range(cap)) if closed and cap is not None else None
    rules = ClientRules(cap, starts_s, 0.7, duration_s, timeout_s)
    limits = SimLimits(max_inflight_requests=limit, max_batch_size=2)
    run = play(times_s, rules, limits, new_tokens=3)
    counts = run.admission.counts()
    assert counts.inflight == 0
    assert counts.reserved == counts.released
    assert run.peak_outstanding <= (cap or len(times_s))
    if duration_s is None:
        assert len(run.sent) == len(times_s)
        assert run.is_exhausted
    for sent in run.sent:
        if isinstance(sent.fate, Request):
            is_whole = len(sent.received_s) == 3
            assert is_whole == (sent.gave_up_s is None)
            if is_whole:
                assert sent.fate.finish_reason is FinishReason.LENGTH
