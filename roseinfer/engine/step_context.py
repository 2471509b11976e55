"""Where the tokens of one step lie and what they attend to, told to the device once for all layers.

On a CPU a decode reads its context where it is (decode_attention.py), in either layout. Elsewhere, contiguous: where it
is, in one piece, if its blocks lie one behind the other; paged: gathered from blocks that lie anywhere, all decodes at
once. Where there are kernels for packed spans (varlen.py), a paged step leaves all of its attention to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from roseinfer.engine.decode_attention import Contexts, in_place
from roseinfer.engine.staging import Staging
from roseinfer.engine.varlen import Flash, PackedSpans, Queries, pack
from roseinfer.executor import KV_BLOCK_TOKENS, Span, StepPlan

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
    packed: PackedSpans | None = None  # in place of decodes and prefills
    packed_lasts: PackedSpans | None = None  # in place of lasts
    decodes_in_place: Contexts | None = None  # in place of decodes
    lasts_in_place: Contexts | None = None  # in place of lasts


def build_step_context(
    plan: StepPlan,
    kv: list[LayerKV],
    staging: Staging,
    *,
    paged: bool = False,
    flash: Flash | None = None,
    reads_in_place: bool = False,
) -> StepContext:
    """Turns the block tables of a plan (decodes first) into slots. `flash` names kernels for a paged step.

    reads_in_place: see `in_place_works`.
    """
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
    slots, last = staging.put(np.concatenate(written)), staging.put(ends[samples])
    if paged and flash is not None:
        packed, packed_lasts = _packed(spans, contexts, flash, staging)
        return StepContext(kv, slots, [], [], last, [], packed, packed_lasts)
    device = kv[0][0].device
    prefills = _prefill_groups(spans[n_decodes:], contexts[n_decodes:], n_decodes, staging, device)
    all_decode = len(sampling) == n_decodes == len(spans)
    if reads_in_place:
        its = in_place(contexts[:n_decodes]) if n_decodes else None
        lasts = its if all_decode else in_place(sampling) if sampling else None
        return StepContext(kv, slots, [], prefills, last, [], decodes_in_place=its, lasts_in_place=lasts)
    decodes = query_groups(contexts[:n_decodes], staging)
    return StepContext(
        kv=kv,
        slots=slots,
        decodes=decodes,
        prefills=prefills,
        last=last,
        lasts=decodes if all_decode else query_groups(sampling, staging),
    )


def idle_step_context(
    n: int, kv: list[LayerKV], device: torch.device, *, reads_in_place: bool = False
) -> StepContext:
    """A step of `n` decodes that all stand in slot 0 and see nothing but themselves: work without a request."""
    decodes = [] if reads_in_place else [QueryGroup(slice(0, n), n, context=1, start=0, stride=0)]
    its = in_place([np.zeros(1, np.int64)] * n) if reads_in_place else None
    slots = torch.zeros(n, dtype=torch.int64, device=device)
    last = torch.arange(n, device=device)
    return StepContext(
        kv, slots, decodes, prefills=[], last=last, lasts=decodes, decodes_in_place=its, lasts_in_place=its
    )


def _slots_of(span: Span) -> NDArray[np.int64]:
    """Slots of positions 0 .. start + n_tokens - 1."""
    blocks = np.asarray(span.request.block_table, dtype=np.int64)
    slots = blocks[:, None] * KV_BLOCK_TOKENS + np.arange(KV_BLOCK_TOKENS)
    return slots.reshape(-1)[: span.start + span.n_tokens]


def _packed(
    spans: list[Span], contexts: list[NDArray[np.int64]], flash: Flash, staging: Staging
) -> tuple[PackedSpans, PackedSpans | None]:
    """Of all tokens of a step, and of the last ones of the spans that sample."""
    own_keys = all(span.start == 0 for span in spans)
    all_sample = all(span.samples for span in spans)
    pairs = list(zip(spans, contexts, strict=True))
    everything = [Queries(span.n_tokens, slots, span.request.block_table) for span, slots in pairs]
    lasts = [Queries(1, slots, span.request.block_table) for span, slots in pairs if span.samples]
    packed = pack(everything, flash, staging, own_keys=own_keys)
    if all(span.n_tokens == 1 and span.samples for span in spans):
        return packed, packed
    return packed, pack(lasts, flash, staging, own_keys=own_keys and all_sample) if lasts else None


def _paged_queries(contexts: list[NDArray[np.int64]], staging: Staging) -> list[QueryGroup]:
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
        mask = staging.put(np.arange(context) < lengths[:, None])[:, None, None]
    rows = slice(0, len(contexts))
    return [QueryGroup(rows, len(contexts), context, slots=staging.put(slots), mask=mask)]


def queries_of_blocks(block_table: torch.Tensor, lengths: torch.Tensor) -> QueryGroup:
    """Row i has the first lengths[i] tokens of the blocks block_table[i]: [n, blocks] and [n], any integers.

    Computed where they are, and its shapes follow from theirs alone, as a CUDA graph wants it.
    """
    n, n_blocks = block_table.shape
    context, device = n_blocks * KV_BLOCK_TOKENS, block_table.device
    offsets = torch.arange(KV_BLOCK_TOKENS, device=device)
    slots = (block_table.long()[:, :, None] * KV_BLOCK_TOKENS + offsets).view(n, context)
    mask = torch.arange(context, device=device) < lengths[:, None]
    last = slots.gather(1, lengths.long()[:, None] - 1)
    return QueryGroup(slice(0, n), n, context, slots=torch.where(mask, slots, last), mask=mask[:, None, None])


def _contiguous_queries(contexts: list[NDArray[np.int64]], staging: Staging) -> list[QueryGroup]:
    """Row i belongs to `contexts[i]`. Requests admitted together usually lie one behind the other: one group."""
    groups = []
    runs: list[tuple[int, int, int]] = []  # (context, first slot, row) of those that lie in one piece
    for row, slots in enumerate(contexts):
        if slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all():
            runs.append((len(slots), int(slots[0]), row))
        else:
            gathered = staging.put(slots[None])
            groups.append(QueryGroup(slice(row, row + 1), 1, len(slots), slots=gathered))
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
        chosen = slice(rows[0], rows[-1] + 1) if in_order else staging.put(np.array(rows))
        groups.append(QueryGroup(chosen, end - first, context, start, stride))
        first = end
    return groups


def _prefill_groups(
    spans: list[Span],
    contexts: list[NDArray[np.int64]],
    offset: int,
    staging: Staging,
    device: torch.device,
) -> list[PrefillGroup]:
    groups: list[PrefillGroup] = []
    pairs = zip(spans, contexts, strict=True)
    for (start, n_tokens), members in groupby(pairs, key=lambda pair: (pair[0].start, pair[0].n_tokens)):
        its = [context for _, context in members]
        slots = mask = None
        if start:
            slots = staging.put(np.stack(its))
            positions = torch.arange(start + n_tokens, device=device)
            mask = positions <= positions[start:, None]
        groups.append(PrefillGroup(offset, len(its), n_tokens, slots, mask))
        offset += len(its) * n_tokens
    return groups
