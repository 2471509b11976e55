from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from roseinfer.engine.linear import (
    HalfLinear,
    Head,
    PackedLinear,
    PlainLinear,
    halving_works,
    make_linear,
    pack_linears,
    packing_works,
)

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def sequence(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 56), nn.GELU(), Conv1D(24, 56), nn.Linear(24, 51, bias=False)).to(
        dtype
    )


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_is_computed_after_packing(dtype: torch.dtype, rows: int) -> None:
    plain = sequence(dtype)
    packed = copy.deepcopy(plain)
    pack_linears(packed)  # nothing, for bf16 on a CPU that has no instructions for it
    x = torch.randn(1, rows, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        assert torch.allclose(plain(x).float(), packed(x).float(), rtol=0, atol=TOLERANCE[dtype])


def test_every_linear_layer_is_replaced() -> None:
    model = sequence(torch.float32)
    pack_linears(model)
    assert [type(layer) for layer in model] == [PackedLinear, nn.GELU, PackedLinear, PackedLinear]


def test_same_sizes_in_two_dtypes() -> None:  # case B25
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    expected = sequence(torch.float32)(x)
    for dtype in (*DTYPES, *reversed(DTYPES)):
        model = sequence(dtype)
        pack_linears(model)
        with torch.inference_mode():
            got = model(x.to(dtype))
        assert got.dtype == dtype
        assert torch.allclose(got.float(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("half", [False, True])
def test_a_shared_embedding_stays_as_it_is(half: bool) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(11, 8), "head": nn.Linear(8, 11, bias=False)})
    embedding = model["embedding"].get_parameter("weight")
    model["head"].weight = embedding  # tied, as in most language models
    before = embedding.detach().clone()
    pack_linears(model, half=half)
    assert model["embedding"].get_parameter("weight") is embedding
    assert torch.equal(embedding, before)
    hidden = torch.eye(8)
    with torch.inference_mode():
        assert torch.allclose(model["head"](hidden), before.half().float().t() if half else before.t())


@pytest.mark.parametrize("fault", ["absent", "wrong"])
def test_plain_layers_stay_where_the_private_operators_fail(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def broken(layer: PackedLinear, x: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        if fault == "absent":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")
        return torch.zeros(3, 48)

    packing_works.cache_clear()
    monkeypatch.setattr(PackedLinear, "_binary", broken)
    model = sequence(torch.float32)
    try:
        assert not pack_linears(model)
        assert type(make_linear(torch.ones(2, 3), None)) is PlainLinear
    finally:
        packing_works.cache_clear()  # and nobody asks before the operators are whole again
    assert isinstance(model[0], nn.Linear)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65])
def test_a_head_gives_logits_of_the_vocabulary_and_no_more(vocab_size: int, half: bool) -> None:
    torch.manual_seed(0)
    weight, x = (
        torch.randn(vocab_size, 8) - 10,
        torch.rand(3, 8),
    )  # every true logit is below those of empty rows
    with torch.inference_mode():
        logits = Head(weight, half=half)(x)
    assert logits.shape == (3, vocab_size)
    assert torch.allclose(logits, x @ (weight.half().float() if half else weight).t(), atol=1e-4)


# Weights kept in float16.


@pytest.mark.parametrize("rows", [0, 1, 7, 32, 33, 300])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("columns", [40, 1100])  # in one piece, and in several
def test_a_halved_layer_computes_with_rounded_weights(rows: int, has_bias: bool, columns: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(48, columns), torch.randn(48)
    kept = bias if has_bias else None
    layer, plain = make_linear(weight, kept, half=True), PlainLinear(weight.half().float(), kept)
    assert type(layer) is HalfLinear
    x, other = torch.randn(rows, columns), torch.randn(rows, 48)
    with torch.inference_mode():
        for got, expected in [
            (layer(x), plain(x)),
            (layer.gelu_tanh(x), plain.gelu_tanh(x)),
            (layer.silu(x), plain.silu(x)),
            (layer.add(x, other), plain.add(x, other)),
            (layer.multiply(x, other), plain.multiply(x, other)),
        ]:
            assert got.shape == (rows, 48)
            assert torch.allclose(got, expected, rtol=1e-4, atol=1e-3)


def test_every_linear_layer_is_halved() -> None:
    model = sequence(torch.float32)
    assert pack_linears(model, half=True)
    assert [type(layer) for layer in model] == [HalfLinear, nn.GELU, HalfLinear, HalfLinear]


@pytest.mark.parametrize("fault", ["absent", "wrong"])
def test_halving_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def broken(layer: HalfLinear, x: torch.Tensor) -> torch.Tensor:
        if fault == "absent":
            raise RuntimeError("Didn't find engine for operation quantized::linear_prepack_fp16 NoQEngine")
        return torch.zeros(3, 48)

    halving_works.cache_clear()
    monkeypatch.setattr(HalfLinear, "forward", broken)
    try:
        assert not halving_works()
    finally:
        halving_works.cache_clear()
