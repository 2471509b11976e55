"""Limits that find themselves: the rule by hand, its traps, and a closed loop with a server of known knee."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.adaptive import SAMPLES, Aimd, Gradient
from roseinfer.errors import InputError

Limit = Aimd | Gradient
BOTH = pytest.mark.parametrize("kind", [Aimd, Gradient])


def window(limit: Limit, slowdown: float, inflight: int | None = None) -> int:
    """One window of equal samples of the epoch, with the limit reached; the limit after it."""
    epoch, inflight = limit.epoch, limit.limit if inflight is None else inflight
    for _ in range(SAMPLES):
        limit.sample(slowdown, epoch, inflight)
    return limit.limit


# ---- the rules by hand ----


def test_aimd_adds_one_within_tolerance_and_takes_a_tenth_above() -> None:
    limit = Aimd(slowdown=3.0, init=20)
    assert [window(limit, slowdown) for slowdown in (1.0, 3.0, 3.1, 3.1, 1.0)] == [21, 22, 19, 17, 18]
    assert limit.epoch == 5


def test_gradient_takes_a_fifth_of_the_excess_and_adds_a_fifth_of_the_root() -> None:
    limit = Gradient(slowdown=3.0, init=100)
    assert window(limit, 4.0) == 95  # 100 - 0.2 * 1/4 * 100
    assert window(limit, 300.0) == 85  # 95 - 0.2 * 1/2 * 95 = 85.5
    assert window(limit, 3.0) == 87  # 85.5 + 0.2 * 9.247 = 87.35


def test_gradient_counts_in_parts_of_a_request_and_ends_no_epoch_for_them() -> None:
    limit = Gradient(init=1, floor=1)
    assert [window(limit, 1.0) for _ in range(5)] == [1, 1, 1, 1, 2]  # 0.2, then more, of a request each
    assert limit.epoch == 1


@BOTH
def test_a_few_requests_behind_a_long_prompt_do_not_move_a_limit(kind: type[Limit]) -> None:
    limit = kind()
    for at in range(SAMPLES):
        limit.sample(90.0 if at < SAMPLES // 2 - 1 else 1.0, 0, 20)
    assert limit.limit >= 20


# ---- the traps ----


@BOTH
def test_a_window_with_too_few_samples_says_nothing(kind: type[Limit]) -> None:  # case A25
    limit = kind()
    for _ in range(SAMPLES - 1):
        limit.sample(100.0, 0, 20)
    assert (limit.limit, limit.epoch) == (20, 0)


@BOTH
@pytest.mark.parametrize("slowdown", [3.01, 10.0, math.inf])
def test_held_above_tolerance_a_limit_falls_below_20_to_its_floor_and_never_below(
    kind: type[Limit], slowdown: float
) -> None:  # case A21
    limit = kind()
    seen = [window(limit, slowdown) for _ in range(10_000)]
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 1
    assert window(limit, slowdown, 0) == 1
    assert window(kind(floor=4), slowdown) >= 4


@BOTH
def test_what_was_dropped_for_waiting_lowers_a_limit(kind: type[Limit]) -> None:  # case A21
    limit = kind()
    assert window(limit, math.inf) < 20


@BOTH
def test_mild_overload_does_not_make_a_limit_creep_up(kind: type[Limit]) -> None:  # case A20
    limit = kind(slowdown=3.0)
    for _ in range(10_000):
        before = limit.limit
        assert window(limit, 3.75) <= before  # a gradient of 0.8


@BOTH
def test_from_its_floor_a_limit_rises_again(kind: type[Limit]) -> None:  # case A25
    limit = kind(init=1)
    for _ in range(100):
        window(limit, 1.0)
    assert limit.limit > 10


@BOTH
def test_a_limit_does_not_grow_while_nothing_tests_it(kind: type[Limit]) -> None:
    limit = kind(init=20)
    assert [window(limit, 1.0, inflight=9) for _ in range(100)] == [20] * 100
    for _ in range(10):
        window(limit, 1.0, inflight=20)
    assert limit.limit > 20


@BOTH
def test_a_burst_of_late_samples_lowers_a_limit_once(kind: type[Limit]) -> None:  # case A19
    limit = kind(init=100)
    for _ in range(1000):
        limit.sample(50.0, 0, 100)
    assert limit.limit == 90
    assert limit.epoch == 1


@BOTH
def test_samples_of_an_older_epoch_do_not_fill_a_window(kind: type[Limit]) -> None:  # case A19
    limit = kind(init=100)
    window(limit, 50.0)
    for _ in range(SAMPLES - 1):
        limit.sample(1.0, 1, 90)
        limit.sample(50.0, 0, 90)
    assert limit.limit == 90
    limit.sample(1.0, 1, 90)
    assert limit.limit > 90


@BOTH
@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"slowdown": 1.0}, "slowdown"),
        ({"slowdown": math.nan}, "slowdown"),
        ({"slowdown": math.inf}, "slowdown"),
        ({"floor": 0}, "floor"),
        ({"floor": 21}, "init"),
        ({"init": 1001}, "most"),
        ({"most": 19}, "most"),
        ({"init": 2.0}, "init"),
    ],
)
def test_values_that_cannot_work_are_named(
    kind: Callable[..., Limit], values: dict[str, float], name: str
) -> None:
    with pytest.raises(InputError) as caught:
        kind(**values)
    assert caught.value.name == name


samples = st.tuples(st.floats(1.0, 1e6) | st.just(math.inf), st.integers(0, 3), st.integers(0, 100))


@BOTH
@given(
    bounds=st.lists(st.integers(1, 60), min_size=3, max_size=3).map(sorted),
    trace=st.lists(samples, max_size=300),
)
def test_a_limit_stays_between_its_bounds_and_changes_with_its_epoch_only(
    kind: type[Limit], bounds: list[int], trace: list[tuple[float, int, int]]
) -> None:
    floor, init, most = bounds
    limit = kind(floor=floor, init=init, most=most)
    for slowdown, age, inflight in trace:
        before = limit.limit, limit.epoch
        limit.sample(slowdown, limit.epoch - age, inflight)
        assert floor <= limit.limit <= most
        assert (limit.limit != before[0]) == (limit.epoch == before[1] + 1)
        assert age == 0 or (limit.limit, limit.epoch) == before


# ---- a closed loop ----


def limits_over_time(
    limit: Limit, rate: float, n_requests: int, decode_s: Callable[[float], float]
) -> tuple[list[int], list[int]]:
    """A server that prefills one request a second, in their order, and then decodes any number beside.

    Requests come at random, and decode for `decode_s` of the time at which they came, give or take a half. What the
    limit was, and how many were in flight, whenever a prefill ended.
    """
    rng, now, free_s = random.Random(1), 0.0, 0.0
    prefills: deque[tuple[float, float, int]] = deque()  # end, slowdown, epoch
    ends_s: list[float] = []
    limits, inflights = [], []
    for _ in range(n_requests):
        now += rng.expovariate(rate)
        while prefills and prefills[0][0] <= now:
            end_s, slowdown, epoch = prefills.popleft()
            inflights.append(sum(other_s > end_s for other_s in ends_s))
            limit.sample(slowdown, epoch, inflights[-1])
            limits.append(limit.limit)
        ends_s = [end_s for end_s in ends_s if end_s > now]
        if len(ends_s) < limit.limit:
            start_s = max(now, free_s)
            free_s = start_s + 1.0
            prefills.append((free_s, start_s - now + 1.0, limit.epoch))
            ends_s.append(free_s + decode_s(now) * rng.uniform(0.5, 1.5))
    return limits, inflights


@BOTH
@pytest.mark.parametrize("init", [1, 20, 100])
@pytest.mark.parametrize("decode_s", [0.0, 10.0, 40.0])
def test_under_overload_a_limit_converges_to_the_knee(kind: type[Limit], init: int, decode_s: float) -> None:
    """At one a second `decode_s` requests decode, one prefills, and two wait where a slowdown of 3 is tolerated."""
    limits, _ = limits_over_time(kind(init=init), 3.0, 15_000, lambda _: decode_s)
    steady, knee = limits[len(limits) // 2 :], decode_s + 3
    assert 0.7 * knee <= sum(steady) / len(steady) <= knee + 1
    assert 0.5 * knee <= min(steady) <= max(steady) <= 1.1 * knee + 2


@BOTH
def test_a_limit_holds_still_when_only_output_lengths_change(kind: type[Limit]) -> None:
    limits, inflights = limits_over_time(kind(init=60), 0.3, 2000, lambda now: 4.0 if now < 3000 else 32.0)
    assert set(limits) == {60}
    assert sum(inflights[1000:]) > 3 * sum(inflights[:900])  # though far more was in flight


@BOTH
def test_a_limit_follows_a_knee_that_moves(kind: type[Limit]) -> None:
    limits, _ = limits_over_time(kind(), 3.0, 30_000, lambda now: 30.0 if now < 4000 else 5.0)
    assert max(limits) >= 25
    assert 5 <= limits[-1] <= 12


@BOTH
def test_a_server_whose_good_limit_is_1_is_not_left_below_it(kind: type[Limit]) -> None:
    """When the only request in flight has ended as its sample is taken, nothing is in flight, and 1 has been tested."""
    limit = kind(init=1)
    for _ in range(5):
        window(limit, 1.0, inflight=0)
    assert limit.limit > 1
