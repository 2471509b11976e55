"""What takes time in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from roseinfer.executor import StepPlan


class Costs(Protocol):
    """What takes time, in seconds. Asked for the steps of a run in their order, and for nothing else in any."""

    @property
    def refuse_seconds(self) -> float:
        """Of the sender, for a request that is refused."""
        ...

    def step_seconds(self, plan: StepPlan) -> float:
        """From the start of a step's computation to its end."""
        ...

    def between_seconds(self, plan: StepPlan) -> float:
        """From there until readers have the tokens and the next step is planned."""
        ...

    def submit_seconds(self, prompt_tokens: int) -> float:
        """Of the sender, for a request that gets in; with its tokenising where no worker does it."""
        ...

    def tokenize_seconds(self, prompt_tokens: int) -> float:
        """Of a tokenise worker; 0 stands for a prompt that comes as token ids."""
        ...


@dataclass(frozen=True, slots=True)
class StepsOnly:
    """Costs of a world where nothing but steps takes time."""

    step_seconds: Callable[[StepPlan], float]

    @property
    def refuse_seconds(self) -> float:
        return 0.0

    def between_seconds(self, plan: StepPlan) -> float:
        return 0.0

    def submit_seconds(self, prompt_tokens: int) -> float:
        return 0.0

    def tokenize_seconds(self, prompt_tokens: int) -> float:
        return 0.0
