"""Arrivals: their law, their rate, and that one seed gives them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from roseinfer.bench import arrivals
from roseinfer.bench.arrivals import arrival_times, cuts_burst
from roseinfer.bench.seeds import BLOCK_ROWS, block_rngs
from roseinfer.errors import InputError
from tests.bench.experiments import experiment


def times(repeat: int = 0, **flags: Any) -> NDArray[np.float64]:
    made = experiment(**flags)
    return arrival_times(made.load, made.cells[0].shape, seed=made.options.seed, repeat=repeat)


def poisson(n: int = 10_000, rate: str = "8", **flags: Any) -> NDArray[np.float64]:
    return times(request_rate=rate, num_requests=n, **flags)


def constant(n: int = 100, rate: str = "20", **flags: Any) -> NDArray[np.float64]:
    return times(arrival="constant", request_rate=rate, num_requests=n, **flags)


def test_constant_arrivals_are_where_the_rate_says() -> None:  # case C6
    due_s = constant(100_001)
    assert due_s.tolist() == (np.arange(100_001) / 20).tolist()  # to the last bit: no sum of rounded gaps
    assert np.std(np.diff(due_s)) / np.mean(np.diff(due_s)) < 1e-9


def test_rates_below_one_are_kept() -> None:  # case H1
    assert constant(4, "0.3").tolist() == pytest.approx([0, 10 / 3, 20 / 3, 10])


@pytest.mark.parametrize("seed", range(4))
def test_poisson_gaps_are_exponential(seed: int) -> None:  # case C17
    gaps = np.diff(poisson(seed=seed))
    assert stats.kstest(gaps, "expon", args=(0, 1 / 8)).pvalue > 0.001


def test_poisson_arrivals_favour_no_part_of_a_second() -> None:  # case C17
    within = poisson()[1:] % 1.0
    assert stats.kstest(within, "uniform").pvalue > 0.001
    assert not np.isin(within, [0.0]).any()


def test_poisson_gaps_have_their_long_tail() -> None:  # case C18
    gaps = np.diff(poisson(n=10_001))
    assert np.mean(gaps > 3 / 8) == pytest.approx(np.exp(-3), abs=0.0065)  # three standard errors
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.03)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rates_mean_and_the_shapes_spread(shape: float) -> None:
    gaps = np.diff(times(request_rate="8", burstiness=shape, num_requests=40_000))
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.04)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(shape**-0.5, rel=0.05)
    assert stats.kstest(gaps, "gamma", args=(shape, 0, 1 / (8 * shape))).pvalue > 0.001


@pytest.mark.parametrize("rate", ["0.3", "8"])
def test_time_zero_is_the_first_arrival(rate: str) -> None:  # case C10
    assert poisson(5, rate)[0] == constant(5, rate)[0] == 0.0


def test_one_seed_gives_the_arrivals_again_and_another_others() -> None:  # case C5
    assert poisson(seed=3).tolist() == poisson(seed=3).tolist()
    drawn = [poisson(seed=3), poisson(seed=4), poisson(seed=3, repeat=1)]
    assert len({tuple(arrivals[1:]) for arrivals in drawn}) == 3


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    assert poisson(2 * BLOCK_ROWS + 5)[: BLOCK_ROWS + 1].tolist() == poisson(BLOCK_ROWS + 1).tolist()


def test_blocks_do_not_repeat_each_other() -> None:
    gaps = np.diff(poisson(2 * BLOCK_ROWS))
    assert len(np.unique(gaps)) > 0.999 * len(gaps)
    assert (gaps > 0).all()


def test_gaps_do_not_rest_on_the_last_bits_of_a_machines_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    class AnotherMachine:
        """Draws as ours does, but for the last bits."""

        def __init__(self, rng: np.random.Generator) -> None:
            self.rng = rng

        def standard_exponential(self, n: int) -> NDArray[np.float64]:
            return np.nextafter(self.rng.standard_exponential(n), 1e9)

    here = poisson(5000, ramp=2.0)
    monkeypatch.setattr(arrivals, "block_rngs", lambda *key: map(AnotherMachine, block_rngs(*key)))
    assert poisson(5000, ramp=2.0).tolist() == here.tolist()


def test_gaps_however_clumped_leave_no_two_requests_at_one_time() -> None:
    due_s = times(request_rate="8", burstiness=0.01, num_requests=20_000)
    assert (np.diff(due_s) > 0).all()


@pytest.mark.parametrize(
    "flags",
    [
        {"num_requests": 20, "burst_interval": 1.95},
        {"num_requests": 15, "duration": 3.0, "burst_interval": 1.45},
    ],
)
def test_bursts_that_never_come_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=f"has no burst within the {flags['num_requests']} requests"
    ) as caught:
        times(arrival="constant", request_rate="10", burst_size="5", **flags)
    assert caught.value.name == "--burst-interval"


@pytest.mark.parametrize(("n", "is_cut"), [(16, True), (19, True), (20, False), (21, False)])
def test_a_burst_that_the_number_of_requests_cuts_is_seen(n: int, is_cut: bool) -> None:
    flags: dict[str, Any] = {
        "arrival": "constant",
        "request_rate": "10",
        "burst_size": "5",
        "burst_interval": 1.45,
    }
    made = experiment(num_requests=n, **flags)
    due_s = arrival_times(made.load, made.cells[0], seed=0, repeat=0)
    assert cuts_burst(made.load, made.cells[0], due_s) == is_cut


def test_rates_of_a_sweep_get_the_same_draws() -> None:
    assert poisson(100, "2") == pytest.approx(4 * poisson(100, "8"))


def test_nothing_is_due_at_the_end_of_the_duration_or_later() -> None:
    due_s = times(arrival="constant", request_rate="4", duration=2.0)
    assert due_s.tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]
    assert len(times(request_rate="1000", duration=100.0)) == pytest.approx(100_000, rel=0.02)


def test_whichever_end_comes_first_counts() -> None:
    assert len(constant(3, "4", duration=2.0)) == 3
    assert len(constant(30, "4", duration=2.0)) == 8


def test_bursts_come_at_whole_intervals() -> None:
    due_s = times(burst_size="3", burst_interval=0.1, num_requests=9)
    assert due_s.tolist() == [0, 0, 0, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2]
    assert times(burst_size="3", burst_interval=0.1, duration=0.2).tolist() == due_s[:6].tolist()
    assert times(burst_size="3", burst_interval=0.1, duration=0.21, num_requests=9).tolist() == due_s.tolist()


def test_bursts_on_background_load_leave_it_as_it_is() -> None:
    flags: dict[str, Any] = {"request_rate": "8", "duration": 10.0}
    both = times(burst_size="5", burst_interval=2.5, **flags)
    instants, counts = np.unique(both, return_counts=True)
    assert instants[counts == 5].tolist() == [2.5, 5.0, 7.5]
    assert instants[counts == 1].tolist() == times(**flags).tolist()
    assert set(counts) == {1, 5}


def test_a_background_request_never_shares_the_instant_of_a_burst() -> None:
    both = times(arrival="constant", request_rate="4", burst_size="5", burst_interval=1.0, duration=3.5)
    instants, counts = np.unique(both, return_counts=True)
    assert instants[counts == 5].tolist() == [1.0, 2.0, 3.0]
    assert set(counts) == {1, 5}
    assert instants[counts == 1] == pytest.approx(np.arange(14) / 4)


def test_requests_in_all_count_bursts_too() -> None:
    both = times(arrival="constant", request_rate="4", burst_size="5", burst_interval=0.6, num_requests=10)
    assert both.tolist() == pytest.approx([0, 0.25, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.75, 1.0])


def test_a_ramp_rises_to_the_rate_in_a_line() -> None:
    due_s = constant(1000, "10", ramp=20.0)  # 100 requests in the ramp
    at = np.searchsorted(due_s, [5.0, 10.0, 20.0, 30.0])
    assert at.tolist() == pytest.approx([6.25, 25, 100, 200], abs=1)  # 10 t^2 / 40, then 10 a second
    assert np.diff(due_s)[110:] == pytest.approx(0.1)


def test_random_arrivals_follow_a_ramp_too() -> None:
    due_s = poisson(40_000, "1000", ramp=20.0)
    at = np.searchsorted(due_s, [10.0, 20.0, 30.0])
    assert at.tolist() == pytest.approx([2_500, 10_000, 20_000], rel=0.06)
    assert stats.kstest(np.diff(due_s[due_s > 20]), "expon", args=(0, 1e-3)).pvalue > 0.001
