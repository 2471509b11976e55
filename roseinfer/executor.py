"""The border between the scheduling core and whatever computes: steps go in, token ids and stamps come out.

`TorchExecutor` (engine/) and the tests' scripted executor stand behind it; the simulator takes its plans and steps, and
computes nothing. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple, Protocol

from roseinfer.request import Request

Clock = Callable[[], float]
"""Returns float seconds that never decrease."""

KV_BLOCK_TOKENS = 16
"""Tokens in one block of KV cache."""


class Span(NamedTuple):
    """Positions start .. start + n_tokens - 1 of a request's prompt + output, to be computed in one step.

    `samples` is True when the span reaches the last known token, so that the step yields the next one.
    """

    request: Request
    start: int
    n_tokens: int
    samples: bool


new_span: Final[Callable[[tuple[Request, int, int, bool]], Span]] = partial(tuple.__new__, Span)
"""`Span(*values)` that runs no line of Python: every request of every step has one."""

_start_of: Final = itemgetter(Span._fields.index("start"))


class Composition(NamedTuple):
    """What a step computes, in the columns of steps.parquet."""

    prefill_requests: int
    prefill_tokens: int
    prefill_attention_pairs: int
    decode_requests: int
    context_tokens: int
    cached_tokens: int


new_composition: Final[Callable[[tuple[int, int, int, int, int, int]], Composition]] = partial(
    tuple.__new__, Composition
)
"""As `new_span`: every step has one."""


class StepPlan:
    """The work of one step, decodes (n_tokens 1, past the prompt) first. Never empty, and never changed.

    `copies` are pairs of KV blocks (from, to), done before anything else is written. All are read before the first is
    written: one may stand on both sides.
    """

    __slots__ = ("_composition", "copies", "spans")

    def __init__(self, spans: list[Span], copies: Sequence[tuple[int, int]] = ()) -> None:
        self.spans = spans
        self.copies = copies
        self._composition: Composition | None = None

    def started_ids(self) -> list[int]:
        """Requests of which nothing was planned before."""
        return [request.request_id for request, start, _, _ in self.spans if start == request.cached_tokens]

    def composition(self) -> Composition:
        """What it computes, and what it found in the prefix cache. A token attends to itself and to all before it."""
        if self._composition is not None:  # asked for by what a step costs, and again by its record
            return self._composition
        prefills = prefill_tokens = attention_pairs = prefill_starts = cached_tokens = 0
        for request, start, n_tokens, _ in reversed(self.spans):
            prompt_ids = request.prompt_ids
            assert prompt_ids is not None
            if start >= len(prompt_ids):
                break  # all before it decode as well
            prefills += 1
            prefill_tokens += n_tokens
            prefill_starts += start
            attention_pairs += n_tokens * start + n_tokens * (n_tokens + 1) // 2
            if start and start == request.cached_tokens:  # its first step
                cached_tokens += start
        decodes = len(self.spans) - prefills
        context_tokens = sum(map(_start_of, self.spans)) - prefill_starts + decodes
        self._composition = new_composition(
            (prefills, prefill_tokens, attention_pairs, decodes, context_tokens, cached_tokens)
        )
        return self._composition


class StepResult(NamedTuple):
    """`token_ids` is aligned with the plan's spans, None where `samples` is False. Stamps in clock seconds."""

    token_ids: list[int | None]
    exec_start_s: float
    exec_end_s: float


class StepRecord(NamedTuple):
    """One step as it happened; stamps in clock seconds. Counts are of the moment after planning.

    `inflight_limit` is where a limit that moves stood then, None where there is none that does.
    """

    plan: StepPlan
    result: StepResult
    plan_start_s: float
    published_s: float
    waiting: int
    running: int
    kv_tokens: int
    inflight_limit: int | None = None


new_result: Final[Callable[[tuple[list[int | None], float, float]], StepResult]] = partial(
    tuple.__new__, StepResult
)
new_record: Final[
    Callable[[tuple[StepPlan, StepResult, float, float, int, int, int, int | None]], StepRecord]
] = partial(tuple.__new__, StepRecord)
"""As `new_span`: a simulation makes one of each a step."""


class StepHandle(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Blocks until the results exist. Raises what the step raised."""
        ...


class Executor(Protocol):
    """Computes steps one after another. Owned by one thread."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step; every request in it has its KV blocks in `request.block_table`.

        The step before it may still run. A span that starts past the last token that its request knows goes on from
        the token that the step before samples.
        """
        ...


class Tokenizer(Protocol):
    """Text to ids and back. One object per thread: fast tokenizers keep state that must not be shared."""

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects in front."""
        ...

    def new_decoder(self) -> IncrementalDecoder:
        """A decoder for one stream of output tokens."""
        ...


class IncrementalDecoder(Protocol):
    """Turns output ids into text piece by piece, without ever splitting a character."""

    def step(self, token_id: int) -> str:
        """The text that this token completes, "" while a character is still open."""
        ...

    def finish(self) -> str:
        """What is left at the end of the stream."""
        ...


class Engine(Protocol):
    """What a SchedulerManager needs of an engine. `InferenceEngine` has it, and so have the tests' scripted ones."""

    @property
    def max_model_len(self) -> int:
        """Tokens (prompt + output) that one request may span."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids 0 .. vocab_size - 1 are valid prompt tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def paged_attn(self) -> bool:
        """Attention reads KV blocks wherever they are, so that requests can share them."""
        ...

    @property
    def launches_async(self) -> bool:
        """A launch returns before its step is computed, so that the next one can be planned meanwhile."""
        ...

    def default_num_batched_tokens(self, max_batch_size: int) -> int:
        """Token budget of a step when the user names none; > max_batch_size."""
        ...

    def default_kv_cache_tokens(self, max_batch_size: int) -> int:
        """KV cache size when the user names none; >= max_model_len."""
        ...

    def make_tokenizer(self) -> Tokenizer:
        """A tokenizer of its own for each caller."""
        ...

    def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> Executor:
        """An executor with physical KV for `num_kv_blocks` blocks of KV_BLOCK_TOKENS tokens."""
        ...


def step_token_ids(span: Span) -> Sequence[int]:
    """The input ids of a span: prompt tokens, then output tokens."""
    return span.request.known_ids(span.start, span.start + span.n_tokens)
