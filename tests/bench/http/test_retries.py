"""Who tries again, and when: on no clock at all."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import pytest

from roseinfer.bench.http.exchange import Failure, HttpAttempt
from roseinfer.bench.http.retries import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    MOST_TRIES,
    Retries,
    is_worth_a_retry,
)


def refused(status: int = 429, **more: Any) -> HttpAttempt:
    return HttpAttempt(
        sent_s=0.0, head_s=0.1, ended_s=0.1, failure=Failure.STATUS, status_code=status, **more
    )


def delays(name: str, attempt: HttpAttempt, n_tries: int = 1, n: int = 200) -> list[float]:
    rng = Random(7)
    found = [Retries(name).delay_s(attempt, n_tries, rng) for _ in range(n)]
    return [delay_s for delay_s in found if delay_s is not None]


def test_without_retries_there_is_one_try() -> None:
    assert not Retries("none").is_on
    assert delays("none", refused()) == []


def test_retry_after_is_never_undercut() -> None:  # cases J1, J7
    assert min(delays("retry-after", refused(retry_after_s=2.0))) >= 2.0


def test_without_a_hint_retry_after_backs_off_like_exponential() -> None:  # case J7
    assert delays("retry-after", refused()) == delays("exponential", refused())


@pytest.mark.parametrize("name", ["immediate", "exponential"])
def test_the_others_are_clients_that_do_not_look_at_it(name: str) -> None:
    assert min(delays(name, refused(retry_after_s=2.0))) < 2.0


@pytest.mark.parametrize("tries", [1, 2, 3, 4])
def test_the_longest_delay_doubles_up_to_a_bound(tries: int) -> None:
    longest_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (tries - 1))
    found = delays("exponential", refused(), tries)
    assert 0 <= min(found) < 0.1 * longest_s
    assert 0.9 * longest_s < max(found) <= longest_s


def test_an_exhausted_quota_is_never_tried_again() -> None:  # case J2
    assert not is_worth_a_retry(refused(error_code="insufficient_quota"))
    assert not is_worth_a_retry(refused(reject_reason="insufficient_quota"))
    assert not is_worth_a_retry(refused(reject_reason="tokens-never-fits"))
    assert is_worth_a_retry(refused(reject_reason="tokens"))


def test_it_gives_up_after_the_last_try() -> None:
    assert delays("immediate", refused(), MOST_TRIES) == []


@pytest.mark.parametrize(
    ("attempt", "worth"),
    [
        (refused(429), True),
        (refused(503), True),
        (refused(500), False),
        (refused(400), False),
        (HttpAttempt(failure=Failure.REFUSED), True),
        (HttpAttempt(failure=Failure.RESET), True),
        (HttpAttempt(failure=Failure.RESET, head_s=1.0, status_code=200), False),  # an answer had begun
        (HttpAttempt(failure=Failure.STREAM_ERROR, head_s=1.0, status_code=200), False),
        (HttpAttempt(failure=Failure.STREAM_ERROR, head_s=1.0, error_code="503"), True),  # a late refusal
        (HttpAttempt(failure=Failure.STREAM_ERROR, head_s=1.0, error_code="429"), True),
        (HttpAttempt(failure=Failure.STREAM_ERROR, head_s=1.0, error_code="500"), False),
        (
            HttpAttempt(failure=Failure.STREAM_ERROR, head_s=1.0, error_code="503", deliveries=[(1.0, None)]),
            False,
        ),
        (HttpAttempt(failure=Failure.TIMEOUT), False),
        (HttpAttempt(failure=Failure.INTERRUPTED), False),
        (HttpAttempt(failure=Failure.CLIENT_LIMIT), False),  # case K3: of no server's making
        (HttpAttempt(failure=Failure.OTHER), False),
    ],
)
def test_what_is_tried_again(attempt: HttpAttempt, worth: bool) -> None:  # case D12
    assert is_worth_a_retry(attempt) is worth


def test_clients_refused_together_do_not_come_back_together() -> None:  # case J13
    full = delays("exponential", refused(), n=64)
    rng = Random(7)
    shortened = [FIRST_DELAY_S * (1 - 0.25 * rng.random()) for _ in range(64)]

    def peak(times_s: list[float], within_s: float = 0.05) -> int:
        return max(sum(start_s <= other < start_s + within_s for other in times_s) for start_s in times_s)

    assert peak(full) < peak(shortened)


def test_a_policy_goes_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(Retries("exponential"))) == Retries("exponential")  # noqa: S301 (our own)
