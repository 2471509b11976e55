"""Does the benchmark report what happened? A server whose every step lasts as scripted, through the real manager.

`python experiments/known_truth.py` plays bursts, constant and Poisson arrivals at batch size 1, works out by hand what
every stage of every request must have been, and prints the median and the largest error of each. Then the two
classical mistakes: latency counted from the moment of sending, and a stall that an average hides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from roseinfer.bench.experiment import Experiment
from roseinfer.bench.options import SweepOptions
from roseinfer.bench.records import REQUEST_SCHEMA, derive
from roseinfer.bench.target import InProcessTarget
from roseinfer.bench.workload import Workload
from roseinfer.executor import Clock, Span, StepPlan, StepResult, Tokenizer

STEPS_S: Final = (0.020, 0.010, 0.010)
"""A prefill and two decodes: 40 ms of service a request."""
SPIN_S: Final = 0.002
"""The end of a step is waited for without sleeping, so that it comes when the script says."""
BACK_TO_BACK_S: Final = 0.003
"""A step that starts so soon after the last one is scripted to follow it at once: what the manager takes between steps
does not add up then, and the truth can be worked out by hand.
"""

StepSeconds = Callable[[Span], float]


class ScriptedEngine:
    """An engine, its executor and its steps: each lasts what `step_seconds` says of its one span."""

    max_model_len = 4096
    vocab_size = 256
    eos_token_ids: frozenset[int] = frozenset()
    paged_attn = False
    launches_async = False

    def __init__(self, step_seconds: StepSeconds) -> None:
        self._step_seconds = step_seconds
        self._scripted_end_s = 0.0

    def default_num_batched_tokens(self, max_batch_size: int) -> int:
        return 512

    def default_kv_cache_tokens(self, max_batch_size: int) -> int:
        return 1 << 16

    def make_tokenizer(self) -> Tokenizer:
        return None  # type: ignore[return-value]  # prompts come as token ids

    def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> ScriptedEngine:
        return self

    def launch(self, plan: StepPlan) -> ScriptedEngine:
        self._plan, self._start_s = plan, time.perf_counter()
        return self

    def wait(self) -> StepResult:
        (span,) = self._plan.spans
        follows = self._start_s - self._scripted_end_s < BACK_TO_BACK_S
        end_s = (self._scripted_end_s if follows else self._start_s) + self._step_seconds(span)
        self._scripted_end_s = end_s
        while (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(max(0.0, left_s - SPIN_S))
        return StepResult([1 if span.samples else None], self._start_s, time.perf_counter())


def measured(
    due_s: NDArray[np.float64], step_seconds: StepSeconds, tokens: int, **flags: Any
) -> pd.DataFrame:
    """The rows of one cell, with their derived columns."""
    n = len(due_s)
    options = SweepOptions(num_requests=n, max_batch_size=1, pretok=True, tokenize_workers=0, **flags)
    experiment = Experiment.from_options(options, {"num_requests", "max_batch_size", "pretok", *flags})
    load = Workload(
        scheduled_s=due_s,
        prompts=[[7] * 8 for _ in range(n)],
        prompt_tokens=np.full(n, 8),
        output_tokens=np.full(n, tokens),
        prompt_seed=0,
        arrival=experiment.load.arrival or "burst",
    )
    result = InProcessTarget(ScriptedEngine(step_seconds), experiment).run(experiment.cells[0], load)
    return derive(result.requests.reindex(columns=REQUEST_SCHEMA.names))


def truth(due_s: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """One server, first come first served, that loses no time."""
    service_s = sum(STEPS_S)
    end_s = np.array(
        [*accumulate(due_s, lambda free_s, at_s: max(free_s, at_s) + service_s, initial=0.0)][1:]
    )
    start_s = end_s - service_s
    first_s = start_s + STEPS_S[0]
    nothing = np.zeros(len(due_s))
    return {
        **dict.fromkeys(("cap_wait_s", "send_lag_s", "retry_wait_s", "reserve_s", "delivery_s"), nothing),
        "queue_wait_s": start_s - due_s,
        "prefill_s": nothing + STEPS_S[0],
        "decode_s": nothing + sum(STEPS_S[1:]),
        "last_delivery_s": nothing,
        "ttft_s": first_s - due_s,
        "e2el_s": end_s - due_s,
    }


def by_script(span: Span) -> float:
    return STEPS_S[len(span.request.output_ids)]


def stages() -> None:
    rng = np.random.default_rng(1)
    loads: dict[str, tuple[NDArray[np.float64], dict[str, Any]]] = {
        "burst of 32": (np.zeros(32), {}),
        "constant, 20 requests/s": (np.arange(60) / 20, {"submit_interval_ms": 50.0}),
        "Poisson, 18 requests/s": (
            np.concatenate([[0.0], np.cumsum(rng.exponential(1 / 18, 89))]),
            {"request_rate": "18"},
        ),
    }
    for name, (due_s, flags) in loads.items():
        rows, expected = measured(due_s, by_script, len(STEPS_S), **flags), truth(due_s)
        print(f"{name}: error of each stage in ms, median (largest)")
        for stage, values in expected.items():
            error_ms = 1e3 * np.abs(rows[stage].to_numpy(dtype=np.float64) - values)
            print(f"  {stage.removesuffix('_s'):14} {np.median(error_ms):7.3f} ({error_ms.max():.3f})")


def coordinated_omission() -> None:
    rows = measured(np.arange(8) / 10, lambda _: 0.5, 1, submit_interval_ms=100.0, max_concurrency=1)
    for name, what in (("ttft_s", "schedule"), ("ttft_from_send_s", "sending")):
        print(f"500 ms of service, 10 requests/s, one at a time, from the {what}:", end=" ")
        print(f"mean {rows[name].mean():.3f} s, max {rows[name].max():.3f} s")


def stall() -> None:
    """Twenty streams of twenty tokens; one step of one of them takes a second."""

    def step_seconds(span: Span) -> float:
        is_stall = span.request.request_id == 11 and len(span.request.output_ids) == 10
        return 1.0 if is_stall else 0.005

    rows = measured(np.zeros(20), step_seconds, 20)
    gaps_s = np.concatenate([np.diff(times) for times in rows["token_times_s"]])
    mean_ms, p99_ms = 1e3 * gaps_s.mean(), 1e3 * np.quantile(gaps_s, 0.99, method="inverted_cdf")
    print(f"a stall of 1 s in 20 streams: mean gap {mean_ms:.1f} ms, p99 {p99_ms:.1f} ms,", end=" ")
    print(f"largest {gaps_s.max():.3f} s, in request {rows['largest_itl_s'].argmax()}")


if __name__ == "__main__":
    stages()
    coordinated_omission()
    stall()
