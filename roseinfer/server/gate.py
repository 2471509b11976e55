"""What every request passes before the app: its id, the key, the size of its body, and the net under it all."""

from __future__ import annotations

import hmac
import logging
import secrets
import traceback
from typing import Final
from urllib.parse import parse_qs

from fastapi import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roseinfer.server.refusals import Refusal

_log = logging.getLogger("roseinfer.server")

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""Answered without a key, for whoever watches over the process."""


class Gate:
    """Plain ASGI around the app. `api_key` None: no key is asked for."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        has_begun = False
        n_body_bytes = 0

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        async def receive_some() -> Message:
            nonlocal n_body_bytes
            message = await receive()
            n_body_bytes += len(message.get("body", b""))
            if n_body_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                # A client that asks first whether its body is wanted sends none. Of others it is still read, and
                # dropped: a socket closed on them would drop the answer.
                close = {"connection": "close"} if b"expect" in dict(scope["headers"]) else {}
                await refusal.response(close)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive_some, send_with_id)
        except ClientDisconnect:
            pass  # while its body was read
        except Exception as error:
            # Where, but not what: an exception's text may quote the request.
            where = "".join(traceback.format_tb(error.__traceback__))
            _log.error("request %s: unexpected %s\n%s", request_id, type(error).__name__, where)
            if not has_begun:
                await Refusal(500, "internal error", "internal_error").response()(
                    scope, receive, send_with_id
                )

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            has_key = hmac.compare_digest(headers.get(b"authorization", b""), self._key)
            if not has_key:
                return Refusal(401, "no valid API key: send Authorization: Bearer KEY", "invalid_api_key")
        if scope["query_string"]:
            query = scope["query_string"].decode("latin-1")
            name = next(iter(parse_qs(query, True)), "") or query
            return Refusal(400, f"{name}: nothing is asked for in the URL", "invalid_value", name)
        length = headers.get(b"content-length", b"")
        return self._too_large() if length.isdigit() and int(length) > self._max_body_bytes else None

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body has over {self._max_body_bytes} bytes", "body_too_large")
