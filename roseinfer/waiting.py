"""The order in which tokenised requests wait, and when they have waited for too long. Knows no clock.

Every order is a static key in seconds, so that nothing has to be sorted again as time passes, and ageing is part of it:
  fcfs  the order of submission
  spf   shortest prefill first: a prompt token is worth SPF_S_PER_TOKEN of waiting
  edf   earliest deadline first; who has none counts as one who came EDF_WITHOUT_S before his
Lanes come on top: each class behind the first is worth `priority_age_s` of waiting. So a request is passed only by
those that come less than that after it, per class between them: nobody who keeps its place starves. (Where there is
no room at the door, a higher class takes a place away; who loses it is told at once.)
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Final

from roseinfer.request import Request

FCFS, SPF, EDF = "fcfs", "spf", "edf"
SCHEDULINGS: Final = (FCFS, SPF, EDF)
"""What --scheduling takes."""

SPF_S_PER_TOKEN: Final = 0.01
EDF_WITHOUT_S: Final = 60.0

STALE_SLACK: Final = 16
"""Requests that a queue may hold although they left it, besides as many as it holds rightly."""


class Order:
    """The key by which requests wait, smallest first; among equal ones in the order of submission."""

    def __init__(self, scheduling: str = FCFS, priority_age_s: float | None = None) -> None:
        self._scheduling = scheduling
        self._age_s = priority_age_s
        self._is_arrival = scheduling == FCFS and priority_age_s is None

    def key_s(self, request: Request) -> float:
        """Seconds on the clock of its stamps. Only asked of tokenised requests."""
        if self._is_arrival:
            return 0.0
        key_s = request.reserved_s
        if self._scheduling == SPF:
            key_s += SPF_S_PER_TOKEN * request.prompt_len
        elif self._scheduling == EDF:
            key_s = key_s + EDF_WITHOUT_S if request.deadline_s is None else request.deadline_s
        return key_s if self._age_s is None else key_s + self._age_s * request.priority


class ReadyQueue:
    """Those of `waiting` that are tokenised, in their order. Who left `waiting` is skipped, and forgotten in time."""

    def __init__(self, waiting: Mapping[int, Request], order: Order, *, keeps_newest: bool = False) -> None:
        self._waiting = waiting
        self._order = order
        self._heap: list[tuple[float, int, Request]] = []
        self._newest: list[Request] | None = [] if keeps_newest else None

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._order.key_s(request), request.arrival, request))
        if self._newest is not None:
            self._newest.append(request)

    def head(self) -> Request | None:
        """Who is next by the order."""
        heap = self._heap
        while heap:
            request = heap[0][2]
            if request.request_id in self._waiting:
                return request
            heapq.heappop(heap)
        return None

    def newest(self) -> Request | None:
        """The one that was ready last. Only where the queue `keeps_newest`."""
        stack = self._newest
        assert stack is not None
        while stack and stack[-1].request_id not in self._waiting:
            stack.pop()
        return stack[-1] if stack else None

    def forget(self) -> None:
        """Called when one left `waiting`: a storm of those that left must not pile up behind a head that stays."""
        most = 2 * len(self._waiting) + STALE_SLACK
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if entry[2].request_id in self._waiting]
            heapq.heapify(self._heap)
        if self._newest is not None and len(self._newest) > most:
            self._newest = [request for request in self._newest if request.request_id in self._waiting]

    def ids(self) -> set[int]:
        """Whom the queue knows of, those that left included."""
        return {request.request_id for _, _, request in self._heap}


class Timeouts:
    """When each of `waiting` has waited for too long."""

    def __init__(self, waiting: Mapping[int, Request]) -> None:
        self._waiting = waiting
        self._heap: list[tuple[float, int, Request]] = []

    def push(self, at_s: float, request: Request) -> None:
        heapq.heappush(self._heap, (at_s, request.arrival, request))
        if len(self._heap) > 4 * len(self._waiting) + STALE_SLACK:  # a request may be in it twice
            self._heap = [entry for entry in self._heap if entry[2].request_id in self._waiting]
            heapq.heapify(self._heap)

    def next_s(self) -> float | None:
        """The earliest of them."""
        while self._heap and self._heap[0][2].request_id not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def overdue(self, now: float) -> list[Request]:
        """Takes out those that should have left before `now`, and have not; whoever asks removes them."""
        if not self._heap:
            return []
        found: dict[int, Request] = {}
        while self._heap and self._heap[0][0] < now:
            request = heapq.heappop(self._heap)[2]
            if request.request_id in self._waiting:
                found[request.request_id] = request
        return list(found.values())
