"""Slots at the server's edge: taken before a prompt is tokenised, and given back whatever becomes of the task."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from roseinfer.errors import SchedulerManagerOverloadedError
from tests.scripted import ScriptedEngine, ScriptedTokenizer, StepGate
from tests.server.serving import an_app, manager_of, request_bytes, stream_to, until

LIMIT = 16
OFFERED = 40


class BlockedTokenizer(ScriptedTokenizer):
    """Tokenises once it may."""

    may = threading.Event()

    def encode(self, text: str) -> list[int]:
        assert self.may.wait(60)
        return super().encode(text[:1])


@pytest.mark.parametrize("prompt", ["x", "x" * 8000])
def test_a_burst_is_let_in_before_anything_is_tokenised(
    monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:  # cases A1, A22
    """All that are over the limit are refused while no prompt at all has been tokenised."""
    monkeypatch.setattr(BlockedTokenizer, "may", threading.Event())
    engine = ScriptedEngine()
    engine.make_tokenizer = BlockedTokenizer

    async def main(app: FastAPI) -> tuple[list[int], list[int]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"prompt": prompt, "max_tokens": 2, "stream": True}
            waiting = {asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(OFFERED)}
            early: list[int] = []
            while len(early) < OFFERED - LIMIT:
                done, waiting = await asyncio.wait(waiting, timeout=60, return_when=asyncio.FIRST_COMPLETED)
                assert done, "requests over the limit wait for the tokeniser"
                early += [task.result().status_code for task in done]
            assert (await client.get("/health")).status_code == 200
            BlockedTokenizer.may.set()
            late = [response.status_code for response in await asyncio.gather(*waiting)]
        return early, late

    with an_app(engine, max_inflight_requests=LIMIT) as app:
        early, late = asyncio.run(main(app))
        assert early == [429] * (OFFERED - LIMIT)
        assert late == [200] * LIMIT
        assert manager_of(app).counts().peak_inflight == LIMIT


@pytest.mark.parametrize("stream", [False, True])
def test_a_task_that_is_cancelled_anywhere_gives_its_slot_back(stream: bool) -> None:  # case A4
    """At each point at which it lets others run; afterwards as many are let in as before."""
    content = request_bytes({"prompt": "x", "max_tokens": 8, "stream": stream}).partition(b"\r\n\r\n")[2]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    headers = [(b"content-type", b"application/json")]

    async def cancelled_after(app: FastAPI, turns: int) -> None:
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": content}]

        async def receive() -> Any:
            await asyncio.sleep(0)
            return messages.pop() if messages else await asyncio.Future()

        async def send(message: Any) -> None:
            await asyncio.sleep(0)

        task = asyncio.create_task(app({**scope, "headers": headers}, receive, send))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main(app: FastAPI) -> None:
        for turns in range(100):
            await cancelled_after(app, turns)

    gate = StepGate()
    gate.opened.set()
    with an_app(ScriptedEngine(gate), max_inflight_requests=4) as app:
        manager = manager_of(app)
        asyncio.run(main(app))
        until(lambda: manager.inflight == 0)
        gate.opened.clear()
        for _ in range(4):
            manager.submit([1])
        with pytest.raises(SchedulerManagerOverloadedError):
            manager.submit([1])
        gate.opened.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_slot_is_held_to_the_last_byte_behind_a_stop_string(stream: bool) -> None:
    """What the request computed on is free at once."""
    found: list[tuple[int, int]] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await asyncio.to_thread(until, lambda: manager.running == 0)
            found.append((manager.inflight, manager._core.scheduler.kv_cache.used_tokens))

    with an_app(max_inflight_requests=1) as app:
        manager = manager_of(app)
        body = {"prompt": "x", "max_tokens": 4000, "stop": "def", "stream": stream}
        asyncio.run(stream_to(send, app, body))
        assert found == [(1, 0)]
        until(lambda: manager.inflight == 0)
