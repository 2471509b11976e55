"""Figures of policies: who is refused, and what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench import plots
from roseinfer.bench.figure_style import Caption
from roseinfer.bench.forecast_figure import draw_forecast, forecast_figure_data
from roseinfer.bench.summary import summarise
from roseinfer.bench.who_is_refused import LENGTH, PLACE, draw_who_is_refused, who_is_refused_data
from tests.bench.rows import facts_by_cell, measured

CAPTION = Caption(model="m", machine="2 cores", run_id="run-7")


def rows(
    admission: str = "tokens:64", n: int = 10, refused: tuple[int, ...] = (8, 9), **flags: Any
) -> pd.DataFrame:
    """A burst of which these were turned away."""
    made = measured(burst_size=n, **flags)
    made["admission"], made["cell_id"] = admission, admission
    late = made["request_index"].isin(refused)
    made.loc[late, "rejected_s"] = made.loc[late, "sent_s"]
    made.loc[late, ["outcome", "reject_stage", "reject_reason"]] = ["rejected", "submit", "tokens"]
    return made


def workload(lengths: list[int], repeat: int = 0) -> pd.DataFrame:
    n = len(lengths)
    shape = {"burst_size": n, "prompt_len": 32, "output_len": 3, "request_rate": np.nan}
    return pd.DataFrame(
        {"repeat": repeat, **shape, "request_index": range(n), "prompt_tokens": lengths}, index=range(n)
    )


def shares(data: pd.DataFrame, axis: str) -> list[float]:
    return data[data["axis"] == axis].sort_values("fifth")["share"].tolist()


def test_shares_are_by_fifth_of_the_place_in_the_burst() -> None:
    data = who_is_refused_data(rows(refused=(2, 8, 9)), None)
    assert shares(data, PLACE) == [0.0, 0.5, 0.0, 0.0, 1.0]
    assert data["low"].tolist() == [1, 3, 5, 7, 9]
    assert data["high"].tolist() == [2, 4, 6, 8, 10]
    assert data["offered"].tolist() == [2] * 5
    assert set(data["axis"]) == {PLACE}


def test_shares_are_by_fifth_of_the_prompt_that_was_asked_for() -> None:
    lengths = [100, 90, 80, 70, 60, 50, 40, 30, 20, 10]
    data = who_is_refused_data(rows(refused=(0, 1, 2)), workload(lengths))
    assert shares(data, LENGTH) == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert data[data["axis"] == LENGTH]["low"].tolist() == [10, 30, 50, 70, 90]


def test_lengths_are_those_of_the_repeat() -> None:
    both = pd.concat([rows(refused=(0,)), rows(refused=(0,), repeat=1)], ignore_index=True)
    asked = pd.concat([workload([*range(1, 11)]), workload([*range(10, 0, -1)], 1)], ignore_index=True)
    assert shares(who_is_refused_data(both, asked), LENGTH) == [0.25, 0.0, 0.0, 0.0, 0.25]


def test_each_policy_that_refused_has_a_line_and_the_others_none() -> None:
    made = pd.concat([rows(), rows("slo:ttft=1s", refused=(0,)), rows("none", refused=())], ignore_index=True)
    data = who_is_refused_data(made, None)
    assert set(data["limit"]) == {"tokens 64", "slo ttft=1s"}
    (axes,) = draw_who_is_refused(data, CAPTION).axes
    assert {line.get_label() for line in axes.lines} == {"tokens 64", "slo ttft=1s"}
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1–2", "3–4", "5–6", "7–8", "9–10"]


def test_dropped_from_the_queue_counts_as_refused() -> None:
    made = rows(refused=(9,))
    made.loc[9, ["outcome", "reject_stage", "reject_reason"]] = ["timeout", "queued", "queue-timeout"]
    assert shares(who_is_refused_data(made, None), PLACE)[-1] == 0.5


@pytest.mark.parametrize(
    "made",
    [
        rows("none", refused=()),
        rows("inflight:8"),  # the first 8 of each burst, as anybody knows
        rows("slo:ttft=1s", interval_s=0.1).assign(burst_size=np.nan),  # all alike, and no bursts
    ],
)
def test_where_it_would_show_nothing_there_is_no_figure(made: pd.DataFrame) -> None:
    assert who_is_refused_data(made, workload([32] * 10)).empty


def test_a_count_is_asked_too_where_lengths_vary() -> None:
    data = who_is_refused_data(rows("inflight:8"), workload([*range(1, 11)]))
    assert set(data["axis"]) == {LENGTH, PLACE}


def predicted(n: int = 40, factor: float = 1.5, admission: str = "slo:ttft=1s") -> pd.DataFrame:
    made = measured(burst_size=n)
    made["admission"], made["cell_id"] = admission, admission
    made["predicted_ttft_s"] = factor * (made["first_token_s"] - made["reserved_s"])
    return made


def test_the_error_is_predicted_over_actual() -> None:
    data = forecast_figure_data(pd.concat([predicted(), predicted(factor=0.8, admission="aimd")]))
    (slo,) = data[data["limit"] == "slo ttft=1s"]["median_error"].unique()
    (aimd,) = data[data["limit"] == "aimd"]["median_size"].unique()
    assert (slo, aimd) == pytest.approx((0.5, 0.2))
    panels = {axes.get_title(loc="left").split("\n")[0]: axes for axes in draw_forecast(data, CAPTION).axes}
    assert "median error +50 %, 50 % in size" in panels["slo ttft=1s"].get_title(loc="left")
    assert "median error -20 %, 20 % in size" in panels["aimd"].get_title(loc="left")


def test_a_scatter_of_many_keeps_the_ends_and_the_error_of_all() -> None:
    data = forecast_figure_data(predicted(4000))
    whole = predicted(4000)
    assert len(data) == 1500
    assert set(data["n"]) == {4000}
    assert data["predicted_ms"].max() == pytest.approx(1e3 * whole["predicted_ttft_s"].max())


def test_without_a_forecast_there_is_no_figure() -> None:
    assert forecast_figure_data(measured(burst_size=4)).empty


def test_a_run_draws_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "save", lambda figure, folder, name: [folder / f"{name}.png"])
    made = predicted(20)
    made.loc[18:, ["outcome", "reject_reason"]] = ["rejected", "slo"]
    made.loc[18:, "rejected_s"] = made.loc[18:, "sent_s"]
    summary = summarise(made, facts_by_cell(made))
    files = plots.draw_all(made, summary, CAPTION, tmp_path, workload=workload([*range(1, 21)]))
    assert {"who_is_refused.png", "predicted_ttft.csv"} <= {file.name for file in files}


def test_a_legend_of_long_names_takes_several_rows() -> None:
    many = pd.concat(
        [
            rows(f"codel:target={ms}ms:interval=500ms+queue-timeout:{ms}s", refused=(9,))
            for ms in range(10, 15)
        ],
        ignore_index=True,
    )
    figure = draw_who_is_refused(who_is_refused_data(many, None), CAPTION)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= max(axes.title.get_window_extent().y1 for axes in figure.axes)
