"""Which cells are held out, and what is said of how they were predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from roseinfer.bench.calibration import MeasuredRun
from roseinfer.bench.hold_out import choose, composition_lines, errors_by_composition, try_out
from roseinfer.bench.records import FACTORS
from roseinfer.errors import InputError
from roseinfer.sim.cost_model import COMPOSITION, CostModel, Fitted, StepCost
from tests.bench.made_runs import TRUTH, made_run


def grid(**levels: list[Any]) -> pd.DataFrame:
    frame = pd.DataFrame(list(product(*levels.values())), columns=list(levels))
    return frame.reindex(columns=FACTORS)


@pytest.mark.parametrize("seed", range(5))
def test_every_level_of_every_factor_is_on_both_sides(seed: int) -> None:
    cells = grid(
        admission=["none", "inflight:8", "inflight:32", "tokens:64"],
        burst_size=[16, 128],
        prompt_len=[16, 64, 256],
    )
    chosen = cells.iloc[choose(cells, 0.5, seed)]
    assert len(chosen) == 12
    for factor, size in (("admission", 3), ("burst_size", 6), ("prompt_len", 4)):
        assert chosen[factor].value_counts(dropna=False).tolist() == [size] * cells[factor].nunique(
            dropna=False
        )


def test_the_seed_decides_which() -> None:
    cells = grid(admission=["none", "inflight:8", "inflight:32", "tokens:64"], burst_size=[16, 128])
    assert choose(cells, 0.5, 1) == choose(cells, 0.5, 1)
    assert len({tuple(choose(cells, 0.5, seed)) for seed in range(10)}) > 1


@pytest.mark.parametrize(("share", "n"), [(0.5, 1), (0.01, 1), (0.99, 2)])
def test_at_least_one_and_never_all(share: float, n: int) -> None:
    assert len(choose(grid(admission=["none", "inflight:8", "tokens:8"]), share, 0)) == n


@pytest.mark.parametrize("seed", range(5))
def test_cells_of_the_same_factors_are_on_one_side(seed: int) -> None:
    """As two runs of one sweep have them."""
    cells = pd.concat([grid(max_inflight=[None, 8, 32], burst_size=[64, 128])] * 2, ignore_index=True)
    chosen = choose(cells, 0.5, seed)
    assert len(chosen) == 6
    assert {place % 6 for place in chosen if place < 6} == {place % 6 for place in chosen if place >= 6}


@pytest.fixture(scope="module")
def run_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of 8 cells at the speed of TRUTH, to be read alone."""
    return made_run(tmp_path_factory.mktemp("made"), "a")


def test_a_law_that_holds_predicts_what_it_has_not_seen(run_a: Path) -> None:
    run = MeasuredRun.open(run_a)
    trial = try_out([run], 0.5, 0)
    assert len(trial.held_out) == len(trial.errors) == 4
    assert set(trial.held_out) == set(trial.errors["cell_id"])
    assert trial.errors["error_p50_ttft_ms"].abs().max() < 0.005
    assert (trial.errors["reject_difference"] == 0).all()
    assert trial.by_composition["median_error"].max() < 0.005
    facts = trial.facts()
    assert facts["cells"] == trial.held_out
    assert facts["median_error"]["p50_ttft_ms"] < 0.005


@pytest.mark.parametrize("seed", range(3))
def test_a_limit_that_cannot_bind_is_on_the_side_of_no_limit(run_a: Path, seed: int) -> None:
    """A limit of 8 is none for a burst of 6."""
    held_out = set(try_out([MeasuredRun.open(run_a)], 0.5, seed).held_out)
    for prompt_len in (16, 200):
        shape = f"burst_6-prompt_{prompt_len}-output_8"
        assert (f"inflight_8-{shape}" in held_out) == (f"inflight_none-{shape}" in held_out)


def test_cells_that_all_ask_for_the_same_cannot_be_held_out(run_a: Path) -> None:
    run = MeasuredRun.open(run_a)
    (one, *_) = run.cells()["cell_id"]
    with pytest.raises(InputError, match=r"all cells ask for the same.*--hold-out none"):
        try_out([run.only([one])] * 2, 0.5, 0)


def test_the_final_fit_is_not_that_of_the_trial(run_a: Path) -> None:
    run = MeasuredRun.open(run_a)
    fitted = try_out([run], 0.5, 0).model.fitted
    assert fitted is not None
    assert fitted.steps < len(run.steps)


def test_one_cell_alone_cannot_be_held_out(tmp_path: Path) -> None:
    run = MeasuredRun.open(
        made_run(tmp_path, "a", burst_size="4", prompt_len="8", max_new_tokens="2", repeats=1)
    )
    with pytest.raises(InputError, match=r"only one cell: --hold-out none"):
        try_out([run], 0.5, 0)


STEPS = pd.DataFrame(
    [(8, 36, 0, 0), (8, 36, 2, 40), (0, 0, 1, 10), (0, 0, 2, 20), (0, 0, 3, 30), (0, 0, 5, 9000)],
    columns=list(COMPOSITION),
).assign(step_s=[1.0, 1.0, 1.0, 1.0, 2.0, 1.0])


def test_errors_are_told_by_kind_of_step() -> None:
    everything = dict.fromkeys(COMPOSITION, (0.0, 100.0))
    model = CostModel(
        "one second", StepCost(1, 0, 0, 0, 0), fitted=Fitted((), 1, everything, None, None, None)
    )
    table = errors_by_composition(model, STEPS).set_index("composition")
    assert table.index.tolist() == [
        "prefill only",
        "decode only, 1",
        "decode only, 2 to 3",
        "decode only, 4 to 7",
        "prefill and decode",
    ]
    assert table["n"].tolist() == [1, 1, 2, 1, 1]
    assert table[["median_error", "p90_error"]].to_numpy()[2].tolist() == [0.0, 0.5]
    assert table["outside"].tolist() == [0, 0, 0, 1, 0]
    lines = list(composition_lines(errors_by_composition(model, STEPS)))
    assert lines[-2].endswith("100 % outside the fitted range")
    assert "outside" not in lines[-1]


def test_a_model_that_was_not_fitted_marks_nothing() -> None:
    assert (errors_by_composition(replace(TRUTH, fitted=None), STEPS)["outside"] == 0).all()
