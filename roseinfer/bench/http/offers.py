"""What the client of a server keeps of a request that is under way."""

from __future__ import annotations

from roseinfer.bench.http.connection import Connection
from roseinfer.bench.http.exchange import HttpAttempt, HttpRequest
from roseinfer.bench.http.incoming import Incoming


class Offer:
    """A request that was sent and has not come to its end; between two tries it has no connection."""

    __slots__ = ("body", "connection", "deadline_s", "index", "is_over", "request")

    def __init__(self, index: int, request: HttpRequest, body: bytes, deadline_s: float) -> None:
        self.index = index
        self.request = request
        self.body = body
        self.deadline_s = deadline_s
        self.connection: Connection | None = None
        self.is_over = False


class Try:
    """One exchange on a connection."""

    __slots__ = ("answer", "attempt", "offer")

    def __init__(self, offer: Offer, attempt: HttpAttempt, answer: Incoming) -> None:
        self.offer = offer
        self.attempt = attempt
        self.answer = answer
