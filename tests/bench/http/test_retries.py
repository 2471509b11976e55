"""What a client of a server tries again."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer.bench.http.exchange import Failure, HttpAttempt
from roseinfer.bench.http.retries import is_worth_a_retry


def refused(status: int = 429, **more: Any) -> HttpAttempt:
    return HttpAttempt(
        sent_s=0.0, head_s=0.1, ended_s=0.1, failure=Failure.STATUS, status_code=status, **more
    )


def test_an_exhausted_quota_is_never_tried_again() -> None:  # case J2
    assert not is_worth_a_retry(refused(error_code="insufficient_quota"))
    assert not is_worth_a_retry(refused(reject_reason="insufficient_quota"))
    assert not is_worth_a_retry(refused(reject_reason="tokens-never-fits"))
    assert is_worth_a_retry(refused(reject_reason="tokens"))


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
        (HttpAttempt(failure=Failure.TIMEOUT), True),  # with time left for its request, that is
        (HttpAttempt(failure=Failure.INTERRUPTED), False),
        (HttpAttempt(failure=Failure.CLIENT_LIMIT), False),  # case K3: of no server's making
        (HttpAttempt(failure=Failure.OTHER), False),
    ],
)
def test_what_is_tried_again(attempt: HttpAttempt, worth: bool) -> None:  # case D12
    assert is_worth_a_retry(attempt) is worth
