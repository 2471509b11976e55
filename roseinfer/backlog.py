"""What is in flight has left to compute, request by request and in sums.

Whole numbers only (tokens, attention pairs, context tokens): however many came and went, the sums come back to
exactly 0. Pure: no clock, no lock. Every call is O(1).
"""

from __future__ import annotations

from typing import Final

from roseinfer.kv_cache import blocks_for

INFLOW_GAIN: Final = 0.1
"""Weight of the newest step in the average of what comes in a step."""


def attended(start: int, n_tokens: int) -> int:
    """Positions that so many tokens from `start` attend to: each to itself and to all before it."""
    return n_tokens * start + n_tokens * (n_tokens + 1) // 2


class Work:
    """What one request has left to compute. Only its Backlog changes it."""

    __slots__ = ("done_tokens", "has_left", "is_started", "last_step", "new_tokens", "prompt_tokens")

    def __init__(self, prompt_tokens: int, new_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.done_tokens = 0  # of the prompt, then of the output
        self.is_started = False
        self.has_left = False
        self.last_step = -1  # that it was in

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens left."""
        return max(self.prompt_tokens - self.done_tokens, 0)

    @property
    def pairs(self) -> int:
        """Attention pairs of these."""
        return attended(self.done_tokens, self.prefill_tokens)

    @property
    def decodes(self) -> int:
        """Decodes left. The prefill gives the first token, and the last is never computed on."""
        return self.prompt_tokens + self.new_tokens - 1 - max(self.done_tokens, self.prompt_tokens)

    @property
    def context_tokens(self) -> int:
        """Positions that these attend to."""
        return attended(max(self.done_tokens, self.prompt_tokens), self.decodes)


class Backlog:
    """Sums over the Work in flight; `half_...` over those of it that run and are not prefilled to the end."""

    def __init__(self) -> None:
        self.inflight = 0
        self.running = 0
        self.prefilling = 0  # waiting or half-prefilled
        self.half_prefilled = 0
        self.half_tokens = 0
        self.prefill_tokens = self.pairs = self.decodes = self.context_tokens = 0  # left
        self.seat_steps = self.squared_seat_steps = 0  # of whole requests: a step a token
        self.kv_blocks = 0  # that these take once they run
        self.came_tokens = 0  # of prompts, since the last step
        self.inflow_tokens = 0.0  # of prompts in a step, on average
        self._steps = 0
        self._has_begun = False  # a step in which somebody takes a seat

    def enter(self, prompt_tokens: int, new_tokens: int) -> Work:
        # As `_count` does, without asking the work what is left of it: in the caller's thread every microsecond counts.
        self.inflight += 1
        self.prefilling += 1
        self.prefill_tokens += prompt_tokens
        self.pairs += prompt_tokens * (prompt_tokens + 1) // 2
        self.decodes += new_tokens - 1
        self.context_tokens += attended(prompt_tokens, new_tokens - 1)
        self.seat_steps += new_tokens
        self.squared_seat_steps += new_tokens * new_tokens
        self.kv_blocks += blocks_for(prompt_tokens + new_tokens)
        self.came_tokens += prompt_tokens
        return Work(prompt_tokens, new_tokens)

    def revise(self, work: Work, prompt_tokens: int) -> None:
        if not work.has_left and not work.is_started:
            self._count(work, -1)
            work.prompt_tokens = prompt_tokens
            self._count(work, 1)

    def start(self, work: Work, cached_tokens: int = 0) -> None:
        """`cached_tokens`, fewer than its prompt has, are there already. That is no step of its own."""
        if not work.has_left and not work.is_started:
            work.is_started = True
            work.done_tokens = cached_tokens
            self.prefill_tokens -= cached_tokens
            self.pairs -= attended(0, cached_tokens)
            self.running += 1
            self.half_prefilled += 1
            self.half_tokens += work.prefill_tokens
            self._has_begun = True

    def advance(self, work: Work, n_tokens: int) -> None:
        if work.has_left or not work.is_started:
            return
        if self._has_begun or work.last_step == self._steps:
            self._end_step()
        work.last_step = self._steps
        prefilled = min(n_tokens, work.prefill_tokens)
        if prefilled:
            self.prefill_tokens -= prefilled
            self.half_tokens -= prefilled
            self.pairs -= attended(work.done_tokens, prefilled)
            work.done_tokens += prefilled
            is_over = not work.prefill_tokens
            self.prefilling -= is_over
            self.half_prefilled -= is_over
        decoded = min(n_tokens - prefilled, work.decodes)
        if decoded:
            self.decodes -= decoded
            self.context_tokens -= attended(work.done_tokens, decoded)
            work.done_tokens += decoded

    def leave(self, work: Work) -> None:
        if not work.has_left:
            self._count(work, -1)
            work.has_left = True

    def _count(self, work: Work, sign: int) -> None:
        prefill_tokens = work.prefill_tokens
        is_prefilling = prefill_tokens > 0
        self.inflight += sign
        self.prefilling += sign * is_prefilling
        self.prefill_tokens += sign * prefill_tokens
        self.pairs += sign * work.pairs
        self.decodes += sign * work.decodes
        self.context_tokens += sign * work.context_tokens
        self.seat_steps += sign * work.new_tokens
        self.squared_seat_steps += sign * work.new_tokens**2
        self.kv_blocks += sign * blocks_for(work.prompt_tokens + work.new_tokens)
        if work.is_started:
            self.running += sign
            self.half_prefilled += sign * is_prefilling
            self.half_tokens += sign * prefill_tokens

    def _end_step(self) -> None:
        """Seen from the first request that is told of it: it was in the step before too, or somebody took a seat."""
        self._steps += 1
        self._has_begun = False
        self.inflow_tokens += INFLOW_GAIN * (self.came_tokens - self.inflow_tokens)
        self.came_tokens = 0
