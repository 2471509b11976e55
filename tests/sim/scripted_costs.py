"""Costs of a simulated engine that a test sets one by one, and what a run leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roseinfer.executor import StepPlan
from roseinfer.request import Request
from roseinfer.sim.virtual import Arrival, SimRun


@dataclass(frozen=True)
class Scripted:
    """Seconds by kind; what is not named takes no time."""

    step: Callable[[StepPlan], float]
    between: Callable[[StepPlan], float] = lambda plan: 0.0
    submit: Callable[[int], float] = lambda prompt_tokens: 0.0
    tokenize: Callable[[int], float] = lambda prompt_tokens: 0.0
    refuse_seconds: float = 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        return self.step(plan)

    def between_seconds(self, plan: StepPlan) -> float:
        return self.between(plan)

    def submit_seconds(self, prompt_tokens: int) -> float:
        return self.submit(prompt_tokens)

    def tokenize_seconds(self, prompt_tokens: int) -> float:
        return self.tokenize(prompt_tokens)


def one_second(plan: StepPlan) -> float:
    return 1.0


def a_second_a_token(plan: StepPlan) -> float:
    return float(sum(span.n_tokens for span in plan.spans))


def burst(size: int, prompt_tokens: int = 4, max_new_tokens: int = 1) -> list[Arrival]:
    return [Arrival(0.0, prompt_tokens, max_new_tokens) for _ in range(size)]


def served(run: SimRun) -> list[Request]:
    """The requests that got in."""
    return [sent.fate for sent in run.sent if isinstance(sent.fate, Request)]
