"""Simulated clients that come back: traces computed by hand, and what is true of every trace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.bench.retries import BUDGET_RESERVE, MOST_TRIES, RETRIES, Retrier, RetryPolicy
from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.request import Request
from roseinfer.sim.client import ClientRules
from roseinfer.sim.virtual import Arrival, Sent, SimLimits, SimRun, request_index, simulate
from tests.sim.scripted_costs import one_second

ALONE = SimLimits(max_batch_size=1, max_inflight_requests=1)


class After(Retrier):
    """Comes back so many seconds after a failure, whatever the jitter would be."""

    def __init__(self, seconds: float) -> None:
        super().__init__(RetryPolicy("immediate"), 0)
        self.seconds = seconds

    def delay_s(
        self, request_index: int, n_tries: int, *, retry_after_s: float | None = None, left_s: float = inf
    ) -> float | None:
        if self.seconds >= left_s:
            return None
        delay_s = super().delay_s(request_index, n_tries)
        return None if delay_s is None else self.seconds


def play(requests: Sequence[tuple[float, int]], rules: ClientRules, limits: SimLimits = ALONE) -> SimRun:
    """Requests of (time, new tokens), each token a second long."""
    return simulate([Arrival(time_s, 4, n) for time_s, n in requests], limits, one_second, rules)


def tries(sent: Sent) -> list[Sent]:
    return [*sent.earlier, sent]


def sent_s(sent: Sent) -> list[float]:
    return [one.sent_s for one in tries(sent)]


def is_refused(sent: Sent) -> bool:
    return isinstance(sent.fate, SchedulerManagerOverloadedError)


# ---- by hand ----


def test_whoever_is_refused_comes_back_until_there_is_room() -> None:  # case J3
    run = play([(0.0, 3), (0.5, 3)], ClientRules(retrier=lambda: After(1.0)))
    second = run.sent[1]
    assert sent_s(second) == [0.5, 1.5, 2.5, 3.5]
    assert [is_refused(one) for one in tries(second)] == [True, True, True, False]
    assert second.received_s == [4.5, 5.5, 6.5]
    assert (second.due_s, second.permitted_s, second.attempt) == (0.5, 0.5, 4)


def test_a_try_that_is_due_when_a_slot_comes_free_meets_it_taken() -> None:
    run = play([(0.0, 3), (0.5, 1)], ClientRules(retrier=lambda: After(2.5)))
    assert sent_s(run.sent[1]) == [0.5, 3.0, 5.5]


def test_an_immediate_client_has_its_tries_used_up_at_once() -> None:
    run = play([(0.0, 1), (0.0, 1)], ClientRules(retrier=partial(Retrier, RetryPolicy("immediate"), 0)))
    assert sent_s(run.sent[1]) == [0.0] * MOST_TRIES
    assert is_refused(run.sent[1])


def test_a_try_that_takes_too_long_is_given_up_and_sent_again() -> None:
    limits = SimLimits(max_batch_size=1)
    rules = ClientRules(retrier=lambda: After(1.0), per_try_timeout_s=2.5)
    run = play([(0.0, 2), (0.0, 2)], rules, limits)
    first, second = tries(run.sent[1])
    assert (first.gave_up_s, first.received_s) == (2.5, [])
    assert (second.sent_s, second.received_s, second.gave_up_s) == (3.5, [4.5, 5.5], None)
    assert isinstance(first.fate, Request)
    assert first.fate.ticket.released_s == 3.0
    works_for = [request_index(span.request.request_id) for step in run.steps for span in step.plan.spans]
    assert works_for == [0, 0, 1, 1, 1]  # the third step is for nobody


def test_a_client_meets_the_dead_work_of_its_own_last_try() -> None:
    rules = ClientRules(retrier=partial(Retrier, RetryPolicy("immediate"), 0), per_try_timeout_s=2.5)
    run = play([(0.0, 4)], rules)
    (sent,) = run.sent
    assert sent_s(sent) == [0.0, *[2.5] * 4]
    assert [is_refused(one) for one in tries(sent)] == [False, True, True, True, True]
    first = sent.earlier[0]
    assert isinstance(first.fate, Request)
    assert first.fate.ticket.released_s == 3.0  # all of it is over when it is handed out


def test_the_deadline_of_the_request_is_over_all_its_tries() -> None:
    rules = ClientRules(timeout_s=3.0, retrier=lambda: After(1.0), per_try_timeout_s=1.5)
    run = play([(0.0, 9)], rules, SimLimits(max_batch_size=1))
    (sent,) = run.sent
    assert [(one.sent_s, one.gave_up_s) for one in tries(sent)] == [(0.0, 1.5), (2.5, 3.0)]


def test_no_try_begins_after_the_deadline_of_its_request() -> None:
    run = play([(0.0, 9), (0.5, 1)], ClientRules(timeout_s=2.0, retrier=lambda: After(1.0)))
    assert sent_s(run.sent[1]) == [0.5, 1.5]


def test_a_request_keeps_its_permit_over_its_tries() -> None:
    rules = ClientRules(max_concurrency=2, retrier=lambda: After(1.0))
    run = play([(0.0, 2), (0.1, 1), (0.2, 1)], rules)
    assert sent_s(run.sent[1]) == pytest.approx([0.1, 1.1, 2.1, 3.1])
    assert sent_s(run.sent[2])[0] == 2.0
    assert run.peak_outstanding == 2


def test_a_user_of_a_closed_loop_pauses_when_all_tries_were_refused() -> None:
    rules = ClientRules(2, (0.0, 0.0), 0.4, retrier=partial(Retrier, RetryPolicy("immediate"), 0))
    run = play([(0.0, 1)] * 3, rules)
    assert [sent_s(sent)[0] for sent in run.sent] == [0.0, 0.0, 0.4]
    assert [sent.attempt for sent in run.sent] == [1, MOST_TRIES, MOST_TRIES]


def test_a_budget_bounds_the_retries_of_all_requests_together() -> None:  # case J12
    run = play([(0.0, 1)] * 41, ClientRules(retrier=partial(Retrier, RetryPolicy("immediate", 0.1), 0)))
    assert sum(sent.attempt - 1 for sent in run.sent) == BUDGET_RESERVE + 3  # the forty refused earn 3.9 more


# ---- whatever happens ----


@given(
    requests=st.lists(st.tuples(st.integers(0, 20).map(lambda n: n / 2), st.integers(1, 4)), max_size=20).map(
        sorted
    ),
    policy=st.builds(RetryPolicy, st.sampled_from(RETRIES), st.sampled_from([None, 0.1, 1.0])),
    limit=st.sampled_from([None, 1, 3]),
    cap=st.sampled_from([None, 1, 4]),
    timeout_s=st.sampled_from([None, 2.0, 7.0]),
    per_try_timeout_s=st.sampled_from([None, 0.5, 1.5]),
    closed=st.booleans(),
)
def test_every_request_ends_once_and_every_slot_comes_back(
    requests: list[tuple[float, int]],
    policy: RetryPolicy,
    limit: int | None,
    cap: int | None,
    timeout_s: float | None,
    per_try_timeout_s: float | None,
    closed: bool,
) -> None:
    starts_s = tuple(range(cap)) if closed and cap is not None else None
    rules = ClientRules(cap, starts_s, 0.7, None, timeout_s, partial(Retrier, policy, 3), per_try_timeout_s)
    run = play(requests, rules, SimLimits(max_inflight_requests=limit, max_batch_size=2))
    assert [sent.index for sent in run.sent] == list(range(len(requests)))
    counts = run.admission.counts()
    assert (counts.inflight, counts.reserved) == (0, counts.released)
    assert run.peak_outstanding <= (cap or len(requests))
    held_s = 0.0
    for sent in run.sent:
        assert [one.attempt for one in tries(sent)] == list(range(1, sent.attempt + 1))
        assert sent.attempt <= (MOST_TRIES if policy.is_on else 1)
        for one in tries(sent):
            if isinstance(one.fate, Request):
                assert one.fate.ticket.released_s is not None
                held_s += one.fate.ticket.released_s - one.fate.reserved_s
        for one, following in zip(tries(sent), tries(sent)[1:], strict=False):
            ended_s = one.returned_s if is_refused(one) else one.gave_up_s
            assert ended_s is not None
            assert following.sent_s >= ended_s
    assert counts.inflight_integral_s == pytest.approx(held_s)
    retries = sum(sent.attempt - 1 for sent in run.sent)
    if policy.budget is not None:
        assert retries <= BUDGET_RESERVE + policy.budget * len(requests)
