"""The prefix cache behind a core: what is found, when, and that no step writes what another request reads."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.executor import KV_BLOCK_TOKENS, StepPlan, step_token_ids
from roseinfer.request import Request
from tests.scripted import CoreDriver

PROMPT = list(range(100, 164))  # four blocks
LATE = -1
layouts = pytest.mark.parametrize("shares_blocks", [True, False], ids=["shared", "copied"])


class Memory:
    """Slots that hold token ids in place of keys: computes steps, and checks what their requests would attend to."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def compute(self, plan: StepPlan, tables: list[list[int]]) -> None:
        """All spans write before any of them reads, as the layers of a model do. `tables` are those of its launch."""
        sources = [[self.slots[slot] for slot in slots_of(source)] for source, _ in plan.copies]
        for held, (_, target) in zip(sources, plan.copies, strict=True):
            self.slots.update(zip(slots_of(target), held, strict=True))
        written: set[int] = set()
        for span, table in zip(plan.spans, tables, strict=True):
            # A late token of one that ended or was aborted is not known, and its keys are nobody's.
            ids = [*step_token_ids(span), LATE][: span.n_tokens]
            for position, token_id in enumerate(ids, start=span.start):
                slot = slot_at(table, position)
                assert slot not in written, "two requests write to one slot"
                written.add(slot)
                self.slots[slot] = token_id
        for (request, start, n_tokens, _), table in zip(plan.spans, tables, strict=True):
            if request.finish_reason is None and not request.aborted:
                held = [self.slots[slot_at(table, position)] for position in range(start + n_tokens)]
                assert held == list(request.known_ids(0, start + n_tokens))


def slots_of(block: int) -> range:
    return range(block * KV_BLOCK_TOKENS, (block + 1) * KV_BLOCK_TOKENS)


def slot_at(table: list[int], position: int) -> int:
    return slots_of(table[position // KV_BLOCK_TOKENS])[position % KV_BLOCK_TOKENS]


def check_writes(driver: CoreDriver, plan: StepPlan) -> None:
    """No step writes to a block that is shared, or that another request may find."""
    kv_cache = driver.core.scheduler.kv_cache
    for request, start, n_tokens, _ in plan.spans:
        for place in range(start // KV_BLOCK_TOKENS, -(-(start + n_tokens) // KV_BLOCK_TOKENS)):
            block = request.block_table[place]
            assert kv_cache._users[block] == 1
            assert block not in (kv_cache._prefixes or ())


def a_driver(*, shares_blocks: bool = True, **sizes: Any) -> CoreDriver:
    return CoreDriver(prefix_cache=True, shares_blocks=shares_blocks, **sizes)


def serve(driver: CoreDriver, prompt: list[int], max_new_tokens: int = 1) -> Request:
    request = driver.add(prompt, max_new_tokens)
    driver.steps()
    return request


@layouts
def test_a_second_request_computes_what_the_first_did_not(shares_blocks: bool) -> None:
    driver = a_driver(shares_blocks=shares_blocks)
    first = serve(driver, PROMPT)
    second = driver.add([*PROMPT[:40], 1, 2, 3], 1)
    assert driver.step() == [(1, 32, 11)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)


@layouts
@pytest.mark.parametrize("n_blocks", [1, 2, 4])
def test_of_a_prompt_of_exactly_k_cached_blocks_the_last_is_computed(
    n_blocks: int, shares_blocks: bool
) -> None:  # case B1
    driver = a_driver(shares_blocks=shares_blocks)
    prompt = PROMPT[: n_blocks * 16]
    serve(driver, prompt)
    again = driver.add(prompt, 1)
    assert driver.step() == [(1, len(prompt) - 16, 16)]
    assert again.cached_tokens == len(prompt) - 16
    assert len(again.output_ids) == 1


@layouts
def test_two_equal_prompts_in_one_step_both_compute(shares_blocks: bool) -> None:  # case B4
    driver = a_driver(shares_blocks=shares_blocks, budget=200)
    for _ in range(2):
        driver.add([*PROMPT, 1], 2)
    assert driver.step() == [(0, 0, 65), (1, 0, 65)]
    driver.add([*PROMPT, 1], 2)
    assert driver.step() == [(0, 65, 1), (1, 65, 1), (2, 64, 1)]


@layouts
def test_an_equal_prompt_beside_a_half_prefilled_one_finds_what_is_done(
    shares_blocks: bool,
) -> None:  # case B4
    driver = a_driver(shares_blocks=shares_blocks, budget=40)
    for _ in range(2):
        driver.add([*PROMPT, 1], 1)
    assert driver.step() == [(0, 0, 40)]
    assert driver.step() == [(0, 40, 25), (1, 32, 15)]


def test_nothing_is_found_before_its_step_is_committed() -> None:
    driver = a_driver(budget=65)
    driver.add([*PROMPT, 1], 1)
    running = driver.plan()
    driver.add([*PROMPT, 2], 1)
    meanwhile = driver.plan()
    assert running is not None
    assert meanwhile is not None
    assert driver.requests[1].cached_tokens == 0
    driver.commit(running)
    driver.commit(meanwhile)
    driver.add([*PROMPT, 3], 1)
    assert driver.step() == [(2, 64, 1)]


def test_one_that_is_aborted_while_it_is_computed_leaves_nothing_behind() -> None:
    driver = a_driver(budget=65)
    request = driver.add([*PROMPT, 1], 1)
    plan = driver.plan()
    assert plan is not None
    driver.abort(request)
    driver.commit(plan)
    kv_cache = driver.core.scheduler.kv_cache
    assert kv_cache.find_prefix([*PROMPT, 2]) == []
    assert kv_cache._num_free == kv_cache.num_blocks


def test_blocks_that_were_published_before_an_abort_stay() -> None:
    driver = a_driver(budget=40)
    request = driver.add([*PROMPT, 1], 1)
    driver.step()
    driver.abort(request)
    assert serve(driver, [*PROMPT, 1]).cached_tokens == 32


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    driver = a_driver(budget=65)
    driver.add([*PROMPT, 1], 1)
    driver.plan()
    driver.took(driver.core.fail_step(RuntimeError("x"), driver.now))
    assert serve(driver, [*PROMPT, 2]).cached_tokens == 0


@layouts
def test_an_answer_is_found_by_the_next_turn_of_its_chat(shares_blocks: bool) -> None:
    driver = a_driver(shares_blocks=shares_blocks)
    first = serve(driver, PROMPT[:20], 30)
    turn = [*PROMPT[:20], *first.output_ids, 7, 8, 9]
    # The last token was sampled and never computed on: 49 tokens have keys.
    assert serve(driver, turn).cached_tokens == 48


def test_a_shared_prefix_takes_its_memory_once() -> None:
    driver = a_driver(kv_tokens=16 * 10, batch=8, budget=100)
    driver.add([*PROMPT, 1], 8)
    driver.step()
    for n in range(5):
        driver.add([*PROMPT, n], 8)
    assert len(driver.step()) == 6  # 4 blocks together, and one each
    assert driver.core.scheduler.kv_cache.used_tokens == 9 * 16 + 16


def test_a_head_that_does_not_fit_leaves_the_cache_as_it_is() -> None:
    driver = a_driver(kv_tokens=16 * 8, max_model_len=128)
    serve(driver, [*PROMPT, 1])
    driver.add([1] * 60, 20)
    driver.step()
    driver.add([*PROMPT, 2], 20)
    assert [request_id for request_id, _, _ in driver.step()] == [1]
    assert driver.requests[2].cached_tokens is None


def test_each_core_has_a_cache_of_its_own() -> None:
    serve(a_driver(), [*PROMPT, 1])
    assert serve(a_driver(), [*PROMPT, 1]).cached_tokens == 0


def test_steps_count_what_was_cached_once() -> None:
    driver = a_driver(budget=10)
    serve(driver, [*PROMPT, 1])
    driver.add([*PROMPT[:32], *range(15)], 3)
    plans = []
    while (plan := driver.plan()) is not None:
        plans.append(plan.composition())
        driver.commit(plan)
    assert [plan.cached_tokens for plan in plans] == [32, 0, 0, 0]
    assert sum(plan.prefill_tokens for plan in plans) == 15


kinds = st.lists(st.integers(0, 1), min_size=1, max_size=4)
scripts = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 20), kinds),
        st.tuples(
            st.sampled_from(["abort", "step", "step", "launch", "commit", "raise"]), st.integers(0, 20), kinds
        ),
    ),
    max_size=40,
)


policies = st.sampled_from(
    [
        (None, "fcfs"),
        ("codel:target=500ms:interval=1500ms:newest-first", "fcfs"),
        ("inflight:6+priority:age=2s", "fcfs"),
        ("queue-timeout:3s", "spf"),
    ]
)


@layouts
@given(scripts, st.integers(1, 4), st.integers(5, 60), st.sampled_from([7, 12, 40]), policies)
def test_every_request_reads_its_own_tokens_whatever_happens(
    shares_blocks: bool,
    script: list[tuple[str, int, list[int]]],
    batch: int,
    budget: int,
    num_blocks: int,
    policy: tuple[str | None, str],
) -> None:  # cases B1, B2, B3, B4, B5, B6, B24
    """Prompts of few kinds of blocks, over memory that is soon short, with up to two steps outstanding."""
    driver = a_driver(
        shares_blocks=shares_blocks,
        batch=batch,
        budget=max(budget, batch + 1),
        kv_tokens=16 * num_blocks,
        policy=policy[0],
        scheduling=policy[1],
    )
    memory = Memory()
    launched: list[tuple[StepPlan, list[list[int]]]] = []

    def launch() -> bool:
        plan = driver.plan()
        if plan is None:
            return False
        check_writes(driver, plan)
        launched.append((plan, [list(span.request.block_table) for span in plan.spans]))
        return True

    def commit() -> None:
        plan, tables = launched.pop(0)
        memory.compute(plan, tables)
        driver.commit(plan, lambda span: (span.request.request_id + len(span.request.output_ids)) % 5)

    for what, n, prompt in script:
        match what:
            case "add" if len(prompt) * 16 + n + 1 + 20 <= 16 * num_blocks:
                ids = [5 + kind for kind in prompt for _ in range(16)] + [9] * n + [8]
                with suppress(SchedulerManagerOverloadedError):
                    driver.add(ids, 1 + n, priority=n % 3)
            case "abort" if driver.requests:
                driver.abort(driver.requests[n % len(driver.requests)])
            case "launch" if len(launched) < 2:
                launch()
            case "commit" if launched:
                commit()
            case "step" if not launched and launch():
                commit()
            case "raise" if launched:
                launched.clear()
                driver.took(driver.core.fail_step(RuntimeError("x"), driver.now))
    while launched or launch():
        commit()
    kv_cache = driver.core.scheduler.kv_cache
    assert kv_cache.used_tokens == 0
    assert kv_cache._num_free + len(kv_cache._run_of) == num_blocks
