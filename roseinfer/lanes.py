"""Who waits in which class, for when a request of a higher one finds no room. No clock; its owner holds the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from roseinfer.ticket import Ticket

STALE_SLACK: Final = 64


class _Lane:
    """One class: who came in which order, and how many of them wait and hold how many tokens."""

    __slots__ = ("held_tokens", "tickets", "waiting")

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []  # those that wait no longer are skipped, and forgotten in time
        self.waiting = 0
        self.held_tokens = 0


class Lanes:
    """Tickets by class; 0 is the highest. Classes in which nobody waits cost nothing."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}

    def add(self, ticket: Ticket) -> None:
        """It waits from now on."""
        lane = self._lanes.setdefault(ticket.priority, _Lane())
        lane.tickets.append(ticket)
        lane.waiting += 1
        lane.held_tokens += ticket.held_tokens
        if len(lane.tickets) > 2 * lane.waiting + STALE_SLACK:
            lane.tickets = [one for one in lane.tickets if one.is_waiting]

    def resize(self, ticket: Ticket, more_tokens: int) -> None:
        """It holds so many more tokens than when it came, and waits still."""
        self._lanes[ticket.priority].held_tokens += more_tokens

    def leave(self, ticket: Ticket) -> None:
        """It waits no longer, whatever became of it."""
        lane = self._lanes[ticket.priority]
        lane.waiting -= 1
        lane.held_tokens -= ticket.held_tokens
        if not lane.waiting:
            del self._lanes[ticket.priority]

    def victims(self, priority: int, slots: int, tokens: int) -> list[Ticket] | None:
        """The fewest that have to go so that one of the class `priority` gets so many slots and tokens: the newest of
        the lowest class first, and only of classes below its own. None where all of them would not do.
        """
        lower = sorted((one for one in self._lanes if one > priority), reverse=True)
        lanes = [self._lanes[one] for one in lower]
        if sum(lane.waiting for lane in lanes) < slots or sum(lane.held_tokens for lane in lanes) < tokens:
            return None  # told from the sums: refusing must not take longer the more there are
        found: list[Ticket] = []
        for lane in lanes:
            while lane.tickets and not lane.tickets[-1].is_waiting:
                lane.tickets.pop()
            for ticket in reversed(lane.tickets):
                if slots <= 0 and tokens <= 0:
                    return found
                if ticket.is_waiting:
                    found.append(ticket)
                    slots -= 1
                    tokens -= ticket.held_tokens
        return found
