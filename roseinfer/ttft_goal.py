"""Admission by a predicted time to first token: `slo:ttft=250ms`. No clock; its owner holds the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from roseinfer.margin import Margin

if TYPE_CHECKING:
    from roseinfer.forecast import Forecast
    from roseinfer.ticket import Ticket

NEAR: Final = 0.5
"""Of a goal: what was expected to keep less than that says nothing of the predictions that decide."""

_NEWS_SHARE: Final = 0.1
"""Weight of the latest text in the tokens that a byte is expected to be."""


class TtftGoal:
    """Who is predicted to have its first token within `goal_s`, with a margin for what predictions turn out to mean.

    A text counts as many tokens as its bytes are expected to be, judged by the texts before it; all of them at first.
    """

    def __init__(self, goal_s: float, forecast: Forecast) -> None:
        self.goal_s = goal_s
        self.forecast = forecast
        self.margin = Margin()
        self._tokens_per_byte = 1.0
        self._has_seen_text = False

    def predict(self, ticket: Ticket, into_step_s: float | None) -> float:
        """The TTFT that the request is expected to keep, in seconds; the ticket gets the one that is as likely as not.

        `into_step_s`: since when the step that runs has run; None where that is unknown.
        """
        predicted_s = self.forecast.ttft_s(self._expected_tokens(ticket), into_step_s)
        ticket.predicted_ttft_s = predicted_s
        return predicted_s * self.margin.factor

    @property
    def is_idle(self) -> bool:
        """There is nothing left to compute, whoever still reads."""
        return not self.forecast.backlog.inflight

    def is_hopeless(self, ticket: Ticket) -> bool:
        """It would miss the goal alone as well, by the cost model as it came."""
        return self.forecast.prefill_s(self._expected_tokens(ticket)) > self.goal_s * self.forecast.correction

    def enter(self, ticket: Ticket) -> None:
        """The request is in."""
        new_tokens = ticket.cost_tokens - ticket.prompt_tokens
        ticket.work = self.forecast.enter(self._expected_tokens(ticket), new_tokens)

    def tokenized(self, ticket: Ticket, bound_tokens: int) -> None:
        """The true length of a prompt that was counted as `bound_tokens` is known."""
        if ticket.is_bound and bound_tokens:
            ratio, weight = ticket.prompt_tokens / bound_tokens, _NEWS_SHARE if self._has_seen_text else 1.0
            self._tokens_per_byte += weight * (ratio - self._tokens_per_byte)
            self._has_seen_text = True
        if ticket.work is not None:
            self.forecast.revise(ticket.work, ticket.prompt_tokens)

    def first_token(self, ticket: Ticket, now: float) -> None:
        """What was predicted is judged by what came, where it was near the goal."""
        predicted_s = ticket.predicted_ttft_s
        # Held against the margin of now, or a margin above 1 / NEAR would never hear of anything again.
        if predicted_s is not None and predicted_s * self.margin.factor >= NEAR * self.goal_s:
            self.margin.saw(predicted_s, now - ticket.reserved_s)

    def _expected_tokens(self, ticket: Ticket) -> int:
        if not ticket.is_bound:
            return ticket.prompt_tokens
        return max(1, round(ticket.prompt_tokens * self._tokens_per_byte))
