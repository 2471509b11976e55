from __future__ import annotations

from collections.abc import Callable

import pytest

from roseinfer.executor import StepPlan
from roseinfer.sim.saturation import burst_of, saturated_rate
from roseinfer.sim.virtual import SimLimits


def one_second(plan: StepPlan) -> float:
    return 1.0


def a_second_a_token(plan: StepPlan) -> float:
    return float(sum(span.n_tokens for span in plan.spans))


def of_fixed(
    limits: SimLimits,
    step_seconds: Callable[[StepPlan], float] = one_second,
    *,
    prompt: int = 8,
    output: int = 3,
) -> float:
    n = burst_of(limits)
    return saturated_rate([prompt] * n, [output] * n, limits, step_seconds)


def test_one_at_a_time_it_is_one_over_the_time_that_a_request_takes() -> None:
    assert of_fixed(SimLimits(max_batch_size=1)) == pytest.approx(1 / 3)
    assert of_fixed(SimLimits(max_batch_size=1), a_second_a_token) == pytest.approx(1 / (8 + 2))


def test_a_batch_shares_its_steps() -> None:
    assert of_fixed(SimLimits(max_batch_size=4)) == pytest.approx(4 / 3)


def test_a_token_budget_that_binds_is_what_the_rate_follows_from() -> None:
    limits = SimLimits(max_batch_size=4, max_num_batched_tokens=8)
    # A prompt of 8 takes a step of its own, unless decodes are in it: 8 + 2 tokens a request, 8 a step at most.
    assert of_fixed(limits) == pytest.approx(0.8, rel=0.03)


def test_so_is_what_may_run_at_a_time() -> None:
    assert of_fixed(SimLimits(max_batch_size=4, max_active_requests=2)) == pytest.approx(2 / 3)


def test_so_is_the_cache() -> None:
    one_at_a_time = SimLimits(max_batch_size=4, kv_cache_tokens=16)
    assert of_fixed(one_at_a_time, prompt=13) == pytest.approx(1 / 3)


def test_admission_has_no_part_in_it() -> None:
    limited = SimLimits(max_inflight_requests=1, max_batch_size=4)
    assert of_fixed(limited) == of_fixed(SimLimits(max_batch_size=4))


def test_a_larger_burst_says_the_same() -> None:
    limits = SimLimits(max_batch_size=3, max_num_batched_tokens=20)
    prompts, outputs = [5, 9, 14, 3, 7, 11, 2], [3, 1, 4, 1, 5, 9, 2]
    small, large = (saturated_rate(prompts * n, outputs * n, limits, a_second_a_token) for n in (20, 80))
    assert small == pytest.approx(large, rel=0.02)


def test_a_burst_that_fits_into_one_batch_is_taken_as_a_whole() -> None:
    assert saturated_rate([8, 8], [3, 3], SimLimits(max_batch_size=4), one_second) == pytest.approx(2 / 3)
