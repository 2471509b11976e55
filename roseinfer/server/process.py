"""The process around an app: its socket, and an end that lets accepted requests finish."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import socket
import time
from typing import Final

import uvicorn
from fastapi import FastAPI

from roseinfer.errors import InputError
from roseinfer.server.connection import Connection
from roseinfer.server.service import Service

KEEP_ALIVE_S: Final = 75
"""Longer than clients keep idle connections, so that seldom one sends into a connection that just closes."""

LAST_WRITES_S: Final = 5
"""At least, for bytes on their way when nothing is computed any more."""


class DrainingServer(uvicorn.Server):
    """Told to end (SIGTERM, SIGINT), it first refuses new requests with a 503 until the accepted ones are done.

    A second SIGINT ends it at once.
    """

    def __init__(self, app: FastAPI, *, drain_timeout_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                lifespan="on",
                ws="none",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WRITES_S,
            )
        )
        self._service: Service = app.state.service
        self._drain_timeout_s = drain_timeout_s

    async def main_loop(self) -> None:
        await super().main_loop()
        # The sockets still listen: uvicorn closes them once this returns.
        end_s = time.monotonic() + self._drain_timeout_s
        drained = asyncio.ensure_future(self._service.drain(self._drain_timeout_s))
        while not drained.done() and not self.force_exit:
            await asyncio.wait([drained], timeout=0.1)
        self.config.timeout_graceful_shutdown = max(LAST_WRITES_S, math.ceil(end_s - time.monotonic()))


def listen(host: str, port: int, write_timeout_s: float) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises InputError where that cannot be had.

    Connections whose client takes nothing any more are dropped by the kernel after twice `write_timeout_s`, with what
    was still to be sent: closing them alone would wait for it. The app has ended their requests by then.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError("--host", host, f"cannot be listened on: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * write_timeout_s))
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise InputError("--port", port, f"cannot be listened on: {error}") from error
    return sock


def serve(app: FastAPI, sock: socket.socket, *, drain_timeout_s: float) -> None:
    """Serves until SIGTERM, then returns. Raises KeyboardInterrupt after SIGINT."""
    gc.collect()
    gc.freeze()  # a full collection of what a loaded model leaves would hold up every stream
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn raises it once more at the end
    try:
        DrainingServer(app, drain_timeout_s=drain_timeout_s).run(sockets=[sock])
    finally:
        signal.signal(signal.SIGTERM, before)
