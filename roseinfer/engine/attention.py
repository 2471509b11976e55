"""Attention over our own KV cache, for the native models and, behind AttentionInterface, for those of transformers.

One step is one row of packed tokens: decodes first (one token each), then prefill spans. Keys and values of every
token live in a slot of the layer's two tensors; slot = block * KV_BLOCK_TOKENS + offset in the block.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from roseinfer.engine.decode_attention import attend_in_place
from roseinfer.engine.prefill_attention import prefill_attention
from roseinfer.engine.step_context import LayerKV, QueryGroup, StepContext
from roseinfer.engine.varlen import packed_attention
from roseinfer.executor import KV_BLOCK_TOKENS

ATTENTION_NAME = "roseinfer"
"""Under this name transformers finds `attend`. It knows no mask function of that name, so it makes no masks."""

STEP_ARGUMENT = "roseinfer_step"
"""Keyword argument of the model's forward that carries the StepContext down to `attend`."""


def copy_blocks(kv: list[LayerKV], copies: torch.Tensor) -> None:
    """Copies KV blocks (from, to) [n, 2] in all layers. All are read before the first is written."""
    sources, targets = copies.unbind(1)
    for tensor in chain.from_iterable(kv):
        blocks = tensor.view(-1, KV_BLOCK_TOKENS, *tensor.shape[1:])
        blocks[targets] = blocks[sources]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepContext,
    layer: int,
    scaling: float | None = None,
) -> torch.Tensor:
    """The attention of one layer. query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim].

    Writes the step's keys and values into the cache and returns [tokens, heads, head_dim]. `scaling` None is
    1 / sqrt(head_dim).
    """
    keys, values = _write(key, value, step, layer)
    if step.packed is not None:
        return packed_attention(query, key, value, keys, values, step.packed, scaling)
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    if step.decodes_in_place is not None:
        attend_in_place(query, keys, values, step.decodes_in_place, scaling, out)
    _one_query_each(query, keys, values, step.decodes, scaling, out)
    for group in step.prefills:
        rows = slice(group.offset, group.offset + group.n_spans * group.n_tokens)
        out[rows] = prefill_attention(query[rows], key[rows], value[rows], keys, values, group, scaling)
    return out


def attention_of_last(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepContext, layer: int
) -> torch.Tensor:
    """As `attention`, but `query` [spans that sample, heads, head_dim] holds the last tokens of those spans alone."""
    keys, values = _write(key, value, step, layer)
    if step.packed_lasts is not None:
        return packed_attention(query, key, value, keys, values, step.packed_lasts, None)
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    if step.lasts_in_place is not None:
        attend_in_place(query, keys, values, step.lasts_in_place, None, out)
    _one_query_each(query, keys, values, step.lasts, None, out)
    return out


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`attention` as transformers calls it: query [1, heads, tokens, head_dim], key and value likewise.

    Returns [1, tokens, heads, head_dim]. Other keyword arguments were judged once, at load: see probe.py.
    """
    layer_idx: int = module.layer_idx  # type: ignore[assignment]  # a plain int on every attention module
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention(query, key, value, kwargs[STEP_ARGUMENT], layer_idx, scaling)[None], None


def _write(
    key: torch.Tensor, value: torch.Tensor, step: StepContext, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = step.kv[layer]
    keys.index_copy_(0, step.slots, key)
    values.index_copy_(0, step.slots, value)
    return keys, values


def _one_query_each(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    groups: list[QueryGroup],
    scaling: float | None,
    out: torch.Tensor,
) -> None:
    """One token per request against its whole context. query [rows, heads, head_dim]; fills the rows of `out`."""
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[1]
    for group in groups:
        mixed = scaled_dot_product_attention(
            # Query heads that share a key head stand in the place of query positions: no key is repeated.
            query[group.rows].reshape(group.n, kv_heads, heads // kv_heads, head_dim),
            _contexts(keys, group),
            _contexts(values, group),
            attn_mask=group.mask,
            scale=scaling,
        )
        out[group.rows] = mixed.reshape(group.n, heads, -1)


def _contexts(cache: torch.Tensor, group: QueryGroup) -> torch.Tensor:
    """[slots, kv_heads, dim] -> [n, kv_heads, context, dim], a view of the cache where it can be one."""
    if group.slots is not None:
        return cache[group.slots].transpose(1, 2)
    per_slot, per_head, per_element = cache.stride()
    shape = (group.n, cache.shape[1], group.context, cache.shape[2])
    strides = (group.stride * per_slot, per_head, per_slot, per_element)
    return cache.as_strided(shape, strides, cache.storage_offset() + group.start * per_slot)


AttentionInterface.register(ATTENTION_NAME, attend)
