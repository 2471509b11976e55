"""Attention of spans in blocks, against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from roseinfer.engine import prefill_attention
from roseinfer.engine.prefill_attention import attend_in_blocks, takes_blocks
from roseinfer.engine.step_context import PrefillGroup
from tests.engine.driver import Driver
from tests.engine.test_native import relative_difference
from tests.engine.tiny_models import CONFIGS, FAMILIES, VOCAB, make_engine

CPU = torch.device("cpu")


def tensors(
    spans: int, tokens: int, context: int, kv_heads: int = 2, value_dim: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [spans, heads, tokens or context, dim], as views of packed tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = (spans, tokens, 4, 16), (spans, context, kv_heads, 16), (spans, context, kv_heads, value_dim)
    query, key, value = (torch.randn(*shape, generator=generator).transpose(1, 2) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("scaling", [None, 0.5])
@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 16), (2, 16), (1, 8)])
@pytest.mark.parametrize("tokens", [1, 64, 192, 193, 400])
@pytest.mark.parametrize("before", [0, 70])
@pytest.mark.parametrize("spans", [1, 3])
def test_it_is_torchs_attention(
    spans: int, before: int, tokens: int, kv_heads: int, value_dim: int, scaling: float | None
) -> None:
    query, key, value = tensors(spans, tokens, before + tokens, kv_heads, value_dim)
    seen = torch.ones(tokens, before + tokens).tril(before).bool()
    expected = scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scaling, enable_gqa=kv_heads != 4
    )
    torch.testing.assert_close(attend_in_blocks(query, key, value, scaling), expected, rtol=1e-5, atol=1e-5)


def test_blocks_get_shorter_for_contexts_that_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors(2, 100, 150)
    expected = attend_in_blocks(query, key, value, None)
    widths: list[int] = []
    later = prefill_attention._later

    def noted(n: int) -> torch.Tensor:
        widths.append(n)
        return later(n)

    monkeypatch.setattr(prefill_attention, "_later", noted)
    monkeypatch.setattr(prefill_attention, "_MOST_SCORES", 2 * 4 * 150 * 7)
    torch.testing.assert_close(attend_in_blocks(query, key, value, None), expected, rtol=1e-5, atol=1e-5)
    assert max(widths) <= 7
    assert sum(widths) == 100


@pytest.mark.parametrize(
    ("n_spans", "n_tokens", "cached", "taken"),
    [(1, 64, 0, True), (4, 16, 0, True), (1, 63, 0, False), (2, 32, 64, True), (4, 31, 64, False)],
)
def test_short_spans_are_left_to_torch(
    n_spans: int, n_tokens: int, cached: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    def blocks(query: torch.Tensor, *rest: object) -> torch.Tensor:
        used.append(len(query))
        return query

    monkeypatch.setattr(prefill_attention, "takes_blocks", lambda device, dtype: True)
    monkeypatch.setattr(prefill_attention, "attend_in_blocks", blocks)
    x, cache = torch.zeros(n_spans * n_tokens, 4, 16), torch.zeros(512, 4, 16)
    slots = torch.arange(cached + n_tokens).repeat(n_spans, 1) if cached else None
    group = PrefillGroup(0, n_spans, n_tokens, slots)
    prefill_attention.prefill_attention(x, x, x, cache, cache, group, None)
    assert used == ([n_spans] if taken else [])


def test_a_token_sees_nothing_of_later_ones() -> None:
    query, key, value = tensors(1, 400, 400)
    alone = attend_in_blocks(query, key, value, None)
    key[:, :, 250:], value[:, :, 250:] = 1e3, -1e3
    assert torch.equal(attend_in_blocks(query, key, value, None)[:, :, :250], alone[:, :, :250])


def test_rounding_is_that_of_bfloat16() -> None:
    exact = tensors(2, 300, 300)
    query, key, value = (x.bfloat16() for x in exact)
    expected = attend_in_blocks(*exact, None)
    assert relative_difference(attend_in_blocks(query, key, value, None), expected) < 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_in_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt as a whole beside another, and one in two pieces."""

    def logits(dtype: torch.dtype, blocks: bool) -> torch.Tensor:
        monkeypatch.setattr(prefill_attention, "takes_blocks", lambda device, dtype: blocks)
        driver = Driver(make_engine(config, dtype=dtype))
        requests = [driver.request([(7 * i + 3 * n) % VOCAB for i in range(75)]) for n in range(3)]
        driver.step((requests[2], 5))
        return driver.logits(*requests)

    config = copy.deepcopy(CONFIGS[family])
    config.initializer_range = 0.1  # rounding errors double in each layer with larger weights
    exact = logits(torch.float32, blocks=False)
    assert relative_difference(logits(torch.float32, blocks=True), exact) < 1e-5
    assert relative_difference(logits(torch.bfloat16, blocks=True), exact) < 2e-2


@pytest.mark.parametrize(("amx", "avx512", "faster"), [(0, 1, True), (1, 1, False), (0, 0, False)])
def test_blocks_are_for_avx512_without_amx(
    amx: int, avx512: int, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bool(amx))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bool(avx512))
    asked = prefill_attention._has_avx512_and_no_amx
    monkeypatch.setattr(prefill_attention, "_has_avx512_and_no_amx", asked.__wrapped__)
    assert takes_blocks(CPU, torch.bfloat16) is faster
    assert not takes_blocks(CPU, torch.float32)
    assert not takes_blocks(torch.device("cuda"), torch.bfloat16)
