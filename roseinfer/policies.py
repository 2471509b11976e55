"""From an AdmissionSpec to what carries it out: its part at the door, and its part in the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.adaptive import Aimd, Gradient
from roseinfer.admission import Admission
from roseinfer.admission_spec import AdaptiveSpec, AdmissionSpec
from roseinfer.codel import CoDel
from roseinfer.errors import InputError
from roseinfer.forecast import Forecast
from roseinfer.scheduler import QueuePolicy, SchedulerLimits
from roseinfer.ttft_goal import TtftGoal
from roseinfer.waiting import FCFS, SCHEDULINGS, Order

if TYPE_CHECKING:
    from roseinfer.sim.cost_model import CostModel


def check_policy(
    spec: AdmissionSpec, scheduling: str, *, has_cost_model: bool, name: str = "admission"
) -> None:
    """Raises InputError of the argument or flag `name` for what cannot work together."""
    if scheduling not in SCHEDULINGS:
        raise InputError("scheduling", scheduling, f"must be {', '.join(SCHEDULINGS)}")
    if spec.needs_cost_model and not has_cost_model:
        why = (
            "weighs what a request will cost: it needs a cost model (roseinfer-bench calibrate RUN makes one)"
        )
        raise InputError(name, str(spec), why)
    is_newest_first = spec.codel is not None and spec.codel.newest_first
    is_reordered = scheduling != FCFS or spec.priority_age_s is not None
    if is_newest_first and is_reordered:
        raise InputError(
            name, str(spec), "newest-first is an order of its own: no lanes, no other --scheduling"
        )
    if spec.slo_ttft_s is not None and (is_newest_first or is_reordered):
        raise InputError(
            name, str(spec), "slo predicts a queue in the order of arrival: no lanes, no other order"
        )


def policies_of(
    spec: AdmissionSpec, scheduling: str, limits: SchedulerLimits, cost_model: CostModel | None
) -> tuple[Admission, QueuePolicy]:
    """New ones, with nothing in flight. Raises InputError for what cannot work together."""
    check_policy(spec, scheduling, has_cost_model=cost_model is not None)
    forecast = None
    if cost_model is not None:
        mean = cost_model.in_the_mean()
        forecast = Forecast(mean.step, mean.between_steps, limits.seats, limits.max_num_batched_tokens)
    goal = None
    if spec.slo_ttft_s is not None and forecast is not None:
        goal = TtftGoal(spec.slo_ttft_s, forecast)
    admission = Admission(
        spec.inflight,
        spec.tokens,
        adaptive=None if spec.adaptive is None else _adaptive(spec.adaptive),
        goal=goal,
        forecast=forecast,
        has_lanes=spec.priority_age_s is not None,
    )
    codel = None if spec.codel is None else CoDel(spec.codel.target_s, spec.codel.interval_s)
    return admission, QueuePolicy(
        Order(scheduling, spec.priority_age_s),
        spec.queue_timeout_s,
        codel,
        spec.codel is not None and spec.codel.newest_first,
    )


def _adaptive(spec: AdaptiveSpec) -> Aimd | Gradient:
    kind = Aimd if spec.kind == "aimd" else Gradient
    return kind(slowdown=spec.slowdown, floor=spec.floor, init=spec.init, most=spec.most)
