"""The bars that explain the p99: shares as `explain` has them, and words where there are none."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from roseinfer.bench.explain import PARTS, WAITED_FOR
from roseinfer.bench.explain_figure import draw_explain, explain_figure_data
from roseinfer.bench.figure_style import Caption
from roseinfer.bench.labels import label_cells
from roseinfer.bench.records import FACTORS, STEP_SCHEMA
from tests.bench.load_shapes import periodic_bursts

CAPTION = Caption(model="builtin:gpt2", machine="2 cores of something", run_id="run-7")


def explained(**changes: object) -> pd.DataFrame:
    """A row as `explain` gives it: three quarters queue, one quarter prefill; the queue waited for prefill."""
    row: dict[str, object] = {
        "cell_id": "cell",
        **dict.fromkeys(FACTORS, np.nan),
        "admission": "none",
        "n": 400,
        "p99_ttft_ms": 250.0,
        "explained": 5,
        **{f"{part}_share": 0.0 for part in PARTS},
        "queue_wait_share": 0.75,
        "prefill_share": 0.25,
        "wait_ms": 187.5,
        **{f"{what}_share": 0.0 for what in WAITED_FOR},
        "earlier_prefill_share": 0.9,
        "decode_only_share": 0.1,
        "steps_waited": 1.0,
        "requests_waited": 12.0,
    }
    return label_cells(pd.DataFrame([row | changes]))


def widths(axes: Axes, y: int = 0) -> list[float]:
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    return [bar.get_width() for bar in bars if round(bar.get_y() + bar.get_height() / 2) == y]


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def names(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


@pytest.fixture(scope="module")
def figure() -> Figure:
    return draw_explain(explained(), CAPTION)


def test_bars_are_the_shares_in_the_order_of_the_parts(figure: Figure) -> None:
    parts, waits = figure.axes

    assert (widths(parts), names(parts)) == ([0.75, 0.25], ["queue wait", "prefill"])
    assert widths(waits) == pytest.approx([0.9, 0.1])
    assert names(waits) == [WAITED_FOR["earlier_prefill"], WAITED_FOR["decode_only"]]


def test_the_p99_stands_beside_its_parts_and_what_it_waited_for_beside_the_queue(figure: Figure) -> None:
    parts, waits = figure.axes

    assert words(parts) == ["75 %", "25 %", "p99: 250 ms"]
    assert words(waits) == ["90 %", "10 %", "188 ms: 1 step,\n12 other requests"]


def test_a_p99_of_few_requests_is_called_their_maximum() -> None:
    # case F10
    assert words(draw_explain(explained(n=64), CAPTION).axes[0])[-1] == "max (n=64): 250 ms"


def test_a_cell_without_completed_requests_says_so() -> None:
    # case D2
    shares = {name: np.nan for name in explained().columns if name.endswith("_share")}
    nothing = explained(n=0, explained=0, p99_ttft_ms=np.nan, wait_ms=np.nan, steps_waited=np.nan, **shares)
    figure = draw_explain(nothing, CAPTION)
    figure.draw_without_rendering()

    assert [words(axes)[0] for axes in figure.axes] == ["none completed"] * 2


def test_without_steps_the_parts_are_drawn_and_the_queue_was_not_measured() -> None:
    no_steps = pd.DataFrame({name: [] for name in STEP_SCHEMA.names})
    data = explain_figure_data(periodic_bursts(limits=(None, 4)), no_steps)
    parts, waits = draw_explain(data, CAPTION).axes

    assert sum(widths(parts)) == pytest.approx(1)
    assert sum(widths(parts, 1)) == pytest.approx(1)
    assert words(waits)[:2] == ["not measured"] * 2


def test_limits_stand_from_the_smallest_to_no_limit_down() -> None:
    # case A10
    rows = [
        explained(admission=limit, n=n) for limit, n in (("none", 3), ("inflight:64", 2), ("inflight:9", 1))
    ]
    figure = draw_explain(label_cells(pd.concat(rows)), CAPTION)

    parts = figure.axes[0]
    assert [label.get_text() for label in parts.get_yticklabels()] == ["9", "64", "no limit"]
    assert parts.yaxis_inverted()
    assert next(text for text in words(parts) if "max" in text).startswith("max (n=1)")
