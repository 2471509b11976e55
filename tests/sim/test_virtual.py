from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.errors import PromptTooLongError, RoseinferError, SchedulerManagerOverloadedError
from roseinfer.executor import StepPlan
from roseinfer.manager import SchedulerManager
from roseinfer.request import Request, SamplingParams
from roseinfer.sim.virtual import Arrival, SimLimits, SimRun, simulate
from roseinfer.stream import RequestStream
from roseinfer.tokenizer_pool import TokenizerPool
from tests.scripted import FakeClock, ScriptedEngine, spans_of

StepSeconds = Callable[[StepPlan], float]


def one_second(plan: StepPlan) -> float:
    return 1.0


def a_second_a_token(plan: StepPlan) -> float:
    return float(sum(span.n_tokens for span in plan.spans))


def fates(run: SimRun) -> list[Request | RoseinferError]:
    """What became of every request, all of which were sent."""
    return [sent.fate for sent in run.sent if sent is not None]


def served(run: SimRun) -> list[Request]:
    return [fate for fate in fates(run) if isinstance(fate, Request)]


def step_spans(run: SimRun) -> list[list[tuple[int, int, int]]]:
    return [spans_of(step.plan) for step in run.steps]


def burst(size: int, prompt_tokens: int = 4, max_new_tokens: int = 1) -> list[Arrival]:
    return [Arrival(0.0, prompt_tokens, max_new_tokens) for _ in range(size)]


# ---- what the virtual clock says ----


def test_requests_wait_for_those_before_them() -> None:
    run = simulate(burst(3, max_new_tokens=2), SimLimits(max_batch_size=1), one_second)
    assert [r.first_scheduled_s for r in served(run)] == [0.0, 2.0, 4.0]
    assert [r.token_times_s for r in served(run)] == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert [r.ticket.released_s for r in served(run)] == [2.0, 4.0, 6.0]


def test_a_step_lasts_as_long_as_its_plan_says_and_later_arrivals_wait_for_its_end() -> None:
    arrivals = [Arrival(0.0, 10, 1), Arrival(4.0, 5, 1)]
    run = simulate(arrivals, SimLimits(), a_second_a_token)
    assert [r.first_token_s for r in served(run)] == [10.0, 15.0]


def test_an_idle_server_sleeps_until_the_next_arrival() -> None:
    run = simulate([Arrival(5.0, 4, 1), Arrival(100.0, 4, 1)], SimLimits(), one_second)
    assert [r.first_scheduled_s for r in served(run)] == [5.0, 100.0]


def test_tokenising_delays_its_own_request_alone_and_keeps_its_place() -> None:
    arrivals = [
        Arrival(0.0, 4, 1, tokenize_s=1.5),
        Arrival(0.0, 4, 1),
        Arrival(0.0, 4, 1),
        Arrival(0.0, 4, 1),
    ]
    run = simulate(arrivals, SimLimits(max_batch_size=1), one_second)
    assert step_spans(run) == [[(1, 0, 4)], [(2, 0, 4)], [(0, 0, 4)], [(3, 0, 4)]]
    assert [r.tokenized_s for r in served(run)] == [1.5, None, None, None]


@pytest.mark.parametrize("limit", [1, 16, 64, 256, None])
@pytest.mark.parametrize("size", [1, 16, 17, 64, 200])
def test_a_burst_of_b_at_limit_m_has_b_minus_m_refused(size: int, limit: int | None) -> None:
    run = simulate(burst(size), SimLimits(max_inflight_requests=limit), one_second)
    refused = [fate for fate in fates(run) if isinstance(fate, SchedulerManagerOverloadedError)]
    assert len(refused) == (0 if limit is None else max(0, size - limit))
    assert len(served(run)) == size - len(refused)
    assert all(isinstance(fate, Request) for fate in fates(run)[: len(served(run))])  # the first get in
    assert run.admission.counts().peak_inflight == size - len(refused)


def test_an_arrival_at_the_moment_that_a_slot_comes_free_is_refused() -> None:
    """The order of events at equal times is part of the answer."""
    run = simulate([Arrival(0.0, 4, 1), Arrival(1.0, 4, 1)], SimLimits(max_inflight_requests=1), one_second)
    assert isinstance(fates(run)[1], SchedulerManagerOverloadedError)
    later = [Arrival(0.0, 4, 1), Arrival(1.0 + 1e-9, 4, 1)]
    assert len(served(simulate(later, SimLimits(max_inflight_requests=1), one_second))) == 2


def test_a_limit_bounds_the_wait_and_changes_no_throughput_of_those_who_get_in() -> None:
    """What the project is about, in the small: 256 at once, one at a time, a second each."""
    free = served(simulate(burst(256), SimLimits(max_batch_size=1), one_second))
    bound = served(simulate(burst(256), SimLimits(max_batch_size=1, max_inflight_requests=64), one_second))
    assert max(r.first_token_s or 0.0 for r in free) == 256.0
    assert max(r.first_token_s or 0.0 for r in bound) == 64.0


def test_an_arrival_that_can_never_be_served_fails_and_gives_its_slot_back() -> None:  # case A15
    arrivals = [Arrival(0.0, 100, 100), Arrival(0.0, 4, 1)]
    run = simulate(arrivals, SimLimits(max_model_len=128, max_inflight_requests=1), one_second)
    assert isinstance(fates(run)[0], PromptTooLongError)
    assert [r.request_id for r in served(run)] == [1]


def test_the_answer_does_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:  # case C15
    """A loaded machine and an idle one agree, since no clock is read and nothing sleeps."""
    rng = random.Random(1)
    arrivals = [
        Arrival(rng.random() * 50, rng.randint(1, 90), rng.randint(1, 9), rng.random()) for _ in range(200)
    ]
    limits = SimLimits(max_inflight_requests=20, max_num_batched_tokens=64, kv_cache_tokens=512)

    def slow(plan: StepPlan) -> float:
        sum(range(20_000))
        return a_second_a_token(plan)

    idle = simulate(arrivals, limits, a_second_a_token)
    with monkeypatch.context() as patch:
        for name in (
            "time",
            "monotonic",
            "perf_counter",
            "process_time",
            "sleep",
            "time_ns",
            "perf_counter_ns",
        ):
            patch.setattr(time, name, lambda *args: 1 / 0)
        loaded = simulate(arrivals, limits, slow)
    assert account_of_run(loaded) == account_of_run(idle)


# ---- the same through a manager that is driven by hand ----


class Account(NamedTuple):
    """All that a scenario leaves: a row a request, the plans, and admission's counters."""

    requests: list[object]
    step_spans: list[list[tuple[int, int, int]]]
    counts: object


def row_of(outcome: Request | RoseinferError) -> object:
    if isinstance(outcome, SchedulerManagerOverloadedError):
        return outcome.limit, outcome.inflight, outcome.reason, outcome.retry_after_s
    assert isinstance(outcome, Request)
    r = outcome
    return (
        *(r.reserved_s, r.tokenized_s, r.first_scheduled_s, r.first_token_s, r.last_token_s, r.finished_s),
        *(r.ticket.released_s, r.ticket.inflight_before, r.finish_reason, tuple(r.token_times_s)),
    )


def account_of_run(run: SimRun) -> Account:
    return Account([row_of(fate) for fate in fates(run)], step_spans(run), run.admission.counts())


class ScriptedPool(TokenizerPool):
    """Workers whose answers come when the test says so."""

    def __init__(self) -> None:
        super().__init__(0, lambda: pytest.fail("no worker here"))
        self.jobs: list[tuple[str, Callable[[list[int] | BaseException], None]]] = []

    def encode(
        self, text: str, wanted: Callable[[], bool], done: Callable[[list[int] | BaseException], None]
    ) -> None:
        self.jobs.append((text, done))


class Replay:
    """Plays arrivals against a SchedulerManager, as the simulator plays them against the core."""

    def __init__(self, arrivals: Sequence[Arrival], limits: SimLimits, step_seconds: StepSeconds) -> None:
        self.arrivals = arrivals
        self.step_seconds = step_seconds
        self.clock = FakeClock()
        self.engine = ScriptedEngine(self.compute)
        self.engine.max_model_len = limits.max_model_len
        self.manager = SchedulerManager(
            self.engine,
            max_batch_size=limits.max_batch_size,
            max_active_requests=limits.max_active_requests,
            max_inflight_requests=limits.max_inflight_requests,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kv_cache_tokens=limits.kv_cache_tokens,
            clock=self.clock,
            start=False,
        )
        self.pool = self.manager._pool = ScriptedPool()
        self.mailbox = self.manager.new_mailbox()
        self.outcomes: dict[int, RequestStream | SchedulerManagerOverloadedError] = {}
        # (time, 0 arrives or 1 is tokenised, arrival): the simulator's order at equal times
        self.heap = [(arrival.time_s, 0, index) for index, arrival in enumerate(arrivals)]
        heapq.heapify(self.heap)
        self.answers: dict[int, Callable[[], None]] = {}

    def run(self) -> Account:
        while self.heap:
            self.clock.now = self.heap[0][0]
            self.play_until(self.clock.now)
            while self.manager.step():
                self.manager._core.check()
                self.read()
        self.manager._core.check()
        index_of = {o.request_id: i for i, o in self.outcomes.items() if isinstance(o, RequestStream)}
        plans = [[(index_of[id_], start, n) for id_, start, n in plan] for plan in self.engine.plans]
        outcomes = [self.outcomes[index] for index in range(len(self.arrivals))]
        rows = [row_of(o._request if isinstance(o, RequestStream) else o) for o in outcomes]
        return Account(rows, plans, self.manager.counts())

    def compute(self, plan: StepPlan) -> None:
        """A step: the world goes on while it lasts."""
        end_s = self.clock.now + self.step_seconds(plan)
        self.play_until(end_s)
        self.clock.now = end_s

    def play_until(self, end_s: float) -> None:
        while self.heap and self.heap[0][0] <= end_s:
            self.clock.now, kind, index = heapq.heappop(self.heap)
            if kind == 0:
                self.arrive(index)
            else:
                self.answers.pop(index)()

    def arrive(self, index: int) -> None:
        arrival = self.arrivals[index]
        is_text = arrival.tokenize_s > 0
        prompt = "x" * arrival.prompt_tokens if is_text else [1] * arrival.prompt_tokens
        params = SamplingParams(arrival.max_new_tokens, ignore_eos=True)
        try:
            self.outcomes[index] = self.manager.submit(prompt, params, mailbox=self.mailbox)
        except SchedulerManagerOverloadedError as refusal:
            self.outcomes[index] = refusal
            return
        if is_text:
            text, done = self.pool.jobs.pop()
            self.answers[index] = lambda: done([ord(char) for char in text])
            heapq.heappush(self.heap, (arrival.time_s + arrival.tokenize_s, 1, index))

    def read(self) -> None:
        for event in self.mailbox.take(timeout_s=0.0):
            if event.finish_reason is not None:
                self.manager.acknowledge(event.request_id)


def assert_same(arrivals: Sequence[Arrival], limits: SimLimits, step_seconds: StepSeconds) -> SimRun:
    run = simulate(arrivals, limits, step_seconds)
    simulated, replayed = account_of_run(run), Replay(arrivals, limits, step_seconds).run()
    assert replayed.requests == simulated.requests
    assert replayed.step_spans == simulated.step_spans
    assert replayed.counts == simulated.counts
    return run


def test_a_burst_at_a_limit_is_the_same_in_both_worlds() -> None:
    run = assert_same(burst(256, 259), SimLimits(max_inflight_requests=64), a_second_a_token)
    assert len(served(run)) == 64


def test_arrivals_during_steps_are_the_same_in_both_worlds() -> None:
    arrivals = [Arrival(0.3 * i, 1 + 7 * i % 40, 1 + i % 5) for i in range(60)]
    run = assert_same(arrivals, SimLimits(max_inflight_requests=12, max_batch_size=3), one_second)
    assert 12 < len(served(run)) < 60  # slots come free and are taken again


def test_tokenising_is_the_same_in_both_worlds() -> None:
    arrivals = [Arrival(0.5 * i, 5, 2, tokenize_s=(i % 4) * 1.25) for i in range(30)]
    run = assert_same(arrivals, SimLimits(max_batch_size=2), one_second)
    assert any(r.tokenized_s is not None for r in served(run))


def test_a_short_kv_cache_is_the_same_in_both_worlds() -> None:
    arrivals = [Arrival(0.5 * i, 20 + 9 * (i % 5), 4) for i in range(20)]
    run = assert_same(arrivals, SimLimits(max_batch_size=8, kv_cache_tokens=128), one_second)
    assert max(len(spans) for spans in step_spans(run)) < 8  # it bound


def test_chunked_prefill_is_the_same_in_both_worlds() -> None:
    limits = SimLimits(max_batch_size=4, max_num_batched_tokens=16)
    run = assert_same([Arrival(float(i), 50, 4) for i in range(8)], limits, one_second)
    assert any(start > 0 and n > 1 for spans in step_spans(run) for _, start, n in spans)


def test_steps_that_take_no_time_are_the_same_in_both_worlds() -> None:
    arrivals = [Arrival(float(i // 3), 4, 3) for i in range(9)]
    assert_same(arrivals, SimLimits(max_inflight_requests=2, max_batch_size=1), lambda plan: 0.0)


# Halves of a second, so that events often fall on the same moment.
halves = st.integers(0, 40).map(lambda n: n / 2)
scenarios = st.lists(
    st.builds(
        Arrival,
        time_s=halves,
        prompt_tokens=st.integers(1, 60),
        max_new_tokens=st.integers(1, 6),
        tokenize_s=st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.5]),
    ),
    max_size=30,
)
sizes = st.builds(
    SimLimits,
    max_inflight_requests=st.sampled_from([None, 1, 3, 8]),
    max_batch_size=st.integers(1, 4),
    max_active_requests=st.sampled_from([None, 1, 2]),
    max_num_batched_tokens=st.sampled_from([5, 16, 64]),
    kv_cache_tokens=st.sampled_from([80, 160, 4096]),
    max_model_len=st.just(80),
)
durations = st.sampled_from([one_second, lambda plan: 0.5 * len(plan.spans), a_second_a_token])


@given(scenarios, sizes, durations)
def test_any_scenario_is_the_same_in_both_worlds(
    arrivals: list[Arrival], limits: SimLimits, step_seconds: StepSeconds
) -> None:
    run = assert_same(arrivals, limits, step_seconds)
    counts = run.admission.counts()
    held = sum((r.ticket.released_s or 0.0) - r.reserved_s for r in served(run))
    assert counts.inflight == 0
    assert counts.inflight_integral_s == pytest.approx(held)
