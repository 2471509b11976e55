"""What a request holds from its reservation on: one slot, and tokens of the budget."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from roseinfer.backlog import Work


class TicketState(Enum):
    RESERVED = "reserved"  # may still be tokenising or waiting
    STARTED = "started"  # in a step: from here on it cannot be evicted
    RELEASED = "released"


RESERVED: Final = TicketState.RESERVED
STARTED: Final = TicketState.STARTED
RELEASED: Final = TicketState.RELEASED
"""Looked up once: on Python 3.11 every look-up of a member takes as long as a call."""


class Ticket:
    """One reserved slot. Only Admission changes it."""

    __slots__ = (
        *("cost_tokens", "epoch", "held_tokens", "inflight_before", "is_bound", "is_evicted", "is_read"),
        *("predicted_ttft_s", "priority", "prompt_tokens", "released_s", "request_id", "reserved_s"),
        *("state", "work"),
    )

    def __init__(
        self,
        reserved_s: float,
        cost_tokens: int,
        held_tokens: int,
        inflight_before: int,
        prompt_tokens: int = 0,
        priority: int = 0,
        is_bound: bool = False,
    ) -> None:
        self.reserved_s = reserved_s
        self.cost_tokens = cost_tokens  # left to compute; an upper bound until `adjust` sets the true count
        self.held_tokens = held_tokens  # of the budget, until its release
        self.inflight_before = inflight_before  # what the request met
        self.released_s: float | None = None
        self.state: TicketState = RESERVED
        self.prompt_tokens = prompt_tokens
        self.is_bound = is_bound  # it counts the bytes of a text that is not tokenised yet
        self.priority = priority
        self.request_id: int | None = None  # once the core has it
        self.is_evicted = False  # its slot went to a higher class
        self.is_read = False  # its reader has the end
        self.work: Work | None = None  # what it costs by the forecast
        self.predicted_ttft_s: float | None = None  # from its reservation on
        self.epoch = 0  # of the adaptive limit that let it in

    @property
    def is_waiting(self) -> bool:
        return self.state is RESERVED

    @property
    def is_over(self) -> bool:
        """Its slot is free, and nobody still has to read its end: an evicted one lost its slot before."""
        return self.state is RELEASED and (self.is_read or not self.is_evicted)
