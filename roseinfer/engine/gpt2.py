"""GPT-2 written out straight: the packed tokens of one step in, logits of the spans that sample out.

The architecture is that of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import layer_norm

from roseinfer.engine.attention import attention, attention_of_last
from roseinfer.engine.linear import Head, Linear, make_linear
from roseinfer.engine.step_context import StepContext

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, PreTrainedModel


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_1: _Norm
    qkv: Linear
    out: Linear
    norm_2: _Norm
    up: Linear
    down: Linear


class GPT2:
    """The weights of a transformers model, packed for its device. Computes what that model computes."""

    def __init__(self, model: GPT2LMHeadModel, *, half: bool = False) -> None:
        """`half` keeps the weights of linear layers in float16."""
        config, body = model.config, model.transformer
        self._n_heads = config.n_head
        self._tokens = body.wte.weight.detach()
        self._positions = body.wpe.weight.detach()
        self._layers = [
            _Layer(
                norm_1=_norm(block.ln_1),
                qkv=_conv1d(block.attn.c_attn, half),
                out=_conv1d(block.attn.c_proj, half),
                norm_2=_norm(block.ln_2),
                up=_conv1d(block.mlp.c_fc, half),
                down=_conv1d(block.mlp.c_proj, half),
            )
            for block in body.h
        ]
        self._norm = _norm(body.ln_f)
        self._head = Head(model.lm_head.weight.detach(), half=half)

    @staticmethod
    def computes(model: PreTrainedModel) -> bool:
        """True for a GPT-2 without the switches that other models of its class may set."""
        config: Any = model.config
        return (
            type(model).__name__ == "GPT2LMHeadModel"
            and config.activation_function in ("gelu_new", "gelu_pytorch_tanh")
            and config.scale_attn_weights
            and not config.scale_attn_by_inverse_layer_idx
            and not config.add_cross_attention
        )

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> torch.Tensor:
        """ids, positions [tokens] -> logits [spans that sample, vocab]. Call under inference_mode."""
        return self._forward(self._layers, ids, positions, step)

    def warm_up(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> None:
        """Uses every kernel once that `forward` would: one layer's, as all have the same shapes, and the head's."""
        self._forward(self._layers[:1], ids, positions, step)

    def _forward(
        self, layers: list[_Layer], ids: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        x = self._tokens[ids] + self._positions[positions]
        for index, layer in enumerate(layers):
            query, key, value = self._heads(layer.qkv(layer.norm_1(x)))
            if index + 1 == len(layers):
                # Behind the last cache write nothing but the tokens that sample is of any use.
                x = x[step.last]
                mixed = attention_of_last(query[step.last], key, value, step, index)
            else:
                mixed = attention(query, key, value, step, index)
            x = layer.out.add(mixed.flatten(1), x)
            x = layer.down.add(layer.up.gelu_tanh(layer.norm_2(x)), x)
        return self._head(self._norm(x))

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[tokens, 3 * hidden] -> three of [tokens, heads, head_dim], without a copy."""
        return qkv.view(len(qkv), 3, self._n_heads, -1).unbind(1)


def _norm(module: torch.nn.LayerNorm) -> _Norm:
    return _Norm(module.weight.detach(), module.bias.detach(), module.eps)


def _conv1d(module: torch.nn.Module, half: bool) -> Linear:
    """transformers keeps GPT-2's weights as [in, out]."""
    weight, bias = module.get_parameter("weight").detach(), module.get_parameter("bias").detach()
    return make_linear(weight.t().contiguous(), bias, half=half)
