"""What a step costs beside its computing: planning it, taking its results in, publishing them, and reading them.

64 requests run on an engine whose steps compute nothing; one reader takes all tokens from one shared mailbox. Driven
by hand, in one thread: all that `step()` does, and all that the reader does with it. With the engine's thread: from
the end of a step's computing until the next one is launched and the reader has dealt with every token, whichever comes
last. A step then sleeps for a millisecond, as one that computes leaves the interpreter to others, and its caches too.
Prints microseconds a step, median and p99, over the steps of all repeats. Bar: 300, aim: 100.

    python experiments/step_overhead.py
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise, product
from typing import NamedTuple

from roseinfer import SamplingParams, SchedulerManager
from roseinfer.bench.environment import GcPauses
from roseinfer.bench.stats import percentile
from roseinfer.executor import Clock, StepPlan, StepRecord, StepResult
from roseinfer.request import TokenEvent
from roseinfer.stream import RequestStream

RUNNING = 64
WAITING = (0, 1_000, 10_000)
TURNOVER = (0, 2)
"""Requests that end in every step, each replaced by a new one."""
PROMPT = [1] * 8
SLEEP_S = 0.001
WARM_UP_STEPS = 100

clock = time.perf_counter


class IdleEngine:
    """Computes nothing, takes `sleep_s` for it, and answers with token 1."""

    max_model_len = 1 << 16
    vocab_size = 2
    eos_token_ids: frozenset[int] = frozenset()
    paged_attn = False
    launches_async = False

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def default_num_batched_tokens(self, max_batch_size: int) -> int:
        return 1024

    def default_kv_cache_tokens(self, max_batch_size: int) -> int:
        return max_batch_size * self.max_model_len

    def make_tokenizer(self) -> IdleEngine:
        return self

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError  # prompts are token ids

    def new_decoder(self) -> IdleEngine:
        return self

    def step(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> IdleEngine:
        return self

    def launch(self, plan: StepPlan) -> IdleStep:
        return IdleStep(plan, self.sleep_s)


class IdleStep:
    def __init__(self, plan: StepPlan, sleep_s: float) -> None:
        self.plan = plan
        self.sleep_s = sleep_s

    def wait(self) -> StepResult:
        start_s = clock()
        if self.sleep_s:
            time.sleep(self.sleep_s)
        ids: list[int | None] = [1 if span.samples else None for span in self.plan.spans]
        return StepResult(ids, start_s, clock())


class Case(NamedTuple):
    waiting: int
    turnover: int
    drive: Callable[[Case, int], list[float]]  # seconds beside computing, one value a step


class Load:
    """Keeps RUNNING requests running and a queue behind them; `read` is what a reader does with events."""

    def __init__(self, manager: SchedulerManager, case: Case) -> None:
        self.manager = manager
        self.mailbox = manager.new_mailbox()
        self.lifetime = RUNNING // case.turnover if case.turnover else IdleEngine.max_model_len // 2
        self.streams: dict[int, RequestStream] = {}
        for index in range(RUNNING):
            # With a turnover the first ones end one after another, not all in one step.
            self.submit(1 + index // case.turnover if case.turnover else self.lifetime)
        for _ in range(case.waiting):
            self.submit(self.lifetime)

    def submit(self, max_new_tokens: int) -> None:
        params = SamplingParams(max_new_tokens, ignore_eos=True)
        stream = self.manager.submit(PROMPT, params, mailbox=self.mailbox)
        self.streams[stream.request_id] = stream

    def read(self, events: list[TokenEvent]) -> int:
        """The number of requests that ended."""
        ended = [event.request_id for event in events if event.finish_reason is not None]
        for request_id in ended:
            self.manager.acknowledge(request_id)
            del self.streams[request_id]
        return len(ended)


def by_hand(case: Case, n_steps: int) -> list[float]:
    records: list[StepRecord] = []
    manager = SchedulerManager(IdleEngine(0.0), RUNNING, start=False, on_step=records.append)
    load = Load(manager, case)
    totals_s = []
    with GcPauses(clock):  # as the benchmark measures
        for _ in range(WARM_UP_STEPS + n_steps):
            start_s = clock()
            manager.step()
            ended = load.read(load.mailbox.take(0.0))
            totals_s.append(clock() - start_s)
            for _ in range(ended):
                load.submit(load.lifetime)
    computing_s = [record.result.exec_end_s - record.result.exec_start_s for record in records]
    manager.close()
    beside_s = [total_s - step_s for total_s, step_s in zip(totals_s, computing_s, strict=True)]
    return beside_s[WARM_UP_STEPS:]


def in_its_thread(case: Case, n_steps: int) -> list[float]:
    records: list[StepRecord] = []
    all_done = threading.Event()

    def on_step(record: StepRecord) -> None:
        records.append(record)
        if len(records) > WARM_UP_STEPS + n_steps:
            all_done.set()

    batches: list[tuple[float, list[TokenEvent]]] = []
    with SchedulerManager(IdleEngine(SLEEP_S), RUNNING, on_step=on_step) as manager:
        load = Load(manager, case)
        with GcPauses(clock):
            is_last = False
            while not is_last:
                is_last = all_done.is_set()  # before taking: what is wanted was published by then
                events = load.mailbox.take()
                ended = load.read(events)
                batches.append((clock(), events))
                for _ in range(ended):
                    load.submit(load.lifetime)
    read_s = {event.time_s: at_s for at_s, events in batches for event in events}  # by the end of their step
    return [
        max(following.result.exec_start_s, read_s[step.result.exec_end_s]) - step.result.exec_end_s
        for step, following in pairwise(records[WARM_UP_STEPS : WARM_UP_STEPS + n_steps + 1])
    ]


def main() -> None:
    """Measures every case in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, one line a case")
    args = parser.parse_args()
    cases = [
        Case(waiting, turnover, drive)
        for drive, turnover, waiting in product((by_hand, in_its_thread), TURNOVER, WAITING)
    ]
    seconds: dict[Case, list[list[float]]] = {case: [] for case in cases}
    for _ in range(args.repeats):
        for case in cases:
            seconds[case].append(case.drive(case, args.steps))
    if not args.json:
        print(f"{RUNNING} running, {args.repeats} x {args.steps} steps; microseconds a step beside computing")
        print(f"{'':<16}{'ends a step':>12}{'waiting':>10}{'median':>10}{'of repeats':>18}{'p99':>10}")
    for case, repeats in seconds.items():
        medians = [percentile(repeat, 50) * 1e6 for repeat in repeats]
        median, p99 = (percentile(repeats, p) * 1e6 for p in (50, 99))
        name = case.drive.__name__.replace("_", " ")
        if args.json:
            figures = {"median_us": median, "median_us_of_repeats": medians, "p99_us": p99}
            print(json.dumps({**case._asdict(), "drive": name, **figures}))
        else:
            spread = f"{min(medians):.0f} to {max(medians):.0f}"
            print(
                f"{name:<16}{case.turnover:>12}{case.waiting:>10,}{median:>10.0f}{spread:>18}{p99:>10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
