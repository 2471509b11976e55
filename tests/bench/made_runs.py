"""Runs with a known truth: simulated at the speed of a cost model, and labelled as if an engine had been measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roseinfer.bench.session import Session
from roseinfer.sim.cost_model import BetweenStepsCost, CostModel, StepCost, SubmitCost
from tests.bench.experiments import experiment

TRUTH = CostModel(
    "the truth",
    StepCost(0.010, 2e-4, 1e-6, 5e-4, 2e-6),
    BetweenStepsCost(3e-4, 2e-5),
    SubmitCost(request_s=4e-5, refusal_s=7e-6),
)
IDENTITY = {
    "model": "builtin:gpt2",
    "dtype": "float32",
    "device": "cpu",
    "device_name": "Abacus",
    "num_threads": 2,
    "max_model_len": 1024,
}

FLAGS: dict[str, Any] = {
    "max_inflight": "0,8",
    "burst_size": "6,24",
    "prompt_len": "16,200",
    "max_new_tokens": "8",
    "max_batch_size": 8,
    "repeats": 2,
}


def made_run(place: Path, run_id: str, truth: CostModel = TRUTH, **flags: Any) -> Path:
    """The folder of a sweep that an engine of these costs would have left; `flags` are its only ones, if any."""
    file = place / f"{run_id}.json"
    truth.write(file)
    names = {"target": "sim", "cost_model": file, "output_dir": place, "run_id": run_id, "quiet": True}
    session = Session(experiment(**names, **(flags or FLAGS)), default_name="sweep")
    session.measure()
    assert session.folder is not None
    relabel(session.folder.path, target="engine", model=IDENTITY)
    return session.folder.path


def relabel(path: Path, **changes: object) -> None:
    """Changes what run.json says; its prompts came as token ids."""
    run = json.loads((path / "run.json").read_text())
    run["configuration"]["pretok"] = True
    (path / "run.json").write_text(json.dumps({**run, **changes}))
