"""What one request is: its sampling parameters, its state, its stamps, and the events that it sends out.

All times are float seconds on the clock of whoever drives the core; None means "has not happened".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from roseinfer.errors import InputError, check_whole

if TYPE_CHECKING:
    from roseinfer.ticket import Ticket


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, or a stop string
    LENGTH = "length"  # max_new_tokens reached
    ABORT = "abort"  # closed by its reader, or the manager was closed
    ERROR = "error"  # tokeniser or engine failed; the event carries the exception


STOP: Final = FinishReason.STOP
LENGTH: Final = FinishReason.LENGTH
ABORT: Final = FinishReason.ABORT
"""Looked up once: on Python 3.11 every look-up of a member takes as long as a call."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen.

    temperature 0 is greedy (argmax); top_k 0 and top_p 1.0 mean "off". The random number behind a token is
    a function of (seed, position), so a stream does not depend on what it is batched with. `seed=None`
    draws a seed at submission. `stop` strings end the text where they begin and are never part of it.
    Raises InputError (a ValueError) on values out of range.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("top_k", self.top_k, 0)
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise InputError("temperature", self.temperature, "must be a finite number >= 0 (0 is greedy)")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise InputError("top_p", self.top_p, "must lie in (0, 1]")
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
            if self.seed >= 2**63:
                raise InputError("seed", self.seed, "must lie in [0, 2**63)")
        # A list could change under a running request.
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise InputError("stop", self.stop, "must be a tuple of non-empty strings")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(slots=True, eq=False)
class Request:
    """One admitted request. Owned by the core from submission on; readers get events, never this object's lists."""

    request_id: int
    params: SamplingParams
    ticket: Ticket
    seed: int  # params.seed, or the one drawn for it
    prompt_ids: Sequence[int] | None  # None while its text is being tokenised

    reserved_s: float
    priority: int = 0  # its class; 0 is the highest
    deadline_s: float | None = None  # when its first token has to be there
    tokenized_s: float | None = None  # None for a prompt that came as token ids
    first_scheduled_s: float | None = None
    finished_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)

    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    arrival: int = -1  # place in submission order, set by the core
    block_table: list[int] = field(default_factory=list)  # KV blocks, in order of position
    num_scheduled: int = 0  # tokens of prompt + output handed to steps so far
    num_to_schedule: int = 0  # all that ever will be, known once its prompt is tokenised
    cached_tokens: int | None = None  # of its prompt, found in the prefix cache when it was admitted to run
    num_pending: int = 0  # launched steps that hold this request and are not committed yet
    aborted: bool = False  # its reader is gone; it ends when its last launched step is committed
    holds_slot: bool = (
        False  # aborted by a reader that is not gone: its slot is not free until that acknowledges
    )

    @property
    def prompt_len(self) -> int:
        """Prompt tokens. Only asked of tokenised requests."""
        assert self.prompt_ids is not None
        return len(self.prompt_ids)

    def known_ids(self, start: int, end: int) -> Sequence[int]:
        """Token ids of positions start .. end - 1 of prompt + output. Only asked of tokenised requests."""
        prompt_ids = self.prompt_ids
        assert prompt_ids is not None
        n_prompt = len(prompt_ids)
        if end <= n_prompt:
            return prompt_ids[start:end]
        return [*prompt_ids[start:], *self.output_ids[max(0, start - n_prompt) : end - n_prompt]]

    @property
    def ready_s(self) -> float:
        """Since when it waits for nothing but its turn."""
        return self.reserved_s if self.tokenized_s is None else self.tokenized_s

    @property
    def max_len(self) -> int:
        """Tokens that its KV is reserved for."""
        assert self.prompt_ids is not None
        return len(self.prompt_ids) + self.params.max_new_tokens

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def last_token_s(self) -> float | None:
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def is_prefilled(self) -> bool:
        """Every prompt token was handed to a step."""
        return self.num_scheduled >= self.prompt_len


class TokenEvent(NamedTuple):
    """One token, or the end of a stream (`finish_reason` set), or both at once.

    `token_id` is None in a terminal event without a token: abort or error. `time_s` is the engine's stamp. Neither
    is set where a mailbox asked to hear of starts as well.
    """

    request_id: int
    token_id: int | None
    time_s: float
    finish_reason: FinishReason | None = None
    error: BaseException | None = None


new_event: Final[
    Callable[[tuple[int, int | None, float, FinishReason | None, BaseException | None]], TokenEvent]
] = partial(tuple.__new__, TokenEvent)
"""`TokenEvent(*values)` that runs no line of Python: every token has one."""
