"""Accepted requests: their events as text, and their slots until `close`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from roseinfer.errors import ManagerClosedError, RequestFailedError
from roseinfer.executor import IncrementalDecoder
from roseinfer.manager import SchedulerManager
from roseinfer.request import FinishReason, SamplingParams, TokenEvent
from roseinfer.server.answers import Outcome
from roseinfer.stream import RequestStream, Timings
from roseinfer.tokenization import StopMatcher

GROUP: Final = 8
"""Tokens that are handled before the event loop has a look at its sockets."""


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Generation:
    """Read by one task of the event loop. Its reader calls `close` whatever happens: nothing else frees the slot.

    A stream that is iterated would free it when the last token is taken, not when that has been sent.
    """

    def __init__(
        self,
        stream: RequestStream,
        stop: Sequence[str],
        new_decoder: Callable[[], IncrementalDecoder],
        on_close: Callable[[int, None], object],
    ) -> None:
        """`on_close` gets the request's id, and None."""
        self.finish_reason: FinishReason | None = None
        self.token_times_s: list[float] = []
        """The engine's stamps of the tokens that became text."""
        self._stream = stream
        self._matcher = StopMatcher(stop)
        self._new_decoder = new_decoder
        self._on_close = on_close
        self._decoder: IncrementalDecoder | None = None
        self._texts: list[str] = []  # not yet read
        self._failure: Exception | None = None
        self._has_started = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def timings(self) -> Timings:
        return self._stream.timings

    @property
    def prompt_tokens(self) -> int:
        return self._stream.prompt_tokens or 0

    @property
    def cached_tokens(self) -> int:
        """Of its prompt, found in the prefix cache."""
        return self._stream.cached_tokens or 0

    def close(self) -> None:
        """Ends the request if it still runs, and frees its slot. Harmless when repeated."""
        self._stream.close()
        self._on_close(self._stream.request_id, None)

    def client_is_gone(self) -> None:
        """Closes; `next` raises a ClientGoneError."""
        self.close()
        self._texts.clear()
        self._failure = ClientGoneError()
        self.wake()

    async def scheduled(self) -> None:
        """Waits until the first step of the request is planned. Raises what `next` raises, for what ended before."""
        while not (self._has_started or self._texts or self._failure is not None):
            await self._wait()
        self._raise_at_the_end()

    async def next(self) -> str:
        """The text of all that came, waiting for something if need be; may be "". Sets `finish_reason` at the end.

        Raises ClientGoneError, RequestFailedError (`__cause__` says why), or ManagerClosedError for a request that
        a closing server cut short.
        """
        if not self._texts and self._failure is None:
            await self._wait()
        self._raise_at_the_end()
        text = "".join(self._texts)
        self._texts.clear()
        return text

    async def _wait(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _raise_at_the_end(self) -> None:
        if not self._texts and self._failure is not None:
            raise self._failure  # what came before it is shown first

    def wake(self) -> None:
        """Lets the reader see what was taken."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def take(self, event: TokenEvent) -> None:
        """Makes an event text; the reader is not woken yet."""
        if self.finish_reason is not None or self._failure is not None:
            return  # computed behind a stop string, or nobody wants it
        if event.token_id is None and event.finish_reason is None:
            self._has_started = True
            return
        try:
            self._take(event)
        except Exception as error:  # one tokenizer's fault must not end the other streams
            self._failure = RequestFailedError(event.request_id, str(error))
            self._failure.__cause__ = error

    def outcome(self) -> Outcome:
        """Only asked of what has ended."""
        assert self.finish_reason is not None
        times, token_times_s = self.timings, self.token_times_s
        queue_s = prefill_s = decode_s = None
        if times.first_scheduled_s is not None:
            queue_s = times.first_scheduled_s - times.reserved_s
            if token_times_s:
                prefill_s = token_times_s[0] - times.first_scheduled_s
                decode_s = token_times_s[-1] - token_times_s[0]
        return Outcome(
            self.finish_reason.value,
            self.prompt_tokens,
            self.cached_tokens,
            len(token_times_s),
            queue_s,
            prefill_s,
            decode_s,
        )

    def _take(self, event: TokenEvent) -> None:
        if self._decoder is None:
            self._decoder = self._new_decoder()
        text = ""
        if event.token_id is not None:
            self.token_times_s.append(event.time_s)
            text = self._matcher.push(self._decoder.step(event.token_id))
        if event.finish_reason is FinishReason.ABORT:
            self._failure = ManagerClosedError("cut short by the end of the server")
        elif event.error is not None:
            self._failure = RequestFailedError(event.request_id, str(event.error))
            self._failure.__cause__ = event.error
        else:
            if event.finish_reason is not None:
                text += self._matcher.push(self._decoder.finish()) + self._matcher.finish()
                self.finish_reason = event.finish_reason
            self._texts.append(text)
        if self._matcher.stopped:
            self.finish_reason = FinishReason.STOP
            self._stream.stop()


class Generations:
    """All that live in one event loop: one reader of one mailbox does for each step once what a reader for each
    request would repeat.
    """

    def __init__(self, manager: SchedulerManager, on_gap: Callable[[float], None]) -> None:
        """`on_gap` gets the seconds between a token and the one before it. Made in the event loop."""
        self.loop = asyncio.get_running_loop()
        self._manager = manager
        self._on_gap = on_gap
        self._mailbox = manager.new_mailbox(wants_starts=True)
        self._live: dict[int, Generation] = {}
        self._reading = self.loop.create_task(self._read())

    def open(self, prompt: str | Sequence[int], params: SamplingParams, priority: int = 0) -> Generation:
        """Raises what `SchedulerManager.submit` raises. Whoever gets a Generation closes it."""
        stream = self._manager.submit(prompt, params, mailbox=self._mailbox, priority=priority)
        generation = Generation(stream, params.stop, self._manager.new_decoder, self._live.pop)
        self._live[stream.request_id] = generation
        return generation

    async def _read(self) -> None:
        while True:
            others = []
            for event in await self._mailbox.take_async():
                generation = self._live.get(event.request_id)
                if generation is None:
                    continue
                if generation.token_times_s:
                    others.append((generation, event))
                else:
                    generation.take(event)
                    generation.wake()
            # Starts and first tokens are written before anything is done for the others, and between groups of those
            # the loop looks for new requests. In a group all text is made before it is written: writes close together
            # wake a reader of many streams once.
            for begin in range(0, len(others), GROUP):
                await asyncio.sleep(0)
                group = others[begin : begin + GROUP]
                for generation, event in group:
                    times_s = generation.token_times_s
                    n_before = len(times_s)
                    generation.take(event)
                    if len(times_s) > n_before:
                        self._on_gap(times_s[-1] - times_s[-2])
                for generation, _ in group:
                    generation.wake()
