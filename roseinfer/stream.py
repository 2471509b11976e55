"""How tokens reach their readers: one collector, mailboxes, and the stream of a single request.

The engine publishes a step's events at once. A mailbox belongs to one stream, or is shared by many (the
benchmark reads all of its streams from one). A reader that stalls costs what its request may still produce,
max_new_tokens events, and delays nobody else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from roseinfer.errors import InputError, RequestFailedError
from roseinfer.executor import IncrementalDecoder
from roseinfer.request import FinishReason, Request, TokenEvent
from roseinfer.tokenization import StopMatcher


class Collector:
    """Distributes published events to mailboxes: one lock and one wake-up a step, whatever the number of streams.

    The lock is reentrant: the garbage collector may close an abandoned reader inside of anything.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._mailboxes: dict[int, Mailbox] = {}
        self._async_readers: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, asyncio.Future[None]]]] = {}
        self.is_asked_for_starts = False
        """Some mailbox wants what `announce` says."""

    def __len__(self) -> int:
        """Streams whose terminal event was not published yet."""
        return len(self._mailboxes)

    def open(self, request_id: int, mailbox: Mailbox) -> None:
        """Events of this request go to `mailbox` until its terminal one."""
        with self._condition:
            self._mailboxes[request_id] = mailbox

    def discard(self, request_id: int) -> None:
        """Forgets a request that was never entered."""
        with self._condition:
            self._mailboxes.pop(request_id, None)

    def end_all(self, error: BaseException, now: float) -> None:
        """The engine is dead: every open stream ends with the error."""
        self.publish(
            [
                TokenEvent(request_id, None, now, FinishReason.ERROR, error)
                for request_id in list(self._mailboxes)
            ]
        )

    def publish(self, events: list[TokenEvent]) -> None:
        """Delivers a step's events. Called by the engine thread."""
        with self._condition:
            mailboxes = self._mailboxes
            for event in events:
                if event.finish_reason is None:
                    mailbox = mailboxes.get(event.request_id)
                else:
                    mailbox = mailboxes.pop(event.request_id, None)
                # A dying engine may end a request that its caller is just taking back.
                if mailbox is not None:
                    mailbox._events.append(event)
            served = self._take_all_served()
        _wake_all(served)

    def announce(self, request_ids: list[int], now: float) -> None:
        """Tells the mailboxes that want to know it that these requests are scheduled, for the first time."""
        with self._condition:
            for request_id in request_ids:
                mailbox = self._mailboxes.get(request_id)
                if mailbox is not None and mailbox._wants_starts:
                    mailbox._events.append(TokenEvent(request_id, None, now))
            served = self._take_all_served()
        _wake_all(served)

    def _take_all_served(self) -> dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]:
        self._condition.notify_all()
        return {loop: self._take_served(loop) for loop in list(self._async_readers)}

    def _take_served(self, loop: asyncio.AbstractEventLoop) -> list[asyncio.Future[None]]:
        readers = self._async_readers.pop(loop, [])
        still_waiting = [(mailbox, future) for mailbox, future in readers if not mailbox._events]
        if still_waiting:
            self._async_readers[loop] = still_waiting
        return [future for mailbox, future in readers if mailbox._events]

    def _drop_reader(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        with self._condition:
            readers = [entry for entry in self._async_readers.pop(loop, []) if entry[1] is not future]
            if readers:
                self._async_readers[loop] = readers


class Mailbox:
    """Events in order of publication, taken all at once.

    With `wants_starts` they begin, for each request, with one that has neither a token nor an end: its first step
    was planned.
    """

    __slots__ = ("_collector", "_events", "_wants_starts", "_woken")

    def __init__(self, collector: Collector, *, wants_starts: bool = False) -> None:
        self._collector = collector
        self._events: list[TokenEvent] = []
        self._wants_starts = wants_starts
        self._woken = False
        if wants_starts:
            collector.is_asked_for_starts = True

    def belongs_to(self, collector: Collector) -> bool:
        return self._collector is collector

    def take(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """Everything that came, waiting for something if need be; [] after `timeout_s` of nothing, or a `wake`."""
        with self._collector._condition:
            self._collector._condition.wait_for(lambda: self._events or self._woken, timeout_s)
            self._woken = False
            return self._take_all()

    def wake(self) -> None:
        """Lets `take` return with what there is: the one that waits, or else the next."""
        with self._collector._condition:
            self._woken = True
            self._collector._condition.notify_all()

    async def take_async(self) -> list[TokenEvent]:
        """Everything that came, waiting for something if need be, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            with self._collector._condition:
                if self._events:
                    return self._take_all()
                future: asyncio.Future[None] = loop.create_future()
                self._collector._async_readers.setdefault(loop, []).append((self, future))
            try:
                await future
            except BaseException:  # cancelled, or its loop shut down
                self._collector._drop_reader(loop, future)
                raise

    def _take_all(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events


class StreamOwner(Protocol):
    """What a stream asks of its manager."""

    def new_decoder(self) -> IncrementalDecoder: ...

    def acknowledge_request(self, request: Request) -> None:
        """The terminal event was taken: the slot is free."""
        ...

    def close_request(self, request: Request) -> None:
        """The reader leaves."""
        ...

    def stop_request(self, request: Request) -> None:
        """The reader wants no more tokens, and keeps its slot until it leaves."""
        ...


class Token(NamedTuple):
    token_id: int
    engine_time_s: float


class Timings(NamedTuple):
    """A request's stamps in seconds of the manager's clock, None for what did not happen."""

    reserved_s: float
    tokenized_s: float | None
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float | None
    released_s: float | None

    @classmethod
    def of(cls, request: Request) -> Timings:
        """The stamps that `request` has so far."""
        r = request
        return cls(
            r.reserved_s,
            r.tokenized_s,
            r.first_scheduled_s,
            r.first_token_s,
            r.last_token_s,
            r.finished_s,
            r.ticket.released_s,
        )


class RequestStream:
    """The output of one request, for one reader.

    The slot of the request is free once its terminal event was taken, or after `close`. Leaving an iteration
    early closes the stream. Iterating raises RequestFailedError if the request ended with an error.

    `mailbox` None: its events go to a mailbox that somebody else reads, and it cannot be iterated.
    """

    # Slots, here and in Mailbox: objects that the garbage collector must visit cost a burst's submitter its tail.
    __slots__ = ("_mailbox", "_owner", "_pending", "_request", "finish_reason", "request_id")

    def __init__(self, request: Request, mailbox: Mailbox | None, owner: StreamOwner) -> None:
        self.request_id = request.request_id
        self.finish_reason: FinishReason | None = None
        self._request = request
        self._mailbox = mailbox
        self._owner = owner
        self._pending: list[TokenEvent] = []  # taken from the mailbox, not yet handed out; last first

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, None until it is tokenised."""
        return None if self._request.prompt_ids is None else len(self._request.prompt_ids)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that the prefix cache had, None until it is scheduled."""
        return self._request.cached_tokens

    @property
    def inflight_before(self) -> int:
        """Requests in flight that this one met when it got its slot."""
        return self._request.ticket.inflight_before

    @property
    def predicted_ttft_s(self) -> float | None:
        """Seconds from its reservation to its first token, as predicted then; None where nothing predicts."""
        return self._request.ticket.predicted_ttft_s

    @property
    def timings(self) -> Timings:
        return Timings.of(self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the request if it still runs, and frees its slot. Harmless when repeated."""
        if self.finish_reason is None:
            self.finish_reason = FinishReason.ABORT
            self._owner.close_request(self._request)

    def stop(self) -> None:
        """Ends the request if it still runs; its slot is held until `close`."""
        self._owner.stop_request(self._request)

    def tokens(self) -> Generator[Token]:
        """Tokens as they come. With stop strings, ends with the token that completes one."""
        for token, _ in self._read(want_text=False):
            if token is not None:
                yield token

    def text(self) -> Generator[str]:
        """Text as it comes, never half a character and nothing of a stop string; no empty pieces."""
        for _, piece in self._read(want_text=True):
            if piece:
                yield piece

    async def tokens_async(self) -> AsyncGenerator[Token]:
        """`tokens` for an event loop."""
        async with aclosing(self._read_async(want_text=False)) as items:
            async for token, _ in items:
                if token is not None:
                    yield token

    async def text_async(self) -> AsyncGenerator[str]:
        """`text` for an event loop."""
        async with aclosing(self._read_async(want_text=True)) as items:
            async for _, piece in items:
                if piece:
                    yield piece

    def _read(self, *, want_text: bool) -> Iterator[tuple[Token | None, str]]:
        mailbox = self._own_mailbox()
        try:
            text = self._text_maker(want_text)
            while self.finish_reason is None:
                if self._pending:
                    yield self._handle(self._pending.pop(), text)
                else:  # and look again: it may be closed by another thread meanwhile
                    self._pending = mailbox.take()[::-1]
        finally:
            self.close()

    async def _read_async(self, *, want_text: bool) -> AsyncGenerator[tuple[Token | None, str]]:
        mailbox = self._own_mailbox()
        try:
            text = self._text_maker(want_text)
            while self.finish_reason is None:
                if self._pending:
                    yield self._handle(self._pending.pop(), text)
                else:  # and look again: it may be closed by another thread meanwhile
                    self._pending = (await mailbox.take_async())[::-1]
        finally:
            self.close()

    def _own_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            raise InputError("request_id", self.request_id, "its events go to a shared mailbox: read that")
        return self._mailbox

    def _text_maker(self, want_text: bool) -> _TextMaker | None:
        stop = self._request.params.stop
        return _TextMaker(self._owner.new_decoder(), stop) if want_text or stop else None

    def _handle(self, event: TokenEvent, text: _TextMaker | None) -> tuple[Token | None, str]:
        """What one event gives the reader. The slot is free before the last token is handed out."""
        piece = "" if text is None or event.token_id is None else text.add(event.token_id)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self._owner.acknowledge_request(self._request)
            if event.error is not None:
                raise RequestFailedError(self.request_id, str(event.error)) from event.error
            if text is not None:
                piece += text.finish()
        if text is not None and text.stopped:
            if self.finish_reason is None:
                self._owner.close_request(self._request)
            self.finish_reason = FinishReason.STOP
        return None if event.token_id is None else Token(event.token_id, event.time_s), piece


class _TextMaker:
    """Ids to text that is safe to show, without stop strings."""

    def __init__(self, decoder: IncrementalDecoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    def add(self, token_id: int) -> str:
        return self._matcher.push(self._decoder.step(token_id))

    def finish(self) -> str:
        return self._matcher.push(self._decoder.finish()) + self._matcher.finish()


def _wake_all(served: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]) -> None:
    for loop, futures in served.items():
        if futures:
            try:
                loop.call_soon_threadsafe(_wake, futures)
            except RuntimeError:
                pass  # the loop was closed, and its readers with it


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
