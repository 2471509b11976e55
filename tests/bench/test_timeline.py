"""In flight, waiting and refused over time: counted at every change, drawn against the limit."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from roseinfer.bench.figure_style import Caption
from roseinfer.bench.timeline import concurrency, draw_timeline, timeline_data
from tests.bench.load_shapes import bursts_over_background, closed_loop, served

CAPTION = Caption(model="builtin:gpt2", machine="2 cores of something", run_id="run-7")


def peak(starts: list[float], ends: list[float]) -> int:
    return int(concurrency(starts, ends, np.array(sorted({*starts, *ends}))).max())


def line_of(axes: Axes, label: str) -> Line2D:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def test_two_spans_within_one_second_are_not_at_once() -> None:
    # case E12
    assert peak([0.0, 0.5], [0.4, 0.9]) == 1


def test_a_span_that_ends_as_another_begins_does_not_overlap_it() -> None:
    # case E12
    assert peak([0.0, 0.5], [0.5, 0.9]) == 1


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=12))
def test_the_count_is_that_of_the_spans_that_hold_the_instant(spans: list[tuple[int, int]]) -> None:
    starts, ends = [start for start, _ in spans], [start + length for start, length in spans]
    at = np.arange(30.0)

    counted = concurrency(starts, ends, at)

    assert list(counted) == [sum(s <= t < e for s, e in zip(starts, ends, strict=True)) for t in at]


def test_what_never_began_counts_nowhere_and_what_never_ended_to_the_end() -> None:
    counted = concurrency([np.nan, 1.0], [2.0, np.nan], np.array([0.0, 1.0, 3.0]))

    assert list(counted) == [0, 1, 1]


def test_the_peak_reaches_the_limit_and_refusals_stand_at_the_bursts() -> None:
    timeline = timeline_data(bursts_over_background(limits=(8,)))
    (axes,) = draw_timeline(timeline, CAPTION).axes

    assert axes.get_title(loc="left") == "limit 8: at most 8 in flight, 7 waiting, 10 refused"
    refusals = np.asarray(line_of(axes, "refused").get_xdata(), np.float64)
    np.testing.assert_allclose(refusals, [0.997, 1.0, 1.997, 2.0])  # the bursts, and who came just after them
    assert set(np.asarray(line_of(axes, "limit").get_ydata())) == {8}


def test_limits_share_one_time_axis_and_one_scale() -> None:
    figure = draw_timeline(timeline_data(bursts_over_background()), CAPTION)

    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == ["limit 8", "no limit"]
    assert (
        len({axes.get_xlim() for axes in figure.axes}) == len({axes.get_ylim() for axes in figure.axes}) == 1
    )


def test_only_the_first_repeat_is_drawn() -> None:
    repeats = [served([0.0] * n, arrival="trace", repeat=n) for n in (2, 5)]

    assert timeline_data(pd.concat(repeats))["in_flight"].max() == 2


def test_a_long_run_is_thinned_without_losing_its_peaks() -> None:
    rng = np.random.default_rng(1)
    scheduled_s = np.sort(np.concatenate([rng.uniform(0, 400, 6000), [333.0] * 40]))
    requests = served(scheduled_s, arrival="poisson", request_rate=15.0)
    events = np.unique(requests[["reserved_s", "released_s"]])
    wanted = concurrency(requests["reserved_s"], requests["released_s"], events).max()

    timeline = timeline_data(requests)

    assert len(timeline) <= 2002
    assert timeline["in_flight"].max() == wanted >= 40
    assert timeline["time_s"].is_monotonic_increasing


def test_a_request_that_left_the_queue_unserved_does_not_wait_for_ever() -> None:
    requests = served([0.0, 0.0], arrival="burst", burst_size=2)
    aborted = requests["request_index"] == 1
    requests.loc[aborted, "first_scheduled_s":"finished_s"] = np.nan

    assert timeline_data(requests)["waiting"].iloc[-1] == 0


@pytest.mark.parametrize("users", [1, 3])
def test_a_closed_loop_has_as_many_in_flight_as_users(users: int) -> None:
    # case K2
    assert timeline_data(closed_loop(users))["in_flight"].max() == users


def test_a_cell_in_which_nothing_happened_can_be_drawn() -> None:
    requests = served([0.0], arrival="burst", burst_size=1)
    requests.loc[:, "reserved_s":"received_last_s"] = np.nan
    (axes,) = draw_timeline(timeline_data(requests), CAPTION).axes

    assert axes.get_title(loc="left") == "no limit: at most 0 in flight, 0 waiting"


def test_a_limit_that_moves_is_drawn_as_it_moved() -> None:
    requests = served([0.0, 1.0, 2.0], arrival="constant", service_s=0.5)
    steps = pd.DataFrame(
        {
            "cell_id": requests["cell_id"].iloc[0],
            "repeat": 0,
            "plan_start_s": [0.1, 0.2, 1.2, 1.7],
            "inflight_limit": pd.array([5, 5, 7, 4], dtype="Int64"),
        }
    )
    timeline = timeline_data(requests, steps)
    at = dict(zip(timeline["time_s"], timeline["inflight_limit"], strict=True))
    assert at[0.0] == 5
    assert (at[1.2], at[1.7]) == (7, 4)
    assert timeline["inflight_limit"].iloc[-1] == 4
    (axes,) = draw_timeline(timeline, CAPTION).axes
    assert set(np.asarray(line_of(axes, "limit").get_ydata())) == {5, 7, 4}
    assert "the limit at 4–7" in axes.get_title(loc="left")
