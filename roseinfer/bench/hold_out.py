"""A trial of a calibration: fitted to some of the cells, it predicts the others, which were measured as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from roseinfer.admission_spec import parse_admission
from roseinfer.bench.calibration import MeasuredRun, calibrate, predicted_step_s
from roseinfer.bench.engine_sizes import EngineSizes
from roseinfer.bench.records import FACTORS
from roseinfer.bench.stats import percentiles
from roseinfer.errors import InputError
from roseinfer.sim.cost_model import CostModel

_EVEN: Final = 1e-9
"""A smaller gain is none but that of rounding."""


@dataclass(frozen=True)
class Trial:
    """`model` was fitted without the cells `held_out` (their names), and `errors` says how it predicted them.

    `errors` is a frame of `prediction.errors`; `by_composition` one of `errors_by_composition`, over the steps of
    these cells; `outside` is what share of those steps lies outside the fitted range, by column.
    """

    share: float
    seed: int
    held_out: list[str]
    model: CostModel
    errors: pd.DataFrame
    by_composition: pd.DataFrame
    outside: dict[str, float]

    def facts(self) -> dict[str, Any]:
        """What the file of the final model keeps of it."""
        from roseinfer.bench.prediction import verdict

        found = verdict(self.errors)
        return {
            "share": self.share,
            "seed": self.seed,
            "cells": self.held_out,
            "median_error": dict(found.median_error),
            "reject_difference": found.reject_difference,
            "model_fitted_on": "all cells",
        }


def try_out(runs: Sequence[MeasuredRun], share: float, seed: int, sizes: EngineSizes | None = None) -> Trial:
    """Holds out a `share` of all cells. `sizes` are those of the server that was measured, if it was one.

    Raises InputError("--hold-out", ...) where there is only one cell, or nobody says the sizes of a server.
    """
    from roseinfer.bench.prediction import errors
    from roseinfer.bench.resimulate import predicted

    cells = pd.concat([run.cells().assign(run=number) for number, run in enumerate(runs)], ignore_index=True)
    if len(cells) < 2:
        raise InputError("--hold-out", f"{share:g}", "there is only one cell: --hold-out none fits to it")
    if sizes is None and any(run.is_remote for run in runs):
        why = (
            "a server does not say how large its batches are, to predict its cells: --max-batch-size N does, and"
            " --hold-out none fits to all"
        )
        raise InputError("--hold-out", f"{share:g}", why)
    as_they_bind = pd.concat([_as_limits_bind(run) for run in runs], ignore_index=True)
    if len(as_they_bind.drop_duplicates()) < 2:
        why = "all cells ask for the same, so that none is unlike the rest: --hold-out none fits to them"
        raise InputError("--hold-out", f"{share:g}", why)
    places = choose(as_they_bind, share, seed)
    is_out = cells.index.isin(places)
    fitted, held_out = (
        [run.only(set(part.loc[part["run"] == number, "cell_id"])) for number, run in enumerate(runs)]
        for part in (cells[~is_out], cells[is_out])
    )
    model = calibrate([run for run in fitted if not run.steps.empty])
    found = [
        errors(run.requests, predicted(run.folder, model, cells=set(run.requests["cell_id"]), sizes=sizes))
        for run in held_out
        if not run.requests.empty
    ]
    steps = pd.concat([run.steps for run in held_out], ignore_index=True)
    return Trial(
        share=share,
        seed=seed,
        held_out=cells.loc[is_out, "cell_id"].tolist(),
        model=model,
        errors=pd.concat(found, ignore_index=True),
        by_composition=errors_by_composition(model, steps),
        outside=model.outside(steps),
    )


def _as_limits_bind(run: MeasuredRun) -> pd.DataFrame:
    """The FACTORS of the run's cells, without the bounds on requests where there were no more than that."""
    cells = run.cells()
    counts = run.requests.groupby(["cell_id", "repeat"], observed=True).size()
    most = cells["cell_id"].map(counts.groupby("cell_id", observed=True).max())
    limits = [
        spec._replace(inflight=None) if spec.inflight is not None and spec.inflight >= count else spec
        for spec, count in zip(map(parse_admission, cells["admission"]), most, strict=True)
    ]
    return cells[list(FACTORS)].assign(admission=list(map(str, limits)))


def choose(cells: pd.DataFrame, share: float, seed: int) -> list[int]:
    """The places of the cells to hold out: at least one, and not all. `cells` has the columns of FACTORS.

    Some that `seed` picks, exchanged with others as long as that brings the levels of the factors nearer to an even
    spread over both sides. Cells of the same factors stay together: who has seen one has seen the others.
    """
    twins = cells.groupby(list(FACTORS), dropna=False, sort=False).ngroup().to_numpy()
    of_cell = np.column_stack(
        [pd.get_dummies(cells[factor], dummy_na=True).to_numpy(np.float64) for factor in FACTORS]
    )
    n = int(twins.max()) + 1
    has_level = np.zeros((n, of_cell.shape[1]))
    np.add.at(has_level, twins, of_cell)
    order = np.random.default_rng(seed).permutation(n)
    n_out = min(max(int(n * share), 1), n - 1)
    out, rest = order[:n_out], order[n_out:]
    while True:
        off = has_level[out].sum(axis=0) - share * has_level.sum(axis=0)
        exchanged = has_level[rest][None, :, :] - has_level[out][:, None, :]
        change = (2 * off * exchanged + exchanged**2).sum(axis=2)  # of the sum of squares of `off`
        one, other = np.unravel_index(np.argmin(change), change.shape)
        if change[one, other] >= -_EVEN:
            places: list[int] = np.flatnonzero(np.isin(twins, out)).tolist()
            return places
        out[one], rest[other] = rest[other], out[one]


def errors_by_composition(model: CostModel, steps: pd.DataFrame) -> pd.DataFrame:
    """How far single steps are from the model without noise: a row per kind of step that there is.

    `composition` names the kind; `n`; `median_error` and `p90_error` of |predicted / measured - 1|; `outside` is the
    share of the steps outside the fitted range.
    """
    steps = steps[steps["step_s"] > 0]
    errors = pd.Series(abs(predicted_step_s(model, steps) / steps["step_s"] - 1), steps.index)
    rows = []
    for kind, part in steps.groupby(_kinds(steps), sort=True):
        median, p90 = percentiles(errors[part.index], (50, 90))
        ranges = {} if model.fitted is None else model.fitted.range
        outside = np.zeros(len(part), dtype=bool)
        for column, (least, most) in ranges.items():
            outside |= ((part[column] < least) | (part[column] > most)).to_numpy()
        rows.append((_kind_text(int(kind)), len(part), median, p90, float(outside.mean())))
    return pd.DataFrame(rows, columns=["composition", "n", "median_error", "p90_error", "outside"])


_PREFILL, _MIXED = -1, 1000


def _kinds(steps: pd.DataFrame) -> pd.Series[Any]:
    """_PREFILL, _MIXED, or of decode alone the power of two that its batch size has reached."""
    sizes = np.frexp(np.maximum(steps["decode_requests"], 1))[1] - 1
    is_mixed = (steps["prefill_tokens"] > 0) & (steps["decode_requests"] > 0)
    kinds = np.where(is_mixed, _MIXED, np.where(steps["decode_requests"] > 0, sizes, _PREFILL))
    return pd.Series(kinds, steps.index)


def _kind_text(kind: int) -> str:
    if kind in (_PREFILL, _MIXED):
        return "prefill only" if kind == _PREFILL else "prefill and decode"
    least, most = 2**kind, 2 ** (kind + 1) - 1
    return f"decode only, {least}" + (f" to {most}" if most > least else "")


def composition_lines(table: pd.DataFrame) -> Iterator[str]:
    """The table of `errors_by_composition` for a terminal."""
    width = max(len("steps held out"), *map(len, table["composition"]))
    yield f"{'steps held out':{width}}  {'n':>7}  {'median error':>12}  {'p90 error':>9}"
    yield "-" * (width + 34)
    for row in table.to_dict("records"):
        figures = f"{row['n']:>7}  {100 * row['median_error']:>10.1f} %  {100 * row['p90_error']:>7.1f} %"
        mark = f"  {100 * row['outside']:.0f} % outside the fitted range" if row["outside"] else ""
        yield f"{row['composition']:{width}}  {figures}{mark}"
