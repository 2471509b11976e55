"""Policies at the door: a predicted goal, limits that move. What the queue does is in test_queue_policies."""

from __future__ import annotations

import copy

import pytest

from roseinfer.adaptive import SAMPLES
from roseinfer.admission import Admission
from roseinfer.admission_spec import parse_admission
from roseinfer.errors import InputError, SchedulerManagerOverloadedError
from roseinfer.forecast import Forecast
from roseinfer.policies import policies_of
from roseinfer.scheduler import SchedulerLimits
from roseinfer.sim.cost_model import CostModel, StepCost
from roseinfer.ticket import Ticket
from roseinfer.ttft_goal import TtftGoal
from tests.scripted import computed

MS_A_TOKEN = CostModel("a millisecond a prompt token", StepCost(0.0, 0.001, 0.0, 0.0, 0.0))


class PlainForecast(Forecast):
    """A millisecond for each prompt token that is not computed yet: the door is tested here, not the prediction."""

    def ttft_s(self, prompt_tokens: int, into_step_s: float | None = None) -> float:
        return 0.001 * (self.backlog.prefill_tokens + prompt_tokens)


def with_goal(ttft_s: float) -> Admission:
    forecast = PlainForecast(
        MS_A_TOKEN.step, MS_A_TOKEN.between_steps, seats=8, max_num_batched_tokens=512, kv_blocks=1 << 16
    )
    return Admission(None, goal=TtftGoal(ttft_s, forecast))


def factor_of(admission: Admission) -> float:
    assert admission.goal is not None
    return admission.goal.margin.factor


def made(spec: str, *, scheduling: str = "fcfs", cost_model: CostModel | None = MS_A_TOKEN) -> Admission:
    limits = SchedulerLimits(8, None, 512)
    return policies_of(parse_admission(spec), scheduling, limits, cost_model, num_kv_blocks=1 << 16)[0]


def reserve(
    admission: Admission, prompt: int, new: int = 1, *, text: bool = False, now: float = 0.0
) -> Ticket:
    return admission.reserve(now, prompt + new, prompt_tokens=prompt, is_bound=text)


def refused(admission: Admission, prompt: int, *, text: bool = False) -> SchedulerManagerOverloadedError:
    with pytest.raises(SchedulerManagerOverloadedError) as caught:
        reserve(admission, prompt, text=text)
    return caught.value


# ---- slo ----


def test_what_is_predicted_to_miss_its_goal_is_refused_and_the_rest_is_not() -> None:
    admission = with_goal(0.25)
    first = reserve(admission, 100)
    second = reserve(admission, 100)
    assert (first.predicted_ttft_s, second.predicted_ttft_s) == pytest.approx((0.1, 0.2))
    error = refused(admission, 100)
    assert (error.reason, error.stage, error.limit, error.inflight) == ("slo", "submit", 0.25, 2)
    assert error.measured == pytest.approx(0.3)
    assert error.retry_after_s == pytest.approx(0.05)
    assert str(error) == "its first token is predicted in 0.3 s, the goal is 0.25 s (slo)"
    assert vars(copy.copy(error)) == vars(error)
    assert reserve(admission, 50).predicted_ttft_s == pytest.approx(0.25)  # a short one still makes it


def test_what_would_miss_alone_is_told_nothing_of_coming_back() -> None:
    assert refused(with_goal(0.25), 251).retry_after_s is None


def test_a_refusal_for_a_goal_touches_nothing_but_its_own_counter() -> None:
    admission = with_goal(0.25)
    reserve(admission, 200)
    before = admission.counts()
    refused(admission, 100)
    assert admission.counts() == before._replace(refused=1)
    assert reserve(admission, 50).predicted_ttft_s == pytest.approx(0.25)


def test_work_that_is_done_or_gone_makes_room() -> None:
    admission = with_goal(0.25)
    tickets = [reserve(admission, 100), reserve(admission, 100)]
    refused(admission, 100)
    admission.start(tickets[0])
    admission.progress([computed(tickets[0], 60)])
    assert reserve(admission, 100).predicted_ttft_s == pytest.approx(0.24)
    for ticket in tickets:
        admission.release(ticket, 1.0)
    assert reserve(admission, 100).predicted_ttft_s == pytest.approx(0.2)


def test_a_text_counts_its_bytes_until_one_has_shown_what_a_byte_is() -> None:
    admission = with_goal(0.25)
    text = reserve(admission, 200, text=True)
    assert text.predicted_ttft_s == pytest.approx(0.2)
    admission.adjust(text, 50 + 1, 0.0)  # four bytes a token
    later = reserve(admission, 400, text=True)
    assert later.predicted_ttft_s == pytest.approx(0.05 + 0.1)


# ---- limits that move ----


@pytest.mark.parametrize("kind", ["aimd", "gradient"])
def test_a_limit_that_moves_refuses_in_its_own_name(kind: str) -> None:
    admission = made(f"{kind}:init=2")
    for _ in range(2):
        reserve(admission, 10)
    error = refused(admission, 10)
    assert (error.reason, error.limit, error.inflight, error.measured) == (kind, 2, 2, 2)


@pytest.mark.parametrize(
    ("spec", "reason"), [("inflight:1+aimd:init=2", "inflight"), ("inflight:9+aimd:init=1", "aimd")]
)
def test_beside_a_fixed_limit_the_smaller_holds(spec: str, reason: str) -> None:
    admission = made(spec)
    reserve(admission, 10)
    assert refused(admission, 10).reason == reason


def test_requests_that_waited_for_long_lower_the_limit_once_for_what_it_let_in() -> None:
    admission = made("aimd:init=40:slowdown=3")
    tickets = [reserve(admission, 100) for _ in range(40)]
    for ticket in tickets:  # a slowdown of 11, of all that came under the first limit
        admission.start(ticket, 1.0)
    assert admission.moving_limit == 36


def test_requests_that_hardly_waited_raise_it_while_it_is_used() -> None:
    admission = made("aimd:init=20:slowdown=3")
    tickets = [reserve(admission, 100) for _ in range(20)]
    for ticket in tickets[:SAMPLES]:
        admission.start(ticket, 0.1)
    assert admission.moving_limit == 21


def test_a_limit_may_fall_below_what_is_in_flight_and_nobody_loses_a_slot() -> None:
    admission = made("aimd:init=20:slowdown=3")
    tickets = [reserve(admission, 100) for _ in range(20)]
    for ticket in tickets[:SAMPLES]:
        admission.start(ticket, 5.0)
    assert admission.moving_limit == 18
    assert admission.inflight == 20
    assert refused(admission, 100).limit == 18


# ---- what does not go together ----


@pytest.mark.parametrize("spec", ["slo:ttft=1s", "aimd", "gradient"])
def test_what_weighs_costs_needs_a_cost_model(spec: str) -> None:
    with pytest.raises(InputError, match="needs a cost model"):
        made(spec, cost_model=None)


@pytest.mark.parametrize(
    ("spec", "scheduling"),
    [("slo:ttft=1s", "spf"), ("slo:ttft=1s+priority", "fcfs"), ("slo:ttft=1s+codel:newest-first", "fcfs")],
)
def test_a_prediction_knows_one_order_only(spec: str, scheduling: str) -> None:
    with pytest.raises(InputError, match="order of arrival"):
        made(spec, scheduling=scheduling)


def test_a_queue_timeout_shorter_than_the_goal_would_drop_what_was_let_in() -> None:
    made("slo:ttft=1s+queue-timeout:1s")
    with pytest.raises(InputError, match="lets in what it drops"):
        made("slo:ttft=1s+queue-timeout:900ms")


@pytest.mark.parametrize(
    ("spec", "scheduling"), [("codel:newest-first", "spf"), ("codel:newest-first+priority", "fcfs")]
)
def test_newest_first_is_an_order_of_its_own(spec: str, scheduling: str) -> None:
    with pytest.raises(InputError, match="newest-first"):
        made(spec, scheduling=scheduling)


def test_who_turned_out_late_makes_the_next_prediction_count_for_more() -> None:
    admission = with_goal(0.25)
    ticket = reserve(admission, 200)
    admission.first_token(ticket, 0.5)  # 0.2 s were predicted
    admission.release(ticket, 0.5)
    assert reserve(admission, 200).predicted_ttft_s == pytest.approx(
        0.2
    )  # the record keeps what was predicted
    assert refused(admission, 40).measured == pytest.approx(0.24 * factor_of(admission))


def test_predictions_far_from_the_goal_decide_nothing_and_teach_nothing() -> None:
    admission = with_goal(0.25)
    ticket = reserve(admission, 100)
    admission.first_token(ticket, 5.0)
    assert factor_of(admission) == 1.0


def test_a_margin_that_became_wide_hears_of_better_times() -> None:
    admission = with_goal(0.25)
    assert admission.goal is not None
    admission.goal.margin.factor = 3.0
    ticket = reserve(admission, 60)  # 0.18 s with the margin
    admission.first_token(ticket, 0.06)
    assert factor_of(admission) < 3.0


def test_an_idle_engine_takes_what_it_can_serve_whatever_worse_times_have_taught() -> None:
    admission = with_goal(0.25)
    assert admission.goal is not None
    admission.goal.margin.factor = 4.0
    admission.goal.forecast.correction = 4.0
    reserve(admission, 100)
    assert refused(admission, 100).retry_after_s is not None
    assert refused(with_goal(0.25), 251).retry_after_s is None  # alone it would miss as well


def test_what_has_ended_is_no_work_however_long_it_stays_unread() -> None:
    admission = with_goal(0.25)
    ticket = reserve(admission, 200)
    admission.start(ticket)
    admission.ended(ticket)
    assert admission.inflight == 1
    assert reserve(admission, 200).predicted_ttft_s == pytest.approx(0.2)
    assert admission.release(ticket, 1.0)


def test_a_victim_whose_stream_was_closed_a_moment_ago_loses_its_slot_once() -> None:
    """A collection inside of `reserve` may close the very stream that was chosen."""
    admission = made("inflight:2+priority")
    victim = admission.reserve(0.0, 8, prompt_tokens=4, priority=1)
    admission.reserve(0.0, 8, prompt_tokens=4, priority=1)
    lanes = admission._lanes
    assert lanes is not None
    choose = lanes.victims

    def chosen_and_closed(priority: int, slots: int, tokens: int) -> list[Ticket] | None:
        victims = choose(priority, slots, tokens)
        for ticket in victims or ():
            admission.release(ticket, 0.0)
        return victims

    lanes.victims = chosen_and_closed  # type: ignore[method-assign]
    admission.reserve(0.0, 8, prompt_tokens=4, priority=0)
    counts = admission.counts()
    assert (counts.inflight, counts.reserved, counts.released) == (2, 3, 1)
    assert not victim.is_evicted


def test_the_hint_of_a_limit_that_fell_counts_all_the_places_that_are_missing() -> None:
    admission = made("aimd:init=10")
    tickets = [reserve(admission, 10) for _ in range(10)]
    for now in (1.0, 2.0, 3.0):
        admission.release(tickets.pop(), now)
        tickets.append(reserve(admission, 10, now=now))
    assert refused(admission, 10).retry_after_s == pytest.approx(1.0)
    assert admission.adaptive is not None
    admission.adaptive.limit = 4
    with pytest.raises(SchedulerManagerOverloadedError) as caught:
        reserve(admission, 10, now=3.0)
    assert caught.value.retry_after_s == pytest.approx(7.0)  # one place a second, seven are missing
