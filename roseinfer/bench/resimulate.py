"""A measured run once more, on a virtual clock: the same requests, limits and sizes, at the speed of a cost model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.engine_sizes import EngineSizes
from roseinfer.bench.experiment import Cell, Experiment
from roseinfer.bench.options import SweepOptions
from roseinfer.bench.records import HTTP, REQUEST_SCHEMA, STEP_SCHEMA, as_frame, cached_share
from roseinfer.bench.row_files import record_table
from roseinfer.bench.sim_target import SimTarget
from roseinfer.bench.store import RunFolder
from roseinfer.bench.workload import WorkloadSource
from roseinfer.errors import InputError
from roseinfer.sim.cost_model import CostModel

_KEPT: Final = (
    *(
        "max_inflight",
        "admission",
        "scheduling",
        "max_active_requests",
        "max_batch_size",
        "pretok",
        "tokenize_workers",
    ),
    *("duration", "max_concurrency", "timeout", "ttft_deadline", "seed", "repeats"),
    *("retry", "retry_budget", "per_try_timeout"),
)
"""Fields of a run's configuration that its simulation has too. When to send what is in its workload."""

_CHOSEN: Final = ("max_num_batched_tokens", "kv_cache_tokens")
"""Sizes that an engine may choose itself; the facts of a cell hold them."""


class Resimulated(NamedTuple):
    """`requests` are rows of REQUEST_SCHEMA, `steps` of STEP_SCHEMA; `notes` are sentences on what to make of them."""

    requests: pd.DataFrame
    steps: pd.DataFrame
    notes: list[str]


def predicted(
    folder: RunFolder,
    model: CostModel,
    *,
    cells: Collection[str] | None = None,
    sizes: EngineSizes | None = None,
) -> pd.DataFrame:
    """The requests of `resimulated`."""
    return resimulated(folder, model, cells=cells, sizes=sizes).requests


def resimulated(
    folder: RunFolder,
    model: CostModel,
    *,
    cells: Collection[str] | None = None,
    sizes: EngineSizes | None = None,
) -> Resimulated:
    """Plays the workload that the run kept once more, for its finished cells and repeats or those of `cells`.

    Rows have the target "sim", and run_id, cell_id and repeat of what they predict. The run of an engine says how
    large its batches and its cache were. A server does not: of a run over HTTP only the limit is known, and `sizes`
    must say the rest. Raises InputError where it does not, or does of an engine, for a run that is not finished (its
    workload is not on disk), and for cells that it has not.
    """
    folder = folder.finished_part()
    experiment = _experiment(folder, model, sizes)
    cell_of = {cell.cell_id: cell for cell in experiment.cells}
    if unknown := set(cells or ()) - cell_of.keys():
        raise InputError("cells", ", ".join(sorted(unknown)), f"{folder.run_id} has none of this name")
    runs = [
        (cell_of[cell_id], repeat, facts)
        for (cell_id, repeat), facts in folder.read_facts().items()
        if cells is None or cell_id in cells
    ]
    requests, steps = _played(folder, model, experiment, runs)
    notes = [*_notes(folder.manifest["configuration"], model, steps), *cache_notes(folder.read_requests())]
    return Resimulated(requests, steps, notes)


def at_limits(
    folder: RunFolder,
    model: CostModel,
    limits: Collection[int | None],
    *,
    sizes: EngineSizes | None = None,
) -> pd.DataFrame:
    """The requests of the run as `predicted` has them, but at these limits, which nobody need have measured.

    None is no limit. No times of single tokens are kept: there may be many limits. Raises what `resimulated` raises.
    """
    folder = folder.finished_part()
    experiment = _experiment(folder, model, sizes)
    options = dataclasses.replace(experiment.options, no_token_times=True)
    experiment = dataclasses.replace(experiment, options=options)
    shapes = dict.fromkeys(cell.shape for cell in experiment.cells)
    facts_of = {repeat: facts for (_, repeat), facts in folder.read_facts().items()}
    runs = [
        (shape.at(AdmissionSpec(limit)), repeat, facts)
        for repeat, facts in facts_of.items()
        for shape, limit in itertools.product(shapes, limits)
    ]
    return _played(folder, model, experiment, runs)[0]


def _played(
    folder: RunFolder,
    model: CostModel,
    experiment: Experiment,
    runs: Iterable[tuple[Cell, int, Mapping[str, Any]]],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Requests and steps of these cells and repeats, on an engine of the sizes in their facts."""
    most_tokens = SimTarget(model, experiment).max_model_len
    source = WorkloadSource(experiment, None, vocab_size=0, max_model_len=most_tokens)
    requests, steps = [REQUEST_SCHEMA.empty_table()], [STEP_SCHEMA.empty_table()]
    for cell, repeat, facts in runs:
        result = SimTarget(model, _sized(experiment, facts)).run(cell, source.draw(cell, repeat))
        key: dict[str, Any] = {"run_id": folder.run_id, "cell_id": cell.cell_id, "repeat": repeat}
        requests.append(record_table(result.requests.assign(**key), REQUEST_SCHEMA))
        steps.append(record_table(result.steps.assign(**key), STEP_SCHEMA))
    return as_frame(pa.concat_tables(requests)), as_frame(pa.concat_tables(steps))


def _experiment(folder: RunFolder, model: CostModel, sizes: EngineSizes | None) -> Experiment:
    """The experiment of the run, but on a simulated engine, with the workload that was kept."""
    manifest, workload = folder.manifest, folder.path / "workload.parquet"
    if not folder.finished_cells():
        raise InputError("RUN", str(folder.path), "holds no finished cell")
    if not workload.exists():
        raise InputError("RUN", str(folder.path), "is not finished: its workload is not on disk yet")
    saved = {name.replace("-", "_"): value for name, value in manifest["configuration"].items()}
    values: dict[str, Any] = {field: saved[field] for field in _KEPT if saved.get(field) is not None}
    if "admission" in values:
        del values["max_inflight"]  # what it stands at where nobody named it
    if manifest.get("target") != HTTP:
        if sizes is not None:
            why = f"{folder.run_id} was measured on an engine, whose sizes it holds"
            raise InputError("--max-batch-size", sizes.max_batch_size, why)
        values["max_model_len"] = manifest["model"].get("max_model_len")
    elif sizes is None:
        why = (
            "was measured on a server, which does not say how large its batches are: --max-batch-size N does"
        )
        raise InputError("RUN", str(folder.path), why)
    else:
        values |= {field: size for field, size in sizes._asdict().items() if size is not None}
        values["pretok"] = saved.get("tokenizer") is not None and saved["api"] == "completions"
    # What its text costs to submit is asked of a simulation only here; as flags they contradict it.
    given = values.keys() - {"pretok", "tokenize_workers"}
    options = SweepOptions(target="sim", cost_model=Path(model.name), workload=workload, **values)
    experiment = Experiment.from_options(options, given)
    # A ramp of users is left: that of a rate is in the schedule, where its flag would contradict the workload.
    load = dataclasses.replace(experiment.load, ramp_s=saved.get("ramp"))
    return dataclasses.replace(experiment, load=load)


def _sized(experiment: Experiment, facts: Mapping[str, Any]) -> Experiment:
    """With the sizes that the engine chose for a cell and repeat, where its facts hold them."""
    sizes = {field: facts[field] for field in _CHOSEN if facts.get(field) is not None}
    return dataclasses.replace(experiment, options=dataclasses.replace(experiment.options, **sizes))


def _notes(configuration: Mapping[str, Any], model: CostModel, steps: pd.DataFrame) -> list[str]:
    notes = []
    if outside := model.outside(steps):
        shares = ", ".join(f"{100 * share:.1f} % in {column}" for column, share in outside.items())
        notes.append(f"predicted steps lie outside of what the cost model was fitted on: {shares}")
    if configuration.get("stop-at-eos"):
        notes.append("outputs were ended by EOS, simulated ones are as long as was asked for")
    return notes


def cache_notes(measured: pd.DataFrame) -> list[str]:
    """What no simulation of these requests knows of: it computes every prompt token."""
    share = cached_share(measured)
    if not share:
        return []
    return [
        f"{100 * share:.1f} % of the measured prompt tokens came from a prefix cache, simulated ones are all computed"
    ]
