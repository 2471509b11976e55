"""The shift function finds where a latency moved, with a band as wide as the repeats differ."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.figure_style import Caption
from roseinfer.bench.shift import draw_shift, shift_data
from roseinfer.bench.stats import percentile
from tests.bench.rows import as_read

CAPTION = Caption(model="builtin:gpt2", machine="2 cores of something", run_id="run-8 against run-7")


def run(ttft_s: list[list[float]], *, limit: int | None = None, rejected: bool = False) -> pd.DataFrame:
    """A cell whose repeats have these TTFTs."""
    return as_read(
        [
            {
                "cell_id": str(limit),
                "repeat": repeat,
                "request_index": index,
                "admission": str(AdmissionSpec(limit)),
                "max_inflight": limit,
                "burst_size": 8,
                "outcome": "rejected" if rejected else "completed",
                "scheduled_s": 0.0,
                "received_first_s": None if rejected else value,
                "reject_stage": "submit" if rejected else None,
            }
            for repeat, values in enumerate(ttft_s)
            for index, value in enumerate(values)
        ]
    )


def sample(repeats: int = 6, n: int = 100, seed: int = 0, factor: float = 1.0) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [list(factor * np.exp(rng.normal(0, 0.5, n) + rng.normal(0, 0.05))) for _ in range(repeats)]


def test_a_run_against_itself_in_pairs_is_one_everywhere_without_a_band() -> None:
    shift = shift_data(run(sample()), run(sample()), paired=True)

    assert list(shift["percent"]) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99]
    assert (shift[["ratio", "lo", "hi"]] == 1).all(axis=None)


def test_a_factor_is_found_at_every_percentile() -> None:
    shift = shift_data(run(sample()), run(sample(factor=1.5)), paired=True)

    np.testing.assert_allclose(shift[["ratio", "lo", "hi"]], 1.5)


def test_the_warm_up_of_an_open_loop_is_left_out() -> None:
    steady = [[0.010 + 1e-5 * (i % 7) for i in range(200)] for _ in range(2)]
    warming = [[1.0] * 40 + repeat[40:] for repeat in steady]
    a, b = (
        run(side).assign(burst_size=np.nan, arrival="poisson", scheduled_s=0.0) for side in (steady, warming)
    )

    shift = shift_data(a, b)

    assert list(shift["b_n"].unique()) == [320]
    assert shift["ratio"].between(0.99, 1.01).all()


def test_only_the_tail_moved() -> None:
    a = sample(n=200)
    b = [[value * (2 if value > np.quantile(repeat, 0.9) else 1) for value in repeat] for repeat in a]
    shift = shift_data(run(a), run(b), paired=True).set_index("percent")

    assert (shift.loc[:70, "ratio"] == 1).all()
    assert (shift.loc[95:, "ratio"] > 1.9).all()


def test_a_change_of_spread_alone_is_seen() -> None:
    # case G12
    a, b = (
        [float(value) for value in range(10, 30)],
        [float(value) for value in (*range(1, 11), *range(30, 40))],
    )
    ratio = shift_data(run([a]), run([b])).set_index("percent")["ratio"]

    assert ratio[10] < 0.5
    assert ratio[90] > 1.2


def test_ratios_are_those_of_nearest_rank_percentiles_of_the_pooled_requests() -> None:
    a, b = sample(seed=1), sample(seed=2)
    shift = shift_data(run(a), run(b))

    for percent, a_ms, ratio in shift[["percent", "a_ms", "ratio"]].to_numpy():
        assert a_ms == pytest.approx(1000 * percentile(a, percent))
        assert ratio == pytest.approx(percentile(b, percent) / percentile(a, percent))


def test_the_band_comes_from_whole_repeats() -> None:
    # every repeat is one value a hundred times: requests say nothing that repeats do not
    repeats = [[value] * 100 for value in (1.0, 1.2, 1.4, 1.6)]
    shift = shift_data(run(repeats), run(repeats))

    assert (shift["lo"] <= 1 / 1.4).all()
    assert (shift["hi"] >= 1.4).all()


def test_a_percentile_that_is_the_maximum_is_not_drawn() -> None:
    # case F10
    shift = shift_data(run(sample(repeats=3, n=21)), run(sample(repeats=3, n=400)))

    assert list(shift["percent"]) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 95]
    assert (
        list(shift_data(run(sample(repeats=3, n=334)), run(sample(repeats=3, n=334)))["percent"])[-1] == 99.9
    )


def test_one_repeat_gives_ratios_without_a_band() -> None:
    shift = shift_data(run(sample(repeats=1)), run(sample(repeats=6)))

    assert shift["ratio"].notna().all()
    assert shift[["lo", "hi"]].isna().all(axis=None)


def test_a_cell_without_completed_requests_is_drawn_as_such() -> None:
    # case D2
    shift = shift_data(run(sample()), run([[0.0] * 4], rejected=True))
    figure = draw_shift(shift, CAPTION)
    figure.draw_without_rendering()

    assert shift["percent"].isna().all()
    assert "too few completed" in [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]


def test_cells_match_by_their_factors_and_no_limit_matches_no_limit() -> None:
    both = pd.concat([run(sample(), limit=None), run(sample(), limit=16)])
    other = pd.concat([run(sample(), limit=None), run(sample(), limit=64)])

    assert set(shift_data(both, other)["limit"]) == {"no limit"}
    assert shift_data(run(sample(), limit=16), run(sample(), limit=64)).empty


def test_the_same_seed_gives_the_same_band() -> None:
    a, b = run(sample(seed=1)), run(sample(seed=2))

    pd.testing.assert_frame_equal(shift_data(a, b, seed=3), shift_data(a, b, seed=3))


def test_a_thinned_sample_gives_nearly_the_same_band(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = run(sample(n=500, seed=1)), run(sample(n=500, seed=2))
    whole = shift_data(a, b)
    monkeypatch.setattr("roseinfer.bench.shift._MOST_VALUES", 1000)

    thinned = shift_data(a, b)

    pd.testing.assert_series_equal(thinned["ratio"], whole["ratio"])
    np.testing.assert_allclose(thinned[["lo", "hi"]][:10], whole[["lo", "hi"]][:10], rtol=0.1)


def test_figure_has_a_panel_a_cell_with_equal_scales_around_one() -> None:
    a = pd.concat([run(sample(), limit=None), run(sample(), limit=16)])
    b = pd.concat([run(sample(factor=2.0), limit=None), run(sample(seed=5), limit=16)])
    figure = draw_shift(shift_data(a, b), CAPTION, names=("before", "after"))

    assert [axes.get_title() for axes in figure.axes] == ["limit 16", "no limit"]
    ((low, high),) = {axes.get_ylim() for axes in figure.axes}
    assert low * high == pytest.approx(1)
    assert high > 2
    assert figure.axes[0].get_ylabel() == "TTFT of after / before"
