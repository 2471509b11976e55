"""The figures show what was measured: read back from their axes and from the CSV behind them."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from roseinfer.bench.figure_style import Caption, limit_styles, log_ticks, p99_text, save, share_text
from roseinfer.bench.gantt import STAGES, draw_gantt, gantt_data
from roseinfer.bench.heat_map import draw_heat_map, heat_map_data
from roseinfer.bench.nines import draw_nines, nines_data
from roseinfer.bench.plots import draw_all
from roseinfer.bench.records import derive
from roseinfer.bench.stats import percentile
from roseinfer.bench.strips import draw_p99, draw_throughput, points_data
from roseinfer.errors import RunError
from tests.bench.simulated_sweep import simulate

CAPTION = Caption(model="builtin:gpt2", machine="2 cores of something", run_id="run-7")
LIMITS = ["16", "64", "no limit"]
REPEATS = 3
BURST = 128

Frames = tuple[pd.DataFrame, pd.DataFrame]
Data = Callable[[pd.DataFrame], pd.DataFrame]


@pytest.fixture(scope="module")
def one_burst() -> Frames:
    return simulate(limits=(None, 16, 64), repeats=REPEATS)


@pytest.fixture(scope="module")
def two_bursts() -> Frames:
    return simulate(limits=(None, 16), bursts=(32, 128), repeats=REPEATS)


@pytest.fixture(scope="module")
def one_refused_cell(one_burst: Frames) -> Frames:
    """`one_burst`, but at limit 16 nothing was served."""
    requests, summary = (frame.copy() for frame in one_burst)
    refused = requests["max_inflight"] == 16
    requests.loc[refused, "reserved_s":"received_last_s"] = np.nan
    requests.loc[refused, "rejected_s"] = 0.001
    requests.loc[refused, "outcome"] = "rejected"
    cell = summary["max_inflight"] == 16
    summary.loc[cell, ["completed", "n_ttft"]] = 0
    summary.loc[cell, "reject_rate"] = 1.0
    summary.loc[cell, list(summary.filter(regex="_ms"))] = np.nan
    summary.loc[cell, "output_throughput"] = 0.0  # a summary that got it wrong must not be believed
    return requests, summary


@pytest.fixture(scope="module")
def p99(one_burst: Frames) -> Figure:
    return draw_p99(points_data(one_burst[1]), CAPTION)


@pytest.fixture(scope="module")
def nines(one_burst: Frames) -> Figure:
    return draw_nines(nines_data(one_burst[0]), CAPTION)


@pytest.fixture(scope="module")
def gantt(one_burst: Frames) -> Figure:
    return draw_gantt(gantt_data(one_burst[0]), CAPTION)


@pytest.fixture(scope="module")
def heat_map(two_bursts: Frames) -> Figure:
    return draw_heat_map(heat_map_data(two_bursts[1]), CAPTION)


def dots(axes: Axes) -> list[tuple[float, float]]:
    """(x, y) of the single measurements: the marks in a limit's marker, without a line."""
    markers = {marker for _, marker in limit_styles(LIMITS).values()}
    drawn = [line for line in axes.lines if line.get_marker() in markers and line.get_linestyle() == "None"]
    return [(float(x), float(y)) for line in drawn for x, y in np.asarray(line.get_xydata())]


def tick_labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def texts(figure: Figure) -> list[str]:
    return [artist.get_text() for artist in figure.findobj(Text) if isinstance(artist, Text)]


def line_of(axes: Axes, limit: str) -> Line2D:
    (line,) = [line for line in axes.lines if str(line.get_label()).startswith(f"{limit}:")]
    return line


def panel_of(figure: Figure, title: str) -> Axes:
    (axes,) = [axes for axes in figure.axes if axes.get_title().startswith(title)]
    return axes


def test_p99_has_a_dot_per_limit_and_repeat(p99: Figure) -> None:
    assert [len(dots(axes)) for axes in p99.axes] == [len(LIMITS) * REPEATS] * 2


def test_the_dots_are_the_p99s_of_the_repeats(one_burst: Frames, p99: Figure) -> None:
    ttft, queue_wait = p99.axes
    repeats = one_burst[1].dropna(subset="repeat")

    assert sorted(y for _, y in dots(ttft)) == sorted(repeats["p99_ttft_ms"])
    assert sorted(y for _, y in dots(queue_wait)) == sorted(repeats["p99_queue_wait_ms"])


def test_limits_ascend_and_no_limit_is_last(p99: Figure) -> None:
    # case A10
    axes = p99.axes[-1]

    assert [label.splitlines()[0] for label in tick_labels(axes)] == LIMITS
    slowest = max(dots(axes), key=lambda dot: dot[1])
    assert round(slowest[0]) == LIMITS.index("no limit")


def test_reject_rate_stands_under_every_limit(p99: Figure) -> None:
    # case D3
    axes = p99.axes[-1]

    rejected = [label.splitlines()[1] for label in tick_labels(axes)]
    assert rejected == ["87.5 % rejected", "50 % rejected", "0 % rejected"]


def test_a_p99_of_few_requests_is_called_their_maximum(p99: Figure) -> None:
    # case F10
    axes = p99.axes[-1]

    samples = [label.splitlines()[2:] for label in tick_labels(axes)]
    assert samples == [
        ["repeat: max (n=16)", "pooled: max (n=48)"],
        ["repeat: max (n=64)", "pooled: p99 (n=192)"],
        ["repeat: p99 (n=128)", "pooled: p99 (n=384)"],
    ]


def test_an_invalid_cell_is_called_so(one_burst: Frames) -> None:
    summary = one_burst[1].assign(valid=one_burst[1]["max_inflight"] != 64)
    axes = draw_throughput(points_data(summary), CAPTION).axes[-1]

    assert tick_labels(axes) == ["16", "64\nINVALID", "no limit"]


def test_a_cell_without_completed_requests_has_a_note_and_no_dot(one_refused_cell: Frames) -> None:
    # cases D2, F7
    figure = draw_p99(points_data(one_refused_cell[1]), CAPTION)

    for axes in figure.axes:
        assert {round(x) for x, _ in dots(axes)} == {1, 2}
        assert [text.get_text() for text in axes.texts] == ["none completed"]


def test_a_cell_that_was_never_run_is_called_so(one_burst: Frames) -> None:
    summary = one_burst[1].assign(burst_size=np.where(one_burst[1]["max_inflight"] == 16, 64, 128))
    figure = draw_p99(points_data(summary), CAPTION)

    notes = [[text.get_text() for text in axes.texts] for axes in figure.axes if axes.get_title()]
    assert notes == [["not run", "not run"], ["not run"]]


def test_throughput_of_nothing_completed_is_absent_while_its_reject_rate_shows(
    one_refused_cell: Frames,
) -> None:
    throughput, reject = draw_throughput(points_data(one_refused_cell[1]), CAPTION).axes

    assert {round(x) for x, _ in dots(throughput)} == {1, 2}
    assert {y for x, y in dots(reject) if round(x) == 0} == {100.0}


def test_refusals_alone_can_be_drawn() -> None:
    # case D2
    figures = figures_of(simulate(limits=(16,), repeats=1, refuse_all=True), CAPTION)

    for figure in figures:
        figure.draw_without_rendering()
    assert [sum("none completed" in text for text in texts(figure)) for figure in figures] == [1, 1, 2, 0]


def test_what_a_remote_server_does_not_say_takes_no_panel(one_burst: Frames) -> None:
    figure = draw_p99(points_data(one_burst[1].assign(p99_queue_wait_ms=np.nan)), CAPTION)

    assert [axes.get_ylabel() for axes in figure.axes] == ["p99 TTFT (ms, log scale)"]


def test_one_repeat_has_neither_median_nor_pooled_mark() -> None:
    _, summary = simulate(limits=(None, 16), repeats=1)
    axes = draw_p99(points_data(summary), CAPTION).axes[0]

    assert len(axes.lines) == len(dots(axes)) == 2


def test_the_median_is_that_of_the_dots(one_burst: Frames, p99: Figure) -> None:
    axes = p99.axes[0]

    bars = [float(np.asarray(line.get_ydata())[0]) for line in axes.lines if line.get_linewidth() == 2]
    repeats = one_burst[1].dropna(subset="repeat").groupby("max_inflight", dropna=False)["p99_ttft_ms"]
    assert sorted(bars) == sorted(repeats.median())


def test_small_multiples_share_their_scale(two_bursts: Frames) -> None:
    figure = draw_p99(points_data(two_bursts[1]), CAPTION)

    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["burst of 32", "burst of 128"]
    ttft = [axes for axes in figure.axes if "TTFT" in axes.get_ylabel()]
    assert len({axes.get_ylim() for axes in ttft}) == 1


@pytest.mark.parametrize(("limit", "n"), [("16", 48), ("64", 192), ("no limit", 384)])
def test_a_line_of_nines_ends_at_its_last_sample(nines: Figure, limit: str, n: int) -> None:
    line = line_of(nines.axes[0], limit)

    assert np.max(line.get_xdata()) == pytest.approx(np.log10(n))  # -log10(1 - (1 - 1/n))
    assert f"n={n}" in str(line.get_label())


def test_a_line_of_nines_reads_the_nearest_rank_percentile(one_burst: Frames, nines: Figure) -> None:
    # case F1
    line = line_of(nines.axes[0], "no limit")
    derived = derive(one_burst[0])
    ttft_ms = 1000 * derived.loc[derived["max_inflight"].isna(), "ttft_s"]

    x, y = np.asarray(line.get_xydata()).T
    for percent in (50.1, 90, 95, 99):
        step = np.searchsorted(x, -np.log10(1 - percent / 100), side="right") - 1
        assert y[step] == pytest.approx(percentile(ttft_ms, percent))


def test_ticks_of_nines_go_as_far_as_the_data(nines: Figure) -> None:
    assert tick_labels(nines.axes[0]) == ["0", "50", "90", "99"]


def test_a_line_without_completed_requests_is_named_in_the_legend(one_refused_cell: Frames) -> None:
    line = line_of(draw_nines(nines_data(one_refused_cell[0]), CAPTION).axes[0], "16")

    assert line.get_label() == "16: none completed, 100 % rejected"
    assert np.isnan(np.asarray(line.get_ydata(), dtype=np.float64)).all()


def test_a_long_line_is_thinned_without_losing_its_ends_or_its_tail() -> None:
    n = 20_000
    ttft_s = np.arange(1, n + 1) / 1000
    row = simulate(limits=(None,), repeats=1)[0].iloc[[0]]
    requests = row.loc[row.index.repeat(n)].assign(received_first_s=ttft_s, scheduled_s=0.0)
    nines = nines_data(requests.reset_index(drop=True))

    assert len(nines) <= 2000
    assert (nines["rank"].iloc[0], nines["rank"].iloc[-1]) == (1, n)
    assert set(nines["rank"].tail(100)) == set(range(n - 99, n + 1))


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: str(stage[0]))
def test_bars_are_the_stages(one_burst: Frames, stage: tuple[str, str, str, str]) -> None:
    name, start, end, _ = stage
    burst = gantt_data(one_burst[0])
    axes = panel_of(draw_gantt(burst, CAPTION), "limit 64")

    (bars,) = [artist for artist in axes.collections if artist.get_label() == name]
    assert isinstance(bars, PolyCollection)
    edges = [(path.get_extents().x0, path.get_extents().x1) for path in bars.get_paths()]
    rows = burst[(burst["limit"] == "64") & burst[end].notna()]
    np.testing.assert_allclose(edges, rows[[start, end]])
    assert len(edges) == 64


@pytest.mark.parametrize(("panel", "rejected"), [("limit 16", 112), ("limit 64", 64), ("no limit", 0)])
def test_every_refusal_is_a_tick(gantt: Figure, panel: str, rejected: int) -> None:
    axes = panel_of(gantt, panel)

    (ticks,) = [line for line in axes.lines if line.get_label() == "rejected"]
    assert len(np.asarray(ticks.get_xdata())) == rejected


def test_a_request_that_failed_is_marked_and_counted(one_burst: Frames) -> None:
    requests = one_burst[0].copy()
    requests.loc[(requests["request_index"] == 5) & requests["max_inflight"].isna(), "outcome"] = "error"
    axes = panel_of(draw_gantt(gantt_data(requests), CAPTION), "no limit")

    assert axes.get_title() == "no limit: 127 completed, 1 error"
    (marks,) = [line for line in axes.lines if line.get_label() == "ended otherwise"]
    assert list(np.asarray(marks.get_ydata())) == [5]


def test_only_the_first_burst_is_drawn(one_burst: Frames) -> None:
    requests = one_burst[0]
    second = requests.assign(request_index=requests["request_index"] + BURST, scheduled_s=9.0)

    assert len(gantt_data(pd.concat([requests, second]))) == len(LIMITS) * BURST


def test_a_burst_too_tall_to_read_is_drawn_in_steps() -> None:
    requests, _ = simulate(limits=(64,), bursts=(600,), repeats=1)
    (axes,) = draw_gantt(gantt_data(requests), CAPTION).axes

    (ticks,) = [line for line in axes.lines if line.get_label() == "rejected"]
    assert len(np.asarray(ticks.get_xdata())) == len([i for i in range(64, 600) if i % 3 == 0])
    assert axes.get_title() == "limit 64: 64 completed, 536 rejected\n(1 in 3 requests is drawn)"


def test_heat_map_hatches_the_cells_with_few_samples(two_bursts: Frames) -> None:
    cells = heat_map_data(two_bursts[1])
    axes = panel_of(draw_heat_map(cells, CAPTION), "p99 TTFT")

    corners = [patch.get_extents() for patch in axes.patches if patch.get_hatch()]
    inside = [axes.transData.inverted().transform((box.x0 + 1, box.y0 + 1)) + 0.25 for box in corners]
    hatched = {(round(x), round(y)) for x, y in inside}
    # n: 48 and 48 at limit 16, 96 and 384 without a limit
    assert hatched == {(0, 0), (1, 0), (0, 1)}


def test_heat_map_cells_hold_the_pooled_p99_or_say_that_it_is_a_maximum(
    two_bursts: Frames, heat_map: Figure
) -> None:
    axes = panel_of(heat_map, "p99 TTFT")

    found = {text.get_position(): text.get_text() for text in axes.texts}
    pooled = two_bursts[1][two_bursts[1]["repeat"].isna()].set_index(["burst_size", "max_inflight"])
    small, large = pooled.xs(32)["p99_ttft_ms"].min(), pooled.xs(128)["p99_ttft_ms"].max()
    assert found[0, 0] == f"max {small:.0f}\n(n=48)"
    assert found[1, 1] == f"{large:,.0f}\n(n=384)"


def test_heat_map_puts_no_limit_last(heat_map: Figure) -> None:
    # case A10
    axes = panel_of(heat_map, "p99 TTFT")

    assert [label.get_text() for label in axes.get_yticklabels()] == ["16", "no limit"]


def test_heat_map_cell_without_completed_requests_says_so(two_bursts: Frames) -> None:
    summary = two_bursts[1].copy()
    cell = (summary["max_inflight"] == 16) & (summary["burst_size"] == 32)
    summary.loc[cell, ["completed", "n_ttft"]] = 0
    summary.loc[cell, "p99_ttft_ms"] = 0.0
    axes = panel_of(draw_heat_map(heat_map_data(summary), CAPTION), "p99 TTFT")

    assert {text.get_position(): text.get_text() for text in axes.texts}[0, 0] == "none\ncompleted"


def test_heat_map_needs_a_second_factor(one_burst: Frames) -> None:
    assert heat_map_data(one_burst[1]).empty


def test_prompt_length_takes_the_columns_when_it_alone_is_swept() -> None:
    _, summary = simulate(limits=(None, 16), bursts=(32,), prompt_lens=(16, 64), repeats=1)
    figure = draw_heat_map(heat_map_data(summary), CAPTION)

    assert panel_of(figure, "p99 TTFT").get_xlabel() == "prompt length (tokens)"


@pytest.fixture(scope="module")
def short() -> Frames:
    return simulate(limits=(16,), bursts=(16, 32), repeats=2)


@pytest.fixture(scope="module")
def files(short: Frames, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return draw_all(*short, CAPTION, tmp_path_factory.mktemp("run") / "figures")


def test_every_figure_comes_as_png_svg_and_csv(files: list[Path]) -> None:
    bursts = ["burst_gantt_1", "burst_gantt_2", "timeline_1", "timeline_2"]
    names = ["p99_vs_limit", "ttft_nines", "throughput_vs_limit", *bursts, "p99_heat_map"]
    assert [path.name for path in files] == [
        f"{name}.{kind}" for name in names for kind in ("png", "svg", "csv")
    ]
    assert all(path.stat().st_size > 100 for path in files)


def test_csv_holds_what_the_figure_shows(files: list[Path], short: Frames) -> None:
    points = pd.read_csv(files[2]).dropna(subset="repeat")
    figure = draw_p99(points_data(short[1]), CAPTION)

    drawn = [y for axes in figure.axes if "TTFT" in axes.get_ylabel() for _, y in dots(axes)]
    assert sorted(points["p99_ttft_ms"]) == pytest.approx(sorted(drawn))


@pytest.mark.parametrize("data", [points_data, heat_map_data])
def test_the_order_of_the_summary_changes_nothing(data: Data, two_bursts: Frames) -> None:
    assert data(two_bursts[1]).to_csv(index=False) == data(two_bursts[1].iloc[::-1]).to_csv(index=False)


@pytest.mark.parametrize("data", [nines_data, gantt_data])
def test_the_order_of_the_requests_changes_nothing(data: Data, two_bursts: Frames) -> None:
    assert data(two_bursts[0]).to_csv(index=False) == data(two_bursts[0].iloc[::-1]).to_csv(index=False)


def test_the_same_figure_gives_the_same_bytes(short: Frames, tmp_path: Path) -> None:
    heat = heat_map_data(short[1])
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        save(draw_heat_map(heat, CAPTION), tmp_path / name, "map")

    assert filecmp.cmp(tmp_path / "first" / "map.svg", tmp_path / "second" / "map.svg", shallow=False)
    assert filecmp.cmp(tmp_path / "first" / "map.png", tmp_path / "second" / "map.png", shallow=False)


def test_a_folder_that_cannot_be_made_is_one_clear_error(one_burst: Frames, tmp_path: Path) -> None:
    (tmp_path / "figures").write_text("a file")

    with pytest.raises(RunError, match="figures could not be written to 'figures'"):
        draw_all(*one_burst, CAPTION, tmp_path / "figures")


def figures_of(frames: Frames, caption: Caption) -> list[Figure]:
    points, bursts, heat = points_data(frames[1]), gantt_data(frames[0]), heat_map_data(frames[1])
    first = bursts[bursts["combination"] == bursts["combination"].iloc[0]]
    return [
        draw_p99(points, caption),
        draw_throughput(points, caption),
        draw_nines(nines_data(frames[0]), caption),
        draw_gantt(first, caption),
        *([] if heat.empty else [draw_heat_map(heat, caption)]),
    ]


def test_caption_names_the_method_the_model_the_machine_and_the_run(
    p99: Figure, nines: Figure, heat_map: Figure
) -> None:
    for figure in (p99, nines, heat_map):
        caption = figure.texts[-1].get_text().replace("\n", " ")
        assert "nearest rank" in caption
        assert "Model builtin:gpt2 · 2 cores of something · run run-7" in caption
        assert f"{REPEATS} repeats" in caption


def test_any_name_of_a_model_can_be_drawn(one_burst: Frames) -> None:
    figure = draw_throughput(points_data(one_burst[1]), Caption("$\\frac{模型$ 🦙", "a_b^c", "run"))
    figure.draw_without_rendering()

    assert any("$\\frac{??$ ?" in text for text in texts(figure))


@pytest.mark.parametrize("frames", ["short", "one_refused_cell"])
def test_nothing_is_cut_off_and_no_tick_labels_overlap(frames: str, request: pytest.FixtureRequest) -> None:
    for figure in figures_of(request.getfixturevalue(frames), CAPTION):
        figure.draw_without_rendering()
        inked, page = figure.get_tightbbox(), figure.bbox_inches
        assert page.contains(inked.x0, inked.y0)
        assert page.contains(inked.x1, inked.y1)
        for axes in figure.axes:
            boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
            assert not any(left.overlaps(right) for left, right in pairwise(boxes))


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.0004, "<0.1 %"), (0.875, "87.5 %"), (0.9996, ">99.9 %"), (1, "100 %"), (np.nan, "n/a")],
)
def test_only_none_and_all_read_as_none_and_all(share: float, text: str) -> None:
    assert share_text(share) == text


def test_a_mixture_of_maxima_and_p99s_is_called_one() -> None:
    assert p99_text(pd.Series([98, 101])) == "p99/max (n=98–101)"


@pytest.mark.parametrize(("low", "high"), [(7, 7), (100, 100), (180, 195), (0.02, 3), (1e-3, 1e6)])
def test_log_ticks_enclose_the_values(low: float, high: float) -> None:
    ticks = log_ticks(low, high)

    assert ticks[0] < low <= high < ticks[-1]
    assert 2 <= len(ticks) <= 13


def test_every_limit_has_its_own_colour_and_marker_and_no_limit_is_black() -> None:
    styles = limit_styles([*map(str, range(1, 8)), "no limit"])

    assert styles["no limit"][0] == "#000000"
    assert len(set(styles.values())) == 8
