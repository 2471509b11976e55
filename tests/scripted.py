"""An engine without a model, and a core with numbers for a clock: tests of order and concurrency in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from roseinfer.admission_spec import admission_of
from roseinfer.core import Core
from roseinfer.executor import Clock, Span, StepPlan, StepResult
from roseinfer.kv_cache import KVCache, blocks_for
from roseinfer.policies import policies_of
from roseinfer.request import Request, SamplingParams, TokenEvent
from roseinfer.scheduler import SchedulerLimits
from roseinfer.sim.cost_model import CostModel
from roseinfer.ticket import Ticket, TicketState

EOS = 0
"""The scripted engines' end of sequence, chr(0); it has no text."""


class FakeClock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedTokenizer:
    """A token is a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def new_decoder(self) -> ScriptedDecoder:
        return ScriptedDecoder()


class ScriptedDecoder:
    def step(self, token_id: int) -> str:
        return "" if token_id == EOS else chr(token_id)

    def finish(self) -> str:
        return ""


class ScriptedEngine:
    """`compute(plan)` is the step: it may pass time, wait for something, or raise.

    The n-th output token of a request is `script[n % len(script)]`, by default the letters of "abc...".
    """

    max_model_len = 4096
    vocab_size = 0x110000
    eos_token_ids = frozenset({EOS})
    paged_attn = True
    launches_async = False

    def __init__(
        self,
        compute: Callable[[StepPlan], None] = lambda plan: None,
        script: str = "abcdefghijklmnopqrstuvwxyz",
    ) -> None:
        self.compute = compute
        self.script = script
        self.plans: list[list[tuple[int, int, int]]] = []  # (request_id, start, n_tokens) of each step
        self.clock: Clock = FakeClock()
        self.make_tokenizer: Callable[[], ScriptedTokenizer] = ScriptedTokenizer

    def default_num_batched_tokens(self, max_batch_size: int) -> int:
        return max_batch_size + 256

    def default_kv_cache_tokens(self, max_batch_size: int) -> int:
        return 1 << 16

    def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> ScriptedEngine:
        self.clock = clock
        return self

    def launch(self, plan: StepPlan) -> ScriptedHandle:
        return ScriptedHandle(self, plan)


class ScriptedHandle:
    def __init__(self, engine: ScriptedEngine, plan: StepPlan) -> None:
        self.engine = engine
        self.plan = plan

    def wait(self) -> StepResult:
        engine, start = self.engine, self.engine.clock()
        engine.plans.append(spans_of(self.plan))
        engine.compute(self.plan)
        ids: list[int | None] = [
            ord(engine.script[len(span.request.output_ids) % len(engine.script)]) if span.samples else None
            for span in self.plan.spans
        ]
        return StepResult(ids, start, engine.clock())


class StepGate:
    """A step that lasts until it is opened: `ScriptedEngine(compute=gate)`."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.entered.set()
        self.opened.wait()


class CoreDriver:
    """A core on a clock of whole numbers, checked after everything that is done to it."""

    def __init__(
        self,
        *,
        limit: int | None = None,
        batch: int = 4,
        active: int | None = None,
        budget: int = 64,
        kv_tokens: int = 1 << 14,
        max_model_len: int = 4096,
        unread_timeout_s: float = 60.0,
        prefix_cache: bool = False,
        shares_blocks: bool = True,
        policy: str | None = None,
        scheduling: str = "fcfs",
        cost_model: CostModel | None = None,
    ) -> None:
        self.now = 0.0
        limits = SchedulerLimits(batch, active, budget)
        kv_cache = KVCache(blocks_for(kv_tokens), prefix_cache=prefix_cache, shares_blocks=shares_blocks)
        admission, queue_policy = policies_of(
            admission_of(limit, policy),
            scheduling,
            limits,
            cost_model,
            num_kv_blocks=kv_cache.num_blocks,
        )
        self.core = Core(
            limits=limits,
            kv_cache=kv_cache,
            admission=admission,
            policy=queue_policy,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            unread_timeout_s=unread_timeout_s,
        )
        self.requests: list[Request] = []
        self.events: list[TokenEvent] = []

    def add(
        self,
        prompt: int | Sequence[int] = 4,
        max_new_tokens: int = 4,
        *,
        text: bool = False,
        ignore_eos: bool = False,
        priority: int = 0,
        deadline_s: float | None = None,
        seed: int = 0,
        **sampling: Any,
    ) -> Request:
        """Reserves and submits token ids, or so many of them; a text is not tokenised yet."""
        prompt_ids = range(prompt) if isinstance(prompt, int) else prompt
        params = SamplingParams(max_new_tokens, ignore_eos=ignore_eos, **sampling)
        ticket = self.core.admission.reserve(
            self.now,
            len(prompt_ids) + max_new_tokens,
            prompt_tokens=len(prompt_ids),
            is_bound=text,
            priority=priority,
        )
        ids = None if text else prompt_ids
        request = Request(len(self.requests), params, ticket, seed, ids, self.now, priority, deadline_s)
        self.requests.append(request)
        self.took(self.core.submit(request))
        return request

    def tokenized(self, request: Request, prompt_tokens: int) -> None:
        self.took(self.core.tokenized(request.request_id, range(prompt_tokens), self.now))

    def abort(self, request: Request) -> None:
        self.took(self.core.abort(request.request_id, self.now))

    def plan(self) -> StepPlan | None:
        plan = self.core.plan(self.now)
        self.took(self.core.take_dropped())
        return plan

    def commit(self, plan: StepPlan, token: Callable[[Span], int] = lambda span: 1) -> list[TokenEvent]:
        """The step ends a second after now."""
        ids = [token(span) if span.samples else None for span in plan.spans]
        self.now += 1
        return self.took(self.core.commit(plan, StepResult(ids, self.now - 1, self.now), self.now))

    def step(self, token: Callable[[Span], int] = lambda span: 1) -> list[tuple[int, int, int]]:
        """Plans, computes and commits; the spans, [] when there was nothing to do."""
        plan = self.plan()
        if plan is None:
            return []
        self.commit(plan, token)
        return spans_of(plan)

    def steps(self) -> list[list[tuple[int, int, int]]]:
        """Steps until there is nothing to do."""
        return list(iter(self.step, []))

    def took(self, events: Sequence[TokenEvent]) -> list[TokenEvent]:
        self.core.check()
        unread = [r for r in self.core._unread if r.ticket.state is not TicketState.RELEASED]
        live = [r for r in self.core._live.values() if not r.ticket.is_evicted]
        assert self.core.admission.inflight == len(live) + len(unread)  # beside threads it may be more
        self.events.extend(events)
        return list(events)


def computed(ticket: Ticket, n_tokens: int) -> Span:
    """So many tokens of a request that holds this ticket."""
    return Span(Request(0, SamplingParams(), ticket, 0, range(n_tokens), 0.0), 0, n_tokens, True)


def spans_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(request_id, start, n_tokens) of each span."""
    return [(span.request.request_id, span.start, span.n_tokens) for span in plan.spans]
