"""The simulator against queueing theory: where a formula knows the answer, the answer is that.

Batch size 1 and one output token make an engine a single server, a step a service. The step loop is not M/M/c, since
its requests share steps, so admission and queue alone meet M/M/c/c and M/M/c, on servers that work by slots. All is
seeded: an interval at 99 % holds the truth, or does not, once and for all; its precision says that it could miss.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from roseinfer.admission import Admission
from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.executor import StepPlan
from roseinfer.request import Request
from roseinfer.sim.virtual import Arrival, SimLimits, simulate
from roseinfer.ticket import Ticket
from tests.sim.queueing import (
    Finite,
    erlang_b,
    estimate,
    md1_wait_s,
    md1k,
    mm1_wait_s,
    mm1k,
    mmc_wait_s,
)

SERVICE_S = 0.01
REPLICATIONS = 20
REQUESTS = 1_500
SETTLING = 300  # arrivals before the queue has forgotten that it began empty


# ---- the formulas, where their values are known from elsewhere ----


@pytest.mark.parametrize(("servers", "load", "blocking"), [(1, 1.0, 0.5), (2, 1.0, 0.2), (10, 5.0, 0.018385)])
def test_erlang_b_has_the_values_of_its_tables(servers: int, load: float, blocking: float) -> None:
    assert erlang_b(servers, load) == pytest.approx(blocking, rel=1e-4)


def test_mmc_of_one_server_is_mm1_and_of_two_is_known() -> None:
    assert mmc_wait_s(1, 0.8, 1.0) == pytest.approx(mm1_wait_s(0.8, 1.0))
    assert mmc_wait_s(2, 1.5, 1.0) == pytest.approx(0.75**2 / (1 - 0.75**2))  # rho^2 / (1 - rho^2) services


@pytest.mark.parametrize("rho", [0.5, 0.9, 1.5])
def test_a_full_system_of_one_or_two_has_the_closed_form(rho: float) -> None:
    assert md1k(rho, 1.0, 1).blocking == pytest.approx(rho / (1 + rho))  # Erlang's loss, whatever the service
    assert md1k(rho, 1.0, 1).wait_s == pytest.approx(0.0, abs=1e-12)
    assert md1k(rho, 1.0, 2).blocking == pytest.approx(1 - 1 / (np.exp(-rho) + rho))


@pytest.mark.parametrize("capacity", [1, 2, 5, 16])
def test_the_same_lines_give_mm1k(capacity: int) -> None:
    rho = 0.8
    p = rho ** np.arange(capacity + 1)
    p /= p.sum()
    in_queue = float(np.maximum(np.arange(capacity + 1) - 1, 0) @ p)
    found = mm1k(rho, 1.0, capacity)
    assert found.blocking == pytest.approx(p[-1])
    assert found.wait_s == pytest.approx(in_queue / (rho * (1 - p[-1])), abs=1e-12)


def test_a_large_system_is_an_infinite_one() -> None:
    assert md1k(0.6, 1.0, 40).wait_s == pytest.approx(md1_wait_s(0.6, 1.0))
    assert md1k(0.6, 1.0, 40).blocking == pytest.approx(0.0, abs=1e-9)


# ---- the core on the virtual clock ----

Services = Callable[[np.random.Generator], NDArray[np.float64]]


def exponential(rng: np.random.Generator) -> NDArray[np.float64]:
    return rng.exponential(SERVICE_S, REQUESTS)


def fixed(rng: np.random.Generator) -> NDArray[np.float64]:
    return np.full(REQUESTS, SERVICE_S)


def single_server(rho: float, services: Services, limit: int | None, seed: int) -> Finite:
    """The share refused and the mean wait of one replication, after settling."""
    rng = np.random.default_rng(seed)
    arrivals_s = rng.exponential(SERVICE_S / rho, REQUESTS).cumsum().tolist()
    service_s = services(rng).tolist()

    def step_seconds(plan: StepPlan) -> float:
        (span,) = plan.spans
        return float(service_s[span.request.request_id])

    limits = SimLimits(max_inflight_requests=limit, max_batch_size=1, kv_cache_tokens=64)
    run = simulate([Arrival(time_s, 1, 1) for time_s in arrivals_s], limits, step_seconds)
    fates = [sent.fate for sent in run.sent[SETTLING:]]
    served = [fate for fate in fates if isinstance(fate, Request)]
    waits_s = [(request.first_scheduled_s or 0.0) - request.reserved_s for request in served]
    return Finite(1 - len(served) / len(fates), float(np.mean(waits_s)))


def single_servers(rho: float, services: Services, limit: int | None = None) -> list[Finite]:
    return [single_server(rho, services, limit, seed) for seed in range(REPLICATIONS)]


def test_the_mean_wait_is_that_of_mm1() -> None:
    found = estimate([one.wait_s for one in single_servers(0.5, exponential)])
    assert found.lo < mm1_wait_s(0.5, SERVICE_S) < found.hi
    assert found.precision < 0.1


def test_the_mean_wait_is_that_of_md1() -> None:
    found = estimate([one.wait_s for one in single_servers(0.7, fixed)])
    assert found.lo < md1_wait_s(0.7, SERVICE_S) < found.hi
    assert found.precision < 0.1


@pytest.mark.parametrize(("rho", "limit"), [(0.9, 4), (1.5, 8)])
def test_a_limit_refuses_and_delays_as_md1k_says(rho: float, limit: int) -> None:
    runs, truth = single_servers(rho, fixed, limit), md1k(rho, SERVICE_S, limit)
    wait, blocking = estimate([one.wait_s for one in runs]), estimate([one.blocking for one in runs])
    assert wait.lo < truth.wait_s < wait.hi
    assert wait.precision < 0.05
    assert blocking.lo < truth.blocking < blocking.hi
    assert blocking.precision < 0.1


# ---- admission and a queue, on servers that work by slots ----


def slot_servers(servers: int, load: float, limit: int | None, seed: int) -> Finite:
    """Poisson arrivals take a ticket, then a free server or a place in the queue, first come first served."""
    rng = np.random.default_rng(seed)
    admission = Admission(limit)
    arrivals_s = rng.exponential(SERVICE_S / load, REQUESTS).cumsum().tolist()
    service_s = iter(rng.exponential(SERVICE_S, REQUESTS).tolist())
    queue: deque[tuple[float, int]] = deque()
    departures: list[tuple[float, int, Ticket]] = []
    tickets: dict[int, Ticket] = {}
    waits_s: dict[int, float] = {}

    def serve(now: float) -> None:
        while queue and len(departures) < servers:
            arrived_s, index = queue.popleft()
            waits_s[index] = now - arrived_s
            heapq.heappush(departures, (now + next(service_s), index, tickets[index]))

    for index, now in enumerate(arrivals_s):
        while departures and departures[0][0] <= now:
            ended_s, _, ticket = heapq.heappop(departures)
            admission.release(ticket, ended_s)
            serve(ended_s)
        try:
            tickets[index] = admission.reserve(now, 1)
        except SchedulerManagerOverloadedError:
            continue
        queue.append((now, index))
        serve(now)
    counted = [wait_s for index, wait_s in waits_s.items() if index >= SETTLING]
    asked = REQUESTS - SETTLING
    admitted = sum(index >= SETTLING for index in tickets)
    return Finite(1 - admitted / asked, float(np.mean(counted)))


def test_admission_alone_refuses_as_erlang_b_says() -> None:
    runs = [slot_servers(10, 9.0, 10, seed) for seed in range(REPLICATIONS)]
    blocking = estimate([one.blocking for one in runs])
    assert blocking.lo < erlang_b(10, 9.0) < blocking.hi
    assert blocking.precision < 0.1
    assert max(one.wait_s for one in runs) == 0.0  # who gets in finds a server


def test_a_queue_without_a_limit_waits_as_mmc_says() -> None:
    runs = [slot_servers(4, 2.8, None, seed) for seed in range(2 * REPLICATIONS)]
    wait = estimate([one.wait_s for one in runs])
    assert wait.lo < mmc_wait_s(4, 2.8, SERVICE_S) < wait.hi
    assert wait.precision < 0.15
