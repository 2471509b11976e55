"""The prefix cache beside the policies of those who wait: what is cached is nobody's work, and each finds its own."""

from __future__ import annotations

import pytest

from roseinfer.sim.cost_model import CostModel, StepCost
from tests.scripted import CoreDriver
from tests.test_prefix_cache import PROMPT, a_driver, serve

TENTH_A_TOKEN = CostModel("a tenth of a second a prompt token", StepCost(0.0, 0.1, 0.0, 0.0, 0.0))


def dropped(driver: CoreDriver) -> list[int]:
    return [event.request_id for event in driver.events if event.error is not None]


def test_the_newest_does_not_get_what_was_found_for_the_oldest() -> None:  # case B5
    """A step a second. At 6 s an interval ends and shows the overload: the newest goes first, the oldest stays."""
    driver = a_driver(batch=1, budget=200, policy="codel:target=500ms:interval=2500ms:newest-first")
    for n in range(7):
        driver.add([*PROMPT, n], 1)
    newest = driver.add([1] * 20, 1)
    for _ in range(6):
        driver.step()
    assert driver.step() == [(newest.request_id, 0, 20)]
    assert newest.cached_tokens == 0


def test_the_newest_gets_what_is_its_own() -> None:
    driver = a_driver(batch=1, budget=200, policy="codel:target=500ms:interval=2500ms:newest-first")
    for n in range(7):
        driver.add([n] * 20, 1)
    newest = driver.add([*[0] * 20, 1], 1)
    for _ in range(6):
        driver.step()
    assert driver.step() == [(newest.request_id, 16, 5)]


def test_a_deadline_counts_what_is_left_to_compute() -> None:
    """80 tokens take 8 s, the 16 that the cache has not got 1.6 s."""
    driver = a_driver(batch=1, budget=200, cost_model=TENTH_A_TOKEN)
    serve(driver, [*PROMPT, 1])  # to 1 s
    driver.add(1, 4)  # to 5 s
    late = driver.add([*PROMPT, *range(16)], 1, deadline_s=7.0)
    driver.steps()
    assert late.first_scheduled_s == 5.0
    assert dropped(driver) == []


@pytest.mark.parametrize(("deadline_s", "gets_in"), [(9.0, True), (5.0, False)])
def test_a_deadline_counts_what_the_cache_has_learned_meanwhile(deadline_s: float, gets_in: bool) -> None:
    driver = a_driver(batch=1, budget=200, cost_model=TENTH_A_TOKEN)
    driver.add([*PROMPT, 1], 4)  # known from 1 s on, leaves its seat at 4 s
    late = driver.add([*PROMPT, *range(16)], 1, deadline_s=deadline_s)
    driver.steps()
    assert len(late.output_ids) == gets_in
    assert dropped(driver) == ([] if gets_in else [late.request_id])


def test_what_is_cached_is_left_to_nobody_and_no_step_of_its_own() -> None:
    driver = a_driver(batch=2, budget=200, policy="slo:ttft=1000s", cost_model=TENTH_A_TOKEN)
    serve(driver, [*PROMPT, 1])
    driver.add([*PROMPT, 2], 3)
    admission = driver.core.admission
    left_tokens = admission.counts().backlog_tokens
    assert driver.plan() is not None
    assert admission.forecast is not None
    backlog = admission.forecast.backlog
    assert (backlog.prefill_tokens, backlog.half_tokens, backlog.pairs) == (1, 1, 65)
    assert backlog.came_tokens == 65  # the step that they came in is not over
    assert left_tokens - admission.counts().backlog_tokens == 64
