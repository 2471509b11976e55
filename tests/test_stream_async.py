from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from roseinfer.request import FinishReason, TokenEvent
from roseinfer.stream import Collector, Mailbox, RequestStream, Token
from tests.stream_desk import Desk, a_token, an_end


class LoopCalls:
    """Counts the wake-ups that other threads sent to a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        call = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
            self.count += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)


async def until_blocked(*coroutines: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Tasks that have run until each waits for something."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def collect(stream: RequestStream) -> str:
    return "".join([piece async for piece in stream.text_async()])


def test_async_readers_get_what_blocking_ones_get() -> None:
    async def main() -> None:
        desk = Desk()
        texts, tokens = desk.stream(0, stop=("d",)), desk.stream(1)
        desk.say("abcde", 0)
        desk.say("xy", 1, end=FinishReason.LENGTH)
        assert await collect(texts) == "abc"
        assert [token async for token in tokens.tokens_async()] == [
            Token(ord("x"), 0.0),
            Token(ord("y"), 1.0),
        ]
        assert desk.asked == [("close", 0), ("acknowledge", 1)]

    asyncio.run(main())


def test_a_step_wakes_an_event_loop_once_however_many_readers_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        desk = Desk()
        readers = await until_blocked(*[collect(desk.stream(i)) for i in range(16)])
        calls = LoopCalls(asyncio.get_running_loop(), monkeypatch)
        for step in range(1, 5):
            end = FinishReason.LENGTH if step == 4 else None
            desk.publish(*[TokenEvent(i, 65 + i, 0.0, end) for i in range(16)])
            assert calls.count == step
            await until_blocked()
        assert await asyncio.gather(*readers) == [4 * chr(65 + i) for i in range(16)]
        assert desk.collector._async_readers == {}

    asyncio.run(main())


def test_readers_that_a_step_does_not_serve_are_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        desk = Desk()
        (idle,) = await until_blocked(collect(desk.stream(0)))
        desk.stream(1)
        calls = LoopCalls(asyncio.get_running_loop(), monkeypatch)
        desk.publish(a_token(1, "a"))
        assert calls.count == 0
        desk.publish(an_end(0))
        assert calls.count == 1
        assert await idle == ""

    asyncio.run(main())


def test_a_step_from_another_thread_reaches_the_loop() -> None:
    async def main() -> None:
        desk = Desk()
        (reader,) = await until_blocked(collect(desk.stream()))
        thread = threading.Thread(target=desk.say, args=("abc", 0, FinishReason.LENGTH))
        thread.start()
        assert await reader == "abc"
        thread.join()

    asyncio.run(main())


def test_a_cancelled_async_reader_closes_its_stream_and_leaves_no_trace() -> None:  # case A4
    async def main() -> None:
        desk = Desk()
        (reader,) = await until_blocked(collect(desk.stream()))
        assert desk.collector._async_readers
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert desk.asked == [("close", 0)]
        assert desk.collector._async_readers == {}

    asyncio.run(main())


def test_an_async_reader_cancelled_between_wake_up_and_reading_loses_no_event() -> None:  # case A4
    async def main() -> None:
        desk = Desk()
        box = Mailbox(desk.collector)
        desk.collector.open(0, box)
        (reader,) = await until_blocked(box.take_async())
        desk.publish(a_token(0, "a"))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await box.take_async() == [a_token(0, "a")]

    asyncio.run(main())


def test_an_async_iteration_that_is_left_early_closes_its_stream() -> None:  # case B10
    async def main() -> None:
        desk = Desk()
        stream = desk.stream()
        desk.say("abc")
        async with aclosing(stream.tokens_async()) as tokens:
            async for _ in tokens:
                break
        assert desk.asked == [("close", 0)]

    asyncio.run(main())


def test_two_tasks_at_one_mailbox_never_get_nothing() -> None:
    async def main() -> None:
        desk = Desk()
        box = Mailbox(desk.collector)
        desk.collector.open(0, box)
        first, second = await until_blocked(box.take_async(), box.take_async())
        desk.publish(a_token(0, "a"))
        await until_blocked()
        assert [first.done(), second.done()] == [True, False]
        desk.publish(an_end())
        assert [await first, await second] == [[a_token(0, "a")], [an_end()]]

    asyncio.run(main())


def test_a_loop_that_was_closed_under_its_reader_does_not_disturb_the_engine() -> None:
    desk = Desk()
    box = Mailbox(desk.collector)
    desk.collector.open(0, box)
    loop = asyncio.new_event_loop()

    async def start() -> Coroutine[Any, Any, list[TokenEvent]]:
        waiting = box.take_async()
        waiting.send(None)
        return waiting

    waiting = loop.run_until_complete(start())
    loop.close()
    desk.publish(a_token(0, "a"))
    assert box.take() == [a_token(0, "a")]
    waiting.close()


@pytest.mark.timeout(20)
def test_a_reader_may_be_dropped_by_the_garbage_collector_inside_of_a_publication() -> None:
    async def main() -> None:
        collector = Collector()
        waiting = Mailbox(collector).take_async()
        waiting.send(None)
        with collector._condition:  # as in publish, where an allocation may run the garbage collector
            waiting.close()
        assert collector._async_readers == {}

    asyncio.run(main())
