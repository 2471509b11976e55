from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.errors import InputError, InvariantError
from roseinfer.executor import KV_BLOCK_TOKENS, StepPlan
from roseinfer.kv_cache import blocks_for
from roseinfer.request import Request
from roseinfer.scheduler import SchedulerLimits
from roseinfer.waiting import STALE_SLACK
from tests.scripted import CoreDriver


def ids(spans: list[tuple[int, int, int]]) -> list[int]:
    return [request_id for request_id, _, _ in spans]


# ---- limits ----


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("max_batch_size", "max_active_requests", "max_num_batched_tokens")
        for value in (0, -1, 1.5, "8", True)
    ],
)
def test_sizes_are_whole_numbers_from_one(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        SchedulerLimits(8, None, 64)._replace(**{name: value}).check()
    assert caught.value.name == name


def test_a_full_batch_of_decodes_must_leave_a_token_for_a_prefill() -> None:
    with pytest.raises(InputError, match="must exceed max_batch_size"):
        SchedulerLimits(8, None, 8).check()
    SchedulerLimits(8, None, 9).check()


@pytest.mark.parametrize(("batch", "active", "seats"), [(8, None, 8), (8, 3, 3), (8, 100, 8)])
def test_seats_are_the_smaller_bound(batch: int, active: int | None, seats: int) -> None:
    assert SchedulerLimits(batch, active, 128).seats == seats


# ---- what goes into a step ----


def test_decodes_come_first_then_the_half_prefilled_then_newcomers() -> None:
    driver = CoreDriver(budget=10)
    driver.add(4)
    driver.step()
    driver.add(12)
    assert driver.step() == [(0, 4, 1), (1, 0, 9)]
    driver.add(30)
    assert driver.step() == [(0, 5, 1), (1, 9, 3), (2, 0, 6)]
    assert driver.step() == [(0, 6, 1), (1, 12, 1), (2, 6, 8)]


def test_a_long_prompt_leaves_every_decode_in_every_step() -> None:  # case B26, the policy's part
    driver = CoreDriver(budget=16, batch=8)
    for _ in range(7):
        driver.add(1, 50)
    driver.step()
    driver.add(100, 1)
    for _ in range(12):
        spans = driver.step()
        assert ids(spans)[:7] == list(range(7))
        assert sum(n for _, _, n in spans) <= 16


def test_only_one_request_is_half_prefilled() -> None:
    driver = CoreDriver(budget=10)
    for _ in range(3):
        driver.add(25, 2)
    assert driver.step() == [(0, 0, 10)]
    assert driver.step() == [(0, 10, 10)]
    assert driver.step() == [(0, 20, 5), (1, 0, 5)]
    assert driver.step() == [(0, 25, 1), (1, 5, 9)]


def test_prompts_go_first_come_first_served() -> None:
    driver = CoreDriver(batch=8, budget=9)
    for n in (3, 1, 2, 4):
        driver.add(n, 1)
    assert [spans[:2] for spans in driver.steps()] == [[(0, 0, 3), (1, 0, 1)], [(3, 3, 1)]]


def test_a_request_being_tokenised_is_passed_over_and_keeps_its_place() -> None:
    driver = CoreDriver(batch=1)
    text = driver.add(text=True)
    driver.add(4, 1)
    driver.add(4, 1)
    assert ids(driver.step()) == [1]
    driver.tokenized(text, 4)
    assert ids(driver.step()) == [0]


def test_a_request_runs_only_with_a_span() -> None:
    driver = CoreDriver(batch=4, budget=8)
    for _ in range(4):
        driver.add(8)
    driver.plan()
    assert driver.core.scheduler.running.keys() == {0}


def test_prefill_fills_what_decodes_leave_of_the_budget_to_the_last_token() -> None:
    driver = CoreDriver(batch=4, budget=5)
    for _ in range(3):
        driver.add(1, 8)
    driver.step()
    driver.add(100, 1)
    assert driver.step() == [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 0, 2)]


# ---- what bounds it ----


def test_never_more_are_active_than_the_cap_whatever_waits() -> None:  # case A13
    driver = CoreDriver(batch=32, active=8, budget=1024)
    for _ in range(200):
        driver.add(10, 3)
    scheduler = driver.core.scheduler
    most = 0
    while driver.step():
        most = max(most, len(scheduler.running))
        assert scheduler.kv_cache.used_tokens <= 8 * KV_BLOCK_TOKENS  # 13 tokens are one block
    assert most == 8


def test_kv_for_prompt_and_output_is_reserved_at_once_so_nobody_is_preempted() -> None:
    driver = CoreDriver(kv_tokens=64)
    driver.add(17, 31)  # 48 tokens, 3 of 4 blocks
    driver.add(16, 1)  # 2 blocks: waits, though one is free
    assert driver.step() == [(0, 0, 17)]
    assert driver.core.scheduler.kv_cache.used_tokens == 48
    later = driver.steps()
    assert all(ids(spans) == [0] for spans in later[:30])
    assert [ids(spans) for spans in later[30:]] == [[1]]


def test_the_head_of_the_line_blocks_those_behind_it() -> None:
    driver = CoreDriver(kv_tokens=64)
    driver.add(16, 16)
    driver.add(40, 8)  # too big for what is left
    driver.add(1, 1)  # would fit
    assert ids(driver.step()) == [0]
    assert ids(driver.step()) == [0]


def test_an_idle_engine_can_always_admit_the_head_of_its_queue() -> None:  # case A16
    driver = CoreDriver(kv_tokens=64, max_model_len=64, batch=1, budget=2)
    for _ in range(3):
        driver.add(63, 1)  # the largest that fits at all
    assert sum(n for spans in driver.steps() for _, _, n in spans) == 3 * 63


def test_an_idle_engine_that_cannot_admit_its_head_is_an_error_not_a_hang() -> None:  # case A16
    driver = CoreDriver(kv_tokens=64)
    driver.add(60, 4)
    driver.core.scheduler.kv_cache.allocate(99, 1)  # a leak
    with pytest.raises(InvariantError, match="cannot admit"):
        driver.core.plan(0.0)


def test_a_waiting_request_whose_slot_is_gone_is_an_error() -> None:
    driver = CoreDriver()
    driver.core.admission.release(driver.add().ticket, 0.0)
    with pytest.raises(InvariantError, match="without a slot"):
        driver.core.plan(0.0)


def test_first_scheduled_is_the_time_of_the_plan() -> None:
    driver = CoreDriver(batch=1)
    first, second = driver.add(4, 2), driver.add(4, 1)
    driver.steps()
    assert (first.first_scheduled_s, second.first_scheduled_s) == (0.0, 2.0)


def test_cancelled_requests_do_not_pile_up_behind_a_blocked_head() -> None:  # case A23
    driver = CoreDriver(batch=1)
    driver.add(4, 100)
    driver.step()
    driver.add()
    for _ in range(500):
        driver.abort(driver.add())
    assert len(driver.core.scheduler._ready.ids()) <= 2 + STALE_SLACK + 1


def test_cancelling_many_leaves_the_others_in_their_order() -> None:
    driver, rng = CoreDriver(batch=1), random.Random(0)
    texts = [driver.add(max_new_tokens=1, text=True) for _ in range(60)]
    for text in rng.sample(texts, 60):
        driver.tokenized(text, 4)
    gone = rng.sample(range(60), 45)
    for i in gone:
        driver.abort(texts[i])
    assert [spans[0][0] for spans in driver.steps()] == sorted(set(range(60)) - set(gone))


# ---- any order of anything ----


class Watcher:
    """States the policy once more, from the outside, and holds each plan against it."""

    def __init__(self, driver: CoreDriver) -> None:
        self.driver = driver
        self.computed: dict[int, int] = {}  # tokens of each request that steps were given so far

    def check(self, plan: StepPlan | None, ready: list[Request], running: list[Request]) -> None:
        """`ready` and `running` are of the moment before the plan, `ready` in order of arrival."""
        scheduler = self.driver.core.scheduler
        spans = [] if plan is None else plan.spans
        limits = scheduler.limits
        left = limits.max_num_batched_tokens - sum(span.n_tokens for span in spans)
        assert left >= 0
        assert len({span.request.request_id for span in spans}) == len(spans)
        decoding = [r for r in running if self.computed[r.request_id] >= r.prompt_len]
        assert [span.request for span in spans[: len(decoding)]] == decoding
        assert all(span.n_tokens == 1 for span in spans[: len(decoding)])
        for span in spans:
            start = self.computed.get(span.request.request_id, 0)
            assert (span.start, span.n_tokens > 0) == (start, True)
            self.computed[span.request.request_id] = start + span.n_tokens
            assert span.samples == (start + span.n_tokens >= span.request.prompt_len)
        half = [r for r in running if r not in decoding]
        new = [r for r in scheduler.running.values() if r not in running]
        assert [span.request for span in spans[len(decoding) :]] == half + new
        assert new == ready[: len(new)]
        unfinished = [r for r in half + new if self.computed[r.request_id] < r.prompt_len]
        assert len(unfinished) <= 1
        blocks = sum(blocks_for(r.max_len) for r in scheduler.running.values())
        assert scheduler.kv_cache.used_tokens == blocks * KV_BLOCK_TOKENS
        if not unfinished and left and len(ready) > len(new):  # somebody waits although there is budget
            free = scheduler.kv_cache.num_blocks - blocks
            seats_taken = len(scheduler.running) == limits.seats
            assert seats_taken or blocks_for(ready[len(new)].max_len) > free


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 6)),
        st.tuples(st.just("add text"), st.integers(1, 40), st.integers(1, 6)),
        st.tuples(st.just("tokenized"), st.integers(0, 9), st.integers(1, 40)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("step"), st.integers(0, 3), st.just(0)),
    ),
    max_size=50,
)


@given(
    events,
    st.integers(1, 4),
    st.sampled_from([None, 1, 2]),
    st.integers(5, 30),
    st.sampled_from([48, 96, 1024]),
)
def test_every_plan_follows_the_policy(
    script: list[tuple[str, int, int]], batch: int, active: int | None, budget: int, kv_tokens: int
) -> None:  # cases A13, A16, B3, B9
    driver = CoreDriver(batch=batch, active=active, budget=budget, kv_tokens=kv_tokens)
    watcher = Watcher(driver)
    scheduler = driver.core.scheduler
    untokenised: list[Request] = []

    def step(token: int) -> bool:
        waiting = scheduler.waiting.values()
        ready = sorted((r for r in waiting if r.prompt_ids is not None), key=lambda r: r.arrival)
        running = list(scheduler.running.values())
        plan = driver.plan()
        watcher.check(plan, ready, running)
        if plan is not None:
            driver.commit(plan, lambda span: (span.request.request_id + token) % 4)  # now and then EOS
        return plan is not None

    for what, a, b in script:
        match what:
            case "add":
                driver.add(a, b)
            case "add text":
                untokenised.append(driver.add(a, b, text=True))
            case "tokenized" if untokenised:
                driver.tokenized(untokenised.pop(a % len(untokenised)), b)
            case "abort" if driver.requests:
                driver.abort(driver.requests[a % len(driver.requests)])
            case "step":
                step(a)
    for request in untokenised:
        driver.tokenized(request, 3)
    while step(1):
        pass
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler._ready.head() is None
    assert scheduler.kv_cache.used_tokens == 0
    ends = [event.request_id for event in driver.events if event.finish_reason is not None]
    assert sorted(ends) == list(range(len(driver.requests)))  # one terminal event each
