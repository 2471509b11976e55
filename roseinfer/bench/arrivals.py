"""When requests arrive: at a rate, in bursts, or both. Times are seconds from the first arrival."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from roseinfer.bench.experiment import Cell
from roseinfer.bench.load import Load
from roseinfer.bench.seeds import BLOCK_ROWS, Stream, block_rngs
from roseinfer.errors import InputError

Times = NDArray[np.float64]

_GRID: Final = 2.0**28
"""Parts of the mean gap that gaps are whole multiples of. Drawing rests on a machine's logarithm, whose last bit may
differ from another's: rounded, the gaps are the same, and so are their sums, which are exact (to 2**25 requests).
"""


def arrival_times(load: Load, cell: Cell, *, seed: int, repeat: int) -> Times:
    """The times of a cell's requests in one repeat, ascending from 0, as far as --num-requests and --duration let.

    Bursts on top of a rate come at the burst interval and its multiples, so that the rate's arrivals are met
    first. Requests of one burst share their time to the last bit, and no other request has it. Raises InputError
    where no burst comes before the last request.
    """
    if cell.request_rate is None:
        assert cell.burst_size is not None
        return _bursts(load, cell.burst_size)
    background = np.concatenate([*at_a_rate(load, cell.request_rate, seed=seed, repeat=repeat)])
    if cell.burst_size is None:
        return background
    assert load.burst_interval_s is not None
    end_s = background[-1] if load.duration_s is None else load.duration_s
    instants = _multiples(load.burst_interval_s, end_s)[1:]
    meets = np.isin(background, instants)
    background[meets] = np.nextafter(background[meets], 0)  # the float before: nobody is in a burst by chance
    merged = np.sort(np.concatenate([background, np.repeat(instants, cell.burst_size)]))
    played: Times = merged[: load.num_requests]
    if not instants.size or played[-1] < instants[0]:
        why = f"has no burst within the {len(played)} requests of repeat {repeat}, {played[-1]:.3g} s"
        raise InputError("--burst-interval", load.burst_interval_s, why)
    return played


def cuts_burst(load: Load, cell: Cell, times: Times) -> bool:
    """Whether --num-requests left out a part of the last burst on top of a rate."""
    if cell.request_rate is None or cell.burst_size is None or load.burst_interval_s is None:
        return False  # without an interval it is a replay
    is_burst = times[-1] in _multiples(load.burst_interval_s, float(np.nextafter(times[-1], np.inf)))
    return bool(is_burst and np.count_nonzero(times == times[-1]) < cell.burst_size)


def _bursts(load: Load, burst_size: int) -> Times:
    if load.burst_interval_s is None:
        return np.zeros(burst_size)
    if load.num_requests is None:
        assert load.duration_s is not None
        return np.repeat(_multiples(load.burst_interval_s, load.duration_s), burst_size)
    bursts = np.arange(load.num_requests, dtype=np.int64) // burst_size
    return _before(bursts * np.float64(load.burst_interval_s), load.duration_s)


def _multiples(interval_s: float, end_s: float) -> Times:
    """0, interval, 2 * interval ... below `end_s`."""
    return _before(np.arange(int(end_s / interval_s) + 2, dtype=np.float64) * interval_s, end_s)


def _before(times: Times, end_s: float | None) -> Times:
    return times if end_s is None else times[: np.searchsorted(times, end_s, side="left")]


def at_a_rate(load: Load, rate: float, *, seed: int, repeat: int) -> Iterator[Times]:
    """The times of a cell without bursts, in blocks of BLOCK_ROWS, the last one of what is left; none is empty.

    Arrivals come at the integral of the rate: number i when that has reached the i-th unit time.
    """
    left = load.num_requests
    for units in _unit_times(load, seed, repeat):
        times = _reached(units, rate, load.ramp_s)
        block = _before(times[:left], load.duration_s)
        if len(block):
            yield block
        if left is not None:
            left -= len(times)
        if len(block) < len(times) or left == 0:
            break


def _unit_times(load: Load, seed: int, repeat: int) -> Iterator[Times]:
    """Blocks of arrivals of rate 1, the first at 0: whole numbers, or sums of gaps drawn around 1.

    Gaps of gamma arrivals have shape `burstiness` and so a coefficient of variation of 1 / sqrt(burstiness); of
    Poisson arrivals they are exponential, which is shape 1.
    """
    if load.arrival == "constant":
        for block in count():
            yield np.arange(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS, dtype=np.float64)
    reached = 0.0
    for block, rng in enumerate(block_rngs(seed, repeat, Stream.GAPS)):
        if load.burstiness is None:
            gaps = rng.standard_exponential(BLOCK_ROWS)
        else:
            gaps = rng.standard_gamma(load.burstiness, BLOCK_ROWS) / load.burstiness
        gaps = np.maximum(np.rint(gaps * _GRID), 1) / _GRID  # one at least: only bursts come at the same time
        if block == 0:
            gaps[0] = 0.0
        units = reached + np.cumsum(gaps)
        reached = float(units[-1])
        yield units


def _reached(units: Times, rate: float, ramp_s: float | None) -> Times:
    """When the integral of the rate is `units`: rate t^2 / (2 ramp) while the rate rises, rate (t - ramp / 2) after."""
    if ramp_s is None:
        return units / rate
    in_ramp = rate * ramp_s / 2
    rising = np.sqrt(2 * ramp_s / rate * np.minimum(units, in_ramp))
    return np.where(units < in_ramp, rising, units / rate + ramp_s / 2)
