"""Every figure can be drawn of every shape of load, whole and legible."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from roseinfer.bench import plots
from roseinfer.bench.figure_style import Caption
from roseinfer.bench.records import STEP_SCHEMA
from roseinfer.bench.timeline import draw_timeline
from tests.bench.load_shapes import SHAPES, summary_of

CAPTION = Caption(model="builtin:gpt2", machine="2 cores of something", run_id="run-7")
NO_STEPS = pd.DataFrame({name: [] for name in STEP_SCHEMA.names})


def drawn(requests: pd.DataFrame, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures of a run by name; drawing them to files takes ten times as long."""
    figures: dict[str, Figure] = {}

    def keep(figure: Figure, folder: Path, name: str) -> list[Path]:
        figures[name] = figure
        return []

    monkeypatch.setattr(plots, "save", keep)
    plots.draw_all(requests, summary_of(requests), CAPTION, folder, steps=NO_STEPS)
    return figures


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_load_has_its_figures(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn(SHAPES[shape](), tmp_path, monkeypatch)

    assert {name.rstrip("_123456") for name in figures} == {
        *("p99_vs_limit", "ttft_nines", "throughput_vs_limit", "burst_gantt", "timeline", "p99_explained"),
        *(("load_curve", "p99_heat_map") if shape == "rates" else ()),
    }
    for figure in figures.values():
        figure.draw_without_rendering()
        inked, page = figure.get_tightbbox(), figure.bbox_inches
        assert page.contains(inked.x0, inked.y0)
        assert page.contains(inked.x1, inked.y1)
        for axes in figure.axes:
            boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
            assert not any(left.overlaps(right) for left, right in pairwise(boxes))


def test_of_many_combinations_some_are_drawn_from_the_first_to_the_last() -> None:
    data = pd.DataFrame({"combination": [f"{rate} requests/s" for rate in range(1, 12)]})

    figures = plots._one_each("timeline", data, draw_timeline)

    assert [name for name, _, _ in figures] == [f"timeline_{number}" for number in (1, 3, 5, 7, 9, 11)]
    assert [list(part["combination"]) for _, part, _ in figures[:2]] == [["1 requests/s"], ["3 requests/s"]]
