"""The burst that this project grew from, as `doctor` runs it: what a limit does to its p99 TTFT on this machine."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from roseinfer.bench.stats import percentile
from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.manager import SchedulerManager
from roseinfer.request import SamplingParams

if TYPE_CHECKING:
    from roseinfer.engine import InferenceEngine
    from roseinfer.stream import RequestStream

LIMITS: Final = (None, 64)
REPEATS: Final = 3


class Burst(NamedTuple):
    """Prompts that arrive at once, and the engine's sizes. Each gets one new token."""

    requests: int = 256
    prompt_tokens: int = 259
    max_batch_size: int = 256
    max_num_batched_tokens: int = 16384


def seed_experiment(engine: InferenceEngine, burst: Burst = Burst()) -> list[dict[str, Any]]:  # noqa: B008 (it cannot change)
    """One entry a limit: the median over repeats of p50 and p99 TTFT in ms, from the first arrival, and the refused."""
    entries = []
    for limit in LIMITS:
        runs = [_run(engine, burst, limit) for _ in range(1 + REPEATS)][1:]  # the first warms up
        entries.append(
            {
                "max_inflight": limit,
                "offered": burst.requests,
                "rejected": burst.requests - len(runs[0]),
                "p50_ttft_ms": _median_ms(runs, 50),
                "p99_ttft_ms": _median_ms(runs, 99),
            }
        )
    return entries


def _median_ms(runs: list[list[float]], p: float) -> float | None:
    found = percentile([percentile(run, p) for run in runs], 50)
    return None if math.isnan(found) else 1e3 * found


def _run(engine: InferenceEngine, burst: Burst, limit: int | None) -> list[float]:
    """Seconds from the first arrival to the first token of each request that was let in."""
    streams: list[RequestStream] = []
    with SchedulerManager(
        engine,
        max_batch_size=burst.max_batch_size,
        max_inflight_requests=limit,
        max_num_batched_tokens=burst.max_num_batched_tokens,
        prefix_cache=False,
    ) as manager:
        prompts = [
            [(7 * i * i + 13 * i + n) % engine.vocab_size for i in range(burst.prompt_tokens)]
            for n in range(burst.requests)
        ]
        start_s = time.perf_counter()
        for prompt in prompts:
            try:
                streams.append(manager.submit(prompt, SamplingParams(1, ignore_eos=True)))
            except SchedulerManagerOverloadedError:
                continue
        times = [[token.engine_time_s for token in stream.tokens()] for stream in streams]
    return [first - start_s for first, *_ in times]
