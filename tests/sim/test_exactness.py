"""The same workload through a SchedulerManager and through the simulator: equal to the last stamp, request by request.

On a clock that is driven by hand, and, in `test_real_time`, beside real threads.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.errors import RoseinferError, SchedulerManagerOverloadedError
from roseinfer.executor import StepPlan
from roseinfer.manager import SchedulerManager
from roseinfer.request import Request, SamplingParams
from roseinfer.sim.client import ClientRules
from roseinfer.sim.cost_model import CostModel, StepCost
from roseinfer.sim.virtual import (
    DEADLINE,
    PUBLISHED,
    STEP_END,
    TOKENIZED,
    Arrival,
    Sent,
    SimLimits,
    SimRun,
    simulate,
)
from roseinfer.stream import RequestStream
from roseinfer.tokenizer_pool import TokenizerPool
from tests.scripted import FakeClock, ScriptedEngine, spans_of
from tests.sim.scripted_costs import Scripted, a_second_a_token, burst, one_second, served

COST_MODEL = CostModel("a second a step", StepCost(1.0, 0.0, 0.0, 0.0, 0.0))

POLICIES = (
    *(
        "tokens:60",
        "tokens:200",
        "inflight:4+tokens:100",
        "queue-timeout:2s",
        "inflight:6+queue-timeout:500ms",
    ),
    *("codel:target=500ms:interval=2s", "codel:target=500ms:interval=1s:newest-first", "inflight:4+priority"),
    *("tokens:80+priority:age=2s", "inflight:3+tokens:100+priority:age=1s+queue-timeout:4s", "slo:ttft=3s"),
    *("aimd:init=3:slowdown=1.5", "gradient:init=3:slowdown=1.5+tokens:200", "aimd:init=2+priority:age=2s"),
)

ARRIVE = -1
"""Before all kinds of events at the same time, as in the simulator."""


class Account(NamedTuple):
    """All that a scenario leaves: a row a request, who was dropped for what, the plans, who ended in which order, and
    admission's counters.
    """

    requests: list[object]
    dropped: dict[int, object]
    step_spans: list[list[tuple[int, int, int]]]
    ended: list[int]
    counts: object


def row_of(outcome: Request | RoseinferError) -> object:
    if isinstance(outcome, SchedulerManagerOverloadedError):
        return tuple(vars(outcome).items())
    if isinstance(outcome, RoseinferError):
        return str(outcome)
    r = outcome
    return (
        *(r.reserved_s, r.tokenized_s, r.first_scheduled_s, r.first_token_s, r.last_token_s, r.finished_s),
        *(r.ticket.released_s, r.ticket.inflight_before, r.finish_reason, tuple(r.token_times_s)),
        *(r.ticket.predicted_ttft_s, r.ticket.epoch, r.ticket.is_evicted),
    )


def simulated(
    arrivals: Sequence[Arrival], limits: SimLimits, costs: Scripted, timeout_s: float | None
) -> tuple[SimRun, Account]:
    ended: list[Sent] = []
    steps: list[list[tuple[int, int, int]]] = []
    run = simulate(
        arrivals,
        limits,
        costs,
        ClientRules(timeout_s=timeout_s),
        on_request=ended.append,
        on_step=lambda step: steps.append(spans_of(step.plan)),
    )
    run.sent = sorted(ended, key=lambda sent: sent.index)
    entered = [sent.index for sent in ended if isinstance(sent.fate, Request)]
    rows = [row_of(sent.fate) for sent in run.sent]
    dropped = {sent.index: row_of(sent.error) for sent in ended if isinstance(sent.error, RoseinferError)}
    return run, Account(rows, dropped, steps, entered, run.admission.counts())


class ScriptedPool(TokenizerPool):
    """Workers that take as long as the script says."""

    def __init__(self, replay: Replay, workers: int) -> None:
        super().__init__(0, lambda: pytest.fail("no worker here"))
        self.replay = replay
        self.free = workers
        self.jobs: deque[tuple[str, Callable[[], bool], Callable[[list[int] | BaseException], None]]] = (
            deque()
        )

    def encode(
        self, text: str, wanted: Callable[[], bool], done: Callable[[list[int] | BaseException], None]
    ) -> None:
        self.jobs.append((text, wanted, done))
        self.work()

    def work(self) -> None:
        while self.free and self.jobs:
            text, wanted, done = self.jobs.popleft()
            if wanted():
                self.free -= 1
                self.replay.tokenises(text, done)


class Replay:
    """Plays arrivals against a SchedulerManager, as the simulator plays them against the core."""

    def __init__(
        self, arrivals: Sequence[Arrival], limits: SimLimits, costs: Scripted, timeout_s: float | None
    ) -> None:
        self.arrivals = arrivals
        self.costs = costs
        self.timeout_s = timeout_s
        self.clock = FakeClock()
        self.engine = ScriptedEngine(self.compute)
        self.engine.max_model_len = limits.max_model_len
        self.manager = SchedulerManager(
            self.engine,
            max_batch_size=limits.max_batch_size,
            max_active_requests=limits.max_active_requests,
            max_inflight_requests=limits.max_inflight_requests,
            admission=limits.admission,
            scheduling=limits.scheduling,
            cost_model=limits.cost_model,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kv_cache_tokens=limits.kv_cache_tokens,
            prefix_cache=False,
            clock=self.clock,
            start=False,
        )
        self.pool = self.manager._pool = ScriptedPool(self, limits.tokenize_workers)
        self.mailbox = self.manager.new_mailbox()
        self.outcomes: dict[int, RequestStream | RoseinferError] = {}
        self.ended: list[int] = []  # by request id
        self.dropped: dict[int, object] = {}  # likewise
        self.heap = [(arrival.time_s, ARRIVE, index) for index, arrival in enumerate(arrivals)]
        heapq.heapify(self.heap)
        self.answers: dict[int, Callable[[], None]] = {}
        self.keys = itertools.count()
        self.published_s = 0.0

    def run(self) -> Account:
        while self.heap:
            self.play_until(self.heap[0][0], DEADLINE)
            while self.manager.step():
                self.manager._core.check()
                self.play_until(self.published_s, PUBLISHED)
                self.clock.now = self.published_s
                self.read()
                self.play_until(self.clock.now, DEADLINE)
            self.read()
        self.manager._core.check()
        index_of = {o.request_id: i for i, o in self.outcomes.items() if isinstance(o, RequestStream)}
        plans = [[(index_of[id_], start, n) for id_, start, n in plan] for plan in self.engine.plans]
        outcomes = [self.outcomes[index] for index in range(len(self.arrivals))]
        rows = [row_of(o._request if isinstance(o, RequestStream) else o) for o in outcomes]
        dropped = {index_of[id_]: row for id_, row in self.dropped.items()}
        return Account(rows, dropped, plans, [index_of[id_] for id_ in self.ended], self.manager.counts())

    def compute(self, plan: StepPlan) -> None:
        """A step: what the inbox brought is read at once, and the world goes on while it lasts."""
        self.read()
        end_s = self.clock.now + self.costs.step_seconds(plan)
        self.published_s = end_s + self.costs.between_seconds(plan)
        self.play_until(end_s, STEP_END)
        self.clock.now = end_s

    def play_until(self, end_s: float, last_kind: int) -> None:
        """All that happens before `end_s`, and what happens then that comes no later than `last_kind`."""
        while self.heap and self.heap[0][:2] <= (end_s, last_kind):
            self.clock.now, kind, index = heapq.heappop(self.heap)
            if kind == ARRIVE:
                self.arrive(index)
            elif kind == TOKENIZED:
                self.pool.free += 1
                self.answers.pop(index)()
                self.pool.work()
            else:
                stream = self.outcomes[index]
                assert isinstance(stream, RequestStream)
                self.manager.abort(stream.request_id)

    def arrive(self, index: int) -> None:
        arrival = self.arrivals[index]
        is_text = self.costs.tokenize_seconds(arrival.prompt_tokens) > 0
        prompt = "x" * arrival.prompt_tokens if is_text else [1] * arrival.prompt_tokens
        params = SamplingParams(arrival.max_new_tokens, ignore_eos=True)
        try:
            self.outcomes[index] = self.manager.submit(
                prompt,
                params,
                mailbox=self.mailbox,
                priority=arrival.priority,
                ttft_deadline_s=arrival.ttft_deadline_s,
            )
        except RoseinferError as error:
            self.outcomes[index] = error
            return
        if self.timeout_s is not None:
            heapq.heappush(self.heap, (self.clock.now + self.timeout_s, DEADLINE, index))

    def tokenises(self, text: str, done: Callable[[list[int] | BaseException], None]) -> None:
        key = next(self.keys)
        self.answers[key] = lambda: done([ord(char) for char in text])
        ready_s = self.clock.now + self.costs.tokenize_seconds(len(text))
        heapq.heappush(self.heap, (ready_s, TOKENIZED, key))

    def read(self) -> None:
        for event in self.mailbox.take(timeout_s=0.0):
            if event.finish_reason is not None:
                self.ended.append(event.request_id)
                if isinstance(event.error, RoseinferError):
                    self.dropped[event.request_id] = row_of(event.error)
                self.manager.acknowledge(event.request_id)


def assert_same(
    arrivals: Sequence[Arrival],
    limits: SimLimits,
    costs: Scripted | Callable[[StepPlan], float],
    timeout_s: float | None = None,
) -> SimRun:
    if not isinstance(costs, Scripted):
        costs = Scripted(costs)
    run, expected = simulated(arrivals, limits, costs, timeout_s)
    replayed = Replay(arrivals, limits, costs, timeout_s).run()
    assert replayed.requests == expected.requests
    assert replayed.dropped == expected.dropped
    assert replayed.step_spans == expected.step_spans
    assert replayed.ended == expected.ended
    assert replayed.counts == expected.counts
    return run


def test_a_burst_at_a_limit_is_the_same_in_both_worlds() -> None:
    run = assert_same(burst(256, 259), SimLimits(max_inflight_requests=64), a_second_a_token)
    assert len(served(run)) == 64


def test_a_token_budget_is_the_same_in_both_worlds() -> None:  # case A7
    arrivals = [Arrival(0.3 * i, 1 + 7 * i % 40, 1 + i % 5) for i in range(80)]
    limits = SimLimits(admission="inflight:5+tokens:120", max_batch_size=3)
    run = assert_same(arrivals, limits, one_second)
    reasons = [
        sent.fate.reason for sent in run.sent if isinstance(sent.fate, SchedulerManagerOverloadedError)
    ]
    assert set(reasons) == {"inflight", "tokens"}
    assert run.admission.counts().peak_held_tokens <= 120


def test_what_never_fits_a_budget_is_the_same_in_both_worlds() -> None:
    """As token ids it is refused at once, as text when it is tokenised, in its turn when nothing else is in flight."""
    costs = Scripted(one_second, tokenize=lambda n: 0.5 if n > 30 and n % 2 else 0.0)
    arrivals = [Arrival(20.0 * i, n, 2) for i, n in enumerate((38, 39, 40, 41, 5))]
    run = assert_same(arrivals, SimLimits(admission="tokens:40"), costs)
    stages = [sent.fate.stage for sent in run.sent if isinstance(sent.fate, SchedulerManagerOverloadedError)]
    late = [sent.error for sent in run.sent if isinstance(sent.error, SchedulerManagerOverloadedError)]
    assert (stages, [error.stage for error in late]) == (["submit"], ["queued", "queued"])
    assert run.admission.counts().held_tokens == 0


def test_arrivals_during_steps_are_the_same_in_both_worlds() -> None:
    arrivals = [Arrival(0.3 * i, 1 + 7 * i % 40, 1 + i % 5) for i in range(60)]
    run = assert_same(arrivals, SimLimits(max_inflight_requests=12, max_batch_size=3), one_second)
    assert 12 < len(served(run)) < 60  # slots come free and are taken again


def test_tokenising_is_the_same_in_both_worlds() -> None:
    arrivals = [Arrival(0.5 * i, 1 + i % 4, 2) for i in range(30)]
    costs = Scripted(one_second, tokenize=lambda n: (n - 1) * 1.25)
    run = assert_same(arrivals, SimLimits(max_batch_size=2), costs)
    assert any(r.tokenized_s is not None for r in served(run))


def test_a_short_kv_cache_is_the_same_in_both_worlds() -> None:
    arrivals = [Arrival(0.5 * i, 20 + 9 * (i % 5), 4) for i in range(20)]
    run = assert_same(arrivals, SimLimits(max_batch_size=8, kv_cache_tokens=128), one_second)
    assert max(r.first_scheduled_s or 0.0 for r in served(run)) > 20.0  # it bound


def test_chunked_prefill_is_the_same_in_both_worlds() -> None:
    limits = SimLimits(max_batch_size=4, max_num_batched_tokens=16)
    assert_same([Arrival(float(i), 50, 4) for i in range(8)], limits, one_second)


def test_steps_that_take_no_time_are_the_same_in_both_worlds() -> None:
    arrivals = [Arrival(float(i // 3), 4, 3) for i in range(9)]
    assert_same(arrivals, SimLimits(max_inflight_requests=2, max_batch_size=1), lambda plan: 0.0)


def test_deadlines_are_the_same_in_both_worlds() -> None:  # case A18
    arrivals = [Arrival(0.25 * i, 4, 3) for i in range(20)]
    limits = SimLimits(max_batch_size=2, max_inflight_requests=6)
    run = assert_same(arrivals, limits, one_second, timeout_s=3.3)
    assert len(run.timed_out) > 3
    assert any(r.first_scheduled_s is None for r in served(run))
    assert any(r.token_times_s for r in served(run) if r.request_id in run.timed_out)


def _that_go_together(limits: SimLimits) -> SimLimits:
    admission = limits.admission or ""
    if "slo" in admission or "newest-first" in admission:
        limits = limits._replace(scheduling="fcfs")
    return limits._replace(max_inflight_requests=None) if admission else limits


def reasons(run: SimRun) -> set[str]:
    """Why requests were refused or dropped."""
    errors = [sent.fate if sent.error is None else sent.error for sent in run.sent]
    return {error.reason for error in errors if isinstance(error, SchedulerManagerOverloadedError)}


@pytest.mark.parametrize(
    ("admission", "reason"),
    [
        ("queue-timeout:3s", "queue-timeout"),  # case A12
        ("codel:target=500ms:interval=2s", "codel"),
        ("codel:target=500ms:interval=2s:newest-first", "codel"),
        ("inflight:6+priority:age=3s", "evicted"),  # case A27
        ("tokens:60+priority", "evicted"),
        ("slo:ttft=4s", "slo"),
        ("aimd:init=4:slowdown=1.5", "aimd"),
        ("gradient:init=4:slowdown=1.5", "gradient"),
    ],
)
def test_a_policy_is_the_same_in_both_worlds(admission: str, reason: str) -> None:
    arrivals = [Arrival(0.3 * i, 1 + 7 * i % 40, 1 + i % 3, priority=(2 * i) % 3) for i in range(80)]
    limits = SimLimits(max_batch_size=3, admission=admission, cost_model=COST_MODEL)
    assert reason in reasons(assert_same(arrivals, limits, one_second))


@pytest.mark.parametrize("scheduling", ["spf", "edf"])
def test_an_order_is_the_same_in_both_worlds(scheduling: str) -> None:
    arrivals = [
        Arrival(0.3 * i, 1 + 31 * i % 80, 2, ttft_deadline_s=(None, 2.0, 9.0)[i % 3]) for i in range(40)
    ]
    limits = SimLimits(max_batch_size=2, scheduling=scheduling)
    run = assert_same(arrivals, limits, one_second)
    started = sorted(
        (r for r in served(run) if r.first_scheduled_s is not None), key=lambda r: r.first_scheduled_s or 0.0
    )
    assert [r.request_id for r in started] != sorted(r.request_id for r in started)


def test_what_a_drop_lets_go_is_sent_at_the_same_moment() -> None:
    """A client with a cap sends its next request when one of its requests was dropped."""
    arrivals = [Arrival(0.0, 4, 9) for _ in range(6)]
    limits = SimLimits(max_batch_size=1, admission="queue-timeout:2s")
    run = simulate(arrivals, limits, one_second, ClientRules(max_concurrency=2))
    assert [sent.sent_s for sent in run.sent] == [0.0, 0.0, 3.0, 6.0, 9.0, 9.0]
    assert reasons(run) == {"queue-timeout"}


# Halves of a second, so that events often fall on the same moment.
halves = st.integers(0, 40).map(lambda n: n / 2)
scenarios = st.lists(
    st.builds(
        Arrival,
        time_s=halves,
        prompt_tokens=st.integers(1, 90),
        max_new_tokens=st.integers(1, 6),
        priority=st.integers(0, 2),
        ttft_deadline_s=st.sampled_from([None, None, None, 1.5, 6.0]),
    ),
    max_size=30,
).map(lambda arrivals: sorted(arrivals, key=lambda arrival: arrival.time_s))
sizes = st.builds(
    SimLimits,
    max_inflight_requests=st.sampled_from([None, 1, 3, 8]),
    max_batch_size=st.integers(1, 4),
    max_active_requests=st.sampled_from([None, 1, 2]),
    max_num_batched_tokens=st.sampled_from([5, 16, 64]),
    kv_cache_tokens=st.sampled_from([80, 160, 4096]),
    max_model_len=st.just(80),
    tokenize_workers=st.sampled_from([1, 2]),
    admission=st.sampled_from([None, None, *POLICIES]),
    cost_model=st.just(COST_MODEL),
    scheduling=st.sampled_from(["fcfs", "fcfs", "spf", "edf"]),
).map(_that_go_together)
all_costs = st.builds(
    Scripted,
    step=st.sampled_from([one_second, lambda plan: 0.5 * len(plan.spans), a_second_a_token]),
    between=st.sampled_from([lambda plan: 0.0, lambda plan: 0.5, lambda plan: 0.5 * len(plan.spans)]),
    tokenize=st.sampled_from([lambda n: 0.0, lambda n: (0.0, 0.0, 0.5, 1.0, 3.5)[n % 5]]),
)


@settings(max_examples=200)
@given(scenarios, sizes, all_costs, st.sampled_from([None, 0.5, 2.0, 5.5]))
def test_any_scenario_is_the_same_in_both_worlds(
    arrivals: list[Arrival], limits: SimLimits, costs: Scripted, timeout_s: float | None
) -> None:
    run = assert_same(arrivals, limits, costs, timeout_s)
    counts = run.admission.counts()
    held = sum((r.ticket.released_s or 0.0) - r.reserved_s for r in served(run))
    assert counts.inflight == 0
    assert counts.inflight_integral_s == pytest.approx(held)
