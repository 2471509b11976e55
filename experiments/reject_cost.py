"""What a refusal and an admission cost their caller while the engine is busy.

Prints, over bursts from one thread at a limit, beside streams that keep the engine computing: the median and the
worst of the per-burst p99 of reject and add_request latency. Bars on two cores: medians under 20 and 100
microseconds where the caller does not tokenise (pretok, or tokenise workers).

    python experiments/reject_cost.py
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from roseinfer import InferenceEngine, SamplingParams, SchedulerManager, SchedulerManagerOverloadedError
from roseinfer.bench.environment import GcPauses
from roseinfer.bench.prompts import PromptMaker
from roseinfer.bench.stats import percentile

LIMIT = 64
BACKGROUND = 8


def main() -> None:
    """Measures the three ways that a prompt can come in, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bursts", type=int, default=20)
    parser.add_argument("--burst-size", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=32)
    args = parser.parse_args()
    engine = InferenceEngine.from_pretrained("builtin:gpt2")
    tokenizer = engine.make_tokenizer()
    maker = PromptMaker(tokenizer, engine.vocab_size)
    texts = [maker.text(0, index, args.prompt_len) for index in range(args.burst_size)]
    ids = [tokenizer.encode(text) for text in texts]
    print(
        f"{args.bursts} bursts of {args.burst_size} at limit {LIMIT}, {BACKGROUND} streams running beside them"
    )
    print(f"{'':<24}{'':>14}{'reject p99 (us)':>28}{'add_request p99 (us)':>28}")
    print(f"{'prompt':<24}{'in/refused':>14}{'median':>14}{'worst':>14}{'median':>14}{'worst':>14}")
    for name, prompts, workers in (
        ("pretok", ids, 0),
        ("text, 1 worker", texts, 1),
        ("text, in the caller", texts, 0),
    ):
        with (
            SchedulerManager(engine, 16, max_inflight_requests=LIMIT, tokenize_workers=workers) as manager,
            GcPauses(time.perf_counter),  # as the benchmark measures
        ):
            bursts = [_burst(manager, prompts) for _ in range(args.bursts)]
        rejects = [percentile(rejected, 99) * 1e6 for _, rejected in bursts]
        adds = [percentile(added, 99) * 1e6 for added, _ in bursts]
        admitted, refused = (sample.size for sample in bursts[0])
        figures = "".join(f"{np.median(p99s):14.1f}{max(p99s):14.1f}" for p99s in (rejects, adds))
        print(f"{name:<24}{f'{admitted}/{refused}':>14}{figures}", flush=True)
    print(
        f"p99 of {admitted} admissions is the slowest of them (nearest rank); medians and worst are over bursts"
    )


def _burst(
    manager: SchedulerManager, prompts: list[str] | list[list[int]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds that each admission and each refusal of one burst took."""
    background = [
        manager.submit([1000 + i], SamplingParams(max_new_tokens=512, ignore_eos=True))
        for i in range(BACKGROUND)
    ]
    readers = [stream.tokens() for stream in background]  # kept: a reader that is dropped ends its stream
    for reader in readers:
        next(reader)  # from here on the engine is computing
    streams = []
    added: list[float] = []
    rejected: list[float] = []
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for prompt in prompts:
        start = time.perf_counter()
        try:
            stream = manager.submit(prompt, params)
        except SchedulerManagerOverloadedError:
            rejected.append(time.perf_counter() - start)
        else:
            added.append(time.perf_counter() - start)
            streams.append(stream)
    for reader in readers:
        reader.close()
    for stream in streams:
        stream.close()
    while manager.inflight:
        time.sleep(0.01)
    return np.array(added), np.array(rejected)


if __name__ == "__main__":
    main()
