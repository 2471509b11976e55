"""Bodies of requests: what is taken of each API, and what the engine is asked for in return.

A parameter that is not served is refused by name, unless it asks for what happens anyway (`n: 1`, or null).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from roseinfer.errors import InputError
from roseinfer.request import SamplingParams

DEFAULT_COMPLETION_TOKENS: Final = 16  # the API's own
DEFAULT_CHAT_TOKENS: Final = 256  # the API's is all that fits, but KV cache is reserved for it beforehand

LOWEST_PRIORITY: Final = 255
"""Each class that was ever asked for is a lane of its own in the queue."""

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (False, True),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Parameters of the APIs and of other servers that are not served, with the values that change nothing."""


def refuse_doubled_names(content: bytes) -> None:
    """Raises InputError for a name that a JSON object holds twice: all parsers drop one of its values unsaid.

    `content` is valid JSON. Token ids hold no name, and would take as long as all else.
    """
    _NAMES.decode(_NUMBERS.sub(b"[]", content).decode())


def _without_doubles(pairs: list[tuple[str, object]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise InputError(name, None, "is there twice")
            seen.add(name)


_NUMBERS: Final = re.compile(rb"\[[-+.\deE,\s]*\]")
_NAMES: Final = json.JSONDecoder(object_pairs_hook=_without_doubles)


class BodyLimits(NamedTuple):
    """What a request may ask for. `body_bytes` is judged before the body is read, the others once it is parsed."""

    body_bytes: int = 4 * 2**20
    prompt_chars: int = 2**20
    output_tokens: int = 2**20  # the context bounds it further
    stop_strings: int = 16
    stop_chars: int = 256


class Wanted(NamedTuple):
    """A request as the engine and the answer need it."""

    prompt: str | Sequence[int]
    params: SamplingParams
    stream: bool
    include_usage: bool
    priority: int = 0


class _Strict(BaseModel):
    """Nothing is converted: "8" and 8.0 are no whole numbers. Unknown fields are kept, and judged by name."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def refuse_unserved(self) -> None:
        """Raises InputError for the first field that asks for what is not served."""
        for name, value in (self.model_extra or {}).items():
            neutral = NEUTRAL.get(name, ())
            if value is not None and not any(value == same and type(value) is type(same) for same in neutral):
                only = f", other than as {' or '.join(map(repr, neutral))}" if neutral else ""
                raise InputError(name, None, f"this parameter is not supported{only}")


Tokens = Annotated[int, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[int], Field(fail_fast=True)]


class Sampling(_Strict):
    """What the three APIs share. The OpenAI ones sample unless told otherwise."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, description="0 and -1 mean off.")] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=0, le=LOWEST_PRIORITY, description="0 is the highest.")] | None = None
    stream: bool | None = None

    def params(
        self, max_new_tokens: int, name: str, temperature: float, limits: BodyLimits
    ) -> SamplingParams:
        """`name` is what the request calls max_new_tokens; `temperature` is for those who name none."""
        if max_new_tokens > limits.output_tokens:
            raise InputError(name, max_new_tokens, f"this server's limit is {limits.output_tokens}")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > limits.stop_strings:
            raise InputError("stop", None, f"{len(stop)} stop strings, the limit is {limits.stop_strings}")
        if any(len(one) > limits.stop_chars for one in stop):
            raise InputError("stop", None, f"a stop string has over {limits.stop_chars} characters")
        return SamplingParams(
            max_new_tokens,
            temperature if self.temperature is None else self.temperature,
            max(0, self.top_k or 0),
            1.0 if self.top_p is None else self.top_p,
            self.seed,
            tuple(stop),
            bool(self.ignore_eos),
        )


class StreamOptions(_Strict):
    include_usage: bool | None = None


class OpenAISampling(Sampling):
    """What both OpenAI APIs take."""

    model: str | None = None
    max_tokens: Tokens | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Raises InputError for options without a stream, as the API does."""
        if self.stream_options is None:
            return False
        self.stream_options.refuse_unserved()
        if not self.stream:
            raise InputError("stream_options", None, "only a stream has options: set stream")
        return bool(self.stream_options.include_usage)


class CompletionBody(OpenAISampling):
    """`POST /v1/completions`."""

    prompt: Annotated[
        str | Ids | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Ids], Field(fail_fast=True)],
        Field(description="Text or token ids, or a list of one of these."),
    ]

    def wanted(self, limits: BodyLimits) -> Wanted:
        """Raises InputError for what is not served."""
        self.refuse_unserved()
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise InputError("prompt", None, f"holds {len(prompt)} prompts: send a request for each")
            prompt = prompt[0]
        tokens = self.max_tokens or min(DEFAULT_COMPLETION_TOKENS, limits.output_tokens)
        params = self.params(tokens, "max_tokens", 1.0, limits)
        checked = _checked(prompt, "prompt", limits)
        return Wanted(checked, params, bool(self.stream), self.include_usage, self.priority or 0)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        self.refuse_unserved()
        content = (
            self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(OpenAISampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None

    def plain_messages(self) -> list[dict[str, str]]:
        """Raises InputError for what is not served."""
        self.refuse_unserved()
        return [message.plain() for message in self.messages]

    def wanted(self, prompt: str, limits: BodyLimits) -> Wanted:
        """`prompt` is what the messages became. Raises InputError for what is not served."""
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise InputError(
                "max_completion_tokens", None, "is max_tokens by its newer name: send one of them"
            )
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        asked = self.max_tokens or self.max_completion_tokens
        tokens = asked or min(DEFAULT_CHAT_TOKENS, limits.output_tokens)
        params = self.params(tokens, name, 1.0, limits)
        checked = _checked(prompt, "messages", limits)
        return Wanted(checked, params, bool(self.stream), self.include_usage, self.priority or 0)


class GenerateBody(Sampling):
    """`POST /generate`: greedy unless told otherwise; a stream of it is plain text."""

    prompt: str | Ids
    max_new_tokens: Tokens | None = None

    def wanted(self, limits: BodyLimits) -> Wanted:
        """Raises InputError for what is not served."""
        self.refuse_unserved()
        tokens = self.max_new_tokens or min(DEFAULT_COMPLETION_TOKENS, limits.output_tokens)
        params = self.params(tokens, "max_new_tokens", 0.0, limits)
        checked = _checked(self.prompt, "prompt", limits)
        return Wanted(checked, params, bool(self.stream), True, self.priority or 0)


def _checked(prompt: str | Sequence[int], name: str, limits: BodyLimits) -> str | Sequence[int]:
    if isinstance(prompt, str) and len(prompt) > limits.prompt_chars:
        raise InputError(name, None, f"{len(prompt)} characters, the limit is {limits.prompt_chars}")
    return prompt
