"""The forecast of a newcomer's TTFT: by hand, against the simulator, and what holds for every history."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.backlog import Backlog
from roseinfer.forecast import LARGEST_CORRECTION, OBSERVED, Forecast, Work
from roseinfer.kv_cache import blocks_for
from roseinfer.request import Request
from roseinfer.sim.cost_model import BetweenStepsCost, CostModel, StepCost
from roseinfer.sim.virtual import Arrival, SimLimits, SimRun, simulate

SECOND_A_STEP = StepCost(1.0, 0.0, 0.0, 0.0, 0.0)
EVERYTHING_COSTS = StepCost(1.0, 0.01, 1e-5, 0.1, 1e-4)
CPU = CostModel("cpu", StepCost(0.06, 1.6e-3, 0.0, 2.9e-3, 2e-5), BetweenStepsCost(3e-4))
GPU = CostModel("gpu", StepCost(0.03, 6e-5, 1e-8, 1.3e-4, 3.5e-7), BetweenStepsCost(1e-4, 1e-6))

KV_TOKENS = 32 * 1024
"""Enough for 32 requests, and soon checked."""


def forecast_of(
    step: StepCost, seats: int = 2, max_num_batched_tokens: int = 10, kv_blocks: int = 1 << 16
) -> Forecast:
    return Forecast(step, BetweenStepsCost(), seats, max_num_batched_tokens, kv_blocks)


def sums(backlog: Backlog) -> dict[str, float]:
    """All that it counts of what is in flight."""
    counted = {name: value for name, value in vars(backlog).items() if not name.startswith("_")}
    del counted["came_tokens"], counted["inflow_tokens"]
    return counted


# ---- by hand ----


@pytest.mark.parametrize(("prompt_tokens", "steps"), [(1, 1), (10, 1), (11, 2), (30, 3)])
def test_alone_a_prompt_takes_as_many_steps_as_chunks(prompt_tokens: int, steps: int) -> None:
    forecast = forecast_of(SECOND_A_STEP)
    assert forecast.prefill_s(prompt_tokens) == forecast.ttft_s(prompt_tokens) == steps


def test_alone_a_prompt_takes_what_the_cost_model_says() -> None:
    forecast = Forecast(GPU.step, GPU.between_steps, 8, 512, 1 << 16)
    run = simulate([Arrival(0.0, 1200, 1)], SimLimits(), GPU.costs(0, as_text=False))
    assert isinstance(run.sent[0].fate, Request)
    assert forecast.prefill_s(1200) == pytest.approx(run.sent[0].fate.first_token_s)


def test_short_prompts_share_steps() -> None:
    forecast = forecast_of(SECOND_A_STEP, seats=9)
    predicted_s = []
    for _ in range(8):
        predicted_s.append(forecast.ttft_s(3))
        forecast.enter(3, 1)
    assert predicted_s == [1, 1, 1, 2, 2, 2, 3, 3]


def test_a_newcomer_waits_for_half_of_the_step_that_runs() -> None:
    forecast = forecast_of(SECOND_A_STEP)
    forecast.start(forecast.enter(5, 4))
    assert forecast.ttft_s(5) == 1.5


def test_what_is_left_of_the_step_that_runs_counts_where_its_beginning_is_known() -> None:
    forecast = forecast_of(SECOND_A_STEP)
    forecast.start(forecast.enter(5, 4))
    assert [forecast.ttft_s(5, into_step_s) for into_step_s in (0.0, 0.75, 1.0, 9.0)] == [2.0, 1.25, 1.0, 1.0]


def test_while_seats_are_free_only_prefill_counts_and_what_rides_on_its_steps() -> None:
    forecast = forecast_of(StepCost(0.0, 1.0, 0.0, 0.5, 0.0), seats=4)
    work = forecast.enter(5, 4)
    forecast.start(work)
    forecast.advance(work, 5)
    # Half of its first decode, then a step of the newcomer's 6 tokens and its second decode.
    forecast.backlog.inflow_tokens = forecast.backlog.came_tokens = 0
    assert forecast.ttft_s(6) == pytest.approx(0.25 + 6 + 0.5)


def test_where_seats_are_full_decodes_have_to_end_first() -> None:
    forecast = forecast_of(SECOND_A_STEP, seats=1)
    work = forecast.enter(5, 4)
    forecast.start(work)
    assert forecast.ttft_s(5) == 0.5 + 3 + 1
    forecast.advance(work, 5)
    assert forecast.ttft_s(5) == 0.5 + 2 + 1
    forecast.advance(work, 1)
    forecast.enter(5, 4)
    assert forecast.ttft_s(5) == 0.5 + 1 + 4 + 1


@pytest.mark.parametrize(("kv_blocks", "expected_s"), [(1, 0.5 + 3 + 1), (2, 0.5 + 1)])
def test_a_cache_that_holds_fewer_than_the_seats_bounds_what_runs(kv_blocks: int, expected_s: float) -> None:
    forecast = forecast_of(SECOND_A_STEP, seats=4, kv_blocks=kv_blocks)
    forecast.start(forecast.enter(5, 4))  # a block
    assert forecast.ttft_s(5) == expected_s


def test_a_text_counts_with_its_bound_until_its_tokens_are_known() -> None:
    forecast = forecast_of(SECOND_A_STEP, seats=9)
    work = forecast.enter(40, 1)
    assert forecast.ttft_s(5) == 5
    forecast.revise(work, 5)
    assert forecast.ttft_s(5) == 1
    forecast.leave(work)
    forecast.revise(work, 99)
    assert forecast.ttft_s(5) == 1


def test_what_is_left_of_one_request() -> None:
    forecast = forecast_of(EVERYTHING_COSTS)
    work = forecast.enter(4, 3)
    # Its tokens attend to 1 + 2 + 3 + 4, its two decodes to 5 + 6.
    assert (work.prefill_tokens, work.pairs) == (4, 10)
    assert (work.decodes, work.context_tokens) == (2, 11)
    forecast.start(work)
    forecast.advance(work, 3)
    assert (work.prefill_tokens, work.pairs) == (1, 4)
    forecast.advance(work, 1)
    forecast.advance(work, 1)
    assert (work.prefill_tokens, work.pairs) == (0, 0)
    assert (work.decodes, work.context_tokens) == (1, 6)


# ---- against the simulator ----


def predictions(run: SimRun, forecast: Forecast, *, knows_steps: bool) -> list[tuple[float, float]]:
    """Predicted and actual TTFT of every request, had the forecast been told of the run as it happened.

    `knows_steps`: and of when the step that runs began.
    """
    events: list[tuple[float, int, int]] = [(sent.sent_s, 0, sent.index) for sent in run.sent]
    for number, step in enumerate(run.steps):
        events += [(step.result.exec_end_s, 1, number), (step.plan_start_s, 2, number)]
    works: dict[int, Work] = {}
    found, began_s = [], 0.0
    for now, kind, index in sorted(events):
        if kind == 0:
            sent = run.sent[index]
            request = sent.fate
            assert isinstance(request, Request)
            assert request.first_token_s is not None
            into_step_s = now - began_s if knows_steps else None
            found.append((forecast.ttft_s(sent.prompt_tokens, into_step_s), request.first_token_s - now))
            works[index] = forecast.enter(sent.prompt_tokens, request.params.max_new_tokens)
            continue
        if kind == 2:
            began_s = now
        for request, start, n_tokens, _ in run.steps[index].plan.spans:
            work = works[request.request_id]
            if kind == 1:
                forecast.advance(work, n_tokens)
                if request.finished_s == now:
                    forecast.leave(work)
            elif start == 0:
                forecast.start(work)
    return found


def errors(
    model: CostModel,
    seats: int,
    arrivals: list[Arrival],
    *,
    knows_steps: bool = True,
    kv_tokens: int = KV_TOKENS,
) -> list[float]:
    """predicted / actual - 1 of every request, in ascending order."""
    limits = SimLimits(max_batch_size=seats, kv_cache_tokens=kv_tokens)
    run = simulate(arrivals, limits, model.costs(0, as_text=False))
    forecast = Forecast(model.step, model.between_steps, seats, 512, blocks_for(kv_tokens))
    pairs = predictions(run, forecast, knows_steps=knows_steps)
    found = sorted(predicted_s / actual_s - 1 for predicted_s, actual_s in pairs)
    assert not any(sums(forecast.backlog).values())
    return found


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def mixed(n: int, gap_s: float) -> list[Arrival]:
    rng, now, arrivals = random.Random(1), 0.0, []
    for _ in range(n):
        arrivals.append(Arrival(now, rng.randint(64, 512), rng.randint(4, 32)))
        now += rng.expovariate(1 / gap_s) if gap_s else 0.0
    return arrivals


MODELS = pytest.mark.parametrize("model", [CPU, GPU], ids=["cpu", "gpu"])
SEATS = pytest.mark.parametrize("seats", [8, 32])


@MODELS
@SEATS
@pytest.mark.parametrize(("size", "bound"), [(16, 0.13), (64, 0.06), (256, 0.04)])
def test_of_a_burst_of_mixed_requests(model: CostModel, seats: int, size: int, bound: float) -> None:
    found = errors(model, seats, mixed(size, 0.0))
    assert middle([abs(error) for error in found]) < bound
    assert abs(middle(found)) < bound


@MODELS
@SEATS
@pytest.mark.parametrize(("prompt_tokens", "new_tokens"), [(64, 4), (64, 32), (512, 4), (512, 32)])
def test_of_a_burst_of_equal_requests(
    model: CostModel, seats: int, prompt_tokens: int, new_tokens: int
) -> None:
    found = errors(model, seats, [Arrival(0.0, prompt_tokens, new_tokens)] * 256)
    assert middle([abs(error) for error in found]) < 0.06
    assert abs(middle(found)) < 0.04


@MODELS
def test_of_a_burst_that_the_kv_cache_bounds_and_not_the_seats(model: CostModel) -> None:
    found = errors(model, 32, mixed(64, 0.0), kv_tokens=4 * (288 + 18))
    assert middle([abs(error) for error in found]) < 0.15
    assert abs(middle(found)) < 0.15


@MODELS
@pytest.mark.parametrize(
    ("load", "knows_steps", "bound"),
    [
        (0.5, True, 0.01),
        (0.5, False, 0.15),
        (1.0, True, 0.1),
        (1.0, False, 0.15),
        (2.0, True, 0.02),
        (2.0, False, 0.02),
    ],
)
def test_of_requests_that_come_at_random(
    model: CostModel, load: float, knows_steps: bool, bound: float
) -> None:
    limits = SimLimits(kv_cache_tokens=KV_TOKENS)
    burst = simulate(mixed(128, 0.0), limits, model.costs(0, as_text=False))
    gap_s = burst.steps[-1].published_s / 128
    found = errors(model, 8, mixed(300, gap_s / load), knows_steps=knows_steps)
    assert middle([abs(error) for error in found]) < bound
    assert abs(middle(found)) < 0.05


# ---- corrections ----


def test_a_machine_that_is_twice_as_slow_is_found_out() -> None:
    forecast = forecast_of(SECOND_A_STEP)
    for _ in range(40 * OBSERVED):
        forecast.observe(forecast.correction * 1.0, 2.0)
    assert forecast.correction == pytest.approx(2.0, rel=0.01)
    assert forecast.prefill_s(5) == pytest.approx(2.0, rel=0.01)


def test_it_is_the_sum_of_steps_that_is_corrected_not_the_most_of_them() -> None:
    forecast = forecast_of(SECOND_A_STEP)
    for at in range(40 * OBSERVED):
        forecast.observe(forecast.correction, 3.0 if at % 4 == 0 else 1.0)
    assert forecast.correction == pytest.approx(1.5, rel=0.01)


def test_a_step_that_hangs_counts_as_one_that_is_4_times_as_slow() -> None:
    forecast, other = forecast_of(SECOND_A_STEP), forecast_of(SECOND_A_STEP)
    for at in range(OBSERVED):
        forecast.observe(1.0, 1e6 if at == 5 else 1.0)
        other.observe(1.0, LARGEST_CORRECTION if at == 5 else 1.0)
    assert forecast.correction == other.correction < 1.05


@given(st.lists(st.tuples(st.floats(-1.0, 1e9), st.floats(-1.0, 1e9)), max_size=400))
def test_corrections_are_bounded(observed: list[tuple[float, float]]) -> None:
    forecast = forecast_of(SECOND_A_STEP)
    for predicted_s, actual_s in observed * 5:
        forecast.observe(predicted_s, actual_s)
        assert 1 / LARGEST_CORRECTION <= forecast.correction <= LARGEST_CORRECTION


# ---- any history ----

calls = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(1, 40)), max_size=150)


@given(calls)
def test_sums_are_those_of_the_requests_and_come_back_to_0(history: list[tuple[int, int, int]]) -> None:
    forecast = forecast_of(EVERYTHING_COSTS, seats=4, max_num_batched_tokens=16)
    works: list[Work] = []
    for call, which, number in history:
        if call == 0 or not works:
            works.append(forecast.enter(number, 1 + which))
            continue
        work = works[which % len(works)]
        if call == 1:
            forecast.revise(work, number)
        elif call == 2:
            forecast.start(work, min(which, work.prompt_tokens - 1))
        elif call in {3, 4}:
            forecast.advance(work, number)
        else:
            forecast.leave(work)
        inflight = [one for one in works if not one.has_left]
        backlog = forecast.backlog
        assert backlog.prefill_tokens == sum(one.prefill_tokens for one in inflight)
        assert backlog.pairs == sum(one.pairs for one in inflight)
        assert backlog.decodes == sum(one.decodes for one in inflight)
        assert backlog.context_tokens == sum(one.context_tokens for one in inflight)
        assert backlog.running == sum(one.is_started for one in inflight)
        assert backlog.half_tokens == sum(one.prefill_tokens for one in inflight if one.is_started)
        assert min(sums(backlog).values()) >= 0
        for prompt_tokens in (1, 15, 200):
            assert forecast.prefill_s(prompt_tokens) <= forecast.ttft_s(prompt_tokens) * (1 + 1e-9) < 1e9
    for work in works:
        forecast.leave(work)
        forecast.leave(work)
    assert not any(sums(forecast.backlog).values())


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(1, 40)), min_size=2, max_size=60))
def test_whoever_comes_behind_more_whole_steps_of_work_waits_longer(lengths: list[tuple[int, int]]) -> None:
    forecast = Forecast(CPU.step, CPU.between_steps, 1, 512, 1 << 16)
    predicted_s = []
    for prompt_tokens, new_tokens in lengths:
        predicted_s.append(forecast.ttft_s(512))
        forecast.enter(prompt_tokens, new_tokens + 2)
    assert all(sooner_s < later_s for sooner_s, later_s in pairwise(predicted_s))
