"""The policy: which tokens of which requests go into the next step.

One loop without phases. Every step has a budget of tokens and takes, in this order:
  1. one token for every request that decodes,
  2. the next chunk of the one request that is half-prefilled, if there is one,
  3. waiting requests in submission order, as far as budget, seats and KV cache reach.
A request still being tokenised is passed over and keeps its place. Nothing here is O(waiting).

Which order that is, and what is dropped instead of being taken up, is a QueuePolicy; without one it is the order of
submission, and nothing is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from roseinfer.admission import Admission
from roseinfer.codel import CoDel
from roseinfer.errors import (
    QUEUE_TIMEOUT,
    InputError,
    InvariantError,
    SchedulerManagerOverloadedError,
    check_whole,
)
from roseinfer.executor import KV_BLOCK_TOKENS, Span, StepPlan, new_span
from roseinfer.kv_cache import KVCache, blocks_for
from roseinfer.request import Request
from roseinfer.ticket import RESERVED, STARTED
from roseinfer.waiting import Order, ReadyQueue, Timeouts

Drop = Callable[[Request, SchedulerManagerOverloadedError, float], None]
"""Ends a request that waits, with this error, now."""


class SchedulerLimits(NamedTuple):
    """`max_active_requests=None` means that only batch size and KV cache bound what runs."""

    max_batch_size: int
    max_active_requests: int | None
    max_num_batched_tokens: int

    @property
    def seats(self) -> int:
        """Requests that may run at a time, KV cache permitting."""
        return min(self.max_batch_size, self.max_active_requests or self.max_batch_size)

    def check(self) -> None:
        """Raises InputError on values that cannot work together."""
        check_whole("max_batch_size", self.max_batch_size, 1)
        check_whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_active_requests is not None:
            check_whole("max_active_requests", self.max_active_requests, 1)
        if self.max_num_batched_tokens <= self.max_batch_size:
            # Else a full batch of decodes leaves no token for a prefill, for ever.
            raise InputError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"must exceed max_batch_size ({self.max_batch_size})",
            )


class QueuePolicy(NamedTuple):
    """What happens to those who wait.

    timeout_s: how long a request may wait. codel: sheds by standing delay; with `newest_first` the newest is taken up
    first while it finds the queue overloaded. Deadlines of requests hold without being asked for.
    """

    order: Order = Order()
    timeout_s: float | None = None
    codel: CoDel | None = None
    newest_first: bool = False


class Scheduler:
    """Waiting and running requests. Owned by one thread; knows no clock.

    `drop` is called, inside of `plan`, for requests that are dropped instead of being taken up; it removes them.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_cache: KVCache,
        admission: Admission,
        policy: QueuePolicy,
        drop: Drop,
    ) -> None:
        limits.check()
        self.limits = limits
        self.kv_cache = kv_cache
        self.admission = admission
        self.waiting: dict[int, Request] = {}  # tokenising or ready
        self.running: dict[int, Request] = {}
        self._timeout_s = policy.timeout_s
        self._codel = policy.codel
        self._newest_first = policy.newest_first
        self._drop = drop
        self._ready = ReadyQueue(self.waiting, policy.order, keeps_newest=policy.newest_first)
        self._timeouts = Timeouts(self.waiting)
        self._half_prefilled: Request | None = None
        self._arrivals = 0
        self._seats = limits.seats
        self._budget = limits.max_num_batched_tokens

    def add(self, request: Request) -> None:
        """Queues a request in its place; it can run once `ready` was told."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self.waiting[request.request_id] = request
        if self._timeout_s is not None:
            self._timeouts.push(request.reserved_s + self._timeout_s, request)
        if request.deadline_s is not None:
            self._timeouts.push(request.deadline_s, request)
        if request.prompt_ids is not None:
            self.ready(request)

    def ready(self, request: Request) -> None:
        """The request's prompt is tokenised."""
        request.num_to_schedule = request.max_len - 1  # the last token is sampled, never computed on
        self._ready.push(request)
        if request.deadline_s is not None and self.admission.forecast is not None:
            self._timeouts.push(self._latest_start_s(request), request)

    def remove(self, request: Request) -> None:
        """Takes a request out wherever it is and frees its KV cache.

        A launched step may still write to these blocks if the request met its end early (EOS) in the step before:
        steps compute in order, so their next owner writes later.
        """
        if self.waiting.pop(request.request_id, None) is None:
            del self.running[request.request_id]
            self.kv_cache.free(request.request_id)
            request.block_table = []
        else:
            self._ready.forget()
        if self._half_prefilled is request:
            self._half_prefilled = None

    def next_timeout_s(self) -> float | None:
        """When somebody will have waited for too long."""
        return self._timeouts.next_s()

    @property
    def has_ready(self) -> bool:
        """Some tokenised request waits."""
        return self._ready.head() is not None

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run. Stamps first_scheduled_s with `now`."""
        spans: list[Span] = []
        copies: list[tuple[int, int]] = []
        for request in self._timeouts.overdue(now):
            # What the prefix cache has learned meanwhile need not be computed any more.
            latest_s = self._latest_start_s(request)
            if latest_s < now:
                self._drop_overdue(request, now)
            else:
                self._timeouts.push(latest_s, request)
        half = self._half_prefilled
        # Counted from what was asked for, not from what came: right with launched steps outstanding as well.
        for request in self.running.values():
            start = request.num_scheduled
            if start < request.num_to_schedule and not request.aborted and request is not half:
                request.num_scheduled = start + 1
                request.num_pending += 1
                spans.append(new_span((request, start, 1, True)))
        budget = self._budget - len(spans)
        if half is not None and not half.aborted and budget:
            spans.append(self._take_prefill(half, budget))
            budget -= spans[-1].n_tokens
        while budget and self._half_prefilled is None:
            head = self._take_up(now, copies)
            if head is None:
                break
            spans.append(self._take_prefill(head, budget))
            budget -= spans[-1].n_tokens
        return StepPlan(spans, copies) if spans else None

    def check(self) -> None:
        """Raises InvariantError when bookkeeping contradicts itself. For tests, after every step."""
        self.kv_cache.check()
        if self.waiting.keys() & self.running.keys():
            raise InvariantError("a request waits and runs at the same time")
        if len(self.running) > self.limits.seats:
            raise InvariantError(f"{len(self.running)} requests run on {self.limits.seats} seats")
        if self.running.keys() != self.kv_cache.owners():
            raise InvariantError("a request runs without KV blocks, or the reverse")
        ready = self._ready.ids()
        for request in self.waiting.values():
            # One that was evicted a moment ago leaves with the next step.
            if request.ticket.state is not RESERVED and not request.ticket.is_evicted:
                raise InvariantError(
                    f"request {request.request_id} waits, its slot is {request.ticket.state}"
                )
            if request.prompt_ids is not None and request.request_id not in ready:
                raise InvariantError(f"request {request.request_id} is tokenised, waits, and would never run")
        for request in self.running.values():
            if request.ticket.state is not STARTED:
                raise InvariantError(f"request {request.request_id} runs, its slot is {request.ticket.state}")
            if len(request.block_table) != blocks_for(request.max_len):
                raise InvariantError(f"request {request.request_id} has no KV blocks for all of its tokens")
            half = not request.is_prefilled
            if half and request is not self._half_prefilled:
                raise InvariantError("more than one request is half-prefilled")
            if request.num_scheduled > request.num_to_schedule:
                raise InvariantError(f"request {request.request_id} was scheduled past its last token")
            n_known = request.prompt_len + len(request.output_ids)
            # The tokens of an aborted one are dropped, and so never known.
            unknown = request.num_scheduled > n_known + request.num_pending and not request.aborted
            if request.num_pending < 0 or unknown:
                raise InvariantError(f"request {request.request_id}: tokens were computed that nobody knows")

    def _take_up(self, now: float, copies: list[tuple[int, int]]) -> Request | None:
        """Moves the next in the queue to running if a seat and its whole KV cache are free. Drops whom the policy
        sheds at that moment. What the prefix cache has of its prompt counts as computed; it may have to be copied first
        (`copies`).
        """
        codel, running, kv_cache = self._codel, self.running, self.kv_cache
        while len(running) < self._seats:
            head = self._ready.head()
            if head is None:
                return None
            prefix = self._room_for(head)
            if prefix is None:
                return None
            if codel is not None:
                # Judged by the one that waits longest, whoever is taken up: the newest has never waited for long.
                waited_s = now - head.ready_s
                if codel.should_drop(now, waited_s):
                    self._shed(head, now, "codel", codel.target_s, waited_s)
                    continue
                if self._newest_first and codel.is_overloaded:
                    newest = self._ready.newest()
                    assert newest is not None
                    head, prefix = newest, self._room_for(newest)
                    if prefix is None:
                        return None
            cached_tokens = len(prefix) * KV_BLOCK_TOKENS
            if not self.admission.start(head.ticket, now - head.ready_s, cached_tokens):
                if not head.ticket.is_evicted:
                    raise InvariantError(f"request {head.request_id} waits without a slot")
                self.drop_evicted(head, now)  # since this step's plan was begun
                continue
            del self.waiting[head.request_id]
            if self._newest_first:
                self._ready.forget()
            running[head.request_id] = head
            head.block_table = kv_cache.allocate(head.request_id, head.num_to_schedule + 1, prefix)
            head.cached_tokens = head.num_scheduled = cached_tokens
            if prefix and not kv_cache.shares_blocks:
                copies += zip(prefix, head.block_table, strict=False)
            head.first_scheduled_s = now
            return head
        return None

    def _room_for(self, request: Request) -> list[int] | None:
        """Blocks that hold the beginning of its prompt; None where there is no room for the rest."""
        assert request.prompt_ids is not None  # it is ready
        prefix = self.kv_cache.find_prefix(request.prompt_ids)
        return prefix if self.kv_cache.can_allocate(request.num_to_schedule + 1, prefix) else None

    def drop_evicted(self, request: Request, now: float) -> None:
        """A waiting request whose slot went to a higher class."""
        self._shed(request, now, "evicted", request.priority, 0)

    def _latest_start_s(self, request: Request) -> float:
        """When it has to be taken up to be of use. What its own prefill takes at least cannot be made up for."""
        latest_s = request.reserved_s + (self._timeout_s or float("inf"))
        if request.deadline_s is None:
            return latest_s
        own_s, forecast = 0.0, self.admission.forecast
        if request.prompt_ids is not None and forecast is not None:
            cached_tokens = len(self.kv_cache.find_prefix(request.prompt_ids)) * KV_BLOCK_TOKENS
            own_s = forecast.prefill_s(request.prompt_len - cached_tokens)
        return min(latest_s, request.deadline_s - own_s)

    def _drop_overdue(self, request: Request, now: float) -> None:
        ends_s = request.reserved_s + (self._timeout_s or float("inf"))
        if request.deadline_s is not None:
            ends_s = min(ends_s, request.deadline_s)
        self._shed(request, now, QUEUE_TIMEOUT, ends_s - request.reserved_s, now - request.reserved_s)

    def _shed(self, request: Request, now: float, reason: str, limit: float, measured: float) -> None:
        self._drop(request, self.admission.dropped(request.ticket, now, reason, limit, measured), now)

    def _take_prefill(self, request: Request, budget: int) -> Span:
        start, prompt_ids = request.num_scheduled, request.prompt_ids
        assert prompt_ids is not None
        left = len(prompt_ids) - start
        n_tokens = min(budget, left)
        request.num_scheduled = start + n_tokens
        request.num_pending += 1
        self._half_prefilled = None if n_tokens == left else request
        return new_span((request, start, n_tokens, n_tokens == left))
