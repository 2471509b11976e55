"""What a million simulated requests cost: seconds, requests per second and peak memory.

Poisson arrivals at 80 % of the capacity, prompts of 259 tokens, 4 new tokens, a limit of 64, records without token
times. Simulating and recording is one process, the summary another. Bars on one core: 60 s (aim 20) and 500 MB; ten
times the requests cost ten times the time and the same memory.

    python experiments/simulator_at_size.py --requests 1000000
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.measurement import summary_of
from roseinfer.bench.options import SweepOptions
from roseinfer.bench.sim_target import SimTarget
from roseinfer.bench.store import RunFolder
from roseinfer.bench.workload import WorkloadSource
from roseinfer.sim.cost_model import CostModel

COST_MODEL = Path(__file__).with_name("gpt2_cpu.cost.json")


def main() -> None:
    """Simulates, records and sums up, in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--cost-model", type=Path, default=COST_MODEL)
    parser.add_argument("--part", choices=("simulate", "summarise"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "simulate":
        simulate(args.requests, args.cost_model, args.folder)
    elif args.part == "summarise":
        summarise(args.folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for part in ("simulate", "summarise"):
                words = [*sys.argv, "--part", part, "--folder", folder]
                subprocess.run([sys.executable, *words], check=True)


def simulate(n: int, cost_model: Path, folder: Path) -> None:
    """What `run --target sim` does with one cell, without a table of the whole workload."""
    flags = {
        "target": "sim",
        "cost_model": cost_model,
        "load": "0.8",
        "num_requests": n,
        "prompt_len": "259",
        "max_new_tokens": "4",
        "max_inflight": "64",
        "no_token_times": True,
    }
    experiment = Experiment.from_options(SweepOptions(**flags), flags.keys())  # type: ignore[arg-type]
    target = SimTarget(CostModel.read(cost_model), experiment)
    source = WorkloadSource(experiment, None, vocab_size=0, max_model_len=target.max_model_len)
    (cell,) = experiment.cells
    configuration = {"configuration": experiment.configuration(), "seed": 0, "target": "sim"}
    run = RunFolder.create(folder, "size", "run", configuration)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    with run.cell(cell.cell_id, 0) as writer:
        facts, notes = target.record(cell, source.blocks(cell.shape, 0), writer)
        writer.facts = {**facts.to_json(), **notes}
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    files = (run.path / "cells").rglob("*.parquet")
    mb = ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in sorted(files))
    print(
        f"simulated and recorded {n} requests of {cell.request_rate} a second: {wall_s:.1f} s, CPU {cpu_s:.1f} s,"
    )
    print(f"  {n / cpu_s:.0f} requests/s, peak memory {peak_mb():.0f} MB; {mb}", flush=True)


def summarise(folder: Path) -> None:
    """The same run, read and summed up."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    summary = summary_of(RunFolder.open(folder / "size" / "run"))
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    row = summary.iloc[-1]
    print(f"summed up: {wall_s:.1f} s, CPU {cpu_s:.1f} s, peak memory {peak_mb():.0f} MB;", end=" ")
    print(
        f"{row['completed']} completed, {row['rejected']} refused, p99 TTFT {row['p99_ttft_ms']:.0f} ms",
        flush=True,
    )


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()
