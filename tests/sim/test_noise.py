"""The noise of simulated steps: the distribution that was asked for, and nothing but seed and step in it."""

from __future__ import annotations

import numpy as np
import pytest

from roseinfer.sim.noise import BLOCK_STEPS, Noise, NoiseOfRun

RATIOS = (0.8, 1.0, 1.1, 2.0)


def test_a_steps_noise_depends_on_its_number_and_the_seed_alone() -> None:
    noise = Noise(RATIOS, 0.2, (1.0, 2.0))
    steps = [0, BLOCK_STEPS - 1, BLOCK_STEPS, 3 * BLOCK_STEPS + 5]
    forth, back = NoiseOfRun(noise, 7), NoiseOfRun(noise, 7)
    in_order = {step: forth.seconds(step, 1.0) for step in steps}
    assert {step: back.seconds(step, 1.0) for step in reversed(steps)} == in_order
    assert NoiseOfRun(noise, 8).seconds(0, 1.0) != in_order[0]


def test_ratios_follow_their_quantiles() -> None:
    noise = NoiseOfRun(Noise(RATIOS, 0.0, ()), 0)
    drawn = np.array([noise.seconds(step, 10.0) for step in range(20_000)]) / 10
    assert drawn.min() >= 0.8
    assert drawn.max() <= 2.0
    shares = np.linspace(0, 1, 4)
    assert np.quantile(drawn, shares[1:-1]) == pytest.approx(RATIOS[1:-1], rel=0.01)
    assert np.quantile(drawn, 0.5) == pytest.approx(1.05, rel=0.01)  # between two quantiles: a straight line


def test_stalls_come_as_often_as_asked_and_are_added() -> None:
    noise = NoiseOfRun(Noise((1.0,), 0.01, (5.0, 7.0)), 0)
    added = np.array([noise.seconds(step, 1.0) for step in range(50_000)]) - 1
    assert sorted(set(added.tolist())) == [0.0, 5.0, 7.0]
    assert (added > 0).mean() == pytest.approx(0.01, rel=0.1)
    assert (added == 5.0).sum() == pytest.approx((added == 7.0).sum(), rel=0.2)


def test_stalls_leave_the_ratios_as_they_are() -> None:
    plain, stalling = (NoiseOfRun(Noise(RATIOS, p, (100.0,)), 3) for p in (0.0, 0.5))
    pairs = [(plain.seconds(step, 1.0), stalling.seconds(step, 1.0)) for step in range(100)]
    assert {round(b - a, 9) for a, b in pairs} == {0.0, 100.0}


def test_the_mean_is_that_of_what_is_drawn() -> None:
    noise = Noise((0.5, 0.9, 1.0, 1.1, 4.0), 0.05, (0.2, 1.0))
    drawn, steps = NoiseOfRun(noise, 0), 200_000
    mean_s = sum(drawn.seconds(step, 0.1) for step in range(steps)) / steps
    ratio, stall_s = noise.mean()
    assert 0.1 * ratio + stall_s == pytest.approx(mean_s, rel=0.01)
