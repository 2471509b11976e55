"""Attention of spans of several tokens each: torch's own, or products of whole blocks where those are faster.

On a CPU with AVX-512 for bfloat16 and no AMX, torch's attention multiplies in pieces too small for oneDNN: of GPT-2 and
259 tokens it takes 1.7 ms a layer, and 0.9 in blocks; of 1,000 tokens 13.6 and 6.5.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from roseinfer.engine.step_context import PrefillGroup

_MOST_BLOCK_TOKENS: Final = 192
"""Query tokens of a block. Shorter ones leave less of a span's own keys masked, and make smaller products."""

_FEWEST_TOKENS: Final = 64
"""Of all spans of a group together. For less, blocks cost more calls than they save."""

_FEWEST_OF_A_CHUNK: Final = 32
"""Of each span that goes on from a cached context: for shorter ones the context is copied for too little."""

_MOST_SCORES: Final = 2**25
"""Of a block: 64 MiB, and as much for its softmax."""


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: PrefillGroup,
    scaling: float | None,
) -> torch.Tensor:
    """The spans of `group`: query [tokens, heads, head_dim] -> the same shape."""
    is_long = len(query) >= _FEWEST_TOKENS
    if group.context_slots is not None:
        is_long = is_long and group.n_tokens >= _FEWEST_OF_A_CHUNK
        key, value = (x[group.context_slots].flatten(0, 1) for x in (keys, values))
    query, key, value = (
        x.reshape(group.n_spans, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
    )  # [spans, heads, tokens or context, head_dim]
    if is_long and takes_blocks(query.device, query.dtype):
        out = attend_in_blocks(query, key, value, scaling)
    else:
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=group.mask,
            is_causal=group.mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.transpose(1, 2).flatten(0, 1)


def takes_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether blocks are the faster way there, for spans that are not short."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _has_avx512_and_no_amx()


@lru_cache
def _has_avx512_and_no_amx() -> bool:
    # Private questions: where torch has them no longer, its own attention it is.
    has_amx: bool = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)()
    has_avx512: bool = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    return has_avx512 and not has_amx


def attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Causal, where scores are finite; the queries are the last tokens of the context.

    query [spans, heads, tokens, head_dim], key and value [spans, kv_heads, context, head_dim] -> as query. Queries
    are rounded to their dtype once scaled, and so are scores, as in transformers' "eager" attention: the larger the
    scores, the more that is. The softmax adds up in float32.
    """
    spans, heads, tokens, head_dim = query.shape
    kv_heads, context = key.shape[1:3]
    sharing = heads // kv_heads  # query heads of a key head
    query = query * (head_dim**-0.5 if scaling is None else scaling)
    key, value = (x.flatten(0, 1) for x in (key.transpose(2, 3), value))
    out = query.new_empty(spans * kv_heads, sharing, tokens, value.shape[-1])
    query = query.reshape(spans * kv_heads, sharing, tokens, head_dim)
    most_tokens = max(1, min(_MOST_BLOCK_TOKENS, _MOST_SCORES // (spans * heads * context)))
    n_blocks = -(-tokens // most_tokens)
    for index in range(n_blocks):
        block = slice(tokens * index // n_blocks, tokens * (index + 1) // n_blocks)
        n, seen = block.stop - block.start, context - tokens + block.stop
        # Query heads that share a key head are rows of one product.
        scores = query[:, :, block].reshape(-1, sharing * n, head_dim) @ key[:, :, :seen]
        scores.view(-1, sharing, n, seen)[..., seen - n :].add_(_later(n))
        mixed = scores.softmax(dim=-1) @ value[:, :seen]
        out[:, :, block] = mixed.view(-1, sharing, n, value.shape[-1])
    return out.view(spans, heads, tokens, -1)


@lru_cache
def _later(n: int) -> torch.Tensor:
    """[n, n]: minus infinity for keys after the query's own token, 0 for the others."""
    return torch.full((n, n), -torch.inf, dtype=torch.bfloat16).triu(1)
