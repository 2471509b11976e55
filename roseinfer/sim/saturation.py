"""The capacity that a cost model implies: how many requests per second an engine ends that never has to wait for one.

No torch, no clock, no noise: the same numbers give the same capacity on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from roseinfer.executor import StepPlan
from roseinfer.request import Request
from roseinfer.sim.costs import Costs
from roseinfer.sim.virtual import Arrival, Sent, SimLimits, simulate

ROUNDS: Final = 32
"""Times that a burst fills the engine; the capacity is taken from those in the middle."""

_FILLING: Final = 4
"""The part of a burst, as its divisor, in which the requests that run fall out of step with each other."""


def burst_of(limits: SimLimits) -> int:
    """Requests that it takes to find the capacity of an engine of these sizes."""
    return ROUNDS * min(limits.max_batch_size, limits.max_active_requests or limits.max_batch_size)


def saturated_rate(
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    limits: SimLimits,
    costs: Costs | Callable[[StepPlan], float],
) -> float:
    """Requests per second, found by a burst of requests of these lengths, `burst_of(limits)` or more, all admitted.

    Every one of them must fit. The time is taken from the end of a step that ended requests, when a quarter of them
    is over, to the last such end before there is a free place for the last of them. A burst that is too small for
    that is taken as a whole.
    """
    burst = [Arrival(0.0, *lengths) for lengths in zip(prompt_tokens, output_tokens, strict=True)]
    starts_s: list[float] = []
    ends_s: list[float] = []

    def on_request(sent: Sent) -> None:
        assert isinstance(sent.fate, Request)
        assert sent.fate.first_scheduled_s is not None
        assert sent.fate.finished_s is not None
        starts_s.append(sent.fate.first_scheduled_s)
        ends_s.append(sent.fate.finished_s)

    everybody = limits._replace(max_inflight_requests=None, admission=None)
    simulate(burst, everybody, costs, on_request=on_request, on_step=lambda _: None)
    ends_s.sort()
    drains_s = max(starts_s)
    begin_s = ends_s[len(ends_s) // _FILLING]
    steady_s = [end_s for end_s in ends_s if begin_s < end_s <= drains_s]
    if not steady_s:
        return len(ends_s) / ends_s[-1]
    return len(steady_s) / (steady_s[-1] - begin_s)
