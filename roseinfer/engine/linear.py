"""Linear layers with weights packed for oneDNN: several times faster than a plain product at small batches on CPU.

The operators are private to torch, so they are tried and compared once per dtype; plain layers stay otherwise.
A step of a few tokens mostly reads weights: kept in float16 (FBGEMM) they are half as many bytes. With layers as large
as GPT-2's and SmolLM2's, on two cores with AVX2, those products are the faster ones from 1 row to 512.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn
from torch.nn.functional import gelu, linear, pad, silu
from transformers.pytorch_utils import Conv1D

_PACK_FOR_ROWS = 256
"""Batch size that the packed layout is chosen for; it serves all others."""

LARGEST_HALF = 65504.0
"""The largest number in float16."""

_HEAD_MULTIPLE = 64
"""Kernels take whole tiles: 50257 rows would leave the last one to slow code."""


class _Unfused(nn.Module):
    """What may follow a product, each by itself."""

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(self(x), approximate="tanh")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return silu(self(x))

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self(x) + other
        return out

    def multiply(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self(x) * other
        return out


class PlainLinear(_Unfused):
    """x @ weight.T + bias, and what may follow it. `weight` is [out, in]; inputs are [..., in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight = weight
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)


class PackedLinear(nn.Module):
    """As PlainLinear, with the weight kept only in oneDNN's own layout and what follows fused into the product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._unary(x, "none", "")

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        # Fused it is slower in fp32: 16.8 against 14.5 ms at 259 rows of GPT-2, on two cores with AVX2.
        if x.dtype == torch.float32:
            return gelu(self(x), approximate="tanh")
        return self._unary(x, "gelu", "tanh")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return self._unary(x, "swish", "")

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._binary(x, other, "add")

    def multiply(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._binary(x, other, "mul")

    def _unary(self, x: torch.Tensor, operation: str, algorithm: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, operation, [], algorithm
        )
        return out

    def _binary(self, x: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self._packed, self._bias, operation
        )
        return out


class HalfLinear(_Unfused):
    """As PlainLinear, with the weight rounded to float16 and kept only so. Inputs, outputs and sums are float32.

    Only of weights within LARGEST_HALF: the operator would cut others down to it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out


Linear = PlainLinear | PackedLinear | HalfLinear


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, *, half: bool = False) -> Linear:
    """A layer for where `weight` [out, in] lies: packed on a CPU that can, else plain; `half`: see HalfLinear."""
    if half:
        return HalfLinear(weight, bias)
    if packs(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are packed there."""
    return device.type == "cpu" and packing_works(dtype)


class Head:
    """Logits of a vocabulary. Its weight has rows added to make whole tiles; their columns are cut off again."""

    def __init__(self, weight: torch.Tensor, *, half: bool = False) -> None:
        self._vocab_size = len(weight)
        self._linear = make_linear(pad(weight, (0, 0, 0, -len(weight) % _HEAD_MULTIPLE)), None, half=half)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        logits: torch.Tensor = self._linear(x)
        return logits[:, : self._vocab_size]


def pack_linears(model: nn.Module, *, half: bool = False) -> bool:
    """Replaces every nn.Linear and Conv1D of a CPU model; False, and nothing done, where packing does not work.

    Weights shared with an embedding stay with the embedding; the layer gets a packed copy. `half` needs
    `halving_works()`.
    """
    if not half and not packing_works(next(model.parameters()).dtype):
        return False
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) not in (nn.Linear, Conv1D):
                continue
            own = {key: parameter.detach() for key, parameter in child.named_parameters(recurse=False)}
            if type(child) is Conv1D:  # GPT-2's: the weight is stored [in, out]
                own["weight"] = own["weight"].t().contiguous()
            setattr(parent, name, make_linear(own["weight"], own.get("bias"), half=half))
    return True


@lru_cache
def packing_works(dtype: torch.dtype) -> bool:
    """True when the private operators exist here and agree with plain ones in this dtype."""
    generator = torch.Generator().manual_seed(0)
    weight, x, bias, other = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((48, 32), (3, 32), (48,), (3, 48))
    )
    try:
        got = _all_forms(PackedLinear(weight, bias), x, other)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return _agree(
        got, _all_forms(PlainLinear(weight, bias), x, other), 0.1 if dtype == torch.bfloat16 else 1e-4
    )


@lru_cache
def halving_works() -> bool:
    """True when this torch has products of float16 weights for this CPU, and they agree with plain ones."""
    generator = torch.Generator().manual_seed(0)
    weight, x, bias = (torch.randn(*shape, generator=generator) for shape in ((48, 32), (3, 32), (48,)))
    try:
        got = HalfLinear(weight, bias)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return _agree([got], [linear(x, weight.half().float(), bias)], 1e-4)


def _agree(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> bool:
    return all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        for a, b in zip(got, expected, strict=True)
    )


def _all_forms(layer: Linear, x: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    return [layer(x), layer.gelu_tanh(x), layer.silu(x), layer.add(x, other), layer.multiply(x, other)]
