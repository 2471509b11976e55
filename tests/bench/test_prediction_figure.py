"""Predicted over measured, drawn: marks where the figures are, and words where there are none."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from roseinfer.bench.figure_style import Caption
from roseinfer.bench.prediction import errors
from roseinfer.bench.prediction_figure import REJECTED, draw_prediction, prediction_figure_data
from tests.bench.rows import measured

CAPTION = Caption(model="builtin:gpt2", machine="2 cores of something", run_id="run-7")


def data(*, is_remote: bool = False, service_s: float = 0.011, burst_size: int = 200) -> pd.DataFrame:
    """Limits 100 and none, predicted to be a tenth slower."""
    real, simulated = (
        pd.concat(
            [measured(burst_size=burst_size, limit=limit, service_s=seconds) for limit in (None, 100)],
            ignore_index=True,
        )
        for seconds in (0.010, service_s)
    )
    if is_remote:
        real = real.assign(first_scheduled_s=np.nan)
    return prediction_figure_data(errors(real, simulated))


def test_there_is_a_row_per_cell_and_figure() -> None:
    rows = data()
    assert rows["limit"].drop_duplicates().tolist() == ["100", "no limit"]
    assert len(rows) == 2 * (2 * 3 + 1)
    (p99,) = rows[(rows["measure"] == "ttft") & (rows["percent"] == 99) & (rows["limit"] == "100")].to_dict(
        "records"
    )
    assert p99["measured"] == pytest.approx(10 + 99 * 10 + 0.1)
    assert p99["predicted"] / p99["measured"] - 1 == pytest.approx(p99["error"])


def test_refusals_are_per_cent_of_the_offered() -> None:
    rows = data()
    refused = rows[rows["measure"] == REJECTED]
    assert refused["measured"].tolist() == [50, 0]
    assert refused["error"].tolist() == [0, 0]


def titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


def test_marks_stand_at_predicted_over_measured() -> None:
    rows = data()
    figure = draw_prediction(rows, CAPTION)
    assert titles(figure) == ["TTFT", "queue wait", "refusals"]
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "^"]
    p99 = rows[(rows["measure"] == "ttft") & (rows["percent"] == 99)]
    assert np.concatenate([line.get_xdata() for line in marks]).tolist() == p99["measured"].tolist()
    heights = np.concatenate([line.get_ydata() for line in marks])
    assert heights.tolist() == pytest.approx((1 + p99["error"]).tolist())


def test_ratios_stand_alike_above_and_below_1() -> None:
    for axes in draw_prediction(data(), CAPTION).axes[:2]:
        bottom, top = axes.get_ylim()
        assert bottom * top == pytest.approx(1)
        assert top > 1.1


def test_labels_below_an_axis_of_many_decades_are_few() -> None:
    rows = data()
    is_ttft = rows["measure"] == "ttft"
    rows.loc[is_ttft, ["measured", "predicted"]] *= np.geomspace(1, 100, is_ttft.sum())[:, None]
    figure = draw_prediction(rows, CAPTION)
    figure.draw_without_rendering()
    texts = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert len([text for text in texts if text]) <= 6
    assert all(text.strip("0,.") in ("1", "") for text in texts)


def test_without_queue_waits_there_is_no_panel_of_them() -> None:
    assert titles(draw_prediction(data(is_remote=True), CAPTION)) == ["TTFT", "refusals"]


def test_a_sample_too_small_for_any_percentile_says_so() -> None:  # case D2
    figure = draw_prediction(data(burst_size=1), CAPTION)
    assert figure.axes[0].texts[0].get_text() == "too few completed"


def test_zeros_are_counted_that_a_logarithmic_axis_cannot_hold() -> None:
    rows = data()
    rows.loc[rows["measure"] == "queue_wait", "predicted"] = 0.0
    figure = draw_prediction(rows, CAPTION)
    assert "6 are left out" in figure.texts[-1].get_text().replace("\n", " ")


def test_nothing_to_compare_is_nothing_to_draw() -> None:
    real, other = measured(limit=1), measured(limit=2)
    assert prediction_figure_data(errors(real, other)).empty
