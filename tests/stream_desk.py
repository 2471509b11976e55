"""A collector, and streams at it, without a manager."""

from __future__ import annotations

import threading

from roseinfer.admission import Admission
from roseinfer.request import FinishReason, Request, SamplingParams, TokenEvent
from roseinfer.stream import Collector, Mailbox, RequestStream
from tests.scripted import ScriptedDecoder


class WaitSignal(threading.Condition):
    """Counts those who are about to wait; whoever then takes the lock finds them waiting."""

    def __init__(self) -> None:
        super().__init__(threading.RLock())
        self.waiting = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting.release()
        return super().wait(timeout)


class Desk:
    """A collector with streams at it, and a list of what they asked of their manager."""

    def __init__(self) -> None:
        self.collector = Collector()
        self.waits = self.collector._condition = WaitSignal()
        self.asked: list[tuple[str, int]] = []
        self.admission = Admission(None)

    def stream(
        self, request_id: int = 0, *, stop: tuple[str, ...] = (), max_new_tokens: int = 1000
    ) -> RequestStream:
        mailbox = Mailbox(self.collector)
        self.collector.open(request_id, mailbox)
        params = SamplingParams(max_new_tokens, stop=stop)
        request = Request(request_id, params, self.admission.reserve(0.0, 1), 0, [1], 0.0)
        return RequestStream(request, mailbox, self)

    def new_decoder(self) -> ScriptedDecoder:
        return ScriptedDecoder()

    def acknowledge_request(self, request: Request) -> None:
        self.asked.append(("acknowledge", request.request_id))

    def close_request(self, request: Request) -> None:
        self.asked.append(("close", request.request_id))

    def stop_request(self, request: Request) -> None:
        self.asked.append(("stop", request.request_id))

    def publish(self, *events: TokenEvent) -> None:
        self.collector.publish(list(events))

    def say(self, text: str, request_id: int = 0, end: FinishReason | None = None) -> None:
        """A step for each letter, at times 0, 1, 2, ...; the last may end the stream."""
        for i, letter in enumerate(text):
            reason = end if i == len(text) - 1 else None
            self.publish(TokenEvent(request_id, ord(letter), float(i), reason))


def a_token(request_id: int, letter: str, time_s: float = 0.0) -> TokenEvent:
    return TokenEvent(request_id, ord(letter), time_s)


def an_end(request_id: int = 0, reason: FinishReason = FinishReason.LENGTH) -> TokenEvent:
    return TokenEvent(request_id, None, 0.0, reason)
