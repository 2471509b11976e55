"""Who comes back, when, and how often: on no clock at all."""

from __future__ import annotations

import pickle
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.bench.retries import (
    BUDGET_RESERVE,
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    MOST_TRIES,
    Retrier,
    RetryPolicy,
)
from roseinfer.errors import ManagerClosedError, SchedulerManagerOverloadedError


def delays(name: str, n_tries: int = 1, n: int = 200, *, retry_after_s: float | None = None) -> list[float]:
    """Of so many requests, each after its `n_tries`-th try."""
    retrier = Retrier(RetryPolicy(name), 7)
    found = [retrier.delay_s(index, n_tries, retry_after_s=retry_after_s) for index in range(n)]
    return [delay_s for delay_s in found if delay_s is not None]


def refusal(reason: str, stage: str = "submit") -> SchedulerManagerOverloadedError:
    return SchedulerManagerOverloadedError(
        limit=1, inflight=1, reason=reason, retry_after_s=None, stage=stage
    )


def test_without_retries_there_is_one_try() -> None:
    assert not RetryPolicy().is_on
    assert delays("none") == []


def test_retry_after_is_never_undercut() -> None:  # cases J1, J7
    assert min(delays("retry-after", retry_after_s=2.0)) >= 2.0


def test_clients_told_the_same_time_do_not_come_back_together() -> None:  # case J13
    found = delays("retry-after", retry_after_s=2.0)
    assert max(found) > 2.0 + 0.9 * FIRST_DELAY_S
    assert len(set(found)) == len(found)


def test_without_a_hint_retry_after_backs_off_like_exponential() -> None:  # case J7
    assert delays("retry-after") == delays("exponential")


@pytest.mark.parametrize("name", ["immediate", "exponential"])
def test_the_others_are_clients_that_do_not_look_at_it(name: str) -> None:
    assert delays(name, retry_after_s=2.0) == delays(name)


@pytest.mark.parametrize("tries", [1, 2, 3, 4])
def test_the_longest_delay_doubles_up_to_a_bound(tries: int) -> None:
    longest_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (tries - 1))
    found = delays("exponential", tries)
    assert 0 <= min(found) < 0.1 * longest_s
    assert 0.9 * longest_s < max(found) <= longest_s


def test_it_gives_up_after_the_last_try() -> None:
    assert delays("immediate", MOST_TRIES) == []


def test_clients_refused_together_do_not_come_back_together() -> None:  # case J13
    full = delays("exponential", n=64)
    rng = Random(7)
    shortened = [FIRST_DELAY_S * (1 - 0.25 * rng.random()) for _ in range(64)]

    def peak(times_s: list[float], within_s: float = 0.05) -> int:
        return max(sum(start_s <= other < start_s + within_s for other in times_s) for start_s in times_s)

    assert peak(full) < peak(shortened)


def test_a_delay_depends_on_nothing_that_came_before() -> None:
    first, second = (Retrier(RetryPolicy("exponential"), 7) for _ in range(2))
    forwards = [first.delay_s(index, 1) for index in range(20)]
    backwards = [second.delay_s(index, 1) for index in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert first.delay_s(0, 2) != forwards[0]
    assert Retrier(RetryPolicy("exponential"), 8).delay_s(0, 1) != forwards[0]


def test_no_try_begins_after_the_deadline_of_its_request() -> None:
    retrier = Retrier(RetryPolicy("immediate"), 7)
    assert retrier.delay_s(0, 1, left_s=1e-9) == 0.0
    assert retrier.delay_s(0, 1, left_s=0.0) is None


def test_a_budget_is_spent_and_earned_back() -> None:  # case J12: for a bucket that retries empty
    retrier = Retrier(RetryPolicy("immediate", budget=0.1), 7)
    assert [retrier.delay_s(index, 1) for index in range(BUDGET_RESERVE)] == [0.0] * BUDGET_RESERVE
    for _ in range(10):
        assert retrier.delay_s(99, 1) is None
        retrier.begin()
    assert retrier.delay_s(99, 1) == 0.0
    assert retrier.delay_s(99, 1) is None


def test_a_long_calm_saves_up_no_storm() -> None:
    retrier = Retrier(RetryPolicy("immediate", budget=1.0), 7)
    for _ in range(1000):
        retrier.begin()
    assert sum(retrier.delay_s(index, 1) is not None for index in range(1000)) == BUDGET_RESERVE


def test_what_would_come_too_late_costs_the_budget_nothing() -> None:
    retrier = Retrier(RetryPolicy("immediate", budget=0.1), 7)
    assert [retrier.delay_s(0, 1, left_s=0.0) for _ in range(99)] == [None] * 99
    assert sum(retrier.delay_s(index, 1) is not None for index in range(99)) == BUDGET_RESERVE


@given(
    st.sampled_from([0.001, 0.1, 0.25, 1.0]), st.lists(st.tuples(st.booleans(), st.integers(1, MOST_TRIES)))
)
def test_a_budget_is_never_overdrawn(budget: float, events: list[tuple[bool, int]]) -> None:
    retrier = Retrier(RetryPolicy("immediate", budget), 7)
    requests = retries = 0
    for is_first, n_tries in events:
        if is_first:
            retrier.begin()
            requests += 1
        elif retrier.delay_s(0, n_tries) is not None:
            retries += 1
        assert retries <= BUDGET_RESERVE + budget * requests


@pytest.mark.parametrize(
    ("error", "worth"),
    [
        *[(refusal(reason), True) for reason in ("inflight", "tokens", "slo", "aimd", "gradient")],
        *[(refusal(reason, "queued"), True) for reason in ("queue-timeout", "codel", "evicted")],
        (refusal("tokens-never-fits"), False),
        (ManagerClosedError("closed"), False),
        (None, True),  # its client gave it up
    ],
)
def test_what_waiting_may_mend_is_tried_again(error: BaseException | None, worth: bool) -> None:
    assert (Retrier(RetryPolicy("immediate"), 7).delay_after_s(error, 0, 1) is not None) is worth


def test_a_client_goes_to_other_processes() -> None:
    retrier = Retrier(RetryPolicy("exponential", 0.1), 7)
    assert pickle.loads(pickle.dumps(retrier)).delay_s(3, 2) == retrier.delay_s(3, 2)  # noqa: S301 (our own)
