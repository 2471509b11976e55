"""Attention over our own KV cache, for the native models and, behind AttentionInterface, for those of transformers.

One step is one row of packed tokens: decodes first (one token each), then prefill spans. Keys and values of every
token live in a slot of the layer's two tensors; slot = block * KV_BLOCK_TOKENS + offset in the block.

A decode reads its context in one of two ways. Contiguous: where it is, in one piece, if its blocks lie one behind the
other. Paged: gathered from blocks that lie anywhere, all decodes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
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

    `context_slots` is None when they start at position 0 and so attend to themselves alone; else it names the slots
    [n_spans, context] of positions 0 .. start + n_tokens - 1, with the causal `mask` [n_tokens, context].
    """

    offset: int
    n_spans: int
    n_tokens: int
    context_slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Requests with one query each, and equally long contexts that lie in memory at equal distances.

    Their `context` keys and values are read where they are: request i's from slot `start + i * stride` on. Contexts
    that lie scattered are gathered from `slots` [n, context]; where they are not equally long, `mask`
    [n, 1, 1, context] is True for what is a request's own.
    """

    rows: torch.Tensor | slice  # of the queries
    n: int
    context: int
    start: int = 0
    stride: int = 0
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepContext:
    """Where the tokens of one step are written and what they attend to; shared by all layers."""

    kv: list[LayerKV]
    slots: torch.Tensor  # [tokens]: where each packed token's key and value go
    decodes: list[QueryGroup]  # of the first packed tokens
    prefills: list[PrefillGroup]
    last: torch.Tensor  # [spans that sample]: their last packed tokens
    lasts: list[QueryGroup]  # of those tokens


def build_step_context(
    plan: StepPlan, kv: list[LayerKV], device: torch.device, *, paged: bool = False
) -> StepContext:
    """Turns the block tables of a plan (decodes first) into slots."""
    query_groups = _paged_queries if paged else _contiguous_queries
    spans = plan.spans
    contexts = [_slots_of(span) for span in spans]
    n_decodes = 0
    while n_decodes < len(spans) and spans[n_decodes].n_tokens == 1:
        n_decodes += 1
    written = [context[span.start :] for span, context in zip(spans, contexts, strict=True)]
    ends = np.cumsum([span.n_tokens for span in spans]) - 1
    samples = np.array([span.samples for span in spans])
    sampling = [context for context, its in zip(contexts, samples, strict=True) if its]
    decodes = query_groups(contexts[:n_decodes], device)
    return StepContext(
        kv=kv,
        slots=torch.from_numpy(np.concatenate(written)).to(device),
        decodes=decodes,
        prefills=_prefill_groups(spans[n_decodes:], contexts[n_decodes:], n_decodes, device),
        last=torch.from_numpy(ends[samples]).to(device),
        lasts=decodes if len(sampling) == n_decodes == len(spans) else query_groups(sampling, device),
    )


def idle_step_context(n: int, kv: list[LayerKV], device: torch.device) -> StepContext:
    """A step of `n` decodes that all stand in slot 0 and see nothing but themselves: work without a request."""
    decodes = [QueryGroup(slice(0, n), n, context=1, start=0, stride=0)]
    slots = torch.zeros(n, dtype=torch.int64, device=device)
    last = torch.arange(n, device=device)
    return StepContext(kv=kv, slots=slots, decodes=decodes, prefills=[], last=last, lasts=decodes)


def _slots_of(span: Span) -> NDArray[np.int64]:
    """Slots of positions 0 .. start + n_tokens - 1."""
    blocks = np.asarray(span.request.block_table, dtype=np.int64)
    slots = blocks[:, None] * KV_BLOCK_TOKENS + np.arange(KV_BLOCK_TOKENS)
    return slots.reshape(-1)[: span.start + span.n_tokens]


def copy_blocks(kv: list[LayerKV], copies: Sequence[tuple[int, int]]) -> None:
    """Copies KV blocks (from, to) in all layers. All are read before the first is written."""
    sources, targets = torch.tensor(copies, device=kv[0][0].device).unbind(1)
    for tensor in chain.from_iterable(kv):
        blocks = tensor.view(-1, KV_BLOCK_TOKENS, *tensor.shape[1:])
        blocks[targets] = blocks[sources]


def _paged_queries(contexts: list[NDArray[np.int64]], device: torch.device) -> list[QueryGroup]:
    """Row i belongs to `contexts[i]`: one group of all."""
    if not contexts:
        return []
    lengths = np.array([len(slots) for slots in contexts])
    context = int(lengths.max())
    # Past its end a request reads its own last slot again: masked, but what others hold may be NaN, and stay so.
    slots = np.array([slots[-1] for slots in contexts])[:, None].repeat(context, 1)
    for row, its in zip(slots, contexts, strict=True):
        row[: len(its)] = its
    mask = None
    if (lengths < context).any():
        mask = torch.from_numpy(np.arange(context) < lengths[:, None])[:, None, None].to(device)
    rows = slice(0, len(contexts))
    return [QueryGroup(rows, len(contexts), context, slots=torch.from_numpy(slots).to(device), mask=mask)]


def _contiguous_queries(contexts: list[NDArray[np.int64]], device: torch.device) -> list[QueryGroup]:
    """Row i belongs to `contexts[i]`. Requests admitted together usually lie one behind the other: one group."""
    groups = []
    runs: list[tuple[int, int, int]] = []  # (context, first slot, row) of those that lie in one piece
    for row, slots in enumerate(contexts):
        if slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all():
            runs.append((len(slots), int(slots[0]), row))
        else:
            gathered = torch.from_numpy(slots).to(device)
            groups.append(QueryGroup(slice(row, row + 1), 1, len(slots), slots=gathered[None]))
    runs.sort()
    first = 0
    while first < len(runs):
        context, start, _ = runs[first]
        end = first + 1
        stride = runs[end][1] - start if end < len(runs) and runs[end][0] == context else 0
        while end < len(runs) and runs[end][:2] == (context, start + (end - first) * stride):
            end += 1
        rows = [row for _, _, row in runs[first:end]]
        in_order = rows == list(range(rows[0], rows[0] + len(rows)))
        chosen = slice(rows[0], rows[-1] + 1) if in_order else torch.tensor(rows, device=device)
        groups.append(QueryGroup(chosen, end - first, context, start, stride))
        first = end
    return groups


def _prefill_groups(
    spans: list[Span], contexts: list[NDArray[np.int64]], offset: int, device: torch.device
) -> list[PrefillGroup]:
    groups: list[PrefillGroup] = []
    pairs = zip(spans, contexts, strict=True)
    for (start, n_tokens), members in groupby(pairs, key=lambda pair: (pair[0].start, pair[0].n_tokens)):
        its = [context for _, context in members]
        slots = mask = None
        if start:
            slots = torch.from_numpy(np.stack(its)).to(device)
            positions = torch.arange(start + n_tokens, device=device)
            mask = positions <= positions[start:, None]
        groups.append(PrefillGroup(offset, len(its), n_tokens, slots, mask))
        offset += len(its) * n_tokens
    return groups


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
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    _one_query_each(query, keys, values, step.decodes, scaling, out)
    for group in step.prefills:
        rows = slice(group.offset, group.offset + group.n_spans * group.n_tokens)
        out[rows] = _prefill(query[rows], key[rows], value[rows], keys, values, group, scaling)
    return out


def attention_of_last(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepContext, layer: int
) -> torch.Tensor:
    """As `attention`, but `query` [spans that sample, heads, head_dim] holds the last tokens of those spans alone."""
    keys, values = _write(key, value, step, layer)
    out = query.new_empty(*query.shape[:2], value.shape[-1])
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


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: PrefillGroup,
    scaling: float | None,
) -> torch.Tensor:
    """Spans of several tokens. query [tokens, heads, head_dim] -> the same shape."""
    if group.context_slots is not None:
        key, value = (x[group.context_slots].flatten(0, 1) for x in (keys, values))
    query, key, value = (
        x.reshape(group.n_spans, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
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
