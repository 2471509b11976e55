"""What an answer of an OpenAI API says: text and when it came, counts, how it ended, what went wrong.

Reads streams and whole answers of completions and of chat completions, and the errors of the servers that speak them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any, Final

from roseinfer.bench.http.exchange import BUSY, Failure, HttpAttempt
from roseinfer.bench.http.sse import Event, EventParser, SseError

DONE: Final = "[DONE]"
MOST_ERROR_BYTES: Final = 64 * 1024
MOST_WHOLE_BYTES: Final = 64 * 1024 * 1024
MOST_ERROR_CHARACTERS: Final = 300
MOST_TOKENS: Final = 1 << 40
"""A server that says more does not count."""

_GENERATED: Final = ("content", "reasoning_content", "reasoning", "refusal")
_WHOLE: Final = ("stop", "length", "tool_calls", "function_call", "content_filter", "eos_token")
"""Of finish_reason. After any other (abort, error) the server gave the answer up."""

_decode: Final = json.JSONDecoder().decode


class AnswerReader:
    """Fills the attempt of one exchange from the body of its answer.

    An event counts as a delivery when it holds generated text: not a role, not usage alone, not an empty string.
    A stream `is_done` once it has said [DONE], whatever becomes of its connection.
    """

    def __init__(self, attempt: HttpAttempt, status_code: int, headers: Mapping[str, str]) -> None:
        self._attempt = attempt
        self._headers = headers
        self._events = EventParser()
        self._whole: list[bytes] = []
        self._whole_bytes = 0
        self._is_ok = 200 <= status_code < 300
        encoding = headers.get("content-encoding", "identity").lower()
        self._is_plain = encoding == "identity"
        is_json = "json" in headers.get("content-type", "").lower()
        self._is_stream = self._is_ok and self._is_plain and not is_json
        self.is_done = False
        self._has_events = False
        self._said_tokens = 0  # completion tokens so far, where each chunk says so
        attempt.status_code = status_code
        if self._is_ok and not self._is_plain:
            self._fail(Failure.BAD_ANSWER, f"Content-Encoding {encoding!r} was not asked for")

    def read(self, body: bytes, received_s: float) -> None:
        """Takes what one read brought of the body."""
        if self._is_stream:
            try:
                events = self._events.feed(body)
            except SseError as error:
                self._fail(Failure.BAD_ANSWER, str(error))
                self._is_stream = False
                return
            for event in events:
                self._event(event, received_s)
            return
        room = (MOST_WHOLE_BYTES if self._is_ok else MOST_ERROR_BYTES) - self._whole_bytes
        if room > 0:
            self._whole.append(body[:room])
            self._whole_bytes += len(self._whole[-1])

    def end(self, received_s: float) -> None:
        """The body was there to its end."""
        attempt = self._attempt
        if self._is_stream:
            for event in self._events.end():
                self._event(event, received_s)
            if attempt.failure is None and not self._has_events:
                kind = self._headers.get("content-type", "none")
                self._fail(Failure.BAD_ANSWER, f"no event in an answer of Content-Type {kind}")
            elif attempt.failure is None and not self.is_done and attempt.finish_reason is None:
                self._fail(Failure.CLOSED, "the stream ended without a finish_reason or [DONE]")
        elif self._is_ok and attempt.failure is None:
            answer = _json(b"".join(self._whole).decode("utf-8", "replace"))
            if not _is_answer(answer):
                self._fail(Failure.BAD_ANSWER, f"no answer of this API: {_short(str(answer))}")
            else:
                self._object(answer, received_s)
        if attempt.failure is None and attempt.finish_reason not in (None, *_WHOLE):
            self._fail(Failure.STREAM_ERROR, f"finish_reason {attempt.finish_reason}")
        self.settle()

    def settle(self) -> None:
        """No more will come, whether it was all or not: what follows from all of it."""
        attempt = self._attempt
        if not self._is_ok:
            self._explain_status()
        if attempt.deliveries and attempt.output_tokens == 0:
            attempt.output_tokens = None  # text is made of tokens: that server does not count
        if any(tokens is None for _, tokens in attempt.deliveries):
            attempt.deliveries = [(received_s, None) for received_s, _ in attempt.deliveries]

    def _event(self, event: Event, received_s: float) -> None:
        if self.is_done or not event.data:
            return
        self._has_events = True
        if event.data.startswith(DONE):
            self.is_done = True
            return
        answer = _json(event.data)
        if event.kind == "error":
            self._say_error(answer if isinstance(answer, dict) else {"message": event.data})
        elif not isinstance(answer, dict):
            self._fail(Failure.BAD_ANSWER, f"an event that is no JSON object: {_short(event.data)}")
        else:
            self._object(answer, received_s)

    def _object(self, answer: dict[str, Any], received_s: float) -> None:
        """A chunk of a stream, or a whole answer."""
        if answer.get("error") or answer.get("object") == "error":
            self._say_error(answer)
            return
        attempt = self._attempt
        has_text = False
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            if _has_text(choice):
                has_text = True
            if choice.get("finish_reason") is not None:
                self._finish(choice["finish_reason"], choice.get("error"))
        usage = answer.get("usage")
        said = self._usage(usage) if isinstance(usage, dict) else None
        if isinstance(answer.get("timings"), dict):
            attempt.timings = answer["timings"]
        if has_text:
            new = None if said is None else said - self._said_tokens
            self._said_tokens = self._said_tokens if said is None else said
            attempt.deliveries.append((received_s, new if new is not None and new > 0 else None))

    def _finish(self, reason: Any, error: Any) -> None:
        """How a choice ended. What came with it may say why: its `error`, or a reason that is an object itself."""
        attempt = self._attempt
        if isinstance(reason, dict):
            reason, error = reason.get("type"), reason
        attempt.finish_reason = _short(str(reason))
        if isinstance(error, dict) and attempt.finish_reason not in _WHOLE:
            attempt.error_code = _text(error.get("code")) or _text(error.get("status_code"))

    def _usage(self, usage: dict[str, Any]) -> int | None:
        """Returns the completion tokens so far, if it says."""
        attempt = self._attempt
        details = usage.get("prompt_tokens_details")
        for name, count in (
            ("prompt_tokens", _count(usage.get("prompt_tokens"))),
            ("output_tokens", _count(usage.get("completion_tokens"))),
            ("cached_tokens", _count(details.get("cached_tokens")) if isinstance(details, dict) else None),
        ):
            if count is not None:
                setattr(attempt, name, count)
        return _count(usage.get("completion_tokens"))

    def _say_error(self, answer: dict[str, Any]) -> None:
        message, code, kind = _error_of(answer)
        attempt = self._attempt
        is_first = attempt.failure is None
        if is_first:
            attempt.error_code = code
        self._fail(Failure.STREAM_ERROR, message or "an error without a message")
        if is_first and attempt.is_busy:
            attempt.reject_reason = kind

    def _explain_status(self) -> None:
        attempt = self._attempt
        text = b"".join(self._whole).decode("utf-8", "replace") if self._is_plain else ""
        answer = _json(text)
        message, code, kind = _error_of(answer) if isinstance(answer, dict) else (text, None, None)
        where = self._headers.get("location")
        attempt.failure = Failure.STATUS
        attempt.error = _short(f"Location: {where}" if where is not None else message) or None
        attempt.error_code = code
        if attempt.status_code in BUSY:
            named = code if code is not None and not code.isdigit() else None
            attempt.reject_reason = _text(self._headers.get("x-roseinfer-reason")) or named or kind
        attempt.retry_after_s = retry_after_s(self._headers)

    def _fail(self, failure: Failure, error: str) -> None:
        """The first failure counts."""
        if self._attempt.failure is None:
            self._attempt.failure, self._attempt.error = failure, _short(error)


def count_single_tokens(attempts: Iterable[HttpAttempt]) -> None:
    """Fills in one token for every delivery of a server that sends its tokens one by one and does not say so.

    It is taken for such a one only if every complete answer whose chunks nobody counted has as many tokens as chunks:
    a chunk with text holds one at least. Of any other server nobody knows, and the tokens stay None.
    """
    uncounted = [
        attempt
        for attempt in attempts
        if attempt.failure is None and attempt.deliveries and attempt.deliveries[0][1] is None
    ]
    if all(attempt.output_tokens == len(attempt.deliveries) for attempt in uncounted):
        for attempt in uncounted:
            attempt.deliveries = [(received_s, 1) for received_s, _ in attempt.deliveries]


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """How long the server asks to wait: `retry-after-ms`, else Retry-After in seconds or as a date. None: not said."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
        if isfinite(seconds) and seconds >= 0:
            return seconds
    try:
        until = parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, OverflowError):
        return None
    until = until.replace(tzinfo=UTC) if until.tzinfo is None else until
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    if delta is None:
        delta = choice.get("message")
    if not isinstance(delta, dict):
        return False
    for name in _GENERATED:
        if delta.get(name):
            return True
    calls = delta.get("tool_calls") or [{"function": delta.get("function_call")}]
    return isinstance(calls, list) and any(
        isinstance(call, dict)
        and isinstance(function := call.get("function"), dict)
        and any(function.values())
        for call in calls
    )


def _is_answer(answer: object) -> bool:
    return isinstance(answer, dict) and ("choices" in answer or bool(answer.get("error")))


def _error_of(answer: dict[str, Any]) -> tuple[str, str | None, str | None]:
    """Message, code and type of an error body: under `error`, or flat, or FastAPI's `detail`."""
    error = answer.get("error") or answer
    if not isinstance(error, dict):
        return str(error), _text(answer.get("code")), _text(answer.get("type"))
    message = error.get("message") or error.get("detail")
    return str(message or ""), _text(error.get("code")), _text(error.get("type"))


def _text(value: object) -> str | None:
    return (_short(str(value)) or None) if isinstance(value, str | int) else None


def _count(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MOST_TOKENS else None


def _json(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return _decode(text)
    except (ValueError, RecursionError):
        return None


def _short(text: str) -> str:
    """One line of what a server said, without the halves of characters that JSON can hold and no file can."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    return line if len(line) <= MOST_ERROR_CHARACTERS else line[: MOST_ERROR_CHARACTERS - 1] + "…"
