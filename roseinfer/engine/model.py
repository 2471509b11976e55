"""What computes the steps."""

from __future__ import annotations

from typing import Protocol

import torch

from roseinfer.engine.step_context import StepContext


class Model(Protocol):
    """A native model, or one of transformers (`transformers_path.TransformersModel`)."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> torch.Tensor:
        """ids, positions [tokens] -> logits [spans that sample, vocab]."""
        ...

    def warm_up(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> None:
        """Uses every kernel once that `forward` would use for a step of this size."""
        ...
