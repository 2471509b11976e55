"""Admission: who may enter, decided and counted in one step, in the caller's thread.

A slot is reserved before a request id exists and before anything is tokenised, and is given back exactly
once, however its request ends. In flight = tokenising + waiting + running + ended but unread.

A slot holds tokens too: prompt + max_new_tokens, for as long as it is held, whole. What is left to compute shrinks with
every step, but a request keeps its KV cache, and its reader its answer, to the end: a budget that refilled with every
token would let in more than it bounds. Until a text is tokenised its slot holds an upper bound, at most the
whole budget: so a text that might fit gets in when nothing else is in flight, and whether it can never fit is judged
by its true count alone.

The lock is reentrant, and counters change in single statements: an abandoned stream that the garbage collector
closes gives its slot back from inside whatever its thread was doing, `reserve` included.

Beside the two bounds there may be policies that are asked here, in the same step: a bound that moves (`adaptive`), a
prediction of the first token (`forecast`), lanes by priority (`lanes`). What is evicted for a higher class loses its
slot at once, and the engine hears of it before it plans its next step.

No clock: `now` is an argument. Callers in several threads read their clocks before they queue for the lock,
so `now` may step back by microseconds between calls; the integral below tolerates that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from roseinfer.errors import (
    SLO_NEVER_MET,
    TOKENS_NEVER_FIT,
    InputError,
    InvariantError,
    SchedulerManagerOverloadedError,
)
from roseinfer.lanes import Lanes
from roseinfer.ticket import RELEASED, RESERVED, STARTED, Ticket

if TYPE_CHECKING:
    from roseinfer.adaptive import Aimd, Gradient
    from roseinfer.executor import Span, StepPlan, StepResult
    from roseinfer.forecast import Forecast
    from roseinfer.ttft_goal import TtftGoal

DRAIN_WINDOW: Final = 32
"""Releases that the drain rate is estimated from."""


class AdmissionCounts(NamedTuple):
    """Admission's own account. `inflight_integral_s` is the integral of in-flight over time, in request seconds.

    `backlog_tokens` are left to compute, `held_tokens` are in flight as a token budget counts them.
    """

    inflight: int
    peak_inflight: int
    reserved: int
    refused: int
    released: int
    inflight_integral_s: float
    backlog_tokens: int
    held_tokens: int
    peak_held_tokens: int


class Admission:
    """Bounds on requests in flight and on the tokens that they hold.

    A request is refused where current + its own would exceed a bound: exactly the limit fits. None means no bound; 0
    and below are an InputError (ValueError).

    adaptive: a bound on requests that moves, beside `limit`. It may fall below what is in flight.
    goal: refuses what it predicts to have its first token too late.
    forecast: what a prefill takes, for `adaptive` and deadlines; the goal's own where there is one.
    has_lanes: a request that finds no room evicts the newest waiting one of the lowest class below its own.
    """

    def __init__(
        self,
        limit: int | None,
        token_limit: int | None = None,
        *,
        adaptive: Aimd | Gradient | None = None,
        goal: TtftGoal | None = None,
        forecast: Forecast | None = None,
        has_lanes: bool = False,
    ) -> None:
        for name, bound in (("max_inflight_requests", limit), ("admission tokens", token_limit)):
            if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 1):
                raise InputError(name, bound, "must be None (no limit) or a whole number >= 1")
        self.limit = limit
        self.token_limit = token_limit
        self.adaptive = adaptive
        self.goal = goal
        self.forecast = forecast if goal is None else goal.forecast
        self.has_lanes = has_lanes
        self._lanes = Lanes() if has_lanes else None
        self._is_count_alone = token_limit is None and adaptive is None and goal is None and not has_lanes
        self._evicted: list[Ticket] = []  # of whom the core does not know it yet
        self.step_began_s: float | None = None  # the step that runs; told by the core
        self._lock = threading.RLock()
        self._inflight = 0
        self.not_started = 0
        """Of those in flight, the ones that no step has worked on yet: tokenising or waiting."""
        self._peak = 0
        self._reserved = 0
        self._refused = 0
        self._released = 0
        self._backlog_tokens = 0
        self._held_tokens = 0
        self._peak_held_tokens = 0
        self._freed_tokens = 0  # by all releases so far
        self._integral_s = 0.0
        self._last_change_s: float | None = None
        self._busy_s = 0.0  # a clock that stands still while nobody holds a slot
        self._releases: deque[tuple[float, int]] = deque(
            maxlen=DRAIN_WINDOW
        )  # _busy_s, and _freed_tokens then

    def reserve(
        self,
        now: float,
        cost_tokens: int,
        is_bound: bool = False,
        prompt_tokens: int = 0,
        priority: int = 0,
    ) -> Ticket:
        """Takes a slot, or raises SchedulerManagerOverloadedError without having touched anything.

        `cost_tokens` is prompt + max_new_tokens; `is_bound`: no more than that, as of a text that is not tokenised.
        `prompt_tokens` and `priority` (0 is the highest) matter to the policies that weigh them.
        """
        with self._lock:
            inflight, limit = self._inflight, self.limit
            if not self._is_count_alone:
                ticket = self._weighed(now, cost_tokens, prompt_tokens, priority, is_bound)
            elif limit is not None and inflight >= limit:
                raise self._slots_refusal(now, limit, inflight, "inflight")
            else:
                ticket = Ticket(now, cost_tokens, cost_tokens, inflight, prompt_tokens, priority, is_bound)
            self._integrate(now)
            self._inflight += 1
            self.not_started += 1
            self._peak = max(self._peak, self._inflight)
            self._reserved += 1
            self._backlog_tokens += cost_tokens
            self._held_tokens += ticket.held_tokens
            self._peak_held_tokens = max(self._peak_held_tokens, self._held_tokens)
            if self._lanes is not None:
                self._lanes.add(ticket)
            return ticket

    def _weighed(
        self, now: float, cost_tokens: int, prompt_tokens: int, priority: int, is_bound: bool
    ) -> Ticket:
        """A ticket that the budget and all policies let in, or their refusal. Whoever makes room for it is out."""
        inflight, held, budget = self._inflight, self._held_tokens, self.token_limit
        asked = cost_tokens
        if budget is not None and cost_tokens > budget:
            if not is_bound:
                self._refused += 1
                raise self._tokens_refusal(now, budget, held, cost_tokens, "submit")
            asked = budget
        limit, reason = self.limit, "inflight"
        adaptive = self.adaptive
        if adaptive is not None and (limit is None or adaptive.limit < limit):
            limit, reason = adaptive.limit, adaptive.name
        short_slots = limit is not None and inflight >= limit
        short_tokens = 0 if budget is None else held + asked - budget
        victims: list[Ticket] | None = []
        if short_slots or short_tokens > 0:
            lanes = self._lanes
            victims = None if lanes is None else lanes.victims(priority, short_slots, short_tokens)
        if victims is None:
            if limit is not None and short_slots:
                raise self._slots_refusal(now, limit, inflight, reason)
            assert budget is not None
            self._refused += 1
            raise self._tokens_refusal(now, budget, held, asked, "submit")
        ticket = Ticket(now, cost_tokens, asked, inflight, prompt_tokens, priority, is_bound)
        goal = self.goal
        if goal is not None:
            began_s = self.step_began_s
            late_s = goal.predict(ticket, None if began_s is None else now - began_s)
            # An idle engine takes what it can serve: else a margin or a correction of worse times, which only
            # served requests can bring back, would refuse for ever.
            is_hopeless = late_s > goal.goal_s and goal.is_hopeless(ticket)
            if is_hopeless or (late_s > goal.goal_s and not goal.is_idle):
                self._refused += 1
                raise SchedulerManagerOverloadedError(
                    limit=goal.goal_s,
                    inflight=inflight,
                    reason=SLO_NEVER_MET if is_hopeless else "slo",
                    retry_after_s=None if is_hopeless else late_s - goal.goal_s,
                    measured=late_s,
                )
            goal.enter(ticket)
        for victim in victims:
            self._evict(victim, now)
        if adaptive is not None:
            ticket.epoch = adaptive.epoch
        return ticket

    def adjust(self, ticket: Ticket, cost_tokens: int, now: float) -> None:
        """Puts the true cost in place of the upper bound, once the prompt is tokenised.

        Raises SchedulerManagerOverloadedError, and changes nothing, where the true cost exceeds the token budget by
        itself, or what is left of it for a tokenizer that made more of a text than it has bytes. The slot is still
        held then.
        """
        with self._lock:
            if ticket.state is RELEASED:
                return
            bound_tokens = ticket.cost_tokens
            others = self._held_tokens - ticket.held_tokens
            if self.token_limit is not None and others + cost_tokens > self.token_limit:
                raise self._tokens_refusal(now, self.token_limit, others, cost_tokens, "queued")
            self._backlog_tokens += cost_tokens - ticket.cost_tokens
            ticket.cost_tokens = cost_tokens
            self._held_tokens += cost_tokens - ticket.held_tokens
            if self._lanes is not None and ticket.state is RESERVED:
                self._lanes.resize(ticket, cost_tokens - ticket.held_tokens)
            ticket.held_tokens = cost_tokens
            self._peak_held_tokens = max(self._peak_held_tokens, self._held_tokens)
            bound_prompt_tokens = ticket.prompt_tokens
            ticket.prompt_tokens += cost_tokens - bound_tokens
            if self.goal is not None:
                self.goal.tokenized(ticket, bound_prompt_tokens)
            ticket.is_bound = False

    def start(self, ticket: Ticket, waited_s: float = 0.0, cached_tokens: int = 0) -> bool:
        """Marks the request as running, after it has waited for so long. False when its slot is gone already, and it
        must not run. Of its prompt `cached_tokens` need not be computed.
        """
        with self._lock:
            if ticket.state is not RESERVED:
                return False
            self._waits_no_longer(ticket)
            ticket.state = STARTED
            ticket.cost_tokens -= cached_tokens
            self._backlog_tokens -= cached_tokens
            forecast, adaptive = self.forecast, self.adaptive
            if forecast is not None:
                if ticket.work is not None:
                    forecast.start(ticket.work, cached_tokens)
                alone_s = forecast.prefill_s(ticket.prompt_tokens)
                if adaptive is not None and alone_s > 0.0:
                    adaptive.sample((waited_s + alone_s) / alone_s, ticket.epoch, self._inflight)
            return True

    def first_token(self, ticket: Ticket, now: float) -> None:
        """A request has its first token: a prediction is judged by it."""
        if self.goal is not None:
            with self._lock:
                self.goal.first_token(ticket, now)

    def ended(self, ticket: Ticket) -> None:
        """Nothing more is computed for a request, whoever still has to read its end, and it waits for nothing."""
        with self._lock:
            if ticket.state is RESERVED:
                self._waits_no_longer(ticket)
                ticket.state = STARTED
            if ticket.work is not None and self.forecast is not None:
                self.forecast.leave(ticket.work)
                ticket.work = None

    def take_evicted(self) -> list[Ticket]:
        """Those evicted since this was last asked. For the core, which ends their requests."""
        if not self._evicted:
            return []
        with self._lock:
            evicted, self._evicted = self._evicted, []
            return evicted

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """What a step took, for the forecast to learn how fast this machine is now."""
        forecast = self.forecast
        if forecast is not None:
            with self._lock:
                predicted_s = forecast.correction * forecast.step.seconds(plan)
                forecast.observe(predicted_s, result.exec_end_s - result.exec_start_s)

    def progress(self, spans: Iterable[Span]) -> None:
        """Takes the tokens that a step computed off the backlog."""
        done_tokens, forecast = 0, self.forecast
        with self._lock:
            for request, _, n_tokens, _ in spans:
                ticket = request.ticket
                if ticket.state is STARTED:
                    left = ticket.cost_tokens
                    done = min(left, n_tokens)
                    ticket.cost_tokens = left - done
                    done_tokens += done
                    if forecast is not None and ticket.work is not None:
                        forecast.advance(ticket.work, n_tokens)
            self._backlog_tokens -= done_tokens

    def release(self, ticket: Ticket, now: float) -> bool:
        """Gives the slot back. Harmless when called again: False, and nothing changes."""
        with self._lock:
            if ticket.state is RELEASED:
                return False
            self._integrate(now)
            if self._inflight < 1:
                raise InvariantError("a slot was released that nobody held")
            self._give_back(ticket, now)
            self._freed_tokens += ticket.held_tokens
            self._releases.append((self._busy_s, self._freed_tokens))
            return True

    @property
    def inflight(self) -> int:
        return self._inflight

    @property
    def moving_limit(self) -> int | None:
        """Where the adaptive limit stands, None without one."""
        return None if self.adaptive is None else self.adaptive.limit

    def counts(self) -> AdmissionCounts:
        with self._lock:
            return AdmissionCounts(
                self._inflight,
                self._peak,
                self._reserved,
                self._refused,
                self._released,
                self._integral_s,
                self._backlog_tokens,
                self._held_tokens,
                self._peak_held_tokens,
            )

    def dropped(
        self, ticket: Ticket, now: float, reason: str, limit: float, measured: float
    ) -> SchedulerManagerOverloadedError:
        """What a request gets that is dropped while it waits. Having waited too long speaks against a moving limit."""
        if self.adaptive is not None and reason != "evicted":
            with self._lock:
                self.adaptive.sample(float("inf"), ticket.epoch, self._inflight)
        return SchedulerManagerOverloadedError(
            limit=limit,
            inflight=self._inflight,
            reason=reason,
            retry_after_s=self._slot_gap_s(now),
            measured=measured,
            stage="queued",
        )

    def _waits_no_longer(self, ticket: Ticket) -> None:
        """Told before its state says so."""
        self.not_started -= 1
        if self._lanes is not None:
            self._lanes.leave(ticket)

    def _evict(self, victim: Ticket, now: float) -> None:
        """Its slot goes to another. No release of the kind that the drain rate counts: nothing was served."""
        if victim.state is not RESERVED:  # a collection in this very thread has closed its stream
            return
        victim.is_evicted = True
        self._integrate(now)
        self._give_back(victim, now)
        self._evicted.append(victim)

    def _give_back(self, ticket: Ticket, now: float) -> None:
        if ticket.state is RESERVED:
            self._waits_no_longer(ticket)
        ticket.state = RELEASED
        ticket.released_s = now
        self._inflight -= 1
        self._released += 1
        self._backlog_tokens -= ticket.cost_tokens
        self._held_tokens -= ticket.held_tokens
        if ticket.work is not None and self.forecast is not None:
            self.forecast.leave(ticket.work)
            ticket.work = None

    def _integrate(self, now: float) -> None:
        if self._last_change_s is None:
            self._last_change_s = now
        passed_s = now - self._last_change_s
        self._integral_s += self._inflight * passed_s
        if self._inflight:
            self._busy_s += passed_s
        self._last_change_s = now

    def _slot_gap_s(self, now: float) -> float | None:
        """What a refused caller has to expect until a slot comes free: the mean time between the last releases, or
        the time since the last one where that is longer. Idle time does not count.
        """
        if len(self._releases) < 2 or self._last_change_s is None:
            return None
        (first_s, _), (last_s, _) = self._releases[0], self._releases[-1]
        mean_s = (last_s - first_s) / (len(self._releases) - 1)
        since_s = self._busy_s + (now - self._last_change_s) - last_s
        return max(mean_s, since_s) if mean_s > 0.0 else None  # slots that came free at once show no rate

    def _slots_refusal(
        self, now: float, limit: int, inflight: int, reason: str
    ) -> SchedulerManagerOverloadedError:
        self._refused += 1
        gap_s = self._slot_gap_s(now)
        return SchedulerManagerOverloadedError(
            limit=limit,
            inflight=inflight,
            reason=reason,
            retry_after_s=None if gap_s is None else gap_s * (inflight - limit + 1),
        )

    def _tokens_refusal(
        self, now: float, limit: int, held: int, asked: int, stage: str
    ) -> SchedulerManagerOverloadedError:
        never = asked > limit
        return SchedulerManagerOverloadedError(
            limit=limit,
            inflight=self._inflight,
            reason=TOKENS_NEVER_FIT if never else "tokens",
            retry_after_s=None if never else self._tokens_wait_s(now, held + asked - limit),
            measured=held,
            asked=asked,
            stage=stage,
        )

    def _tokens_wait_s(self, now: float, missing_tokens: int) -> float | None:
        """Time until so many come free, at the rate at which the last releases freed them; no less than the time since
        the last release, which a slower drain makes longer than that. Idle time does not count.
        """
        if len(self._releases) < 2 or self._last_change_s is None:
            return None
        (first_s, freed_before), (last_s, freed) = self._releases[0], self._releases[-1]
        if last_s <= first_s or freed <= freed_before:
            return None
        since_s = self._busy_s + (now - self._last_change_s) - last_s
        return max(missing_tokens * (last_s - first_s) / (freed - freed_before), since_s)
