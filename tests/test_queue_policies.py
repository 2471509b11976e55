"""What happens to those who wait: order, time limits, shedding, eviction. By hand, a step a second, one at a time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.errors import InputError, SchedulerManagerOverloadedError
from roseinfer.request import FinishReason, Request
from roseinfer.sim.cost_model import CostModel, StepCost
from roseinfer.waiting import SPF_S_PER_TOKEN
from tests.scripted import CoreDriver

A_SECOND_A_STEP = CostModel("a second a step", StepCost(1.0, 0.0, 0.0, 0.0, 0.0))
TENTH_A_TOKEN = CostModel("a tenth of a second a prompt token", StepCost(0.0, 0.1, 0.0, 0.0, 0.0))


def drops(driver: CoreDriver) -> list[tuple[int, str, float, float]]:
    """(request_id, reason, limit, measured) of those that were dropped, in that order."""
    found = []
    for event in driver.events:
        if isinstance(event.error, SchedulerManagerOverloadedError):
            assert event.finish_reason is FinishReason.ERROR
            assert event.error.stage == "queued"
            found.append((event.request_id, event.error.reason, event.error.limit, event.error.measured))
    return found


def order_of_service(driver: CoreDriver) -> list[int]:
    """Requests as steps took them up, until nothing is left."""
    taken = dict.fromkeys(
        request_id for spans in driver.steps() for request_id, start, _ in spans if start == 0
    )
    return list(taken)


# ---- queue-timeout, deadlines ----


def test_what_waited_too_long_is_dropped_before_it_costs_a_prefill() -> None:  # case A12
    driver = CoreDriver(batch=1, policy="queue-timeout:2s")
    driver.add(max_new_tokens=4)  # runs for 4 s
    waits = driver.add()
    driver.now = 0.5
    later = driver.add()
    assert order_of_service(driver) == [0]
    assert drops(driver) == [
        (waits.request_id, "queue-timeout", 2.0, 2.5),
        (later.request_id, "queue-timeout", 2.0, 3.0),
    ]
    assert waits.first_scheduled_s is None
    assert not waits.output_ids


@pytest.mark.parametrize(("busy_tokens", "gets_in"), [(2, True), (3, False)])
def test_exactly_the_time_limit_is_in_time(busy_tokens: int, gets_in: bool) -> None:
    driver = CoreDriver(batch=1, policy="queue-timeout:2s")
    driver.add(max_new_tokens=busy_tokens)
    driver.add()
    assert (order_of_service(driver) == [0, 1]) is gets_in


def test_what_runs_is_never_timed_out() -> None:
    driver = CoreDriver(batch=1, policy="queue-timeout:1s")
    request = driver.add(max_new_tokens=30)
    driver.steps()
    assert request.finish_reason is FinishReason.LENGTH


def test_a_text_that_is_still_tokenised_times_out_too_and_its_tokens_come_to_nobody() -> None:
    driver = CoreDriver(batch=1, policy="queue-timeout:2s")
    text = driver.add(text=True)
    driver.now = 2.5
    assert driver.step() == []
    assert [drop[0] for drop in drops(driver)] == [text.request_id]
    driver.tokenized(text, 4)
    assert driver.step() == []


def test_a_deadline_of_its_own_holds_without_a_policy() -> None:
    driver = CoreDriver(batch=1)
    driver.add(max_new_tokens=4)
    driver.add(deadline_s=2.0)
    driver.add()
    assert order_of_service(driver) == [0, 2]
    assert drops(driver) == [(1, "queue-timeout", 2.0, 3.0)]


def test_what_could_only_just_begin_is_dropped_where_its_prefill_is_known() -> None:
    """10 tokens take a second: to have its first token by 3.5 s it has to begin by 2.5 s."""
    driver = CoreDriver(batch=1, policy="queue-timeout:60s", cost_model=TENTH_A_TOKEN)
    driver.add(1, max_new_tokens=3)  # leaves its seat at 3 s
    driver.add(10, deadline_s=3.5)
    assert order_of_service(driver) == [0]
    assert drops(driver) == [(1, "queue-timeout", 3.5, 3.0)]


def test_a_dropped_request_keeps_its_slot_until_its_reader_knows() -> None:  # case A3
    driver = CoreDriver(batch=1, policy="inflight:2+queue-timeout:1s")
    driver.add(max_new_tokens=3)
    dropped = driver.add()
    driver.steps()
    assert driver.core.admission.inflight == 2
    driver.core.acknowledge(dropped, driver.now)
    assert driver.core.admission.inflight == 1


# ---- codel ----


def test_codel_by_hand() -> None:
    """A step a second, each request one step; target 0.5 s, interval 2.5 s. Four come at once, then two a second."""
    driver = CoreDriver(batch=1, policy="codel:target=500ms:interval=2500ms")
    for _ in range(8):
        driver.add(max_new_tokens=1)
    # 0 s: the first one opens an interval, delay 0. 1 s, 2 s: its least delay is 0, no overload.
    # 3 s: its end; not overloaded, and the first of an interval is never dropped. Least delay now 3.
    # 4 s, 5 s: not overloaded yet. 6 s: the end, least delay 3 > 0.5: overloaded; served, as the first.
    # 7 s: request 7 has waited for 7 s > 1 s: dropped.
    assert order_of_service(driver) == [0, 1, 2, 3, 4, 5, 6]
    assert drops(driver) == [(7, "codel", 0.5, 7.0)]


def test_newest_first_only_while_overloaded() -> None:
    def served(policy: str) -> list[int]:
        driver = CoreDriver(batch=1, policy=policy)
        for _ in range(7):
            driver.add(max_new_tokens=1)
        taken = []
        while plan := driver.plan():
            taken += [span.request.request_id for span in plan.spans]
            driver.commit(plan)
            if len(driver.requests) < 10 and driver.now >= 6:
                driver.add(max_new_tokens=1)
        return taken

    policy = "codel:target=500ms:interval=2500ms"
    assert served(policy) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]  # each new one has waited for a second at most
    assert served(policy + ":newest-first")[:6] == [0, 1, 2, 3, 4, 5]


def test_newest_first_is_judged_by_the_one_that_waits_longest() -> None:
    """Overloaded, the oldest is shed and the newest served, whose own short wait says nothing of the queue."""
    driver = CoreDriver(batch=1, policy="codel:target=500ms:interval=2500ms:newest-first")
    for _ in range(8):
        driver.add(max_new_tokens=1)
    for _ in range(7):  # to 7 s: overloaded since 6 s
        driver.step()
    newest = driver.add(max_new_tokens=1)
    assert driver.step() == [(newest.request_id, 0, 4)]
    assert drops(driver) == [(6, "codel", 0.5, 7.0)]  # 7 was the newest at 6 s


# ---- order ----


def test_shortest_prefill_first_ages() -> None:  # case A24
    driver = CoreDriver(batch=1, scheduling="spf")
    long = driver.add(60, 1)
    driver.add(5, 1)
    driver.now = 61 * SPF_S_PER_TOKEN  # by now it has waited for longer than its length is worth
    late = driver.add(1, 1)
    assert order_of_service(driver) == [1, long.request_id, late.request_id]


def test_earliest_deadline_first_and_none_is_late_but_not_last_for_ever() -> None:
    driver = CoreDriver(batch=1, scheduling="edf")
    for deadline_s in (None, 50.0, 20.0, 100.0):
        driver.add(max_new_tokens=1, deadline_s=deadline_s)
    assert order_of_service(driver) == [2, 1, 0, 3]


def test_an_expired_deadline_is_dropped_and_not_first() -> None:
    driver = CoreDriver(batch=1, scheduling="edf")
    driver.add(max_new_tokens=3, deadline_s=0.5)
    driver.add(deadline_s=1.0)
    driver.add(deadline_s=9.0)
    assert order_of_service(driver) == [0, 2]
    assert [drop[:2] for drop in drops(driver)] == [(1, "queue-timeout")]


def test_a_half_prefilled_one_goes_on_whoever_comes() -> None:
    driver = CoreDriver(batch=4, budget=8, scheduling="spf")
    driver.add(20, 1)
    driver.step()
    driver.add(1, 1)
    assert driver.step() == [(0, 8, 8)]
    assert driver.step() == [(0, 16, 4), (1, 0, 1)]


def test_in_a_flood_of_short_prompts_a_long_one_is_passed_for_as_long_as_its_length_is_worth() -> None:
    """case A24: two short ones come for every step of one; the long one has 600 tokens more."""
    driver = CoreDriver(batch=1, budget=1024, scheduling="spf")
    long = driver.add(601, 1)
    taken: list[int] = []
    while long.first_scheduled_s is None:
        for _ in range(2):
            driver.add(1, 1)
        plan = driver.plan()
        assert plan is not None
        taken += [span.request.request_id for span in plan.spans]
        driver.commit(plan)
    passed_by = [driver.requests[request_id] for request_id in taken if request_id != long.request_id]
    assert max(request.reserved_s for request in passed_by) == 600 * SPF_S_PER_TOKEN - 1.0
    assert len(passed_by) == 2 * 600 * SPF_S_PER_TOKEN


# ---- limits that move ----


def test_what_timed_out_lowers_a_limit_that_moves() -> None:  # case A21
    driver = CoreDriver(
        batch=1, policy="aimd:init=40:slowdown=100+queue-timeout:1s", cost_model=A_SECOND_A_STEP
    )
    driver.add(max_new_tokens=5)
    for _ in range(20):
        driver.add()
    driver.steps()
    assert len(drops(driver)) == 20
    assert driver.core.admission.moving_limit == 36


# ---- lanes ----


def test_a_higher_class_goes_first_and_ageing_is_worth_a_class() -> None:
    driver = CoreDriver(batch=1, policy="priority:age=10s")
    low = driver.add(max_new_tokens=1, priority=1)
    high = driver.add(max_new_tokens=1, priority=0)
    driver.now = 10.5  # the low one is worth a class by now
    late = driver.add(max_new_tokens=1, priority=0)
    assert order_of_service(driver) == [high.request_id, low.request_id, late.request_id]


def test_when_full_the_newest_of_the_lowest_class_makes_room() -> None:  # case A27
    driver = CoreDriver(batch=1, policy="inflight:4+priority")
    running = driver.add(priority=2)
    driver.step()
    old, middle, new = (driver.add(priority=priority) for priority in (2, 1, 2))
    high = driver.add(priority=0)
    assert new.ticket.is_evicted
    assert driver.core.admission.inflight == 4
    driver.steps()
    assert drops(driver) == [(new.request_id, "evicted", 2, 0)]
    assert all(r.finish_reason is FinishReason.LENGTH for r in (running, old, middle, high))


def test_of_its_own_class_and_of_what_runs_nobody_is_evicted() -> None:
    driver = CoreDriver(batch=1, policy="inflight:2+priority")
    driver.add(priority=1)
    driver.step()
    driver.add(priority=0)
    with pytest.raises(SchedulerManagerOverloadedError) as caught:
        driver.add(priority=0)
    assert (caught.value.reason, caught.value.stage) == ("inflight", "submit")
    driver.steps()
    assert not drops(driver)


def test_as_many_go_as_the_tokens_need_and_none_where_all_would_not_do() -> None:
    driver = CoreDriver(batch=1, policy="tokens:100+priority")
    driver.add(16, 4, priority=0)
    driver.step()
    low = [driver.add(16, 4, priority=1) for _ in range(4)]
    with pytest.raises(SchedulerManagerOverloadedError):
        driver.add(90, 5, priority=0)
    assert not any(request.ticket.is_evicted for request in low)
    driver.add(50, 5, priority=0)
    assert [request.ticket.is_evicted for request in low] == [False, True, True, True]
    assert driver.core.admission.counts().held_tokens == 20 + 20 + 55


def test_one_that_is_evicted_before_the_core_has_it_never_runs() -> None:
    driver = CoreDriver(batch=1, policy="inflight:1+priority")
    admission = driver.core.admission
    ticket = admission.reserve(0.0, 8, prompt_tokens=4, priority=1)
    driver.add(priority=0)  # takes its slot
    late = Request(99, driver.requests[0].params, ticket, 0, range(4), 0.0, 1)
    driver.took(driver.core.submit(late))
    driver.steps()
    assert drops(driver) == [(99, "evicted", 1, 0)]
    assert admission.inflight == 1


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.floats(0.0, 3.0)), max_size=60),
    st.integers(1, 6),
)
def test_nobody_starves_and_no_limit_is_passed(arrivals: list[tuple[int, int, float]], limit: int) -> None:
    """A request is passed by those only that came less than the ageing, per class between them, after it."""
    age_s = 2.0
    driver = CoreDriver(batch=1, policy=f"inflight:{limit}+priority:age=2s")
    came_s: dict[int, float] = {}
    served: list[Request] = []
    for priority, n_steps, pause_s in arrivals:
        try:
            request = driver.add(2, n_steps, priority=priority, ignore_eos=True)
            came_s[request.request_id] = driver.now
        except SchedulerManagerOverloadedError:
            assert driver.core.admission.inflight == limit
        for _ in range(n_steps):
            plan = driver.plan()
            if plan is not None:
                served += [span.request for span in plan.spans if span.start == 0]
                driver.commit(plan)
        for ended in list(driver.core._unread):
            driver.core.acknowledge(ended, driver.now)
        driver.now += pause_s
        assert driver.core.admission.counts().peak_inflight <= limit
    while plan := driver.plan():
        served += [span.request for span in plan.spans if span.start == 0]
        driver.commit(plan)
    for first, second in itertools.combinations(served, 2):
        passed_s = came_s[first.request_id] - came_s[second.request_id]
        assert passed_s <= age_s * max(0, second.priority - first.priority)
    ends = {event.request_id: event for event in driver.events if event.finish_reason is not None}
    assert ends.keys() == came_s.keys()


def test_evicted_ones_that_nobody_reads_are_not_looked_through_at_every_end() -> None:
    driver = CoreDriver(batch=1, policy="inflight:2+priority")
    driver.add(max_new_tokens=1000, ignore_eos=True)
    filtered = 0
    for low in range(400):
        driver.add(priority=500 - low)  # each takes the place of the one before
        before = driver.core._unread
        driver.step()
        filtered += driver.core._unread is not before
    assert len(drops(driver)) == len(driver.core._unread) == 399
    assert filtered <= 6  # each time that they have become twice as many


@pytest.mark.parametrize("scheduling", ["lifo", "", "FCFS"])
def test_an_order_that_there_is_not_is_named(scheduling: str) -> None:
    with pytest.raises(InputError, match="scheduling"):
        CoreDriver(scheduling=scheduling)
