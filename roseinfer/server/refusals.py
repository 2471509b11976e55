"""What a client gets instead of an answer: status, body and headers, in the shape of the OpenAI API."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic_core import ErrorDetails
from starlette.responses import Response

from roseinfer.errors import (
    NEVER,
    TOKENS_NEVER_FIT,
    InputError,
    ManagerClosedError,
    PromptTooLongError,
    SchedulerManagerOverloadedError,
)

LONGEST_RETRY_AFTER_S: Final = 60
"""Clients that are told to come back later than this give up."""

_HTTP_REASONS: Final = {"inflight": "max_inflight"}
_TYPES: Final = {401: "authentication_error", 429: "overloaded_error", 503: "overloaded_error"}


class Refusal(NamedTuple):
    """`reason` is set where the same request may be served later (429 and 503)."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    reason: str | None = None
    retry_after_s: float | None = None
    more: Mapping[str, Any] = {}

    @property
    def body(self) -> str:
        """JSON with message, type, param and code under `error`."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.more}
        return json.dumps({"error": error if self.reason is None else {**error, "reason": self.reason}})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """Those who are told a reason are told as well when to come back, or that it is of no use."""
        headers = dict(headers or {})
        if self.reason in NEVER:
            headers["x-should-retry"] = "false"  # no time is long enough, so none is named
            headers["x-roseinfer-reason"] = self.reason
        elif self.reason is not None:
            wait_s = 1.0 if self.retry_after_s is None else self.retry_after_s
            whole_s = min(max(math.ceil(wait_s), 1), LONGEST_RETRY_AFTER_S)
            wait_ms = min(max(math.ceil(1000 * wait_s), 1), 1000 * LONGEST_RETRY_AFTER_S)
            headers["retry-after"] = str(whole_s)
            headers["retry-after-ms"] = str(wait_ms)
            headers["x-roseinfer-reason"] = self.reason
        return Response(self.body, self.status, headers, media_type="application/json")


def refusal_of(error: BaseException, *, draining: bool = False) -> Refusal:
    """What an exception means to the client. Its own text shows only where it was written for one."""
    if isinstance(error, SchedulerManagerOverloadedError):
        reason = _HTTP_REASONS.get(error.reason, error.reason)
        more = {"limit": error.limit, "measured": error.measured, "inflight": error.inflight}
        if error.reason in ("tokens", TOKENS_NEVER_FIT):
            more["requested"] = error.asked
        return Refusal(429, str(error), reason, None, reason, error.retry_after_s, more)
    if isinstance(error, ManagerClosedError):
        if draining:
            return Refusal(503, "this server is about to end", "draining", reason="draining")
        return Refusal(503, "the engine does not run", "engine_dead", reason="engine_dead")
    if isinstance(error, PromptTooLongError):
        return Refusal(400, _text_of(error), "context_length_exceeded", "prompt")
    if isinstance(error, InputError):
        return Refusal(400, _text_of(error), "invalid_value", error.name)
    return Refusal(500, f"the engine failed at this request ({type(error).__name__})", "engine_error")


def refusal_of_body(errors: Sequence[ErrorDetails]) -> Refusal:
    """`errors` are what pydantic found in one body."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return Refusal(400, "the body is not valid JSON", "invalid_json")
    if not first["loc"]:
        return Refusal(400, "the body must be a JSON object", "invalid_body")
    name = first["loc"][0]
    # A value that is neither of several kinds has an error for each.
    why = " or ".join(dict.fromkeys(error["msg"] for error in errors if error["loc"][:1] == (name,)))
    return Refusal(400, f"{name}: {why}", "invalid_value", str(name))


def _text_of(error: InputError) -> str:
    value = "" if error.value is None else f" {error.value!r}"
    return f"{error.name}{value}: {error.why}"
