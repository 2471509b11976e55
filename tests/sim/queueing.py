"""What queueing theory says, from formulas, and what a sample says, with its confidence interval.

Formulas are those of Gross, Shortle, Thompson and Harris, Fundamentals of Queueing Theory (4th edition, 2008).
Rates are per second, `rho` and `load` are arrival rate times mean service time, waits are of the queue alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, lgamma, log, sqrt
from typing import NamedTuple

import numpy as np
from scipy import stats


def mm1_wait_s(rho: float, service_s: float) -> float:
    """Mean wait of M/M/1: rho / (1 - rho) mean services (section 2.2)."""
    return rho / (1 - rho) * service_s


def md1_wait_s(rho: float, service_s: float) -> float:
    """Mean wait of M/D/1, half that of M/M/1 (Pollaczek and Khinchine, section 5.1)."""
    return rho / (2 * (1 - rho)) * service_s


class Finite(NamedTuple):
    """A queue that holds so many at most: the share that is refused, and the mean wait of those who get in."""

    blocking: float
    wait_s: float


def md1k(rho: float, service_s: float, capacity: int) -> Finite:
    """M/D/1/K, with `capacity` K in the system: the arrivals during a service are Poisson (see `mg1k`)."""
    arrivals = [exp(-rho + k * log(rho) - lgamma(k + 1)) for k in range(capacity)]
    return mg1k(arrivals, rho, service_s)


def mm1k(rho: float, service_s: float, capacity: int) -> Finite:
    """M/M/1/K through the same lines: the arrivals during a service are geometric (see `mg1k`)."""
    return mg1k([1 / (1 + rho) * (rho / (1 + rho)) ** k for k in range(capacity)], rho, service_s)


def mg1k(arrivals: Sequence[float], rho: float, service_s: float) -> Finite:
    """M/G/1/K (section 5.1.7), K = len(arrivals); `arrivals[k]` is the chance of k arrivals during a service.

    pi, the number left behind by a departure (0 .. K-1), solves pi_j = pi_0 a_j + sum_{i=1..j+1} pi_i a_{j-i+1}, one
    unknown after another. At any time n < K are there with p_n = pi_n / (pi_0 + rho), K with the rest, which is the
    share refused. The wait follows by Little's law from the mean number in the queue.
    """
    capacity = len(arrivals)
    pi = [1.0]
    for j in range(capacity - 1):
        flow = pi[0] * arrivals[j] + sum(pi[i] * arrivals[j - i + 1] for i in range(1, j + 1))
        pi.append((pi[j] - flow) / arrivals[0])
    p = np.array(pi) / sum(pi)
    p = p / (p[0] + rho)
    blocking = float(1 - p.sum())
    in_queue = float(np.arange(capacity - 1) @ p[1:]) + (capacity - 1) * blocking
    return Finite(blocking, in_queue / (rho / service_s * (1 - blocking)))


def erlang_b(servers: int, load: float) -> float:
    """The share that M/M/c/c refuses, by B(c) = a B(c-1) / (c + a B(c-1)) (section 2.5)."""
    blocking = 1.0
    for c in range(1, servers + 1):
        blocking = load * blocking / (c + load * blocking)
    return blocking


def mmc_wait_s(servers: int, load: float, service_s: float) -> float:
    """Mean wait of M/M/c: Erlang-C's chance to wait, times a mean service over c - a (section 2.3)."""
    blocking = erlang_b(servers, load)
    chance = blocking / (1 - load / servers * (1 - blocking))
    return chance * service_s / (servers - load)


class Estimate(NamedTuple):
    """A mean with its confidence interval."""

    lo: float
    point: float
    hi: float

    @property
    def precision(self) -> float:
        """Half the width, as a share of the mean."""
        return (self.hi - self.lo) / 2 / self.point


def estimate(means: Sequence[float], level: float = 0.99) -> Estimate:
    """Student's t over the means of independent replications."""
    values = np.array(means)
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / sqrt(len(values))
    return Estimate(values.mean() - half, values.mean(), values.mean() + half)
