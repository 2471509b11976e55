"""The core: from submission to the last token, without a clock, a thread, or a tensor.

`SchedulerManager` drives it with real time, `sim` with a virtual clock; the answers are the same lines of code.
One thread owns it. Only `acknowledge` may be called from others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from roseinfer.admission import Admission
from roseinfer.errors import (
    InputError,
    InvariantError,
    PromptTooLongError,
    SchedulerManagerOverloadedError,
)
from roseinfer.executor import KV_BLOCK_TOKENS, StepPlan, StepResult
from roseinfer.kv_cache import KVCache
from roseinfer.request import ABORT, LENGTH, STOP, FinishReason, Request, TokenEvent, new_event
from roseinfer.scheduler import QueuePolicy, Scheduler, SchedulerLimits
from roseinfer.ticket import RELEASED, RESERVED
from roseinfer.waiting import STALE_SLACK


class Core:
    """Scheduling state and its transitions. Methods return the events that readers must get."""

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        kv_cache: KVCache,
        admission: Admission,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        unread_timeout_s: float,
        policy: QueuePolicy = QueuePolicy(),  # noqa: B008 (it holds no state)
    ) -> None:
        self.admission = admission
        self.scheduler = Scheduler(limits, kv_cache, admission, policy, self._drop)
        self._most_unread = 0
        self._dropped: list[TokenEvent] = []
        self._evicted_early: list[Request] = []  # before they came here
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.unread_timeout_s = unread_timeout_s
        self._live: dict[int, Request] = {}
        self._unread: deque[Request] = deque()  # in order of finished_s; some of them read meanwhile

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def check_fits(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raises InputError for an empty prompt, PromptTooLongError for what an empty engine could not serve."""
        if prompt_tokens < 1:
            raise InputError("prompt", prompt_tokens, "holds no token")
        need = prompt_tokens + max_new_tokens
        capacity = self.scheduler.kv_cache.capacity_tokens
        if need > self.max_model_len:
            raise PromptTooLongError(prompt_tokens, max_new_tokens, "context", self.max_model_len)
        if need > capacity:
            raise PromptTooLongError(prompt_tokens, max_new_tokens, "KV cache", capacity)

    def live_ids(self) -> list[int]:
        """Requests that have not ended, in order of submission."""
        return list(self._live)

    def submit(self, request: Request) -> list[TokenEvent]:
        """Takes over a request that holds a ticket, tokenised (and checked to fit) or not."""
        request.ticket.request_id = request.request_id
        self._live[request.request_id] = request
        self.scheduler.add(request)
        if request.ticket.is_evicted:
            self._evicted_early.append(request)
        return []

    def tokenized(self, request_id: int, prompt_ids: Sequence[int], now: float) -> list[TokenEvent]:
        """The prompt's ids, stamped when they were ready. Ends a request whose prompt can never fit.

        What fits the engine may still exceed a token budget: known only now, it ends the request as well.
        """
        request = self._live.get(request_id)
        if request is None:
            return []  # aborted meanwhile
        request.tokenized_s = now
        try:
            self.check_fits(len(prompt_ids), request.params.max_new_tokens)
            self.admission.adjust(request.ticket, len(prompt_ids) + request.params.max_new_tokens, now)
        except (InputError, SchedulerManagerOverloadedError) as error:
            return [self._end(request, now, FinishReason.ERROR, error=error)]
        request.prompt_ids = prompt_ids
        self.scheduler.ready(request)
        return []

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do. `take_dropped` says who was dropped meanwhile."""
        for ticket in self.admission.take_evicted():
            known = None if ticket.request_id is None else self._live.get(ticket.request_id)
            if known is not None:
                self.scheduler.drop_evicted(known, now)
        while self._evicted_early:
            request = self._evicted_early.pop()
            if request.request_id in self._live:
                self.scheduler.drop_evicted(request, now)
        plan = self.scheduler.plan(now)
        if plan is not None:
            self.admission.step_began_s = now
        if plan is None and not self.scheduler.running and self.scheduler.has_ready:
            raise InvariantError("an idle engine cannot admit the head of its queue")
        return plan

    def take_dropped(self) -> list[TokenEvent]:
        """The ends of those that `plan` dropped since this was last asked."""
        if not self._dropped:
            return self._dropped
        dropped, self._dropped = self._dropped, []
        return dropped

    def _drop(self, request: Request, error: SchedulerManagerOverloadedError, now: float) -> None:
        self._dropped.append(self._end(request, now, FinishReason.ERROR, error=error))

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Takes a step's results in. Tokens of requests that ended or were aborted meanwhile are dropped.

        Tokens carry the step's end; what an aborted request held is free from `now` on, not from before.
        """
        self.admission.progress(plan.spans)
        self.admission.observe(plan, result)
        kv_cache = self.scheduler.kv_cache
        caches_prefixes = kv_cache.caches_prefixes
        end_s = result.exec_end_s
        events = []
        for (request, start, n_tokens, samples), token_id in zip(plan.spans, result.token_ids, strict=True):
            request.num_pending -= 1
            if request.finish_reason is not None:
                continue
            if request.aborted:
                if request.num_pending == 0:
                    events.append(self._end(request, now, FinishReason.ABORT))
                continue
            if caches_prefixes and start // KV_BLOCK_TOKENS < (start + n_tokens) // KV_BLOCK_TOKENS:
                # Not sooner: another request of the same step would read what is only being written.
                kv_cache.publish(request.request_id, request.known_ids, start + n_tokens)
            if not samples:
                continue
            if token_id is None:
                raise InvariantError(f"request {request.request_id}: a sampling span gave no token")
            params, output_ids = request.params, request.output_ids
            output_ids.append(token_id)
            request.token_times_s.append(end_s)
            n_output = len(output_ids)
            if n_output == 1 and request.ticket.predicted_ttft_s is not None:
                self.admission.first_token(request.ticket, end_s)
            if token_id in self.eos_token_ids and not params.ignore_eos:
                events.append(self._end(request, end_s, STOP, token_id))
            elif n_output == params.max_new_tokens:
                events.append(self._end(request, end_s, LENGTH, token_id))
            else:
                events.append(new_event((request.request_id, token_id, end_s, None, None)))
        return events

    def fail_step(self, error: BaseException, now: float) -> list[TokenEvent]:
        """A step raised: every request that runs ends with the error, since its KV cache cannot be trusted."""
        return [
            self._end(request, now, FinishReason.ERROR, error=error)
            for request in list(self.scheduler.running.values())
        ]

    def fail(self, request_id: int, error: BaseException, now: float) -> list[TokenEvent]:
        """A request that cannot go on before it ever ran: its tokeniser failed."""
        request = self._live.get(request_id)
        return [] if request is None else [self._end(request, now, FinishReason.ERROR, error=error)]

    def abort(self, request_id: int, now: float, holds_slot: bool = False) -> list[TokenEvent]:
        """Ends a request now, or as soon as the step that it is in is committed. Unknown ids are ignored.

        `holds_slot`: its reader has all that it wants and is busy with that; it acknowledges later.
        """
        request = self._live.get(request_id)
        if request is None:
            return []
        request.aborted = True
        request.holds_slot = holds_slot
        if request.num_pending:
            return []
        return [self._end(request, now, FinishReason.ABORT)]

    def acknowledge(self, request: Request, now: float) -> None:
        """The reader has taken the terminal event: the slot is free. Any thread, any number of times."""
        ticket = request.ticket
        ticket.is_read = True
        self.admission.release(ticket, now)

    def expire(self, now: float) -> list[Request]:
        """Frees the slots of streams that ended `unread_timeout_s` ago and that nobody read; returns them."""
        expired = []
        while self._unread:
            request = self._unread[0]
            if not request.ticket.is_over:
                assert request.finished_s is not None
                if now < request.finished_s + self.unread_timeout_s:
                    break
                self.acknowledge(request, now)
                expired.append(request)
            self._unread.popleft()
        return expired

    def next_due_s(self) -> float | None:
        """When there is something to do though nobody asks for it: a slot that nobody reads, or a request that waits
        for its tokeniser for too long.
        """
        due = (self._next_expiry_s(), self.scheduler.next_timeout_s())
        return min((at_s for at_s in due if at_s is not None), default=None)

    def _next_expiry_s(self) -> float | None:
        while self._unread and self._unread[0].ticket.is_over:
            self._unread.popleft()
        if not self._unread:
            return None
        finished_s = self._unread[0].finished_s
        assert finished_s is not None
        return finished_s + self.unread_timeout_s

    def check(self) -> None:
        """Raises InvariantError when bookkeeping contradicts itself. For tests, after every step."""
        scheduler = self.scheduler
        scheduler.check()
        if self._live.keys() != scheduler.waiting.keys() | scheduler.running.keys():
            raise InvariantError("a live request is neither waiting nor running, or the reverse")
        for request in self._live.values():
            if request.aborted and not request.num_pending:
                raise InvariantError(f"request {request.request_id} was aborted and lingers")
        # Before counting: meanwhile readers may give slots back, and callers may reserve.
        counts, limit, budget = self.admission.counts(), self.admission.limit, self.admission.token_limit
        if counts.reserved != counts.inflight + counts.released or counts.backlog_tokens < 0:
            raise InvariantError(f"admission contradicts itself: {counts}")
        holders = [request for request in self._live.values() if not request.ticket.is_evicted]
        held_tokens = sum(request.ticket.held_tokens for request in holders)
        if held_tokens > counts.held_tokens or (budget is not None and counts.held_tokens > budget):
            raise InvariantError(
                f"live requests hold {held_tokens} tokens, {counts.held_tokens} are held, budget {budget}"
            )
        unread = sum(request.ticket.state is not RELEASED for request in self._unread)
        if len(holders) + unread > counts.inflight or (limit is not None and counts.inflight > limit):
            raise InvariantError(
                f"{len(self._live)} live, {unread} unread, {counts.inflight} in flight, limit {limit}"
            )

    def _end(
        self,
        request: Request,
        now: float,
        reason: FinishReason,
        token_id: int | None = None,
        error: BaseException | None = None,
    ) -> TokenEvent:
        if request.aborted:
            # Its reader is gone, or wants no more: whatever happened to its last step, nobody will ask.
            reason, token_id, error = ABORT, None, None
        request.finish_reason = reason
        request.finished_s = now
        ticket = request.ticket
        del self._live[request.request_id]
        self.scheduler.remove(request)
        if ticket.work is not None or ticket.state is RESERVED:
            self.admission.ended(ticket)
        if reason is ABORT and not request.holds_slot:
            self.admission.release(ticket, now)
        else:
            self._unread.append(request)
            # One stream that nobody reads must not keep all that were read after it in memory.
            n_unread = len(self._unread)
            if n_unread > self._most_unread and n_unread > 2 * self.admission.inflight + STALE_SLACK:
                self._unread = deque(r for r in self._unread if not r.ticket.is_over)
                self._most_unread = 2 * len(self._unread) + STALE_SLACK  # evicted ones hold no slot
        return new_event((request.request_id, token_id, now, reason, error))
