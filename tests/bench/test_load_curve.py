"""Sweeps of the request rate: what stands where, and what is not drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from roseinfer.bench.figure_style import Caption
from roseinfer.bench.load_curve import draw_load_curve, load_curve_data
from roseinfer.bench.stats import median_interval
from tests.bench.load_shapes import rates, summary_of

CAPTION = Caption(model="builtin:gpt2", machine="2 cores of something", run_id="run-7")
RATES = (10.0, 40.0, 100.0)


@pytest.fixture(scope="module")
def summary() -> pd.DataFrame:
    return summary_of(rates(RATES, limits=(None, 4), repeats=6, n=40))


@pytest.fixture(scope="module")
def figure(summary: pd.DataFrame) -> Figure:
    return draw_load_curve(load_curve_data(summary), CAPTION)


def line_of(axes: Axes, label: str) -> Line2D:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def test_latency_stands_over_the_offered_rate_and_never_over_throughput(figure: Figure) -> None:
    # past saturation throughput stands still: a line over it would fold back
    for axes in figure.axes:
        for line in axes.lines:
            np.testing.assert_array_equal(line.get_xdata(), RATES)
    assert figure.axes[-1].get_xlabel() == "offered load (requests/s)"


def test_a_mark_is_the_median_of_the_repeats_and_its_bar_their_interval(
    summary: pd.DataFrame, figure: Figure
) -> None:
    cell = summary[
        (summary["request_rate"] == 40) & summary["max_inflight"].isna() & summary["repeat"].notna()
    ]
    wanted = median_interval(cell["p99_ttft_ms"])
    line = line_of(figure.axes[0], "no limit: p99 TTFT")
    (bars,) = [
        bars
        for bars in figure.axes[0].collections
        if any(np.allclose(path.vertices, [[40, wanted.lo], [40, wanted.hi]]) for path in bars.get_paths())
    ]

    assert np.asarray(line.get_ydata())[1] == pytest.approx(wanted.point)
    assert len(bars.get_paths()) == len(RATES)


def test_under_six_repeats_the_bars_are_said_to_be_the_extremes() -> None:
    curve = load_curve_data(summary_of(rates((10, 40), repeats=3, n=20)))
    figure = draw_load_curve(curve, CAPTION)

    assert not np.isfinite(curve[["lo", "hi"]].to_numpy()).any()
    assert "bars: the least and the most" in figure.texts[-1].get_text().replace("\n", " ")


def test_throughput_saturates_where_refusals_begin(figure: Figure) -> None:
    _, served, refused = figure.axes

    assert served.get_ylabel() == "throughput (requests/s)"
    assert np.asarray(line_of(served, "4: throughput").get_ydata())[-1] < 60
    assert np.asarray(line_of(refused, "4: rejected").get_ydata())[-1] > 20
    assert list(np.asarray(line_of(refused, "no limit: rejected").get_ydata())) == [0, 0, 0]


def test_goodput_takes_the_place_of_throughput_where_goals_were_set(summary: pd.DataFrame) -> None:
    with_goals = summary.assign(request_goodput=summary["request_throughput"] / 2)
    figure = draw_load_curve(load_curve_data(with_goals), CAPTION)

    assert figure.axes[1].get_ylabel() == "goodput (requests/s)"


def test_a_rate_at_which_nothing_was_completed_has_no_latency_and_all_refused(summary: pd.DataFrame) -> None:
    # case D2
    refused = summary.copy()
    cell = (refused["max_inflight"] == 4) & (refused["request_rate"] == 100)
    refused.loc[cell, ["completed", "n_ttft"]] = 0
    refused.loc[cell, "reject_rate"] = 1.0
    refused.loc[cell, "p99_ttft_ms"] = 0.0  # a summary that got it wrong must not be believed
    latency, _, rejected = draw_load_curve(load_curve_data(refused), CAPTION).axes

    assert np.isnan(np.asarray(line_of(latency, "4: p99 TTFT").get_ydata(), np.float64)[-1])
    assert np.asarray(line_of(rejected, "4: rejected").get_ydata())[-1] == 100


def test_one_rate_makes_no_curve() -> None:
    assert load_curve_data(summary_of(rates((10,), repeats=1, n=5))).empty


def test_a_p99_of_few_requests_is_called_their_maximum(figure: Figure) -> None:
    # case F10
    assert any(text.get_text().startswith("max (n=") for text in figure.legends[0].get_texts())
