"""Shedding by standing delay: traces by hand, and what holds for every trace."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.codel import CoDel
from roseinfer.errors import InputError


def decisions(codel: CoDel, trace: list[tuple[float, float]]) -> list[bool]:
    """Of requests that are taken up at these times after these delays, in seconds."""
    return [codel.should_drop(now, delay_s) for now, delay_s in trace]


def is_overloaded(codel: CoDel) -> bool:
    """Asked anew: to a type checker an attribute stays what it was."""
    return codel.is_overloaded


def test_a_trace_by_hand() -> None:
    """Target 1 s, interval 10 s. A queue stands from 0 to 20 s, and has gone by 30 s."""
    codel = CoDel(1.0, 10.0)
    assert decisions(codel, [(0.0, 3.0), (5.0, 4.0), (9.0, 5.0)]) == [False, False, False]  # not judged yet
    assert not is_overloaded(codel)
    # The least of the first interval was 3 s: from here on those who waited for over 2 s go, but for the first one.
    assert decisions(codel, [(10.0, 5.0), (11.0, 5.0), (12.0, 2.0)]) == [False, True, False]
    assert codel.should_drop(13.0, 2.001)
    assert is_overloaded(codel)
    assert decisions(codel, [(20.0, 0.5), (21.0, 3.0)]) == [False, True]  # the least of the second was 2 s
    assert decisions(codel, [(30.0, 3.0), (31.0, 3.0)]) == [False, False]  # of the third, 0.5 s
    assert not is_overloaded(codel)


def test_a_queue_that_empties_once_an_interval_is_no_overload() -> None:
    codel = CoDel(1.0, 10.0)
    for start_s in range(0, 100, 10):
        trace = [(float(start_s + at_s), 0.0 if at_s == 7 else 50.0) for at_s in range(10)]
        assert not any(decisions(codel, trace))


def test_a_delay_of_just_the_target_is_no_overload() -> None:
    codel = CoDel(1.0, 10.0)
    decisions(codel, [(0.0, 1.0), (10.0, 1.0)])
    assert not is_overloaded(codel)


def test_whoever_comes_alone_in_an_interval_is_served_however_long_it_waited() -> None:
    assert not any(decisions(CoDel(1.0, 10.0), [(20.0 * at, 1000.0) for at in range(50)]))


def test_the_first_after_a_silence_is_served_and_judged_anew() -> None:
    codel = CoDel(1.0, 10.0)
    decisions(codel, [(0.0, 5.0), (10.0, 5.0), (11.0, 5.0)])
    assert decisions(codel, [(1000.0, 0.0), (1001.0, 0.1)]) == [False, False]
    codel.should_drop(1010.0, 0.0)
    assert not is_overloaded(codel)


@pytest.mark.parametrize(
    ("target_s", "interval_s", "name"),
    [
        (0.0, 1.0, "codel target"),
        (-1.0, 1.0, "codel target"),
        (math.nan, 1.0, "codel target"),
        (math.inf, math.inf, "codel target"),
        (1.0, 1.0, "codel interval"),
        (1.0, 0.5, "codel interval"),
        (1.0, math.inf, "codel interval"),
        (1.0, math.nan, "codel interval"),
    ],
)
def test_the_interval_exceeds_the_target_and_the_target_0(
    target_s: float, interval_s: float, name: str
) -> None:
    with pytest.raises(InputError) as caught:
        CoDel(target_s, interval_s)
    assert caught.value.name == name


delays_s = st.floats(0.0, 10.0)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), delays_s), max_size=200))
def test_at_least_one_an_interval_is_served_and_nobody_within_twice_the_target_goes(
    gaps_and_delays: list[tuple[float, float]],
) -> None:
    codel, now, ends_s = CoDel(1.0, 4.0), 0.0, 0.0
    for gap_s, delay_s in gaps_and_delays:
        now += gap_s
        is_first = now >= ends_s
        if is_first:
            ends_s = now + 4.0
        dropped = codel.should_drop(now, delay_s)
        assert not (dropped and (is_first or delay_s <= 2.0))


@given(st.lists(delays_s, max_size=100))
def test_a_queue_within_the_target_is_left_alone_for_ever_after_one_interval(before_s: list[float]) -> None:
    codel = CoDel(1.0, 10.0)
    decisions(codel, [(float(at), delay_s) for at, delay_s in enumerate(before_s)])
    start_s = len(before_s) + 10.0
    decisions(codel, [(start_s, 0.5), (start_s + 10.0, 0.5)])
    assert not any(decisions(codel, [(start_s + 11.0 + at, 0.5) for at in range(30)]))
    assert not is_overloaded(codel)


def test_a_verdict_of_long_ago_sheds_nobody_of_a_fresh_burst() -> None:
    codel = CoDel(1.0, 10.0)
    decisions(codel, [(0.0, 3.0), (5.0, 4.0)])
    assert decisions(codel, [(3600.0, 0.0), (3603.0, 3.0)]) == [False, False]
    assert not is_overloaded(codel)


def test_a_verdict_of_the_interval_before_holds() -> None:
    codel = CoDel(1.0, 10.0)
    decisions(codel, [(0.0, 3.0), (5.0, 4.0)])
    assert decisions(codel, [(19.9, 3.0), (20.0, 3.0)]) == [False, True]
