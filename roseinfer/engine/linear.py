"""Linear layers with weights packed for oneDNN: several times faster than a plain product at small batches on CPU.

The two operators are private to torch, so they are tried and compared once per dtype; plain layers stay otherwise.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

_PACK_FOR_ROWS = 256
"""Batch size that the packed layout is chosen for; it serves all others."""


class PackedLinear(nn.Module):
    """x @ weight.T + bias, with `weight` [out, in] kept only in oneDNN's own layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._packed = _pack(weight)
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return _packed_linear(x, self._packed, self._bias)


def pack_linears(model: nn.Module) -> bool:
    """Replaces every nn.Linear and Conv1D of a CPU model; False, and nothing done, where packing does not work.

    Weights shared with an embedding stay with the embedding; the layer gets a packed copy.
    """
    if not packing_works(next(model.parameters()).dtype):
        return False
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) not in (nn.Linear, Conv1D):
                continue
            own = {key: parameter.detach() for key, parameter in child.named_parameters(recurse=False)}
            if type(child) is Conv1D:  # GPT-2's: the weight is stored [in, out]
                own["weight"] = own["weight"].t().contiguous()
            setattr(parent, name, PackedLinear(own["weight"], own.get("bias")))
    return True


@lru_cache
def packing_works(dtype: torch.dtype) -> bool:
    """True when the private operators exist here and agree with F.linear in this dtype."""
    generator = torch.Generator().manual_seed(0)
    weight, x, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((48, 32), (3, 32), (48,))
    )
    try:
        got = _packed_linear(x, _pack(weight), bias)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    return torch.allclose(got.float(), linear(x, weight, bias).float(), rtol=tolerance, atol=tolerance)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
    return packed


def _packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
