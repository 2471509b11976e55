"""Scripted workloads beside real threads and a real clock: the simulator says who is refused, who runs when, who ends.

Their events lie 20 ms apart or more. A machine that is busy may shift them by as much; such a try says nothing.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

from roseinfer.bench.rows import CellResult
from roseinfer.bench.sim_target import SimTarget
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.workload import Workload
from roseinfer.executor import StepPlan
from roseinfer.sim.cost_model import CostModel, StepCost
from tests.bench.experiments import experiment
from tests.scripted import ScriptedEngine

MODEL = CostModel("a tenth of a second a step", StepCost(0.1, 0.0, 0.0, 0.0, 0.0))
CLOSE_S = 0.015
TRIES = 10


class Script(NamedTuple):
    """When requests are due, prompt tokens, new tokens; and flags."""

    due_s: list[float]
    prompt_tokens: list[int]
    new_tokens: list[int]
    flags: dict[str, Any]

    def workload(self) -> Workload:
        return Workload(
            scheduled_s=np.array(self.due_s),
            prompts=[[1] * n for n in self.prompt_tokens],
            prompt_tokens=np.array(self.prompt_tokens),
            output_tokens=np.array(self.new_tokens),
            prompt_seed=0,
            arrival="trace",
        )


SCRIPTS = {
    "a limit": Script(
        [0.0, 0.05, 0.08, 0.15, 0.25, 0.35, 0.45],
        [4] * 7,
        [2, 1, 1, 1, 2, 1, 1],
        {"max_inflight": "2", "max_batch_size": 1},
    ),
    "chunked prefill": Script(
        [0.0, 0.05, 0.15, 0.25],
        [20, 10, 4, 9],
        [2, 3, 1, 2],
        {"max_batch_size": 4, "max_num_batched_tokens": 8},
    ),
    "a short KV cache": Script(
        [0.0, 0.05, 0.15, 0.25], [10, 20, 5, 5], [3, 3, 2, 2], {"max_batch_size": 4, "kv_cache_tokens": 48}
    ),
    "active requests": Script(
        [0.0, 0.05, 0.15, 0.25, 0.28],
        [4] * 5,
        [3, 2, 2, 1, 1],
        {"max_batch_size": 4, "max_active_requests": 2, "max_inflight": "3"},
    ),
    "deadlines": Script(
        [0.0, 0.03, 0.05, 0.15, 0.45],
        [4] * 5,
        [3, 9, 2, 2, 1],
        {"max_batch_size": 2, "max_inflight": "3", "timeout": 0.32},
    ),
}


class Paced:
    """A step that ends when the script says: what lies between steps does not add up."""

    def __init__(self) -> None:
        self.end_s = 0.0

    def __call__(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        is_next = now - self.end_s < CLOSE_S
        self.end_s = (self.end_s if is_next else now) + MODEL.step_seconds(plan)
        time.sleep(max(0.0, self.end_s - time.perf_counter()))


def happened(result: CellResult) -> tuple[list[str], list[list[Any]], list[int]]:
    """What became of each request, whose tokens were in each step, and in which order slots came free."""
    requests, steps = result.requests, result.steps
    plans = [
        [(one["request_index"], one["start"], one["n_tokens"]) for one in members]
        for members in steps["members"]
    ]
    released = requests.dropna(subset="released_s").sort_values("released_s", kind="stable")
    return requests["outcome"].tolist(), plans, sorted_ties(released)


def sorted_ties(released: pd.DataFrame) -> list[int]:
    """Indexes in the order of release; those of one moment, give or take, in the order of their indexes."""
    moments = (released["released_s"].diff() > 2 * CLOSE_S).cumsum()
    return [int(index) for _, rows in released.groupby(moments) for index in sorted(rows["request_index"])]


def shift_s(measured: CellResult, simulated: CellResult) -> float:
    """By how much an event came late, as far as both have it."""
    n = min(len(measured.steps), len(simulated.steps))
    return float(
        max(
            (measured.requests["sent_s"] - simulated.requests["sent_s"]).abs().max(),
            (measured.steps["exec_start_s"][:n] - simulated.steps["exec_start_s"][:n]).abs().max(),
            (measured.steps["published_s"][:n] - simulated.steps["published_s"][:n]).abs().max(),
        )
    )


@pytest.mark.alone
@pytest.mark.parametrize("name", SCRIPTS)
def test_real_time_and_virtual_time_agree(name: str) -> None:
    script = SCRIPTS[name]
    load = {"num_requests": len(script.due_s), "submit_interval_ms": 50.0, **script.flags}
    made = experiment(pretok=True, tokenize_workers=0, prefix_cache=False, **load)
    virtual = experiment(target="sim", cost_model="unread.json", **load)
    simulated = SimTarget(MODEL, virtual).run(virtual.cells[0], script.workload())
    for _ in range(TRIES):
        engine = ScriptedEngine(Paced())
        measured = InProcessTarget(engine, made).run(made.cells[0], script.workload())
        if happened(measured) == happened(simulated):
            return
        if shift_s(measured, simulated) < CLOSE_S:
            break
    assert happened(measured) == happened(simulated)
