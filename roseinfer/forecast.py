"""When would a request that came now have its first token? Predicted from sums over what is in flight, in O(1).

The engine computes at most T tokens a step, first come first served, and has S seats, or as many as its KV cache holds
requests of the mean size of those in flight. A newcomer waits for the end of the step that runs (half of it, where
nobody says when it began), and then for so many steps, the one of its own first token included:

    by tokens    A / (T - riders), rounded up: A prompt tokens are to be prefilled up to its own last one; a rider
                 decodes, at a token a step, and up to S - 1 do
    by seats     (W - (S - 1) r) / S plus its own, where S are in flight: those ahead hold seats for W steps, one a
                 token, and when the newcomer's comes free the others are held for r more. Seats that come free at any
                 phase have r = (E[h^2] / E[h] - 1) / 2, h the tokens of a request: the residual life of a renewal
                 process, in whole steps.

The larger count holds. It lasts the constants of these steps, the prefill of all ahead and its own, the decodes that
ride on them, and the prompts behind it that share its last step: as many tokens a step as came since the last step,
or as come on average, as far as there is room. So a burst shows itself while it comes.

What no prediction can know is left as its error: who comes later, and noise, a fifth of a TTFT or so in the simulator.
Who lets in what is predicted to just meet a goal therefore sees half of it miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from roseinfer.backlog import Backlog, Work, attended

if TYPE_CHECKING:
    from roseinfer.sim.cost_model import BetweenStepsCost, StepCost

__all__ = ["Forecast", "Work"]

OBSERVED: Final = 16
"""Steps that a correction is judged by, by their sums: a queue waits for all of a step that stalls."""

GAIN: Final = 0.25
"""The part of what they were off by, in logarithms, that is corrected at a time."""

LARGEST_CORRECTION: Final = 4.0


class Forecast:
    """Of an engine with `seats` and `kv_blocks` that computes up to `max_num_batched_tokens` a step.

    Steps take `step` and `between`. Seconds are multiplied by `correction`, which follows how far predictions were off.
    No clock, no lock: whoever reserves guards it.
    """

    def __init__(
        self,
        step: StepCost,
        between: BetweenStepsCost,
        seats: int,
        max_num_batched_tokens: int,
        kv_blocks: int,
    ) -> None:
        self.step = step
        self.between = between
        self.seats = seats
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_blocks = kv_blocks
        self.backlog = Backlog()
        self.correction = 1.0
        self._constant_s = step.constant_s + between.constant_s
        self._n_observed = 0
        self._predicted_s = self._actual_s = 0.0  # of these

    def enter(self, prompt_tokens: int, new_tokens: int) -> Work:
        """A slot was reserved, for at most so many prompt tokens and for `new_tokens`, 1 or more."""
        return self.backlog.enter(prompt_tokens, new_tokens)

    def revise(self, work: Work, prompt_tokens: int) -> None:
        """Its prompt is tokenised, and has so many tokens."""
        self.backlog.revise(work, prompt_tokens)

    def start(self, work: Work, cached_tokens: int = 0) -> None:
        """It has taken a seat, and is in the step that begins; so many tokens of its prompt need not be computed."""
        self.backlog.start(work, cached_tokens)

    def advance(self, work: Work, n_tokens: int) -> None:
        """A step has computed so many tokens of it, of the prompt first. Called once a step and request."""
        self.backlog.advance(work, n_tokens)

    def leave(self, work: Work) -> None:
        """Its slot was given back, however it ended. Harmless when called again."""
        self.backlog.leave(work)

    def prefill_s(self, prompt_tokens: int) -> float:
        """TTFT in an idle engine, in seconds: all of its steps, with their constants."""
        return self.correction * self._alone_s(prompt_tokens)

    def ttft_s(self, prompt_tokens: int, into_step_s: float | None = None) -> float:
        """TTFT of a request that came now, in seconds, `into_step_s` after the step that runs began (None: unknown)."""
        if not self.backlog.inflight:
            return self.prefill_s(prompt_tokens)
        running_s, rest_s = self._queued_s(prompt_tokens)
        running_s *= self.correction
        left_s = running_s / 2 if into_step_s is None else max(running_s - into_step_s, 0.0)
        return left_s + self.correction * rest_s

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """What a step was predicted to take by the correction of now, and what it took, both in seconds.

        Of steps, not of whole TTFTs: these were predicted by the correction of long ago, and a deep queue would correct
        many times what was wrong once.
        """
        if predicted_s > 0.0 and actual_s > 0.0:
            self._n_observed += 1
            self._predicted_s += predicted_s
            self._actual_s += min(actual_s, LARGEST_CORRECTION * predicted_s)
            if self._n_observed == OBSERVED:
                changed = self.correction * (self._actual_s / self._predicted_s) ** GAIN
                self.correction = min(max(changed, 1 / LARGEST_CORRECTION), LARGEST_CORRECTION)
                self._n_observed, self._predicted_s, self._actual_s = 0, 0.0, 0.0

    def _own_s(self, prompt_tokens: int, steps: int) -> float:
        """Seconds that a prefill in so many chunks adds to their steps. Its token is there before the last one ends."""
        step, between = self.step, self.between
        computed_s = step.prefill_token_s * prompt_tokens + step.attention_pair_s * attended(0, prompt_tokens)
        return computed_s + between.request_s * (steps - 1) - between.constant_s

    def _alone_s(self, prompt_tokens: int) -> float:
        steps = -(-prompt_tokens // self.max_num_batched_tokens)
        return steps * self._constant_s + self._own_s(prompt_tokens, steps)

    def _queued_s(self, prompt_tokens: int) -> tuple[float, float]:
        """The whole step that runs, and from its end to the first token of a newcomer, without correction."""
        log, step = self.backlog, self.step
        seats = min(self.seats, max(self.kv_blocks * log.inflight // log.kv_blocks, 1))
        riders = log.running - log.half_prefilled
        budget = self.max_num_batched_tokens - min(log.running, seats - 1)
        context_s = step.context_token_s * log.context_tokens / max(log.decodes, 1)
        decode_s = step.decode_request_s + self.between.request_s + context_s
        prefill_s = step.prefill_token_s * log.prefill_tokens + step.attention_pair_s * log.pairs
        token_s = prefill_s / max(log.prefill_tokens, 1)

        running_tokens = min(log.half_tokens, budget)  # prefilled in the step that runs
        running_s = self._constant_s + token_s * running_tokens + decode_s * riders if log.running else 0.0
        tokens = log.prefill_tokens - running_tokens + prompt_tokens
        decodes = log.decodes - riders  # left when it is over
        own_steps = -(-prompt_tokens // budget)
        steps: float = -(-tokens // budget)
        came_tokens = max(log.came_tokens, log.inflow_tokens) * (steps - 0.5)
        shared_tokens = min(steps * budget - tokens, came_tokens)
        if log.inflight < seats:
            each = decodes / log.inflight
            waiting = log.inflight - log.running  # these start one by one, and so ride half of the steps
            decoded = min(decodes, riders * min(steps, each) + waiting * min(steps / 2, each))
        else:
            others = seats - 1
            left = others * (log.squared_seat_steps / log.seat_steps - 1) / 2
            held = log.decodes + log.prefilling
            seat_steps = max((held - left) / seats - 1, 0.0) + own_steps
            if seat_steps > steps:
                steps, shared_tokens = seat_steps, 0.0
            else:
                left -= others * (steps - seat_steps)
            decoded = max(0.0, decodes - max(0.0, left))
        rest_s = (
            steps * self._constant_s
            + (prefill_s - token_s * running_tokens)
            + self._own_s(prompt_tokens, own_steps)
            + token_s * shared_tokens
            + decode_s * decoded
        )
        return running_s, rest_s
