"""Streams whose reader is slower than the engine."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from fastapi import FastAPI

from roseinfer.executor import StepPlan
from roseinfer.request import SamplingParams
from tests.scripted import FakeClock, ScriptedEngine
from tests.server.serving import an_app, events_of, manager_of, stream_to, text_of, until

N_TOKENS = 8


async def until_computed(app: FastAPI) -> None:
    """The last token of every request is there for its reader."""
    live = app.state.service._generations._live
    await asyncio.to_thread(until, lambda: all(one.finish_reason is not None for one in live.values()))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("stalled", range(N_TOKENS))
def test_what_comes_while_a_write_waits_is_sent_once(path: str, stalled: int) -> None:
    """The write of this number lasts until the engine is done; 0 is the head."""
    permits = threading.Semaphore(1)
    sent: list[dict[str, Any]] = []

    def compute(plan: StepPlan) -> None:
        assert permits.acquire(timeout=60)

    async def send(message: dict[str, Any]) -> None:
        if len(sent) == stalled:
            permits.release(N_TOKENS)
            await until_computed(app)
        elif sent:
            permits.release()  # a token for each write before it
        sent.append(message)

    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    n_tokens = {"max_new_tokens" if path == "/generate" else "max_tokens": N_TOKENS}
    with an_app(ScriptedEngine(compute)) as app:
        asyncio.run(stream_to(send, app, {**prompt, **n_tokens, "stream": True}, path))
    text = b"".join(message.get("body", b"") for message in sent).decode()
    assert (text if path == "/generate" else text_of(events_of(text))) == "abcdefgh"


def test_a_reader_keeps_its_slot_however_slow_it_is() -> None:
    clock = FakeClock()
    inflight: list[int] = []

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and not inflight:
            await until_computed(app)
            clock.now = 1e6
            other = manager_of(app).submit([1], SamplingParams(1))  # the engine looks at its clock again
            assert await asyncio.to_thread("".join, other.text()) == "a"
            inflight.append(manager_of(app).inflight)

    with an_app(clock=clock, max_inflight_requests=2) as app:
        asyncio.run(stream_to(send, app, {"prompt": "x", "max_tokens": N_TOKENS, "stream": True}))
        assert inflight == [1]
        assert manager_of(app).inflight == 0
