"""The executor as a GPU has it, with stand-ins on the CPU for the kernels and graphs that only a GPU has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from roseinfer.engine.engine import InferenceEngine
from roseinfer.engine.executor import TorchExecutor
from roseinfer.engine.graphs import Compute, DecodeGraphs
from roseinfer.engine.staging import Staged
from roseinfer.engine.varlen import Flash
from roseinfer.executor import Clock
from tests.engine.tiny_models import CONTEXT

CPU = torch.device("cpu")


class GpuEngine:
    """`engine` with a staged way to its device. `graphs` captures its decodes, `flash` packs its spans."""

    paged_attn = True

    def __init__(self, engine: InferenceEngine, *, graphs: bool = False, flash: Flash | None = None) -> None:
        self._engine = engine
        self._has_graphs = graphs
        self._flash = flash
        self.replays: list[int] = []  # the batch of each

    def make_executor(self, *, num_kv_blocks: int, max_batch_size: int, clock: Clock) -> TorchExecutor:
        kv = self._engine._kv.tensors(num_kv_blocks + 1)  # fresh: nobody is told that they are in use
        for tensor in (tensor for layer in kv for tensor in layer):
            tensor.fill_(torch.nan)  # what is read before it is written shows
        graphs = None
        if self._has_graphs:
            graphs = DecodeGraphs(
                self._engine._model,
                kv,
                Staged(CPU),
                max_model_len=CONTEXT,
                flash=self._flash,
                capture=self._capture,
            )
            graphs.warm_up(max_batch_size)
        self.graphs, self.kv = graphs, kv
        return TorchExecutor(
            self._engine._model, kv, clock, paged_attn=True, flash=self._flash, graphs=graphs
        )

    def _capture(self, compute: Compute) -> tuple[Callable[[], None], torch.Tensor]:
        """Computes again what was captured, from what the captured tensors hold by then."""
        logits = compute().clone()

        def replay() -> None:
            self.replays.append(len(logits))
            logits.copy_(compute())

        return replay, logits


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch's `varlen_attn`, span by span; with the demands of its kernels."""
    assert enable_gqa == (query.shape[1] != key.shape[-2])
    assert window_size == (-1, 0)
    assert (block_table is None) == (seqused_k is None) == (cu_seq_k is not None)
    for given in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert given is None or given.dtype == torch.int32
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    assert int(cu_seq_q[-1]) == len(query)
    outs = []
    for span in range(len(cu_seq_q) - 1):
        queries = query[cu_seq_q[span] : cu_seq_q[span + 1]]
        its: list[Any] = [key, value]
        if block_table is not None:
            assert seqused_k is not None
            its = [cache[block_table[span].long()].flatten(0, 1)[: seqused_k[span]] for cache in its]
        else:
            assert cu_seq_k is not None
            its = [packed[cu_seq_k[span] : cu_seq_k[span + 1]] for packed in its]
        n, context = len(queries), len(its[0])
        assert n <= max_q
        assert context <= max_k
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, *its))
        mask = torch.ones(n, context, dtype=torch.bool).tril(context - n)
        mixed = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        outs.append(mixed[0].transpose(0, 1))
    return torch.cat(outs)


def varlen_attn_of_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """As torch 2.11 has it: contexts in one piece, and groups of queries are seen by the shapes."""
    return varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale=scale,
        window_size=window_size,
        enable_gqa=query.shape[1] != key.shape[1],
    )
