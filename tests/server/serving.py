"""Apps on scripted engines: asked in their own process without a socket, or served on a real one."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import httpx
from fastapi import FastAPI

from roseinfer.executor import StepPlan
from roseinfer.manager import SchedulerManager
from roseinfer.server.app import create_app
from roseinfer.server.process import DrainingServer, listen
from tests.scripted import ScriptedEngine

WRITE_TIMEOUT_S = 30.0


@contextmanager
def an_app(engine: ScriptedEngine | None = None, **options: Any) -> Iterator[FastAPI]:
    """Its manager is closed at the end, whoever asked for what."""
    app = create_app(engine or ScriptedEngine(), **options)
    try:
        yield app
    finally:
        manager_of(app).close()


def manager_of(app: FastAPI) -> SchedulerManager:
    manager = app.state.service.manager
    assert isinstance(manager, SchedulerManager)
    return manager


def ask(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    """One request without a socket; the answer comes whole."""

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **request)

    return asyncio.run(main())


def complete(app: FastAPI, **body: Any) -> httpx.Response:
    """`POST /v1/completions` of a prompt that may be left out; greedy."""
    return ask(app, "POST", "/v1/completions", json={"prompt": "x", "temperature": 0, **body})


def chat(app: FastAPI, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return ask(app, "POST", "/v1/chat/completions", json={"messages": messages, "temperature": 0, **body})


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended as it should."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices
    )


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer in the OpenAI shape."""
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error, dict)
    return error


def until(condition: Callable[[], bool]) -> None:
    """Sockets tell nobody what became of them: the condition is looked at until it holds."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "did not come about"
        time.sleep(0.005)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = connection.recv(1 << 16)
        assert piece, f"closed before {mark!r}: {data[-200:]!r}"
        data += piece
    return data


class PacedSteps:
    """Steps that wait for a permit each until `run_free`."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.free = False
        self.entered = threading.Semaphore(0)

    def __call__(self, plan: StepPlan) -> None:
        self.entered.release()
        if not self.free:
            self.permits.acquire()

    def run_free(self) -> None:
        self.free = True
        self.permits.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.run_free()  # else nothing that waits for the engine would end


class Served:
    """An app on a real socket, in a thread of its own."""

    def __init__(
        self, app: FastAPI, *, drain_timeout_s: float = 30.0, send_buffer: int | None = None
    ) -> None:
        self.app = app
        self.manager = manager_of(app)
        self.socket = listen("127.0.0.1", 0, app.state.service.write_timeout_s)
        if send_buffer is not None:  # connections have it from the socket that they came in at
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.socket.listen(1024)  # connections wait in the kernel until the loop runs
        self.address: tuple[str, int] = self.socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.server = DrainingServer(app, drain_timeout_s=drain_timeout_s)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)

    def send(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """A connection that a request was sent on."""
        connection = self.connect()
        connection.sendall(request_bytes(body, path))
        return connection

    def end(self) -> None:
        """What SIGTERM does; `thread` ends when it is done."""
        self.server.should_exit = True


@contextmanager
def served(
    engine: ScriptedEngine | None = None,
    *,
    drain_timeout_s: float = 30.0,
    send_buffer: int | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Ends without a drain: what still runs is aborted."""
    with an_app(engine, **options) as app:
        one = Served(app, drain_timeout_s=drain_timeout_s, send_buffer=send_buffer)
        one.thread.start()
        try:
            yield one
        finally:
            one.server._drain_timeout_s = 0.0
            one.end()
            one.thread.join()


async def stream_to(
    send: Callable[[Any], Awaitable[None]], app: FastAPI, body: dict[str, Any], path: str = "/v1/completions"
) -> None:
    """One request without a socket, whose answer goes to `send` message by message."""
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> Any:
        return next(messages, None) or await asyncio.Future()

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    await app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    kind = "Content-Type: application/json"
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\n{kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content
