"""Attention of spans of any lengths in one call, none of them padded: torch's varlen_attn, half precision on CUDA.

With FA3 active it reads the KV blocks where they are. FA2, which torch brings along, takes contexts in one piece, so
those that do not begin in this step are gathered first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from roseinfer.engine.staging import Staging
from roseinfer.executor import KV_BLOCK_TOKENS

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a torch without it
    varlen_attn = None  # type: ignore[assignment]

Flash = Literal["FA2", "FA3"]

_MOST_HEAD_DIM: Final = 256


class Queries(NamedTuple):
    """The last `n` positions of a context."""

    n: int
    context_slots: NDArray[np.int64]
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """Queries of spans, one behind the other. Starts and lengths are int32, as the kernels want them.

    Either `block_table` [spans, blocks] and `context_lengths` [spans] say where contexts are, or they lie one behind
    the other from `context_starts` [spans + 1] on: in the order of `context_slots`, or, where that is None, as the
    step's own keys do.
    """

    starts: torch.Tensor  # [spans + 1]: of the queries
    longest: int  # in queries
    longest_context: int
    context_starts: torch.Tensor | None = None
    context_slots: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    context_lengths: torch.Tensor | None = None


def flash_for(device: torch.device, dtype: torch.dtype, head_dims: Sequence[tuple[int, int]]) -> Flash | None:
    """The kernels that can be had for layers of these key and value sizes; None: there are none.

    FA3 is taken where it is installed, on the GPUs that it is made for.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type != "cuda" or not half or varlen_attn is None:
        return None
    if any(key != value or key % 8 or key > _MOST_HEAD_DIM for key, value in head_dims):
        return None
    taken = _parameters(varlen_attn)
    if not {"scale", "window_size"} <= taken:
        return None  # before torch 2.11
    major, _ = torch.cuda.get_device_capability(device)  # CUDA only
    # Before torch 2.12 it reads no blocks.
    if major == 9 and {"block_table", "seqused_k"} <= taken and _fa3_is_active():
        return "FA3"
    return "FA2" if major >= 8 else None


@cache
def _parameters(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _fa3_is_active() -> bool:
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

    if current_flash_attention_impl() is None and find_spec("flash_attn_interface") is not None:
        with suppress(ImportError, RuntimeError):  # built for another torch, or without what torch asks for
            activate_flash_attention_impl("FA3")
    return current_flash_attention_impl() == "FA3"


def pack(queries: Sequence[Queries], flash: Flash, staging: Staging, *, own_keys: bool) -> PackedSpans:
    """`own_keys`: the contexts are what this step computes, all of it in its order."""
    lengths = np.array([len(each.context_slots) for each in queries], np.int32)
    starts = staging.put(_starts([each.n for each in queries]))
    longest, longest_context = max(each.n for each in queries), int(lengths.max())
    if flash == "FA2":
        slots = None if own_keys else np.concatenate([each.context_slots for each in queries])
        return PackedSpans(
            starts,
            longest,
            longest_context,
            context_starts=staging.put(_starts(lengths)),
            context_slots=None if slots is None else staging.put(slots),
        )
    n_blocks = -(-lengths // KV_BLOCK_TOKENS)
    table = np.zeros((len(queries), int(n_blocks.max())), np.int32)
    for row, each, n in zip(table, queries, n_blocks, strict=True):
        row[:n] = each.block_table[:n]
    return PackedSpans(
        starts,
        longest,
        longest_context,
        block_table=staging.put(table),
        context_lengths=staging.put(lengths),
    )


def _starts(lengths: Any) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: PackedSpans,
    scaling: float | None,
) -> torch.Tensor:
    """query [queries, heads, head_dim]; key and value are the step's own, keys and values the cache, just written."""
    more: dict[str, Any] = {}  # that torch 2.11 does not take
    if spans.block_table is not None:
        key, value = (x.view(-1, KV_BLOCK_TOKENS, *x.shape[1:]) for x in (keys, values))
        more = {"seqused_k": spans.context_lengths, "block_table": spans.block_table}
    elif spans.context_slots is not None:
        key, value = keys[spans.context_slots], values[spans.context_slots]
    if query.shape[-2] != key.shape[-2] and "enable_gqa" in _parameters(varlen_attn):
        more["enable_gqa"] = True  # where it cannot be said, it need not be
    mixed = varlen_attn(
        query,
        key,
        value,
        spans.starts,
        spans.context_starts,
        spans.longest,
        spans.longest_context,
        scale=scaling,
        window_size=(-1, 0),  # causal, the last query at the end of its context
        **more,
    )
    assert isinstance(mixed, torch.Tensor)  # a pair only where more was asked for
    return mixed
