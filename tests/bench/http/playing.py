"""Plays a load against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf
from typing import Any

from roseinfer.bench.http.exchange import Endpoint, HttpAttempt, HttpPlayed
from roseinfer.bench.http.workers import play
from roseinfer.bench.load import CLOSED, Load
from roseinfer.bench.retries import Retrier, RetryPolicy


class Never(Retrier):
    """A client without retries."""

    def __init__(self) -> None:
        super().__init__(RetryPolicy(), 1)


class UpTo(Retrier):
    """Tries `n` times, after `delay_s`; notes in `asked` after which tries it was asked."""

    def __init__(self, n: int, delay_s: float = 0.0) -> None:
        super().__init__(RetryPolicy("immediate"), 1)
        self._n = n
        self._delay_s = delay_s
        self.asked: list[int] = []

    def delay_s(
        self, request_index: int, n_tries: int, *, retry_after_s: float | None = None, left_s: float = inf
    ) -> float | None:
        self.asked.append(n_tries)
        return self._delay_s if n_tries < self._n and self._delay_s < left_s else None


def bodies(n: int) -> list[bytes]:
    return [json.dumps({"i": i}).encode() for i in range(n)]


def played(
    endpoint: Endpoint,
    scheduled_s: list[float],
    *,
    policy: Retrier | None = None,
    client_workers: int = 1,
    **load: Any,
) -> HttpPlayed:
    """An open loop; `load` are fields of Load."""
    shape = Load(arrival="constant", **load)
    return play(
        endpoint,
        shape,
        scheduled_s,
        bodies(len(scheduled_s)),
        Never() if policy is None else policy,
        client_workers=client_workers,
    )


def looped(
    endpoint: Endpoint,
    users: int,
    its_bodies: Sequence[bytes],
    *,
    policy: Retrier | None = None,
    **load: Any,
) -> HttpPlayed:
    """A closed loop."""
    shape = Load(arrival=CLOSED, max_concurrency=users, **load)
    return play(endpoint, shape, None, its_bodies, Never() if policy is None else policy)


def last_tries(result: HttpPlayed) -> list[HttpAttempt]:
    return [request.tries[-1] for request in result.requests]


def most_outstanding(result: HttpPlayed) -> int:
    """From the moments alone: the most that had been sent and not ended at any of them."""
    moments: list[tuple[float, int]] = []
    for request in result.requests:
        if request.tries:
            sent_s, ended_s = request.tries[0].sent_s, request.tries[-1].ended_s
            assert sent_s is not None
            assert ended_s is not None
            moments += [(sent_s, 1), (ended_s, -1)]
    now = most = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most
