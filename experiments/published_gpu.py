"""A cost model of a GPU server that somebody else measured: for plans before there is a machine to calibrate on.

Reads a table of prompt and token times by prompt length and batch size (columns as in splitwise-sim's
data/perf_model.csv: model, hardware, tensor_parallel, prompt_size, batch_size, token_size, prompt_time, token_time,
times in ms), fits the coefficients of a step, prints how far off they are, and writes the cost model.

    python experiments/published_gpu.py perf_model.csv --model llama2-70b --hardware h100-80gb --tensor-parallel 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from roseinfer.sim.cost_model import CostModel, StepCost

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    args = _arguments()
    table = pd.read_csv(args.table)
    chosen = table[
        (table["model"] == args.model)
        & (table["hardware"] == args.hardware)
        & (table["tensor_parallel"] == args.tensor_parallel)
    ]
    if chosen.empty:
        raise SystemExit(f"{args.table}: nothing measured for that model, hardware and tensor_parallel")
    shapes = ["prompt_size", "batch_size", "token_size"]
    medians = chosen.groupby(shapes)[["prompt_time", "token_time"]].median().reset_index()
    work = pd.concat([_prefills(medians), _decodes(medians)], ignore_index=True)
    seconds = work.pop("seconds").to_numpy()
    # Divided by what was measured: so many percent off weighs the same in a short step and in a long one.
    coefficients, _ = nnls(work.to_numpy() / seconds[:, None], np.ones(len(work)))
    off = np.abs(work.to_numpy() @ coefficients / seconds - 1)
    for name, rows in (("prefill", work["prefill_tokens"] > 0), ("decode", work["decode_requests"] > 0)):
        typical, most = np.median(off[rows]), off[rows].max()
        print(f"{name}: {rows.sum()} shapes, off by {typical:.1%} in the median, {most:.1%} at most")
    name = f"{args.model} on {args.tensor_parallel} x {args.hardware}, fitted to published times"
    model = CostModel(name, StepCost(*(float(f"{value:.4g}") for value in coefficients)))
    path = args.out or ROOT / "results/reference/cost_models" / (
        f"{args.model}-{args.tensor_parallel}x{args.hardware}.cost.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    model.write(path)
    print(f"{path.name}: {model.step}")


def _prefills(medians: pd.DataFrame) -> pd.DataFrame:
    """One step each that computes whole prompts: the columns of a step's cost, and its seconds."""
    n, tokens = medians["batch_size"], medians["prompt_size"]
    return pd.DataFrame(
        {
            "constant": 1.0,
            "prefill_tokens": n * tokens,
            "prefill_attention_pairs": n * tokens * (tokens + 1) // 2,
            "decode_requests": 0,
            "context_tokens": 0,
            "seconds": medians["prompt_time"] / 1e3,
        }
    )


def _decodes(medians: pd.DataFrame) -> pd.DataFrame:
    """One step each in the middle of a generation: `token_time` is a mean over all of its tokens."""
    n = medians["batch_size"]
    return pd.DataFrame(
        {
            "constant": 1.0,
            "prefill_tokens": 0,
            "prefill_attention_pairs": 0,
            "decode_requests": n,
            "context_tokens": n * (medians["prompt_size"] + medians["token_size"] / 2),
            "seconds": medians["token_time"] / 1e3,
        }
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--tensor-parallel", type=int, required=True)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
