"""How busy a client was: its busiest window, its longest turn, and how long what it read may have lain there."""

from __future__ import annotations

import pytest

from roseinfer.bench.http.loop_load import LoopLoad


def told(*waits: tuple[float, float]) -> LoopLoad:
    load = LoopLoad(10.0)
    for from_s, to_s in waits:
        load.waited(from_s, to_s)
    return load


def test_the_longest_turn_is_the_longest_time_between_two_waits() -> None:
    assert told((10.01, 10.02), (10.05, 10.06), (10.07, 10.09)).longest_turn_s == pytest.approx(0.03)


def test_a_loop_that_waits_all_the_time_is_not_busy() -> None:
    load = told((10.0, 10.3), (10.3, 10.5))
    assert (load.busy_share, load.busy_share_max, load.longest_turn_s) == pytest.approx((0.0, 0.0, 0.0))


def test_the_busiest_window_is_told_however_idle_the_rest_was() -> None:
    load = told((10.08, 10.1), (10.1, 20.0))
    assert load.busy_share_max == pytest.approx(0.8)
    assert load.busy_share == pytest.approx(0.008)


def test_a_wait_counts_in_a_window_as_far_as_it_lies_in_it() -> None:
    load = told((10.05, 10.06), (10.09, 20.0))
    assert load.busy_share_max == pytest.approx(0.8)


def test_a_window_begins_as_the_wait_is_over_in_which_the_last_one_ended() -> None:
    load = told((10.0, 10.15), (10.24, 10.25))
    assert load.busy_share_max == pytest.approx(0.9)


def test_a_turn_longer_than_a_window_fills_one() -> None:
    load = told((10.0, 10.05), (10.35, 10.36))
    assert load.busy_share_max == pytest.approx(1.0)


def test_what_ended_a_wait_had_just_come() -> None:
    assert told((10.01, 10.02)).since_s == 10.02


def test_what_was_there_at_once_may_have_come_right_after_the_last_look() -> None:
    assert told((10.01, 10.02), (10.05, 10.050001)).since_s == 10.02


def test_what_has_not_begun_was_not_busy() -> None:
    assert LoopLoad(10.0).busy_share == 0.0
