"""Runs the core through a heap of events, with scripted step durations.

Virtual time only: the result does not depend on the machine, nor on how busy it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from roseinfer.admission import Admission
from roseinfer.core import Core
from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.executor import StepPlan, StepResult
from roseinfer.kv_cache import KVCache, blocks_for
from roseinfer.request import Request, SamplingParams, TokenEvent
from roseinfer.scheduler import SchedulerLimits

ARRIVE, TOKENIZED, STEP_END = range(3)
"""Kinds of events. At equal times they are handled in this order, and a step is planned after all of them."""

TOKEN_ID = 1
"""What every simulated token is: nothing depends on its value."""


class Arrival(NamedTuple):
    """A request of the workload. `tokenize_s` 0 stands for a prompt that comes as token ids."""

    time_s: float
    prompt_tokens: int
    max_new_tokens: int
    tokenize_s: float = 0.0


class SimLimits(NamedTuple):
    """The sizes that a SchedulerManager takes, with the same meaning."""

    max_inflight_requests: int | None = None
    max_batch_size: int = 8
    max_active_requests: int | None = None
    max_num_batched_tokens: int = 512
    kv_cache_tokens: int = 1 << 20
    max_model_len: int = 1 << 20


@dataclass(slots=True)
class SimRun:
    """`outcomes` is aligned with the arrivals: the request as it ended, or its refusal."""

    outcomes: list[Request | SchedulerManagerOverloadedError]
    admission: Admission
    step_spans: list[list[tuple[int, int, int]]] = field(
        default_factory=list
    )  # (arrival index, start, n_tokens)


def simulate(
    arrivals: Sequence[Arrival], limits: SimLimits, step_seconds: Callable[[StepPlan], float]
) -> SimRun:
    """Plays `arrivals` against an engine whose steps last `step_seconds(plan)`. Readers read without delay.

    Raises PromptTooLongError for an arrival of token ids that gets a slot and could never be served.
    """
    return _Simulation(arrivals, limits, step_seconds).run()


class _Simulation:
    def __init__(
        self, arrivals: Sequence[Arrival], limits: SimLimits, step_seconds: Callable[[StepPlan], float]
    ) -> None:
        self.arrivals = arrivals
        self.step_seconds = step_seconds
        self.core = Core(
            limits=SchedulerLimits(
                limits.max_batch_size, limits.max_active_requests, limits.max_num_batched_tokens
            ),
            kv_cache=KVCache(blocks_for(limits.kv_cache_tokens)),
            admission=Admission(limits.max_inflight_requests),
            max_model_len=limits.max_model_len,
            eos_token_ids=frozenset(),
            unread_timeout_s=float("inf"),
        )
        self.requests: dict[int, Request] = {}
        self.result = SimRun([], self.core.admission)
        self.heap = [(arrival.time_s, ARRIVE, index) for index, arrival in enumerate(arrivals)]
        heapq.heapify(self.heap)
        self.running: tuple[StepPlan, StepResult] | None = None

    def run(self) -> SimRun:
        outcomes: dict[int, Request | SchedulerManagerOverloadedError] = {}
        while self.heap:
            now, kind, index = heapq.heappop(self.heap)
            if kind == ARRIVE:
                outcomes[index] = self._arrive(index, now)
            elif kind == TOKENIZED:
                self._read(self.core.tokenized(index, range(self.arrivals[index].prompt_tokens), now))
            else:
                assert self.running is not None
                plan, result = self.running
                self.running = None
                self._read(self.core.commit(plan, result, now))
            if self.running is None and not (self.heap and self.heap[0][0] == now):
                self._start_step(now)
        self.result.outcomes = [outcomes[index] for index in range(len(self.arrivals))]
        return self.result

    def _arrive(self, index: int, now: float) -> Request | SchedulerManagerOverloadedError:
        arrival = self.arrivals[index]
        try:
            ticket = self.core.admission.reserve(now, arrival.prompt_tokens + arrival.max_new_tokens)
        except SchedulerManagerOverloadedError as refusal:
            return refusal
        is_text = arrival.tokenize_s > 0
        if not is_text:
            self.core.check_fits(arrival.prompt_tokens, arrival.max_new_tokens)
        params = SamplingParams(max_new_tokens=arrival.max_new_tokens, ignore_eos=True)
        ids = None if is_text else range(arrival.prompt_tokens)
        request = Request(index, params, ticket, seed=0, prompt_ids=ids, reserved_s=now)
        self.requests[index] = request
        self.core.submit(request)
        if is_text:
            heapq.heappush(self.heap, (now + arrival.tokenize_s, TOKENIZED, index))
        return request

    def _start_step(self, now: float) -> None:
        plan = self.core.plan(now)
        if plan is None:
            return
        end = now + self.step_seconds(plan)
        ids = [TOKEN_ID if span.samples else None for span in plan.spans]
        self.running = plan, StepResult(ids, now, end)
        self.result.step_spans.append([(s.request.request_id, s.start, s.n_tokens) for s in plan.spans])
        heapq.heappush(self.heap, (end, STEP_END, -1))

    def _read(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self.core.acknowledge(self.requests.pop(event.request_id), event.time_s)
