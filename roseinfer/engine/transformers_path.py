"""Any other model: transformers' own modules, with our attention and packed linear layers swapped in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.engine.attention import STEP_ARGUMENT
from roseinfer.engine.linear import pack_linears
from roseinfer.engine.step_context import StepContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersModel:
    """Takes over `model`, which `probe` has switched to our attention."""

    def __init__(self, model: PreTrainedModel, *, half: bool = False) -> None:
        if model.device.type == "cpu":
            pack_linears(model, half=half)
        self._model = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> torch.Tensor:
        """ids, positions [tokens] -> logits [spans that sample, vocab]. Call under inference_mode."""
        output = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            logits_to_keep=step.last,
            use_cache=False,
            **{STEP_ARGUMENT: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def warm_up(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> None:
        """Uses every kernel once that `forward` would for a step of this size."""
        self.forward(ids, positions, step)
