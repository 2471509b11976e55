"""Is the limit that a coarse sweep recommends the one that an exhaustive sweep would?

`python experiments/recommendation_quality.py` simulates 20 workloads drawn at random (arrivals, lengths, bursts, cost
models, goals), each once with six limits, and once with 22 limits and other requests, 8 repeats each. Both
recommend a limit; the first is right where the second lies within one place of it in the coarse list. "None can be
recommended" is the place below the smallest limit. Nothing in roseinfer was chosen by what is printed here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.options import SweepOptions
from roseinfer.bench.recommend import Recommendation, parse_slo, recommend
from roseinfer.bench.records import FACTORS, REQUEST_SCHEMA, as_frame
from roseinfer.bench.row_files import record_table
from roseinfer.bench.sim_target import SimTarget
from roseinfer.bench.summary import limit_label
from roseinfer.bench.workload import WorkloadSource
from roseinfer.sim.cost_model import CostModel

COARSE: Final = (8, 16, 32, 64, 128, None)
FINE: Final = (4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, None)
WORKLOADS: Final = 20
FIRST_SEED: Final = 20261201


class Drawn(NamedTuple):
    """One workload: flags of `sweep`, and what must hold."""

    words: str
    flags: Mapping[str, Any]
    slo: str


class Outcome(NamedTuple):
    """What both sweeps recommend. `regret` is the share of the offered that the coarse choice serves less, in points.

    It is NaN where a choice does not qualify in the exhaustive sweep, or there is none.
    """

    coarse: Recommendation
    exhaustive: Recommendation
    regret: float

    @property
    def is_within_a_step(self) -> bool:
        return abs(_place(self.coarse) - _place(self.exhaustive)) <= 1


def draw(seed: int, folder: Path) -> Drawn:
    """A workload, its cost model kept in `folder`."""
    rng = np.random.default_rng(seed)
    constant_s = float(rng.uniform(0.002, 0.02))
    prefill_token_s = float(10 ** rng.uniform(-4.5, -3))
    decode_request_s = float(10 ** rng.uniform(-4, -2.7))
    is_noisy = bool(rng.random() < 0.5)
    ratios = np.quantile(np.exp(0.08 * rng.standard_normal(1000)), np.linspace(0, 1, 21))
    model = {
        "schema_version": 1,
        "name": f"drawn with seed {seed}",
        "step": {
            "constant_s": constant_s,
            "prefill_token_s": prefill_token_s,
            "attention_pair_s": float(10 ** rng.uniform(-9, -7)),
            "decode_request_s": decode_request_s,
            "context_token_s": float(10 ** rng.uniform(-7, -5.5)),
        },
        "noise": {
            "ratios": [float(ratio) for ratio in ratios],
            "stall_probability": 0.002,
            "stalls_s": [0.05, 0.1, 0.3],
        }
        if is_noisy
        else None,
        "fitted": None,
    }
    file = folder / f"{seed}.cost.json"
    file.write_text(json.dumps(model), encoding="utf-8")

    prompt, output = int(2 ** rng.uniform(4, 9)), int(2 ** rng.uniform(0, 5))
    flags: dict[str, Any] = {"target": "sim", "cost_model": file, "no_token_times": True}
    flags |= {"prompt_len": str(prompt), "max_new_tokens": str(output)}
    flags["prompt_len_dist"] = str(rng.choice(["fixed", "uniform:0.5", "lognormal:0.6"]))
    flags["output_len_dist"] = str(rng.choice(["fixed", "uniform:0.5"]))
    flags["max_batch_size"] = int(rng.choice([8, 16, 32, 64]))
    burst = int(2 ** rng.uniform(5, 8))
    kind = str(rng.choice(["burst", "bursts", "poisson", "gamma", "constant"]))
    if kind == "burst":
        flags["burst_size"] = str(burst)
    elif kind == "bursts":
        flags |= {"burst_size": str(burst), "num_requests": 3 * burst}
        flags["burst_interval"] = (
            float(rng.uniform(0.3, 1.5)) * burst * (prompt * prefill_token_s + constant_s / 4)
        )
    else:
        flags |= {"arrival": kind, "load": f"{rng.uniform(0.7, 1.6):.2f}", "num_requests": 200}
        if kind == "gamma":
            flags["burstiness"] = float(rng.uniform(0.1, 0.6))
    alone_ms = 1e3 * (constant_s + prompt * prefill_token_s)
    metric = str(rng.choice(["p99_ttft", "p95_ttft", "p99_queue_wait"]))
    slo = f"{metric}:{alone_ms * 10 ** rng.uniform(0.5, 1.7):.4g}"
    words = [f"{kind} of {burst}" if kind.startswith("burst") else f"{kind} at load {flags['load']}"]
    words += [f"prompt {prompt}", f"output {output}", *(["noise"] if is_noisy else [])]
    return Drawn(", ".join(words), flags, slo)


def outcome(drawn: Drawn, seed: int, repeats: int) -> Outcome:
    """Sweeps twice: with `seed`, and all limits with another seed."""
    coarse = _swept(drawn, COARSE, seed=seed, repeats=repeats)
    exhaustive = _swept(drawn, FINE, seed=seed + 1, repeats=repeats)
    own = [
        one for one in exhaustive.evidence if coarse.chosen is not None and one.limit == coarse.chosen.limit
    ]
    regret = float("nan")
    if exhaustive.chosen is not None and own and own[0].qualifies:
        regret = 100 * (exhaustive.chosen.served_share - own[0].served_share)
    return Outcome(coarse, exhaustive, regret)


def _swept(drawn: Drawn, limits: Sequence[int | None], *, seed: int, repeats: int) -> Recommendation:
    """What `sweep` measures, without its files."""
    options = SweepOptions(
        **drawn.flags, max_inflight=",".join(str(limit or 0) for limit in limits), seed=seed, repeats=repeats
    )
    experiment = Experiment.from_options(options, {*drawn.flags, "max_inflight", "seed", "repeats"})
    assert options.cost_model is not None
    target = SimTarget(CostModel.read(options.cost_model), experiment)
    source = WorkloadSource(experiment, None, vocab_size=0, max_model_len=target.max_model_len)
    tables = []
    for repeat, cell in product(range(repeats), experiment.cells):
        rows = target.run(cell, source.draw(cell.shape, repeat)).requests
        key: dict[str, Any] = {"run_id": "none", "cell_id": cell.cell_id, "repeat": repeat}
        tables.append(record_table(rows.assign(**key), REQUEST_SCHEMA))
    requests = as_frame(pa.concat_tables(tables))
    cells = requests.drop_duplicates("cell_id")[["cell_id", *FACTORS]]
    cells = cells.assign(repeat=np.nan, valid=True, invalid_reasons=None)
    (found,) = recommend(requests, cells, [parse_slo(drawn.slo)], seed=seed)
    return found


def _place(found: Recommendation) -> float:
    """In the coarse list, from 0; -1 is none, and what lies between two limits lies between their places."""
    if found.chosen is None:
        return -1.0
    if found.chosen.max_inflight is None:
        return len(COARSE) - 1.0
    known = [limit for limit in COARSE if limit is not None]
    return float(
        np.interp(found.chosen.max_inflight, known, range(len(known)), left=-0.5, right=len(known) - 0.5)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--workloads", type=int, default=WORKLOADS)
    parser.add_argument("--seed", type=int, default=FIRST_SEED)
    parser.add_argument("--repeats", type=int, default=8)
    asked = parser.parse_args()
    right = 0
    print(f"{'coarse':>9}  {'fine':>9}  within  regret  goal                      workload")
    for seed in range(asked.seed, asked.seed + asked.workloads):
        with tempfile.TemporaryDirectory(prefix="recommendation-") as aside:
            drawn = draw(seed, Path(aside))
            found = outcome(drawn, seed, asked.repeats)
        right += found.is_within_a_step
        labels = ["none" if one.chosen is None else limit_label(one.chosen.limit) for one in found[:2]]
        within, regret = "yes" if found.is_within_a_step else "NO", f"{found.regret:.1f}"
        print(
            f"{labels[0]:>9}  {labels[1]:>9}  {within:>6}  {regret:>6}  {drawn.slo:24}  {drawn.words}",
            flush=True,
        )
    print(f"{right} of {asked.workloads} within one step of the coarse list")
    sys.exit(0 if right >= 0.95 * asked.workloads else 1)


if __name__ == "__main__":
    main()
