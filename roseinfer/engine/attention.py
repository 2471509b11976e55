"""Attention over our own KV cache, behind transformers' AttentionInterface.

One step is one row of packed tokens: decodes first (one token each), then prefill spans. Keys and values of every
token live in a slot of the layer's two tensors; slot = block * KV_BLOCK_TOKENS + offset in the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from roseinfer.executor import KV_BLOCK_TOKENS, Span, StepPlan

ATTENTION_NAME = "roseinfer"
"""Under this name transformers finds `attend`. It knows no mask function of that name, so it makes no masks."""

STEP_ARGUMENT = "roseinfer_step"
"""Keyword argument of the model's forward that carries the StepContext down to `attend`."""

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer: [num_slots, kv_heads, head_dim] each."""


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """`n_spans` neighbouring spans of `n_tokens` each, from packed token `offset` on.

    `context_slots` is None when they start at position 0 and so attend to themselves alone; else there is one span
    and it names the slots of positions 0 .. start + n_tokens - 1, with the causal `mask` [n_tokens, context].
    """

    offset: int
    n_spans: int
    n_tokens: int
    context_slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepContext:
    """Where the tokens of one step are written and what they attend to; shared by all layers."""

    kv: list[LayerKV]
    slots: torch.Tensor  # [tokens]: where each packed token's key and value go
    n_decodes: int
    decode_slots: torch.Tensor  # [n_decodes, longest context], short rows filled up with a slot of their own
    decode_mask: torch.Tensor  # [n_decodes, 1, 1, longest context], True where a position counts
    prefills: list[PrefillGroup]


def build_step_context(plan: StepPlan, kv: list[LayerKV], device: torch.device) -> StepContext:
    """Turns the block tables of a plan (decodes first) into slots."""
    spans = plan.spans
    contexts = [_slots_of(span) for span in spans]
    n_decodes = 0
    while n_decodes < len(spans) and spans[n_decodes].n_tokens == 1:
        n_decodes += 1
    written = [context[span.start :] for span, context in zip(spans, contexts, strict=True)]
    decode_slots, decode_mask = _pad(contexts[:n_decodes])
    return StepContext(
        kv=kv,
        slots=torch.from_numpy(np.concatenate(written)).to(device),
        n_decodes=n_decodes,
        decode_slots=torch.from_numpy(decode_slots).to(device),
        decode_mask=torch.from_numpy(decode_mask).to(device),
        prefills=_prefill_groups(spans[n_decodes:], contexts[n_decodes:], n_decodes, device),
    )


def _slots_of(span: Span) -> NDArray[np.int64]:
    """Slots of positions 0 .. start + n_tokens - 1."""
    blocks = np.asarray(span.request.block_table, dtype=np.int64)
    slots = blocks[:, None] * KV_BLOCK_TOKENS + np.arange(KV_BLOCK_TOKENS)
    return slots.reshape(-1)[: span.start + span.n_tokens]


def _pad(contexts: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    longest = max(map(len, contexts), default=0)
    slots = np.empty((len(contexts), longest), dtype=np.int64)
    mask = np.zeros((len(contexts), 1, 1, longest), dtype=np.bool_)
    for row, context in enumerate(contexts):
        slots[row, : len(context)] = context
        # A masked value still takes part as 0 * value: a NaN in a stranger's slot would leak, in its own it may not.
        slots[row, len(context) :] = context[0]
        mask[row, ..., : len(context)] = True
    return slots, mask


def _prefill_groups(
    spans: list[Span], contexts: list[NDArray[np.int64]], offset: int, device: torch.device
) -> list[PrefillGroup]:
    groups: list[PrefillGroup] = []
    pairs = zip(spans, contexts, strict=True)
    for (start, n_tokens), members in groupby(pairs, key=lambda pair: (pair[0].start, pair[0].n_tokens)):
        members_ = list(members)
        if start == 0:
            groups.append(PrefillGroup(offset, len(members_), n_tokens))
            offset += len(members_) * n_tokens
            continue
        positions = torch.arange(start + n_tokens, device=device)
        mask = positions <= positions[start:, None]
        for _, context in members_:
            groups.append(PrefillGroup(offset, 1, n_tokens, torch.from_numpy(context).to(device), mask))
            offset += n_tokens
    return groups


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
    """The attention of one layer. query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim].

    Writes the step's keys and values into the cache and returns [1, tokens, heads, head_dim]. Other keyword
    arguments were judged once, at load: see probe.py.
    """
    step: StepContext = kwargs[STEP_ARGUMENT]
    layer_idx: int = module.layer_idx  # type: ignore[assignment]  # a plain int on every attention module
    keys, values = step.kv[layer_idx]
    query, key, value = query[0], key[0], value[0]
    keys.index_copy_(0, step.slots, key.transpose(0, 1))
    values.index_copy_(0, step.slots, value.transpose(0, 1))

    heads, n_all, _ = query.shape
    out = query.new_empty(n_all, heads, value.shape[-1])
    if step.n_decodes:
        out[: step.n_decodes] = _decode(query[:, : step.n_decodes], keys, values, step, scaling)
    for group in step.prefills:
        end = group.offset + group.n_spans * group.n_tokens
        rows = slice(group.offset, end)
        out[rows] = _prefill(query[:, rows], key[:, rows], value[:, rows], keys, values, group, scaling)
    return out[None], None


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepContext, scaling: float | None
) -> torch.Tensor:
    """One token per request against its whole context. query [heads, n, head_dim] -> [n, heads, head_dim]."""
    heads, n, head_dim = query.shape
    kv_heads = keys.shape[1]
    # Query heads that share a key head stand in the place of query positions: no key is repeated.
    grouped = query.transpose(0, 1).reshape(n, kv_heads, heads // kv_heads, head_dim)
    out = scaled_dot_product_attention(
        grouped,
        keys[step.decode_slots].transpose(1, 2),
        values[step.decode_slots].transpose(1, 2),
        attn_mask=step.decode_mask,
        scale=scaling,
    )
    return out.reshape(n, heads, -1)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: PrefillGroup,
    scaling: float | None,
) -> torch.Tensor:
    """Spans of several tokens. query [heads, tokens, head_dim] -> [tokens, heads, head_dim]."""
    if group.context_slots is not None:
        key = keys[group.context_slots].transpose(0, 1)
        value = values[group.context_slots].transpose(0, 1)
    query, key, value = (
        x.reshape(x.shape[0], group.n_spans, -1, x.shape[-1]).transpose(0, 1) for x in (query, key, value)
    )  # [spans, heads, tokens or context, head_dim]
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


AttentionInterface.register(ATTENTION_NAME, attend)
