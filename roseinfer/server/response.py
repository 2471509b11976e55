"""The response to an accepted or refused request, from its slot to its last byte."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from roseinfer.errors import ManagerClosedError, RoseinferError
from roseinfer.server.answers import Answer
from roseinfer.server.bodies import Wanted
from roseinfer.server.generation import ClientGoneError, Generation
from roseinfer.server.service import Service

_log = logging.getLogger("roseinfer.server")


class _Writer:
    """Writes to one client, and cancels its task when one write lasts longer than `timeout_s`.

    It costs a write two assignments, where a timeout of asyncio's own costs each a timer.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self.timed_out = False
        self._send = send
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._began_s: float | None = None
        self._timer = self._loop.call_later(timeout_s, self._check)

    async def write(self, text: str, *, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": text.encode(), "more_body": more})

    async def send(self, message: Message) -> None:
        self._began_s = self._loop.time()
        await self._send(message)
        self._began_s = None

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        lasts_s = 0.0 if self._began_s is None else self._loop.time() - self._began_s
        if lasts_s < self._timeout_s:
            self._timer = self._loop.call_later(self._timeout_s - lasts_s, self._check)
        elif self._task is not None:
            self.timed_out = True
            self._task.cancel()


class GenerationResponse(Response):
    """Takes the slot, and gives it back, inside of one call.

    The head of a stream is sent when the request is first scheduled, so that what happens before (a request refused,
    dropped from the queue, or too long once it is tokenised) still has a status of its own.
    """

    def __init__(self, service: Service, wanted: Wanted, answer: Answer) -> None:
        super().__init__()
        self._service = service
        self._wanted = wanted
        self._answer = answer
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        if service.log_requests:
            _log.info("prompt %r, %r", self._wanted.prompt, self._wanted.params)
        try:
            wanted = self._wanted
            generation = service.accept(wanted.prompt, wanted.params, wanted.priority)
        except RoseinferError as error:
            refusal = service.refusal_of(error)
            service.metrics.refused(refusal.reason)
            await refusal.response()(scope, receive, send)
            return
        end = "error"
        writer = _Writer(send, service.write_timeout_s)
        watch = asyncio.ensure_future(_watch(receive, generation))
        try:
            try:
                await generation.scheduled()
            finally:  # also of those whose client leaves just then
                service.metrics.scheduled(generation)
            await (self._stream if self._wanted.stream else self._whole)(generation, writer)
            assert generation.finish_reason is not None
            end = generation.finish_reason.value
        except ClientGoneError:
            end = "client_gone"
        except asyncio.CancelledError:
            if not writer.timed_out:
                raise
            end = "stalled_reader"  # the answer is not complete, so whoever called this closes the connection
        except Exception as error:
            refusal = service.refusal_of(error)
            if isinstance(error, ManagerClosedError):
                end = "cut_short"
            elif refusal.reason is not None:
                end = "refused"
                service.metrics.refused(refusal.reason)
            if not self._has_begun:
                await refusal.response()(scope, receive, send)
            elif (event := self._answer.failure(refusal)) is not None:
                await writer.write(event, more=False)
        finally:
            generation.close()
            watch.cancel()
            writer.close()
            service.metrics.ended(generation, end, service.clock())

    async def _stream(self, generation: Generation, writer: _Writer) -> None:
        answer = self._answer
        await self._start(writer, answer.stream_type)
        text = answer.begin() + answer.piece(await generation.next())
        # Asked right after `next` and never after a write: what comes while a write waits is not in `text`.
        has_ended = generation.finish_reason is not None
        if not has_ended:
            await writer.write(text, more=True)
        self._service.metrics.began(generation, self._service.clock())
        while not has_ended:
            text = answer.piece(await generation.next())
            has_ended = generation.finish_reason is not None
            if text and not has_ended:
                await writer.write(text, more=True)
        await writer.write(text + answer.end(generation.outcome()), more=False)

    async def _whole(self, generation: Generation, writer: _Writer) -> None:
        texts = [await generation.next()]
        self._service.metrics.began(generation, self._service.clock())
        while generation.finish_reason is None:
            texts.append(await generation.next())
        body = self._answer.whole("".join(texts), generation.outcome())
        await self._start(writer, "application/json", (b"content-length", str(len(body.encode())).encode()))
        await writer.write(body, more=False)

    async def _start(self, writer: _Writer, content_type: str, *more: tuple[bytes, bytes]) -> None:
        headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store"), *more]
        self._has_begun = True
        await writer.send({"type": "http.response.start", "status": 200, "headers": headers})


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.client_is_gone()
