"""A small server of the OpenAI API in a thread of this process: one answer at a time to each connection, no clock."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

METRICS = "# HELP vllm:num_requests_waiting x\nvllm:num_requests_waiting 3.0\nprocess_cpu_seconds_total 9\n"


class Said:
    """One POST: its path, headers and body, and how it is answered (a stream of two tokens, unless told otherwise)."""

    def __init__(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        self.path = path
        self.headers = headers
        self.body = body


Answer = tuple[int, dict[str, str], bytes]
Answering = Callable[[int, Said], Answer]


def stream(*events: dict[str, Any]) -> Answer:
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    return 200, {"Content-Type": "text/event-stream"}, body


def two_tokens(**more: Any) -> Answer:
    usage = {"prompt_tokens": 11, "completion_tokens": 2}
    return stream(
        {"choices": [{"index": 0, "text": "one", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": " two", "finish_reason": "length"}]},
        {"choices": [], "usage": usage, **more},
    )


def refusal(status: int = 429, **headers: str) -> Answer:
    error = {"message": "too many", "type": "overloaded_error", "param": None, "code": "max_inflight"}
    return status, {"Content-Type": "application/json", **headers}, json.dumps({"error": error}).encode()


class OpenAiServer:
    """`answering(n, said)` answers the nth POST, from 0 in the order of arrival. `said` keeps all of them."""

    def __init__(
        self,
        answering: Answering = lambda number, said: two_tokens(),
        *,
        models: tuple[str, ...] = ("mock",),
        metrics: str | None = None,
    ) -> None:
        self.said: list[Said] = []
        self.asked: list[str] = []
        self.metrics = metrics
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(handler) -> None:  # noqa: N805
                self.asked.append(handler.path)
                found = {
                    "/v1/models": json.dumps({"data": [{"id": name} for name in models]}),
                    "/health": "{}",
                    "/metrics": self.metrics,
                }.get(handler.path)
                _send(handler, (404, {}, b"") if found is None else (200, {}, found.encode()))

            def do_POST(handler) -> None:  # noqa: N805
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                said = Said(handler.path, {k.lower(): v for k, v in handler.headers.items()}, body)
                with lock:
                    number = len(self.said)
                    self.said.append(said)
                _send(handler, answering(number, said))

            def log_message(handler, *_: object) -> None:  # noqa: N805
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    status, headers, body = answer
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    with suppress(BrokenPipeError, ConnectionResetError):  # an interrupted client is gone
        handler.wfile.write(body)
