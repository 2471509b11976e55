"""What the prefix cache saves: TTFT of a prompt of 512 tokens whose first 486 an earlier prompt had.

Both KV layouts, the cache on and off, one request at a time on an idle engine. Every round asks each of the four once,
in shuffled order, with a prompt that ends in its own way. A round of nobody's else comes first. Prints milliseconds of
engine time, and the ratio of on to off within a round. Bar: a third.

    python experiments/prefix_cache_ttft.py
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from roseinfer import InferenceEngine, SamplingParams, SchedulerManager
from roseinfer.bench.environment import GcPauses
from roseinfer.bench.stats import percentile

PROMPT_TOKENS = 512
SHARED_TOKENS = 486  # 95 %: 30 blocks of 16, and 6 tokens of the next
BAR = 1 / 3
LAYOUTS = ("contiguous", "paged")
Side = tuple[str, bool]  # layout, cache


def ttft_ms(manager: SchedulerManager, prompt: Sequence[int]) -> float:
    """From its slot to its first token, by the engine's clock."""
    with manager.submit(prompt, SamplingParams(1, ignore_eos=True)) as stream:
        list(stream.tokens())
        times = stream.timings
    assert times.first_token_s is not None
    return 1e3 * (times.first_token_s - times.reserved_s)


class Figures(NamedTuple):
    """Medians over rounds; `ratio` is on / off within a round, from `least` to `most`."""

    layout: str
    on_ms: float
    off_ms: float
    ratio: float
    least: float
    most: float


def figures_of(layout: str, on: list[float], off: list[float]) -> Figures:
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    return Figures(
        layout, percentile(on, 50), percentile(off, 50), percentile(ratios, 50), min(ratios), max(ratios)
    )


def main() -> None:
    """Measures all four sides in every round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="builtin:gpt2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    ms: dict[Side, list[float]] = {(layout, on): [] for layout in LAYOUTS for on in (True, False)}
    with ExitStack() as stack:
        engines = {
            layout: InferenceEngine.from_pretrained(
                args.model, device=args.device, dtype=args.dtype, paged_attn=layout == "paged"
            )
            for layout in LAYOUTS
        }
        managers = {
            side: stack.enter_context(
                SchedulerManager(
                    engines[side[0]], 1, max_num_batched_tokens=PROMPT_TOKENS, prefix_cache=side[1]
                )
            )
            for side in ms
        }
        stack.enter_context(GcPauses(time.perf_counter))  # as the benchmark measures
        vocab_size = engines["paged"].vocab_size
        shared = rng.integers(vocab_size, size=SHARED_TOKENS).tolist()
        for number in range(args.rounds + 1):
            own = rng.integers(vocab_size, size=PROMPT_TOKENS - SHARED_TOKENS).tolist()
            for index in rng.permutation(len(ms)):
                side = list(ms)[index]
                taken_ms = ttft_ms(managers[side], [*shared, *own])
                if number:  # the first fills the caches
                    ms[side].append(taken_ms)
    about = engines["paged"].description
    figures = [figures_of(layout, ms[layout, True], ms[layout, False]) for layout in LAYOUTS]
    if args.json:
        sides = [side._asdict() for side in figures]
        print(json.dumps({"model": about.model, "dtype": about.dtype, "rounds": args.rounds, "sides": sides}))
        return
    print(
        f"{about.model}, {about.dtype}, {about.device_name}, {about.num_threads} threads, {args.rounds} rounds"
    )
    print(f"{'layout':<12}{'on (ms)':>10}{'off (ms)':>10}{'on / off':>10}{'rounds':>18}")
    for side in figures:
        spread = f"{side.least:.3f} to {side.most:.3f}"
        verdict = f"{'under' if side.ratio < BAR else 'over'} a third"
        print(
            f"{side.layout:<12}{side.on_ms:10.1f}{side.off_ms:10.1f}{side.ratio:10.3f}{spread:>18}  {verdict}"
        )


if __name__ == "__main__":
    main()
