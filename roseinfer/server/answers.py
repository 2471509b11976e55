"""Answers as bytes on the wire: the events of a stream, or one body.

What all chunks of an answer share is put together once; a chunk costs the escaping of its text.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple, Protocol

from roseinfer.server.refusals import Refusal

_DONE = "data: [DONE]\n\n"


class Outcome(NamedTuple):
    """How an answer ended: tokens counted from ids, durations in seconds (None: never got so far)."""

    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def timings(self) -> dict[str, Any]:
        return {
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


class Answer(Protocol):
    """One answer in the form of one API."""

    stream_type: str
    """Content type of its stream."""

    def begin(self) -> str:
        """What a stream starts with."""
        ...

    def piece(self, text: str) -> str:
        """Text as a stream carries it."""
        ...

    def end(self, outcome: Outcome) -> str:
        """What a stream ends with."""
        ...

    def failure(self, refusal: Refusal) -> str | None:
        """How a stream that has begun ends with an error; None: by breaking off."""
        ...

    def whole(self, text: str, outcome: Outcome) -> str:
        """The body of an answer that is no stream."""
        ...


class OpenAIAnswer:
    """`text_completion` or, with `chat`, `chat.completion`.

    Usage comes in a chunk of its own where it was asked for, and brings the timings; else the chunk with the
    finish reason has them.
    """

    stream_type = "text/event-stream; charset=utf-8"

    def __init__(
        self, request_id: str, created_s: int, model: str, *, chat: bool, include_usage: bool
    ) -> None:
        self._chat = chat
        self._include_usage = include_usage
        self._kind = "chat.completion" if chat else "text_completion"
        self._about = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if chat else self._kind,
            "created": created_s,
            "model": model,
        }
        head = json.dumps(self._about)[:-1]
        self._usage = ', "usage": null' if include_usage else ""
        content = '{"index": 0, "delta": {"content": ' if chat else '{"index": 0, "text": '
        self._before = f'data: {head}, "choices": [{content}'
        after = "}" if chat else ""
        self._after = f'{after}, "logprobs": null, "finish_reason": null}}]{self._usage}}}\n\n'

    def begin(self) -> str:
        return self._choice({"delta": {"role": "assistant", "content": ""}}, None) if self._chat else ""

    def piece(self, text: str) -> str:
        return f"{self._before}{quoted(text)}{self._after}" if text else ""

    def end(self, outcome: Outcome) -> str:
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        if not self._include_usage:
            return self._choice(content, outcome.finish_reason, timings=outcome.timings) + _DONE
        usage = {**self._about, "choices": [], "usage": outcome.usage, "timings": outcome.timings}
        return f"{self._choice(content, outcome.finish_reason)}data: {json.dumps(usage)}\n\n{_DONE}"

    def failure(self, refusal: Refusal) -> str | None:
        return f"data: {refusal.body}\n\n"

    def whole(self, text: str, outcome: Outcome) -> str:
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        choice = {
            "index": 0,
            **(content if self._chat else {"text": text}),
            "logprobs": None,
            "finish_reason": outcome.finish_reason,
        }
        body = {"choices": [choice], "usage": outcome.usage, "timings": outcome.timings}
        return json.dumps({**self._about, "object": self._kind, **body})

    def _choice(self, content: dict[str, Any], finish_reason: str | None, **more: Any) -> str:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return f"data: {json.dumps({**self._about, 'choices': [choice], **usage, **more})}\n\n"


class PlainAnswer:
    """`/generate`: a stream is the bare text, a whole answer JSON."""

    stream_type = "text/plain; charset=utf-8"

    def begin(self) -> str:
        return ""

    def piece(self, text: str) -> str:
        return text

    def end(self, outcome: Outcome) -> str:
        return ""

    def failure(self, refusal: Refusal) -> str | None:
        return None

    def whole(self, text: str, outcome: Outcome) -> str:
        about = {"finish_reason": outcome.finish_reason, "usage": outcome.usage, "timings": outcome.timings}
        return json.dumps({"text": text, **about})
