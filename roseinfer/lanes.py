"""Who waits in which class, for when a request of a higher one finds no room. No clock; its owner holds the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from roseinfer.admission import Ticket

STALE_SLACK: Final = 64


class Lanes:
    """Tickets by class (0 is the highest), each lane in the order in which they came.

    A ticket stays after it has left the queue, and is skipped; it is forgotten in time.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, list[Ticket]] = {}
        self._size = 0

    def add(self, ticket: Ticket, n_waiting: int) -> None:
        """`n_waiting`: how many tickets wait now, in all lanes."""
        self._lanes.setdefault(ticket.priority, []).append(ticket)
        self._size += 1
        if self._size > 2 * n_waiting + STALE_SLACK:
            for priority, lane in self._lanes.items():
                self._lanes[priority] = [one for one in lane if one.is_waiting]
            self._size = sum(map(len, self._lanes.values()))

    def victims(self, priority: int, slots: int, tokens: int) -> list[Ticket] | None:
        """The fewest that have to go so that one of the class `priority` gets so many slots and tokens: the newest of
        the lowest class first, and only of classes below its own. None where all of them would not do.
        """
        found: list[Ticket] = []
        for lower in sorted(self._lanes, reverse=True):
            if lower <= priority:
                break
            lane = self._lanes[lower]
            while lane and not lane[-1].is_waiting:
                lane.pop()
                self._size -= 1
            for ticket in reversed(lane):
                if slots <= 0 and tokens <= 0:
                    return found
                if ticket.is_waiting:
                    found.append(ticket)
                    slots -= 1
                    tokens -= ticket.held_tokens
        return found if slots <= 0 and tokens <= 0 else None
