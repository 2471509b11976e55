"""What check-and-reserve costs at 10,000 waiting, under every policy.

Prints the median over bursts of the p99 of one `Admission.reserve`, for requests that get in and for requests that are
refused, in microseconds. Bar: under 20.

    python experiments/admission_cost.py
"""

from __future__ import annotations

import argparse
import gc
import math
import time

import numpy as np

from roseinfer.admission import Admission
from roseinfer.admission_spec import parse_admission
from roseinfer.bench.stats import percentile
from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.policies import policies_of
from roseinfer.scheduler import SchedulerLimits
from roseinfer.sim.cost_model import CostModel, StepCost

WAITING = 10_000
PROMPT, NEW = 259, 4
COST_MODEL = CostModel("microseconds", StepCost(1e-4, 1e-6, 1e-9, 1e-6, 1e-9))
ALWAYS, NEVER = 1_000_000_000, WAITING
"""Limits that let the next one in, and that do not."""


def main() -> None:
    """One line a policy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bursts", type=int, default=20)
    parser.add_argument("--burst-size", type=int, default=1000)
    args = parser.parse_args()
    tokens = WAITING * (PROMPT + NEW)
    print(
        f"{args.bursts} bursts of {args.burst_size} beside {WAITING:,} waiting; p99 in us, median over bursts"
    )
    print(f"{'policy':<44}{'gets in':>10}{'refused':>10}{'evicts':>10}")
    for entering, refusing in (
        (f"inflight:{ALWAYS}", f"inflight:{NEVER}"),
        (f"tokens:{ALWAYS}", f"tokens:{tokens}"),
        (f"inflight:{ALWAYS}+tokens:{ALWAYS}", f"inflight:{ALWAYS}+tokens:{tokens}"),
        ("slo:ttft=86400s", "slo:ttft=1s"),
        (f"aimd:init={NEVER + 1}:most={ALWAYS}", f"aimd:init={NEVER}:most={ALWAYS}"),
        (f"gradient:init={NEVER + 1}:most={ALWAYS}", f"gradient:init={NEVER}:most={ALWAYS}"),
        ("queue-timeout:2s", None),
        ("codel", None),
        (f"inflight:{ALWAYS}+priority", f"inflight:{NEVER}+priority"),
    ):
        figures: list[float | None] = [_p99_us(entering, args.bursts, args.burst_size)]
        figures.append(None if refusing is None else _p99_us(refusing, args.bursts, args.burst_size))
        if refusing is not None and "priority" in refusing:
            evicting = min(args.bursts, WAITING // 2 // args.burst_size)  # there are no more to evict
            figures.append(_p99_us(refusing, evicting, args.burst_size, evicts=True))
        print(
            f"{entering:<44}" + "".join(f"{'' if x is None else f'{x:.1f}':>10}" for x in figures), flush=True
        )


def _p99_us(spec: str, bursts: int, size: int, *, evicts: bool = False) -> float:
    limits = SchedulerLimits(64, None, 512)
    filling, _ = policies_of(parse_admission(spec), "fcfs", limits, COST_MODEL, num_kv_blocks=1 << 20)
    held = filling.limit, filling.token_limit, filling.adaptive
    goal = filling.goal
    filling.limit = filling.token_limit = filling.adaptive = None
    goal_s = math.inf if goal is None else goal.goal_s
    if goal is not None:
        goal.goal_s = math.inf
    for _ in range(WAITING):
        filling.reserve(0.0, PROMPT + NEW, prompt_tokens=PROMPT, priority=1)
    filling.limit, filling.token_limit, filling.adaptive = held
    if goal is not None:
        goal.goal_s = goal_s
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        p99s = [_burst(filling, size, priority=0 if evicts else 1) for _ in range(bursts)]
    finally:
        gc.enable()
        gc.unfreeze()
    return float(np.median(p99s)) * 1e6


def _burst(admission: Admission, size: int, *, priority: int) -> float:
    """p99 in seconds of one reserve; whoever gets in leaves again."""
    took_s = []
    for i in range(size):
        start_s = time.perf_counter()
        try:
            ticket = admission.reserve(float(i), PROMPT + NEW, prompt_tokens=PROMPT, priority=priority)
        except SchedulerManagerOverloadedError:
            took_s.append(time.perf_counter() - start_s)
            continue
        took_s.append(time.perf_counter() - start_s)
        admission.release(ticket, float(i))
    return percentile(np.array(took_s), 99)


if __name__ == "__main__":
    main()
