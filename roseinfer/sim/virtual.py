"""Runs the core through a heap of events, with scripted durations.

Virtual time only: the result does not depend on the machine, nor on how busy it is. Memory holds what is in flight,
and of the workload the next request.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from roseinfer.admission import Admission
from roseinfer.admission_spec import admission_of
from roseinfer.core import Core
from roseinfer.errors import InputError, InvariantError, RoseinferError, SchedulerManagerOverloadedError
from roseinfer.executor import StepPlan, StepRecord, new_record, new_result
from roseinfer.kv_cache import KVCache, blocks_for
from roseinfer.policies import policies_of
from roseinfer.request import Request, SamplingParams, TokenEvent
from roseinfer.scheduler import SchedulerLimits
from roseinfer.sim.client import ClientRules, Comebacks, Outbox
from roseinfer.sim.cost_model import CostModel
from roseinfer.sim.costs import Costs, StepsOnly
from roseinfer.waiting import FCFS, STALE_SLACK

USER, RETRY, RETURNED, TOKENIZED, STEP_END, PUBLISHED, DEADLINE = range(7)
"""Kinds of events. At equal times arrivals come first, then these in this order, those of one kind in order of their
requests, and a step is planned after all of them. So a request that is due when a slot comes free meets it taken, and
an answer that comes at its deadline has come in time. A request that the client held back is sent by the very event
that lets it go.
"""

NEVER_S: Final = float("inf")

TOKEN_ID: Final = 1
"""What every simulated token is: nothing depends on its value."""

TRY_IDS: Final = 1 << 40
"""From the request id of a try to that of the next of the same request; that of the first is the request's index."""


class Arrival(NamedTuple):
    """A request of the workload. In a closed loop `time_s` has no meaning: requests are taken in their order.

    `priority` is its class, 0 the highest; `ttft_deadline_s` counts from when it is sent.
    """

    time_s: float
    prompt_tokens: int
    max_new_tokens: int
    priority: int = 0
    ttft_deadline_s: float | None = None


new_arrival: Final[Callable[[tuple[float, int, int, int, float | None]], Arrival]] = partial(
    tuple.__new__, Arrival
)
"""`Arrival(*values)` that runs no line of Python: there may be millions."""


class SimLimits(NamedTuple):
    """The sizes that a SchedulerManager takes, with the same meaning.

    Text has no bytes here: a prompt that is to be tokenised holds its true tokens from the first.
    """

    max_inflight_requests: int | None = None
    max_batch_size: int = 8
    max_active_requests: int | None = None
    max_num_batched_tokens: int = 512
    kv_cache_tokens: int = 1 << 20
    max_model_len: int = 1 << 20
    tokenize_workers: int = 1
    admission: str | None = None
    scheduling: str = FCFS
    cost_model: CostModel | None = None  # what the policies go by, not what steps take


@dataclass(slots=True)
class Sent:
    """One request that was sent, as its client saw it, and what became of it; where clients retry, one try of it.

    `waiting` is how many waited for a seat when it was sent. `fate` is the request as it ended, its refusal, or the
    error of a prompt that can never fit; where that was found when it was tokenised, `error` is it. `received_s` is
    when its client got each token, up to `gave_up_s`, and `ended_s` when the end. The last try of a request has the
    `earlier` ones.
    """

    index: int
    due_s: float
    permitted_s: float
    sent_s: float
    returned_s: float
    prompt_tokens: int
    waiting: int
    fate: Request | RoseinferError
    priority: int = 0
    gave_up_s: float | None = None
    received_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    error: BaseException | None = None
    attempt: int = 1
    earlier: tuple[Sent, ...] = ()

    @property
    def request_id(self) -> int:
        return self.index + (self.attempt - 1) * TRY_IDS


@dataclass(slots=True)
class SimRun:
    """A simulation that is over.

    `offered` counts what arrived, in a closed loop what its users came to. `sent` and `steps` are in the order of
    requests and of time, empty where they were handed out as they ended.
    `unsent` was due, and held back by the client until its duration ended. `is_exhausted`: all requests were sent.
    """

    admission: Admission
    offered: int
    peak_outstanding: int
    last_sent_s: float | None
    is_exhausted: bool
    unsent: list[tuple[int, Arrival]]
    sent: list[Sent]
    steps: list[StepRecord]

    @property
    def timed_out(self) -> set[int]:
        """Indexes of the requests that the client gave up."""
        return {sent.index for sent in self.sent if sent.gave_up_s is not None}


def simulate(
    arrivals: Iterable[Arrival],
    limits: SimLimits,
    costs: Costs | Callable[[StepPlan], float],
    client: ClientRules = ClientRules(),  # noqa: B008 (it cannot change)
    *,
    on_request: Callable[[Sent], None] | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
) -> SimRun:
    """Plays `arrivals`, which come in the order of their times, against an engine whose work lasts as `costs` say.

    `on_request` gets every request that was sent (its last try), when all of it is over, and `on_step` every step;
    without them the run holds them. One sender sends, one request after another; readers read what is published without
    delay. `request_index` gives the place of an arrival, from 0, that a request id is of. Costs that are a function are
    those of a step, and all else is free.
    """
    sent: list[Sent] = []
    steps: list[StepRecord] = []
    if callable(costs):
        costs = StepsOnly(costs)
    simulation = _Simulation(
        arrivals, limits, costs, client, on_request or sent.append, on_step or steps.append
    )
    simulation.run()
    outbox = simulation.outbox
    is_exhausted = outbox.is_exhausted()
    return SimRun(
        admission=simulation.core.admission,
        offered=outbox.taken if client.is_closed else simulation.arrived,
        peak_outstanding=outbox.peak,
        last_sent_s=simulation.last_sent_s,
        is_exhausted=is_exhausted,
        unsent=[] if client.is_closed else list(outbox.held),
        sent=sorted(sent, key=lambda one: one.index),
        steps=steps,
    )


def request_index(request_id: int) -> int:
    return request_id % TRY_IDS


class _Simulation:
    def __init__(
        self,
        arrivals: Iterable[Arrival],
        limits: SimLimits,
        costs: Costs,
        client: ClientRules,
        on_request: Callable[[Sent], None],
        on_step: Callable[[StepRecord], None],
    ) -> None:
        self.costs = costs
        self.client = client
        self.comebacks = None if client.retrier is None else Comebacks(client, client.retrier())
        self.again: deque[int] = deque()  # those whose next try is due
        self.on_request = on_request
        # A try is over for the client and the engine.
        self.on_try = on_request if self.comebacks is None else self._end_try
        self.on_step = on_step
        sizes = SchedulerLimits(
            limits.max_batch_size, limits.max_active_requests, limits.max_num_batched_tokens
        )
        kv_cache = KVCache(blocks_for(limits.kv_cache_tokens))
        admission, policy = policies_of(
            admission_of(limits.max_inflight_requests, limits.admission),
            limits.scheduling,
            sizes,
            limits.cost_model,
            num_kv_blocks=kv_cache.num_blocks,
        )
        self.core = Core(
            limits=sizes,
            kv_cache=kv_cache,
            admission=admission,
            policy=policy,
            max_model_len=limits.max_model_len,
            eos_token_ids=frozenset(),
            unread_timeout_s=NEVER_S,
        )
        self.arrivals = enumerate(arrivals)
        self.arrived = 0  # of a schedule
        self.outbox = Outbox(client, self.arrivals)
        self.held = self.outbox.held
        self.is_closed = client.is_closed
        self.params: dict[int, SamplingParams] = {}  # by max_new_tokens
        self.last_sent_s: float | None = None
        self.submitting: Sent | None = None  # what the sender is at
        self.open: dict[int, Sent] = {}  # what has entered the engine and not ended there, by index
        self.workers = limits.tokenize_workers
        self.workers_free = limits.tokenize_workers
        self.to_tokenize: deque[Sent] = deque()
        self.step: StepRecord | None = None  # the one that runs, or is not published yet
        self.committed: list[TokenEvent] = []  # what it brought
        # What callers left for the engine while a step ran, done before the next is planned. New requests need not
        # wait here: nothing looks at them before.
        self.inbox: deque[Callable[[float], list[TokenEvent]]] = deque()
        self.heap: list[tuple[float, int, int]] = [
            (start_s, USER, user) for user, start_s in enumerate(client.user_starts_s or ())
        ]
        heapq.heapify(self.heap)

    def run(self) -> None:
        heap, arrivals, held = self.heap, self.arrivals, self.held
        following = None if self.is_closed else next(arrivals, None)
        due_s = NEVER_S if following is None else following[1].time_s
        while True:
            if heap and heap[0][0] < due_s:
                now, kind, index = heapq.heappop(heap)
                self._handle(kind, index, now)
            elif following is not None:
                now = due_s
                held.append(following)
                self.arrived += 1
                following = next(arrivals, None)
                due_s = NEVER_S if following is None else following[1].time_s
                if due_s < now:
                    raise InvariantError("arrivals are not in the order of their times")
                self._send(now)
            else:
                return
            if self.step is None and due_s != now and not (heap and heap[0][0] == now):
                self._start_step(now)

    def _handle(self, kind: int, index: int, now: float) -> None:
        if kind == STEP_END:
            self._end_step(now)
        elif kind == PUBLISHED:
            self._publish(now)
        elif kind == RETURNED:
            sent, self.submitting = self.submitting, None
            assert sent is not None
            self._returned(sent, now)
        elif kind == TOKENIZED:
            self.workers_free += 1
            sent = self.open.get(index)
            if sent is not None:
                self._tokenized(sent, now)
            self._tokenize(now)
        elif kind == DEADLINE:
            self._give_up(index, now)
        elif kind == RETRY:
            self.again.append(index)
        else:
            self.outbox.add_user(now)
        if self.held or self.is_closed or self.again:
            self._send(now)

    # ---- the client's side ----

    def _send(self, now: float) -> None:
        """Sends whatever may be sent now. A refused request ends at once, and so lets the next of a schedule go."""
        while self.submitting is None and (self.held or self.is_closed or self.again):
            due = self.outbox.take(now) if self.comebacks is None or not self.again else self._due_again()
            if due is None:
                return
            index, arrival, permitted_s = due
            attempt = 1 if self.comebacks is None else self.comebacks.next_try(due)
            request_id = index + (attempt - 1) * TRY_IDS
            due_s, prompt_tokens = arrival.time_s, arrival.prompt_tokens
            waiting = self.core.admission.not_started
            fate = self._reserve(request_id, arrival, now)
            if isinstance(fate, Request):
                returned_s = now + self.costs.submit_seconds(prompt_tokens)
            else:
                returned_s = now + self.costs.refuse_seconds
            sent = Sent(
                index, due_s, permitted_s, now, returned_s, prompt_tokens, waiting, fate, arrival.priority
            )
            if self.comebacks is not None:
                self.comebacks.add(sent)
            self.last_sent_s = now
            if returned_s > now:
                self.submitting = sent
                heapq.heappush(self.heap, (returned_s, RETURNED, index))
            else:
                self._returned(sent, now)

    def _returned(self, sent: Sent, now: float) -> None:
        """Submitting has come back to the sender. The user of a closed loop who is refused is gone for a while."""
        if isinstance(sent.fate, Request):
            self.open[sent.fate.request_id] = sent
            self._enter(sent, sent.fate, now)
            if self.comebacks is not None:
                self._set_deadline(sent, max(now, self.comebacks.give_up_s(sent)))
            elif self.client.timeout_s is not None:
                self._set_deadline(sent, max(now, sent.sent_s + self.client.timeout_s))
            return
        if self._is_last(sent, now):
            back_s = self.outbox.refused(now)
            if back_s is not None:
                heapq.heappush(self.heap, (back_s, USER, sent.index))
        self.on_try(sent)

    def _set_deadline(self, sent: Sent, at_s: float) -> None:
        if at_s == float("inf"):
            return
        heapq.heappush(self.heap, (at_s, DEADLINE, sent.request_id))
        if len(self.heap) > 2 * len(self.open) + STALE_SLACK:
            # Deadlines of what has ended long before them must not pile up.
            self.heap[:] = [event for event in self.heap if event[1] != DEADLINE or event[2] in self.open]
            heapq.heapify(self.heap)

    def _read(self, events: list[TokenEvent], now: float) -> None:
        """Takes what was published; whoever has ended gives its slot and its permit back."""
        for request_id, token_id, _, finish_reason, error in events:
            sent = self.open[request_id]
            if token_id is not None and sent.gave_up_s is None:
                sent.received_s.append(now)
            if finish_reason is None:
                continue
            del self.open[request_id]
            assert isinstance(sent.fate, Request)
            self.core.acknowledge(sent.fate, now)
            if sent.gave_up_s is None:
                sent.ended_s, sent.error = now, error
                if self._is_last(sent, now):
                    self.outbox.ended(now)
            self.on_try(sent)

    def _give_up(self, request_id: int, now: float) -> None:
        sent = self.open.get(request_id)
        if sent is not None:
            sent.gave_up_s = now
            if self._is_last(sent, now):
                self.outbox.ended(now)
            assert isinstance(sent.fate, Request)
            if sent.fate.finish_reason is not None:  # and nobody knew
                self.core.acknowledge(sent.fate, now)
            else:
                self._command(partial(self.core.abort, request_id), now)

    # ---- a client that comes back ----

    def _is_last(self, sent: Sent, now: float) -> bool:
        """A try has ended for the client; False: another follows, and it sees to that."""
        if self.comebacks is None:
            return True
        failure = sent.error if isinstance(sent.fate, Request) else sent.fate
        if failure is None and sent.gave_up_s is None:
            self.comebacks.served(sent)
            return True
        again_s = self.comebacks.again_s(sent, failure, now)
        if again_s is not None:
            heapq.heappush(self.heap, (again_s, RETRY, sent.index))
        return again_s is None

    def _due_again(self) -> tuple[int, Arrival, float] | None:
        assert self.comebacks is not None
        return self.comebacks.due(self.again.popleft())

    def _end_try(self, sent: Sent) -> None:
        assert self.comebacks is not None
        if (last := self.comebacks.end(sent)) is not None:
            self.on_request(last)

    # ---- the engine's side ----

    def _reserve(self, request_id: int, arrival: Arrival, now: float) -> Request | RoseinferError:
        """What SchedulerManager.submit does up to the inbox."""
        _, prompt_tokens, max_new_tokens, priority, ttft_deadline_s = arrival
        core, admission = self.core, self.core.admission
        is_text = not self.workers or self.costs.tokenize_seconds(prompt_tokens) > 0
        try:
            if admission.has_lanes and not is_text:
                core.check_fits(prompt_tokens, max_new_tokens)
            ticket = admission.reserve(now, prompt_tokens + max_new_tokens, is_text, prompt_tokens, priority)
        except (SchedulerManagerOverloadedError, InputError) as refusal:
            return refusal.with_traceback(None)  # which would keep this frame alive
        prompt_ids = None
        if not is_text:
            prompt_ids = range(prompt_tokens)
            try:
                core.check_fits(prompt_tokens, max_new_tokens)
            except InputError as error:
                admission.release(ticket, now)
                return error.with_traceback(None)
        params = self.params.get(max_new_tokens)
        if params is None:
            params = self.params[max_new_tokens] = SamplingParams(max_new_tokens, ignore_eos=True)
        deadline_s = None if ttft_deadline_s is None else now + ttft_deadline_s
        return Request(request_id, params, ticket, 0, prompt_ids, now, priority, deadline_s)

    def _enter(self, sent: Sent, request: Request, now: float) -> None:
        self.core.submit(request)
        if request.prompt_ids is not None:
            return
        if self.workers:
            self.to_tokenize.append(sent)
            self._tokenize(now)
        else:
            self._tokenized(sent, now)

    def _tokenize(self, now: float) -> None:
        """Gives free workers what waits for them, first come first served, but for what nobody wants any more."""
        while self.workers_free and self.to_tokenize:
            sent = self.to_tokenize.popleft()
            if sent.request_id in self.open:
                self.workers_free -= 1
                ready_s = now + self.costs.tokenize_seconds(sent.prompt_tokens)
                heapq.heappush(self.heap, (ready_s, TOKENIZED, sent.request_id))

    def _tokenized(self, sent: Sent, now: float) -> None:
        ids, core = range(sent.prompt_tokens), self.core
        # Stamped with the moment that it was ready, whenever the engine hears of it.
        self._command(lambda _: core.tokenized(sent.request_id, ids, now), now)

    def _command(self, command: Callable[[float], list[TokenEvent]], now: float) -> None:
        """Has the engine do this, as soon as no step runs; it is told the time then."""
        if self.step is None:
            self._read(command(now), now)
        else:
            self.inbox.append(command)

    def _start_step(self, now: float) -> None:
        plan = self.core.plan(now)
        if dropped := self.core.take_dropped():
            self._read(dropped, now)
            self._send(now)  # what waited for them to end
            if plan is None:
                self._start_step(now)  # ends: every turn drops somebody
        if plan is None:
            return
        end_s = now + self.costs.step_seconds(plan)
        published_s = end_s + self.costs.between_seconds(plan)
        token_ids = [TOKEN_ID if samples else None for _, _, _, samples in plan.spans]
        scheduler = self.core.scheduler
        waiting, running = len(scheduler.waiting), len(scheduler.running)
        kv_tokens, limit = scheduler.kv_cache.used_tokens, self.core.admission.moving_limit
        result = new_result((token_ids, now, end_s))
        self.step = new_record((plan, result, now, published_s, waiting, running, kv_tokens, limit))
        heapq.heappush(self.heap, (end_s, STEP_END, -1))

    def _end_step(self, now: float) -> None:
        step = self.step
        assert step is not None
        self.committed = self.core.commit(step.plan, step.result, now)
        if step.published_s > now:
            heapq.heappush(self.heap, (step.published_s, PUBLISHED, -1))
        else:
            self._publish(now)

    def _publish(self, now: float) -> None:
        step, self.step = self.step, None
        assert step is not None
        self._read(self.committed, now)
        while self.inbox:
            self._read(self.inbox.popleft()(now), now)
        self.on_step(step)
