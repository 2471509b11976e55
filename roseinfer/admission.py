"""Admission: who may enter, decided and counted in one step, in the caller's thread.

A slot is reserved before a request id exists and before anything is tokenised, and is given back exactly
once, however its request ends. In flight = tokenising + waiting + running + ended but unread.

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

from roseinfer.errors import InputError, InvariantError, SchedulerManagerOverloadedError

DRAIN_WINDOW: Final = 32
"""Releases that the drain rate is estimated from."""


class TicketState(Enum):
    RESERVED = "reserved"  # may still be tokenising or waiting
    STARTED = "started"  # in a step: from here on it cannot be evicted
    RELEASED = "released"


class Ticket:
    """One reserved slot. Only Admission changes it."""

    __slots__ = ("cost_tokens", "inflight_before", "released_s", "reserved_s", "state")

    def __init__(self, reserved_s: float, cost_tokens: int, inflight_before: int) -> None:
        self.reserved_s = reserved_s
        self.cost_tokens = cost_tokens  # an upper bound until `adjust` sets the true count
        self.inflight_before = inflight_before  # what the request met
        self.released_s: float | None = None
        self.state = TicketState.RESERVED


class AdmissionCounts(NamedTuple):
    """Admission's own account. `inflight_integral_s` is the integral of in-flight over time, in request seconds."""

    inflight: int
    peak_inflight: int
    reserved: int
    refused: int
    released: int
    inflight_integral_s: float
    backlog_tokens: int


class Admission:
    """A bound on requests in flight. `limit=None` means no bound; 0 and below are an InputError (ValueError)."""

    def __init__(self, limit: int | None) -> None:
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise InputError("max_inflight_requests", limit, "must be None (no limit) or a whole number >= 1")
        self.limit = limit
        self._lock = threading.RLock()
        self._inflight = 0
        self._not_started = 0
        self._peak = 0
        self._reserved = 0
        self._refused = 0
        self._released = 0
        self._backlog_tokens = 0
        self._integral_s = 0.0
        self._last_change_s: float | None = None
        self._busy_s = 0.0  # a clock that stands still while nobody holds a slot
        self._releases_busy_s: deque[float] = deque(maxlen=DRAIN_WINDOW)

    def reserve(self, now: float, cost_tokens: int) -> Ticket:
        """Takes a slot, or raises SchedulerManagerOverloadedError without having touched anything."""
        with self._lock:
            inflight = self._inflight
            if self.limit is not None and inflight >= self.limit:
                self._refused += 1
                raise SchedulerManagerOverloadedError(
                    limit=self.limit,
                    inflight=inflight,
                    reason="inflight",
                    retry_after_s=self._slot_gap_s(now),
                )
            self._integrate(now)
            self._inflight += 1
            self._not_started += 1
            self._peak = max(self._peak, self._inflight)
            self._reserved += 1
            self._backlog_tokens += cost_tokens
            return Ticket(now, cost_tokens, inflight)

    def adjust(self, ticket: Ticket, cost_tokens: int) -> None:
        """Puts the true cost in place of the upper bound, once the prompt is tokenised."""
        with self._lock:
            if ticket.state is not TicketState.RELEASED:
                self._backlog_tokens += cost_tokens - ticket.cost_tokens
                ticket.cost_tokens = cost_tokens

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
            self._releases_busy_s.append(self._busy_s)
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
        releases_s = self._releases_busy_s
        if len(releases_s) < 2 or self._last_change_s is None:
            return None
        mean_s = (releases_s[-1] - releases_s[0]) / (len(releases_s) - 1)
        since_s = self._busy_s + (now - self._last_change_s) - releases_s[-1]
        return max(mean_s, since_s) if mean_s > 0.0 else None  # slots that came free at once show no rate
