"""--load: request rates as shares of the capacity that a cost model implies for each shape of requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.fit import most_tokens
from roseinfer.bench.lengths import asked_lengths, cut_to_fit, vary
from roseinfer.bench.load import check_shape
from roseinfer.bench.seeds import BLOCK_ROWS
from roseinfer.bench.sim_target import SimTarget
from roseinfer.sim.cost_model import CostModel
from roseinfer.sim.saturation import burst_of, saturated_rate

DRAWN_REQUESTS: Final = 1024
"""Requests of a saturating burst whose lengths vary, at least."""


def at_load(experiment: Experiment) -> Experiment:
    """`experiment`, whose cells hold shares of a capacity where their rates belong, with the rates.

    Rates have six digits, as the names of cells have: `--request-rate` with what is printed measures the same.
    Raises InputError for a cost model that cannot be read, requests that cannot be served, and rates too high.
    """
    options, load = experiment.options, experiment.load
    assert options.cost_model is not None
    model = CostModel.read(options.cost_model).in_the_mean()
    target = SimTarget(model, experiment)
    experiment.check_fits(target.max_model_len)
    limits = target.limits(experiment.cells[0])
    costs = model.costs(0, as_text=not options.pretok, tokenize_workers=options.tokenize_workers)
    capacities = {
        lengths: saturated_rate(*_lengths(experiment, lengths, burst_of(limits), target), limits, costs)
        for lengths in dict.fromkeys((cell.prompt_len, cell.output_len) for cell in experiment.cells)
    }
    cells = []
    for cell in experiment.cells:
        assert cell.request_rate is not None
        rate = float(f"{cell.request_rate * capacities[cell.prompt_len, cell.output_len]:g}")
        check_shape(options, load, cell.burst_size, rate)
        cells.append(cell._replace(request_rate=rate))
    return replace(experiment, cells=tuple(cells))


def told_of_load(experiment: Experiment) -> list[str]:
    """What the rates are a share of, a sentence per shape of requests; nothing without --load."""
    if experiment.options.load is None:
        return []
    first_share = float(experiment.options.load.partition(",")[0])
    rates: dict[tuple[int | None, int | None], list[float]] = {}
    for cell in experiment.cells:
        known = rates.setdefault((cell.prompt_len, cell.output_len), [])
        if cell.request_rate is not None and cell.request_rate not in known:
            known.append(cell.request_rate)
    return [
        f"--load {experiment.options.load} is a rate of {', '.join(f'{rate:g}' for rate in of_shape)} requests/s with"
        f" prompts of {prompt_len} and outputs of {output_len} tokens, of which the cost model implies a capacity of"
        f" {of_shape[0] / first_share:.4g} requests/s."
        for (prompt_len, output_len), of_shape in rates.items()
    ]


def _lengths(
    experiment: Experiment, lengths: tuple[int | None, int | None], n: int, target: SimTarget
) -> tuple[list[int], list[int]]:
    """Prompts and outputs of a saturating burst of `n` requests, or of more where they vary.

    They are even draws of a far larger sample, whatever the seed of the run is, so that no luck is in their mean.
    """
    cell = Cell(AdmissionSpec(), None, *lengths)
    if not vary(experiment.load):
        prompts, outputs = asked_lengths(experiment, cell, n, 0, 0)
        return prompts.tolist(), outputs.tolist()
    seedless = replace(experiment, options=replace(experiment.options, seed=0))
    n = max(n, DRAWN_REQUESTS)
    sample = asked_lengths(seedless, cell, max(n, BLOCK_ROWS), 0, 0)
    rng = np.random.default_rng(0)
    prompts, outputs = (_evenly(tokens, n)[rng.permutation(n)] for tokens in sample)
    least = prompts if experiment.load.prompt_lengths.kind == "fixed" else 1
    most = most_tokens(experiment, target.max_model_len)
    prompts, outputs = cut_to_fit(prompts, outputs, least_prompt_tokens=least, most_tokens=most)
    return prompts.tolist(), outputs.tolist()


def _evenly(tokens: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    places = ((np.arange(n) + 0.5) * len(tokens) / n).astype(int)
    picked: NDArray[np.int64] = np.sort(tokens)[places]
    return picked
