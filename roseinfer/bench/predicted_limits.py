"""What a cost model says of limits that nobody measured: the requests of a run once more, at limits between its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from roseinfer.admission_spec import AdmissionSpec, parse_admission
from roseinfer.bench.engine_sizes import EngineSizes
from roseinfer.bench.recommend import Evidence, Recommendation, Slo, best, recommend
from roseinfer.bench.records import FACTORS
from roseinfer.bench.resimulate import at_limits
from roseinfer.bench.store import RunFolder
from roseinfer.bench.summary import limit_label
from roseinfer.errors import InputError
from roseinfer.sim.cost_model import CostModel

BETWEEN: Final = 3
"""Limits that are predicted between two that were measured."""


class Prediction(NamedTuple):
    """Of one combination of factors: what the cost model says of every limit, measured ones too, smallest first."""

    measured: Recommendation
    predicted: Recommendation

    @property
    def between(self) -> tuple[Evidence, ...]:
        """Of the limits that were not measured."""
        known = {one.limit for one in self.measured.evidence}
        return tuple(one for one in self.predicted.evidence if one.limit not in known)

    def sentence(self) -> str:
        """Whether a limit that was not measured is predicted to be better than the recommended one.

        Predictions are compared with predictions: a model that is off is off for both.
        """
        chosen, candidate = self.measured.chosen, best(self.between)
        if chosen is None and candidate is None:
            return "Predicted, not measured: none of the limits between keeps the goal either."
        none_better = (
            "No limit between those measured is predicted to keep the goal and to serve more within it."
        )
        if candidate is None:
            return none_better
        label = limit_label(candidate.limit)
        share = f"{100 * candidate.served_share:.1f} % served within the goal"
        if chosen is None:
            return f"Predicted, not measured: {label} would keep it, with {share}. Measure it."
        same = next(one for one in self.predicted.evidence if one.limit == chosen.limit)
        if candidate.served_share <= same.served_share:
            return none_better
        against = f"{100 * same.served_share:.1f} % predicted for {limit_label(chosen.limit)}"
        return f"Predicted, not measured: {label} would do better, {share} against {against}."


def limits_between(limits: Sequence[int | None], peak_inflight: int) -> list[int]:
    """Limits that were not tried, between neighbours that were; `peak_inflight` is what no limit comes to."""
    tried = sorted(
        {limit for limit in limits if limit is not None} | ({peak_inflight} if None in limits else set())
    )
    found: set[int] = set()
    for low, high in pairwise(tried):
        found.update(map(int, np.geomspace(low, high, BETWEEN + 2)[1:-1].round()))
    return sorted(found - set(tried))


def peak_without_limit(facts: Iterable[Mapping[str, Any]]) -> int:
    """The most that was in flight where there was no limit, from the facts of all cells.

    A server does not say it; its clients know what they had outstanding.
    """
    unlimited = [cell for cell in facts if cell["limit"] is None]
    peaks = [cell["peak_inflight"] or cell.get("peak_outstanding") for cell in unlimited]
    return max([1, *(int(peak) for peak in peaks if peak is not None)])


def predictions(
    folder: RunFolder,
    model: CostModel,
    measured: Sequence[Recommendation],
    slos: Sequence[Slo],
    *,
    seed: int,
    sizes: EngineSizes | None = None,
) -> list[Prediction]:
    """One for each of `measured`, in their order. `sizes` are those of the server that was measured, if it was one.

    Raises InputError where the run cannot be simulated, and where anything but a number of requests limits them: such
    limits have no others between them.
    """
    specs = list(dict.fromkeys(parse_admission(one.limit) for found in measured for one in found.evidence))
    others = [str(spec) for spec in specs if spec != AdmissionSpec(spec.inflight)]
    if others:
        raise InputError("--cost-model", model.name, f"predicts limits of requests, not {others[0]}")
    limits = [spec.inflight for spec in specs]
    between = limits_between(limits, peak_without_limit(folder.read_facts().values()))
    simulated = at_limits(folder, model, [*limits, *between], sizes=sizes)
    cells = simulated.drop_duplicates("cell_id")[["cell_id", *FACTORS]]
    found = recommend(
        simulated, cells.assign(repeat=np.nan, valid=True, invalid_reasons=None), slos, seed=seed
    )
    return [Prediction(*pair) for pair in zip(measured, found, strict=True)]
