"""Which requests a Gantt chart shows of loads that are not one burst."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.figure_style import Caption
from roseinfer.bench.gantt import draw_gantt, gantt_data
from tests.bench.load_shapes import bursts_over_background, closed_loop, periodic_bursts, poisson, served

CAPTION = Caption(model="builtin:gpt2", machine="2 cores of something", run_id="run-7")


def test_of_bursts_over_background_the_first_burst_is_drawn_and_nothing_else() -> None:
    requests = bursts_over_background(limits=(None,))
    burst = gantt_data(requests)

    drawn = requests.set_index("request_index").loc[burst["request_index"]]
    assert drawn["scheduled_s"].nunique() == 1
    assert len(drawn) == 12
    assert burst["first_scheduled_ms"].min() >= 0  # zero is when the burst was due, not the run


def test_of_periodic_bursts_the_first_is_drawn() -> None:
    burst = gantt_data(periodic_bursts(limits=(None,)))

    assert list(burst["request_index"]) == list(range(10))


def test_of_bursts_measured_in_random_order_the_earliest_is_drawn() -> None:
    requests = periodic_bursts(limits=(None,)).sample(frac=1, random_state=1)

    assert list(gantt_data(requests)["request_index"]) == list(range(10))


def test_without_bursts_the_middle_of_the_load_is_drawn_from_when_each_request_was_due() -> None:
    stretch = gantt_data(served(poisson(30, 400, 0), arrival="poisson", request_rate=30.0))
    figure = draw_gantt(stretch, CAPTION)

    assert list(stretch["request_index"]) == list(range(72, 328))
    np.testing.assert_allclose(stretch["reserved_ms"], 0, atol=1e-9)
    assert figure.axes[0].get_xlabel() == "time since the request was due (ms)"
    assert figure.texts[0].get_text() == "A stretch of the load, request by request"


def test_arrivals_of_a_trace_that_share_an_instant_are_no_burst() -> None:
    stretch = gantt_data(served([0.0, 0.0, 3.0, 3.0], arrival="trace"))

    assert not stretch["is_burst"].any()
    assert len(stretch) == 4


def test_a_request_that_was_never_sent_is_counted_and_has_no_bar() -> None:
    stretch = gantt_data(closed_loop(users=3, n=20))
    (axes,) = draw_gantt(stretch, CAPTION).axes

    assert axes.get_title() == "no limit: 20 completed, 1 incomplete"
    assert stretch["first_scheduled_ms"].isna().sum() == 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_burst_of_one_is_drawn_too(size: int) -> None:
    requests = served(np.repeat([0.0, 1.0], size), arrival="burst", burst_size=size)
    figure = draw_gantt(gantt_data(requests), CAPTION)
    figure.draw_without_rendering()

    assert pd.notna(figure.axes[0].get_title())
