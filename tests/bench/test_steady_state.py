from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from roseinfer.bench.records import derive
from roseinfer.bench.steady_state import WarmUp, mser5, recoveries_s, steady_rows, warm_up
from tests.bench.load_shapes import served

INF = math.inf

# --- MSER-5


def by_definition(values: NDArray[np.float64]) -> int:
    """d* batches of 5, by the formula, one d at a time."""
    m = len(values) // 5
    z = values[: 5 * m].reshape(m, 5).mean(axis=1)
    spread = [((z[d:] - z[d:].mean()) ** 2).sum() / (m - d) ** 2 for d in range(m // 2 + 1)]
    return int(np.argmin(spread))


@pytest.mark.parametrize("seed", range(8))
def test_the_cut_is_that_of_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(60, 400))
    values = rng.normal(10, 1, n) + 8 * np.exp(-np.arange(n) / rng.uniform(5, 40))
    d = by_definition(values)
    assert mser5(values) == (WarmUp(0, False) if d == n // 5 // 2 else WarmUp(5 * d, True))


def test_a_series_that_steps_down_is_cut_at_the_step() -> None:
    assert mser5([9.0] * 40 + [1.0] * 160) == WarmUp(40, True)


def test_a_constant_series_is_not_cut() -> None:
    assert mser5([0.1] * 200) == WarmUp(0, True)


def test_a_series_that_never_settles_has_no_steady_part_and_is_not_cut() -> None:
    assert mser5(np.arange(200.0)) == WarmUp(0, False)


@pytest.mark.parametrize("n", [0, 4, 5, 9])
def test_too_few_values_have_no_steady_part(n: int) -> None:
    assert mser5([1.0] * n) == WarmUp(0, False)


def test_values_beyond_the_last_batch_are_not_looked_at() -> None:
    assert mser5([9.0] * 40 + [1.0] * 160 + [1000.0] * 4) == WarmUp(40, True)


# --- which runs, which rows


def settling(n: int = 200, arrival: str = "poisson", burst_size: int | None = None) -> pd.DataFrame:
    """TTFT is 1 s for the first 40 requests and 10 ms from there on."""
    rows = served(np.linspace(0, 0.1 * (n - 1), n), arrival=arrival, burst_size=burst_size, request_rate=10.0)
    first_s = rows["scheduled_s"] + np.where(rows["request_index"] < 40, 1.0, 0.01)
    return derive(rows.assign(received_first_s=first_s))


@pytest.mark.parametrize("arrival", ["constant", "poisson", "gamma", "trace"])
def test_warm_up_is_cut_from_open_loops(arrival: str) -> None:
    found = warm_up(settling(arrival=arrival))
    assert found is not None
    assert found[0] == WarmUp(40, True)
    assert np.flatnonzero(~found[1]).tolist() == list(range(40))


@pytest.mark.parametrize(("arrival", "burst_size"), [("burst", 8), ("closed", None), ("poisson", 8)])
def test_bursts_and_closed_loops_are_not_cut(arrival: str, burst_size: int | None) -> None:
    assert warm_up(settling(arrival=arrival, burst_size=burst_size)) is None


def test_the_series_is_in_the_order_of_the_schedule() -> None:
    shuffled = settling().sample(frac=1, random_state=0)
    found = warm_up(shuffled)
    assert found is not None
    assert found[0] == WarmUp(40, True)
    assert sorted(shuffled["request_index"][~found[1]]) == list(range(40))


def test_what_failed_during_the_warm_up_is_left_out_with_it() -> None:
    rows = settling()
    rows.loc[rows["request_index"] < 10, "outcome"] = "timeout"
    found = warm_up(rows)
    assert found is not None
    assert found[0] == WarmUp(30, True)  # of those that completed
    assert np.flatnonzero(~found[1]).tolist() == list(range(40))


def test_each_repeat_is_cut_on_its_own() -> None:
    rows = pd.concat([settling(), settling().assign(repeat=1, ttft_s=0.01)], ignore_index=True)
    assert steady_rows(rows).groupby("repeat").size().tolist() == [160, 200]


def test_when_nothing_completed_nothing_is_cut() -> None:  # case D2
    found = warm_up(settling().assign(outcome="error"))
    assert found is not None
    assert found[0] == WarmUp(0, False)
    assert found[1].all()


# --- recovery from a burst


def background(
    waits_s: NDArray[np.float64], bursts_s: tuple[float, ...] = (10.0,), arrival: str = "constant"
) -> pd.DataFrame:
    """10 requests/s, the i-th with this queue wait (NaN: refused), and bursts of 3 on top."""
    due_s = np.arange(len(waits_s)) * 0.1 + 0.05
    scheduled_s = np.concatenate([due_s, np.repeat(bursts_s, 3)])
    queue_wait_s = np.concatenate([waits_s, np.full(3 * len(bursts_s), 5.0)])
    order = np.argsort(scheduled_s, kind="stable")
    return pd.DataFrame(
        {
            "arrival": arrival,
            "burst_size": 3,
            "request_index": np.arange(order.size),
            "scheduled_s": scheduled_s[order],
            "queue_wait_s": queue_wait_s[order],
            "retry_wait_s": 0.0,
            "outcome": np.where(np.isnan(queue_wait_s[order]), "rejected", "completed"),
        }
    )


def waits(*parts: tuple[int, float]) -> NDArray[np.float64]:
    return np.concatenate([np.full(n, wait_s) for n, wait_s in parts])


def test_who_came_back_has_waited_between_its_tries() -> None:
    rows = background(waits((200, 0.01)))
    rows.loc[100:122, "retry_wait_s"] = 1.0  # 3 of the burst, 20 after it
    assert recoveries_s(rows) == pytest.approx([2.05])


def test_who_was_given_up_is_not_back() -> None:
    rows = background(waits((200, 0.01)))
    rows.loc[100:122, "outcome"] = "timeout"
    assert recoveries_s(rows) == pytest.approx([2.05])


def test_recovery_is_when_the_queue_wait_is_back() -> None:
    # The burst comes at 10 s; requests 100 to 119 wait longer; number 120 is due at 12.05 s.
    found = recoveries_s(background(waits((100, 0.01), (20, 3.0), (80, 0.01))))
    assert found == pytest.approx([2.05])


def test_a_single_dip_is_no_recovery() -> None:
    dips = waits((100, 0.01), (10, 3.0), (1, 0.0), (9, 3.0), (80, 0.01))
    assert recoveries_s(background(dips)) == pytest.approx([2.05])


def test_a_single_late_request_does_not_undo_a_recovery() -> None:
    late = waits((100, 0.01), (20, 3.0), (2, 0.01), (1, 3.0), (77, 0.01))
    assert recoveries_s(background(late)) == pytest.approx([2.05])


def test_the_level_before_is_its_90th_percentile() -> None:
    # One in five waits 1 s before the burst, so that 1 s is back at the level.
    before = np.tile([0.01, 0.01, 0.01, 0.01, 1.0], 20)
    found = recoveries_s(background(np.concatenate([before, waits((20, 3.0), (80, 1.0))])))
    assert found == pytest.approx([2.05])


def test_a_refused_request_has_not_recovered() -> None:
    refused = waits((100, 0.01), (20, np.nan), (80, 0.01))
    assert recoveries_s(background(refused)) == pytest.approx([2.05])


def test_a_burst_that_is_never_over_has_no_recovery() -> None:
    assert recoveries_s(background(waits((100, 0.01), (100, 3.0)))).tolist() == [INF]


def test_a_recovery_after_the_next_burst_does_not_count_for_the_one_before() -> None:
    # Of the burst at 10 s nothing recovers before 15 s; from 17 s on all is well.
    rows = background(waits((100, 0.01), (70, 3.0), (80, 0.01)), bursts_s=(10.0, 15.0))
    assert recoveries_s(rows) == pytest.approx([INF, 2.05])


def test_the_disturbed_part_is_not_the_level_before_the_next_burst() -> None:
    # Each burst disturbs 40 of the 50 requests behind it: a level over all of them would be the disturbed one.
    rows = background(waits((100, 0.01), (40, 3.0), (10, 0.01), (40, 3.0), (10, 0.01)), bursts_s=(10.0, 15.0))
    assert recoveries_s(rows) == pytest.approx([4.05, 4.05])


def test_without_a_level_before_it_a_burst_has_no_recovery_time() -> None:
    assert recoveries_s(background(waits((100, 0.01)), bursts_s=(0.2,))).size == 0


def test_background_that_was_refused_before_the_burst_has_no_level() -> None:
    assert recoveries_s(background(waits((100, np.nan), (100, 0.01)))).size == 0


@pytest.mark.parametrize("arrival", ["burst", "closed"])
def test_only_bursts_over_background_load_recover(arrival: str) -> None:
    assert recoveries_s(background(waits((200, 0.01)), arrival=arrival)).size == 0
