"""Runs the core through a heap of events, with scripted step durations.

Virtual time only: the result does not depend on the machine, nor on how busy it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roseinfer.admission import Admission
from roseinfer.core import Core
from roseinfer.errors import InputError, RoseinferError, SchedulerManagerOverloadedError
from roseinfer.executor import StepPlan, StepRecord, StepResult
from roseinfer.kv_cache import KVCache, blocks_for
from roseinfer.request import Request, SamplingParams, TokenEvent
from roseinfer.scheduler import SchedulerLimits
from roseinfer.sim.client import ClientRules, Outbox

USER, ARRIVE, TOKENIZED, STEP_END, DEADLINE = range(5)
"""Kinds of events. At equal times they are handled in this order, those of one kind in order of their requests, and a
step is planned after all of them. So a request that is due when a slot comes free meets it taken, and an answer that
comes at its deadline has come in time. A request that the client held back is sent by the very event that lets it go.
"""

TOKEN_ID = 1
"""What every simulated token is: nothing depends on its value."""


class Arrival(NamedTuple):
    """A request of the workload. `tokenize_s` 0 stands for a prompt that comes as token ids.

    In a closed loop `time_s` has no meaning: requests are taken in their order.
    """

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


class Sent(NamedTuple):
    """One request that was sent: when, how many waited for a seat then, and what became of it.

    `fate` is the request as it ended, its refusal, or the error of a prompt that can never fit.
    """

    time_s: float
    waiting: int
    fate: Request | RoseinferError


@dataclass(slots=True)
class SimRun:
    """`sent` is aligned with the arrivals, None where the client's duration ended before; `timed_out` holds indexes."""

    sent: list[Sent | None]
    timed_out: set[int]
    peak_outstanding: int
    admission: Admission
    steps: list[StepRecord]


def simulate(
    arrivals: Sequence[Arrival],
    limits: SimLimits,
    step_seconds: Callable[[StepPlan], float],
    client: ClientRules = ClientRules(),  # noqa: B008 (it cannot change)
) -> SimRun:
    """Plays `arrivals` against an engine whose steps last `step_seconds(plan)`. Readers read without delay.

    Request ids are the indexes of the arrivals. Refusals cost no time.
    """
    return _Simulation(arrivals, limits, step_seconds, client).run()


class _Simulation:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        limits: SimLimits,
        step_seconds: Callable[[StepPlan], float],
        client: ClientRules,
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
        self.client = client
        self.outbox = Outbox(client, len(arrivals))
        self.sent: list[Sent | None] = [None] * len(arrivals)
        self.timed_out: set[int] = set()
        self.open: dict[int, Request] = {}  # what the client still reads, by index
        self.steps: list[StepRecord] = []
        self.is_running = False  # the last of `steps` has not ended
        if client.user_starts_s is not None:
            self.heap = [(start_s, USER, user) for user, start_s in enumerate(client.user_starts_s)]
        else:
            self.heap = [(arrival.time_s, ARRIVE, index) for index, arrival in enumerate(arrivals)]
        heapq.heapify(self.heap)

    def run(self) -> SimRun:
        heap, core = self.heap, self.core
        while heap:
            now, kind, index = heapq.heappop(heap)
            if kind == ARRIVE:
                self.outbox.held.append(index)
                self._send(now)
            elif kind == STEP_END:
                self.is_running = False
                step = self.steps[-1]
                self._read(core.commit(step.plan, step.result, now), now)
            elif kind == TOKENIZED:
                self._read(core.tokenized(index, range(self.arrivals[index].prompt_tokens), now), now)
            elif kind == DEADLINE:
                self._give_up(index, now)
            else:
                self.outbox.add_user()
                self._send(now)
            if not self.is_running and not (heap and heap[0][0] == now):
                self._start_step(now)
        return SimRun(self.sent, self.timed_out, self.outbox.peak, core.admission, self.steps)

    # ---- the client's side ----

    def _send(self, now: float) -> None:
        """Sends whatever may be sent now. A refused request ends at once, and so lets the next of a schedule go.

        The user of a closed loop who is refused is gone for a while.
        """
        while (index := self.outbox.take(now)) is not None:
            waiting = self.core.admission.not_started
            fate = self._submit(index, now)
            self.sent[index] = Sent(now, waiting, fate)
            if not isinstance(fate, Request):
                self.outbox.ended()
                if self.client.is_closed:
                    self.outbox.remove_user()
                    heapq.heappush(self.heap, (now + self.client.refused_pause_s, USER, index))
                continue
            self.open[index] = fate
            if self.client.timeout_s is not None:
                heapq.heappush(self.heap, (now + self.client.timeout_s, DEADLINE, index))

    def _read(self, events: list[TokenEvent], now: float) -> None:
        """Takes what a step brought; whoever has ended gives its slot and its permit back."""
        for event in events:
            if event.finish_reason is not None:
                request = self.open.pop(event.request_id, None)
                if request is not None:  # else the client gave it up
                    self.core.acknowledge(request, event.time_s)
                    self.outbox.ended()
        if self.outbox.held:
            self._send(now)

    def _give_up(self, index: int, now: float) -> None:
        if self.open.pop(index, None) is not None:
            self.timed_out.add(index)
            self.outbox.ended()
            self._read(self.core.abort(index, now), now)

    # ---- the engine's side ----

    def _submit(self, index: int, now: float) -> Request | RoseinferError:
        """What SchedulerManager.submit does."""
        _, prompt_tokens, max_new_tokens, tokenize_s = self.arrivals[index]
        core = self.core
        try:
            ticket = core.admission.reserve(now, prompt_tokens + max_new_tokens)
        except SchedulerManagerOverloadedError as refusal:
            return refusal
        prompt_ids = None
        if tokenize_s > 0:
            heapq.heappush(self.heap, (now + tokenize_s, TOKENIZED, index))
        else:
            prompt_ids = range(prompt_tokens)
            try:
                core.check_fits(prompt_tokens, max_new_tokens)
            except InputError as error:
                core.admission.release(ticket, now)
                return error
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        request = Request(index, params, ticket, seed=0, prompt_ids=prompt_ids, reserved_s=now)
        core.submit(request)
        return request

    def _start_step(self, now: float) -> None:
        plan = self.core.plan(now)
        if plan is None:
            return
        end_s = now + self.step_seconds(plan)
        result = StepResult([TOKEN_ID if span.samples else None for span in plan.spans], now, end_s)
        scheduler = self.core.scheduler
        counts = len(scheduler.waiting), len(scheduler.running), scheduler.kv_cache.used_tokens
        self.steps.append(StepRecord(plan, result, now, end_s, *counts))
        self.is_running = True
        heapq.heappush(self.heap, (end_s, STEP_END, -1))
