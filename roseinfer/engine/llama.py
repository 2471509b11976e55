"""Llama and its relatives by configuration (SmolLM, Mistral, Qwen2, Qwen3), written out straight.

The architecture is that of Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023): RMS norm
before each part, rotary positions, grouped queries, a gated MLP. Qwen2 adds biases to q, k and v; Qwen3 a norm of
every head's query and key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import rms_norm

from roseinfer.engine.attention import attention, attention_of_last
from roseinfer.engine.linear import Head, Linear, make_linear
from roseinfer.engine.step_context import StepContext

if TYPE_CHECKING:
    from torch import nn
    from transformers import LlamaForCausalLM, PreTrainedModel

_CLASSES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_1: _Norm
    qkv: Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: Linear
    norm_2: _Norm
    gate: Linear
    up: Linear
    down: Linear


class Llama:
    """The weights of a transformers model, packed for its device. Computes what that model computes."""

    def __init__(self, model: LlamaForCausalLM, max_model_len: int, *, half: bool = False) -> None:
        """`half` keeps the weights of linear layers in float16."""
        body = model.model
        attention_0 = body.layers[0].self_attn
        self._head_dim = attention_0.head_dim
        self._n_kv_heads = model.config.num_key_value_heads
        self._tokens = body.embed_tokens.weight.detach()
        self._layers = [
            _Layer(
                norm_1=_norm(block.input_layernorm),
                qkv=_joined([block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj], half),
                query_norm=_head_norm(block.self_attn, "q_norm"),
                key_norm=_head_norm(block.self_attn, "k_norm"),
                out=_joined([block.self_attn.o_proj], half),
                norm_2=_norm(block.post_attention_layernorm),
                gate=_joined([block.mlp.gate_proj], half),
                up=_joined([block.mlp.up_proj], half),
                down=_joined([block.mlp.down_proj], half),
            )
            for block in body.layers
        ]
        self._norm = _norm(body.norm)
        self._head = Head(model.lm_head.weight.detach(), half=half)
        # Every position once: the rotations of a step are rows of this table. [positions, 1, head_dim]
        everywhere = torch.arange(max_model_len, device=self._tokens.device)[None]
        with torch.inference_mode():
            cos, sin = body.rotary_emb(self._tokens[:1], everywhere)
        self._cos, self._sin = cos[0, :, None], sin[0, :, None]

    @staticmethod
    def computes(model: PreTrainedModel) -> bool:
        """True for the known classes with the known activation."""
        config: Any = model.config
        return type(model).__name__ in _CLASSES and config.hidden_act == "silu"

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> torch.Tensor:
        """ids, positions [tokens] -> logits [spans that sample, vocab]. Call under inference_mode."""
        return self._forward(self._layers, ids, positions, step)

    def warm_up(self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> None:
        """Uses every kernel once that `forward` would: one layer's, as all have the same shapes, and the head's."""
        self._forward(self._layers[:1], ids, positions, step)

    def _forward(
        self, layers: list[_Layer], ids: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        x = self._tokens[ids]
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(layers):
            query, key, value = self._heads(layer, layer.qkv(layer.norm_1(x)), cos, sin)
            if index + 1 == len(layers):
                # Behind the last cache write nothing but the tokens that sample is of any use.
                x = x[step.last]
                mixed = attention_of_last(query[step.last], key, value, step, index)
            else:
                mixed = attention(query, key, value, step, index)
            x = layer.out.add(mixed.flatten(1), x)
            h = layer.norm_2(x)
            x = layer.down.add(layer.up.multiply(h, layer.gate.silu(h)), x)
        return self._head(self._norm(x))

    def _heads(
        self, layer: _Layer, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[tokens, (heads + 2 kv_heads) * head_dim] -> query, key, value [tokens, heads or kv_heads, head_dim]."""
        heads = qkv.view(len(qkv), -1, self._head_dim)
        query, key, value = heads.tensor_split([-2 * self._n_kv_heads, -self._n_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021), the halves of a head being the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin)


def _norm(module: nn.Module) -> _Norm:
    return _Norm(module.get_parameter("weight").detach(), module.variance_epsilon)  # type: ignore[arg-type]


def _head_norm(attention_module: nn.Module, name: str) -> _Norm | None:
    module = getattr(attention_module, name, None)
    return None if module is None else _norm(module)


def _joined(modules: list[nn.Linear], half: bool) -> Linear:
    """One product in place of several that have the same input."""
    weight = torch.cat([module.weight.detach() for module in modules])
    biases = [module.bias for module in modules]
    if any(bias is None for bias in biases):
        return make_linear(weight, None, half=half)
    return make_linear(weight, torch.cat([bias.detach() for bias in biases]), half=half)
