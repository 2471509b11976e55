"""The kernels for packed spans against SDPA. Half precision is all that they compute, and in it tokens of two paths may
part at a near tie: so attention itself is compared, on random contexts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from roseinfer.bench.doctor_paths import Agreement

if TYPE_CHECKING:
    import torch

    from roseinfer.engine.varlen import Flash

SPANS: Final = ((1, 1), (1, 40), (7, 7), (9, 40), (64, 64))
"""Queries and context of each: decodes, whole prompts, the end of one in chunks."""

HEADS: Final = 8
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
TOLERANCE: Final = 0.05
"""More is no rounding: values are around 1, of which bfloat16 keeps 8 bits."""


def compare_kernels(flash: Flash, device: torch.device, dtype: torch.dtype) -> Agreement:
    """Queries for which packed attention gives what SDPA gives in float32."""
    import numpy as np
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from roseinfer.engine.staging import Staged
    from roseinfer.engine.varlen import Queries, pack, packed_attention
    from roseinfer.executor import KV_BLOCK_TOKENS
    from roseinfer.kv_cache import blocks_for

    n_blocks = [blocks_for(context) for _, context in SPANS]
    tables = np.split(np.random.default_rng(0).permutation(sum(n_blocks)), np.cumsum(n_blocks)[:-1])
    n_queries, n_slots = sum(n for n, _ in SPANS), sum(n_blocks) * KV_BLOCK_TOKENS
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(n, heads, HEAD_DIM, generator=generator).to(device=device, dtype=dtype)
        for n, heads in ((n_queries, HEADS), (n_slots, KV_HEADS), (n_slots, KV_HEADS))
    )
    offsets = np.arange(KV_BLOCK_TOKENS)
    spans = [
        Queries(n, (table[:, None] * KV_BLOCK_TOKENS + offsets).reshape(-1)[:context], table.tolist())
        for (n, context), table in zip(SPANS, tables, strict=True)
    ]
    staging = Staged(device)
    packed = pack(spans, flash, staging, own_keys=False)
    staging.send()
    with torch.inference_mode():
        mixed = packed_attention(query, keys, values, keys, values, packed, None).float()
        expected = []
        for first, (n, slots, _) in zip(packed.starts.tolist(), spans, strict=False):
            its = torch.from_numpy(slots).to(device)
            seen = torch.ones(n, len(slots), dtype=torch.bool, device=device).tril(len(slots) - n)
            q, k, v = (
                x.float().transpose(0, 1)[None] for x in (query[first : first + n], keys[its], values[its])
            )
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            expected.append(out[0].transpose(0, 1))
        errors = (mixed - torch.cat(expected)).abs().amax(dim=(1, 2))
    return Agreement(int((errors <= TOLERANCE).sum()), n_queries)  # NaN is no agreement
