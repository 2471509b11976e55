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

No clock: `now` is an argument. Callers in several threads read their clocks before they queue for the lock,
so `now` may step back by microseconds between calls; the integral below tolerates that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple

from roseinfer.errors import TOKENS_NEVER_FIT, InputError, InvariantError, SchedulerManagerOverloadedError

DRAIN_WINDOW: Final = 32
"""Releases that the drain rate is estimated from."""


class TicketState(Enum):
    RESERVED = "reserved"  # may still be tokenising or waiting
    STARTED = "started"  # in a step: from here on it cannot be evicted
    RELEASED = "released"


class Ticket:
    """One reserved slot. Only Admission changes it."""

    __slots__ = ("cost_tokens", "held_tokens", "inflight_before", "released_s", "reserved_s", "state")

    def __init__(self, reserved_s: float, cost_tokens: int, held_tokens: int, inflight_before: int) -> None:
        self.reserved_s = reserved_s
        self.cost_tokens = cost_tokens  # left to compute; an upper bound until `adjust` sets the true count
        self.held_tokens = held_tokens  # of the budget, until its release
        self.inflight_before = inflight_before  # what the request met
        self.released_s: float | None = None
        self.state = TicketState.RESERVED


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
    """

    def __init__(self, limit: int | None, token_limit: int | None = None) -> None:
        for name, bound in (("max_inflight_requests", limit), ("admission tokens", token_limit)):
            if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 1):
                raise InputError(name, bound, "must be None (no limit) or a whole number >= 1")
        self.limit = limit
        self.token_limit = token_limit
        self._lock = threading.RLock()
        self._inflight = 0
        self._not_started = 0
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

    def reserve(self, now: float, cost_tokens: int, *, is_bound: bool = False) -> Ticket:
        """Takes a slot, or raises SchedulerManagerOverloadedError without having touched anything.

        `cost_tokens` is prompt + max_new_tokens; `is_bound`: no more than that, as of a text that is not tokenised.
        """
        with self._lock:
            inflight, held, budget = self._inflight, self._held_tokens, self.token_limit
            asked = cost_tokens
            if budget is not None and cost_tokens > budget:
                if not is_bound:
                    self._refused += 1
                    raise self._tokens_refusal(now, budget, held, cost_tokens, "submit")
                asked = budget
            if self.limit is not None and inflight >= self.limit:
                self._refused += 1
                raise SchedulerManagerOverloadedError(
                    limit=self.limit,
                    inflight=inflight,
                    reason="inflight",
                    retry_after_s=self._slot_gap_s(now),
                )
            if budget is not None and held + asked > budget:
                self._refused += 1
                raise self._tokens_refusal(now, budget, held, asked, "submit")
            self._integrate(now)
            self._inflight += 1
            self._not_started += 1
            self._peak = max(self._peak, self._inflight)
            self._reserved += 1
            self._backlog_tokens += cost_tokens
            self._held_tokens += asked
            self._peak_held_tokens = max(self._peak_held_tokens, self._held_tokens)
            return Ticket(now, cost_tokens, asked, inflight)

    def adjust(self, ticket: Ticket, cost_tokens: int, now: float) -> None:
        """Puts the true cost in place of the upper bound, once the prompt is tokenised.

        Raises SchedulerManagerOverloadedError, and changes nothing, where the true cost exceeds the token budget by
        itself, or what is left of it for a tokenizer that made more of a text than it has bytes. The slot is still
        held then.
        """
        with self._lock:
            if ticket.state is TicketState.RELEASED:
                return
            others = self._held_tokens - ticket.held_tokens
            if self.token_limit is not None and others + cost_tokens > self.token_limit:
                raise self._tokens_refusal(now, self.token_limit, others, cost_tokens, "queued")
            self._backlog_tokens += cost_tokens - ticket.cost_tokens
            ticket.cost_tokens = cost_tokens
            self._held_tokens += cost_tokens - ticket.held_tokens
            ticket.held_tokens = cost_tokens
            self._peak_held_tokens = max(self._peak_held_tokens, self._held_tokens)

    def start(self, ticket: Ticket) -> bool:
        """Marks the request as running. False when its slot is gone already, and it must not run."""
        with self._lock:
            if ticket.state is not TicketState.RESERVED:
                return False
            ticket.state = TicketState.STARTED
            self._not_started -= 1
            return True

    def progress(self, step: Iterable[tuple[Ticket, int]]) -> None:
        """Takes the tokens that a step computed for each ticket off the backlog."""
        started = TicketState.STARTED  # looking up a member of an enum takes long for a loop over tokens
        done_tokens = 0
        with self._lock:
            for ticket, n_tokens in step:
                if ticket.state is started:
                    done = min(n_tokens, ticket.cost_tokens)
                    ticket.cost_tokens -= done
                    done_tokens += done
            self._backlog_tokens -= done_tokens

    def release(self, ticket: Ticket, now: float) -> bool:
        """Gives the slot back. Harmless when called again: False, and nothing changes."""
        with self._lock:
            if ticket.state is TicketState.RELEASED:
                return False
            self._integrate(now)
            if self._inflight < 1:
                raise InvariantError("a slot was released that nobody held")
            self._not_started -= ticket.state is TicketState.RESERVED
            ticket.state = TicketState.RELEASED
            ticket.released_s = now
            self._inflight -= 1
            self._released += 1
            self._backlog_tokens -= ticket.cost_tokens
            self._held_tokens -= ticket.held_tokens
            self._freed_tokens += ticket.held_tokens
            self._releases.append((self._busy_s, self._freed_tokens))
            return True

    @property
    def inflight(self) -> int:
        return self._inflight

    @property
    def not_started(self) -> int:
        """Of those in flight, the ones that no step has worked on yet: tokenising or waiting."""
        return self._not_started

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
