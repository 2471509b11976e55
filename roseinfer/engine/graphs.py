"""CUDA graphs of decode steps: a step of some size is captured once, and later launched as one piece of work.

A graph computes what it was captured with, at the addresses that it was captured with. So steps are padded to few
sizes, and put their inputs into one buffer at the same places (`Staged`). Larger steps, and those with a prefill, are
computed as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from roseinfer.engine.model import Model
from roseinfer.engine.staging import Staged
from roseinfer.engine.step_context import LayerKV, StepContext, queries_of_blocks
from roseinfer.engine.varlen import Flash, PackedSpans
from roseinfer.executor import KV_BLOCK_TOKENS, Span, StepPlan
from roseinfer.kv_cache import blocks_for
from roseinfer.no_gc import no_gc

BATCHES: Final = (1, 2, 4, *range(8, 65, 8), *range(96, 257, 32))
"""Requests in a captured step."""

_FEWEST_BLOCKS: Final = 8

_MOST_BLOCKS: Final = 2**14
"""In the block tables of one step: it gathers all of them, used or not, in every layer."""

_MOST_BLOCKS_IN_PLACE: Final = 2**18
"""Where they are read and not gathered: the table itself must find its place in the staged buffer."""

Compute = Callable[[], torch.Tensor]
Capture = Callable[[Compute], tuple[Callable[[], None], torch.Tensor]]
"""Captures a computation: what computes it again, and the tensor that then has the result."""


class GraphKey(NamedTuple):
    """What a captured step has in it as a number, and all that differs between the graphs of one DecodeGraphs.

    Model, dtype, KV tensors, the size of a block and the kernels are one for all of them.
    """

    batch: int
    blocks: int  # of each request: the width of the block table


class DecodeInputs(NamedTuple):
    """The tensors that a captured step reads."""

    ids: torch.Tensor  # [batch]
    positions: torch.Tensor  # [batch]
    slots: torch.Tensor  # [batch]
    lengths: torch.Tensor  # int32 [batch]
    block_table: torch.Tensor  # int32 [batch, blocks]


class DecodeGraph(NamedTuple):
    """A captured step. `put` its inputs, send them, `replay` it; then `logits` [batch, vocab] has the result."""

    key: GraphKey
    scratch_block: int  # that padded rows write to
    staging: Staged
    replay: Callable[[], None]
    logits: torch.Tensor

    def put(self, plan: StepPlan, ids: NDArray[np.int64]) -> DecodeInputs:
        """The inputs of a plan of decodes. Call it right after `staging.begin()`: then they lie where they did."""
        return _put(self.key, self.scratch_block, plan.spans, ids, self.staging)


def bucket_of(n: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest that holds `n`; `buckets` ascend."""
    return next((bucket for bucket in buckets if bucket >= n), None)


def widths_for(max_blocks: int, flash: Flash | None) -> tuple[int, ...]:
    """Widths of block tables. FA3 reads what is there; else every row costs as much as the widest could."""
    widths = [max_blocks]
    while flash != "FA3" and widths[0] > _FEWEST_BLOCKS:
        widths.insert(0, max(_FEWEST_BLOCKS, -(-widths[0] // 2)))
    return tuple(widths)


class DecodeGraphs:
    """The captured steps of a model on KV tensors that have one block more than requests are given."""

    def __init__(
        self,
        model: Model,
        kv: list[LayerKV],
        staging: Staged,
        *,
        max_model_len: int,
        flash: Flash | None,
        capture: Capture | None = None,
    ) -> None:
        """`capture` None is that of torch."""
        self.staging = staging
        self._kv = kv
        self._model = model
        self._flash = flash
        self._scratch_block = kv[0][0].shape[0] // KV_BLOCK_TOKENS - 1
        self._widths = widths_for(blocks_for(max_model_len), flash)
        self._most_blocks = _MOST_BLOCKS_IN_PLACE if flash == "FA3" else _MOST_BLOCKS
        self._graphs: dict[GraphKey, DecodeGraph] = {}
        self._capture = _capture_in_pool() if capture is None else capture

    def warm_up(self, max_batch_size: int) -> None:
        """Captures every step of up to so many requests that is not there yet."""
        largest = bucket_of(max_batch_size, BATCHES) or BATCHES[-1]
        with torch.inference_mode():
            # The largest first: the others find room in what it leaves.
            for batch in sorted((batch for batch in BATCHES if batch <= largest), reverse=True):
                for blocks in reversed(self._widths):
                    key = GraphKey(batch, blocks)
                    if key not in self._graphs and batch * blocks <= self._most_blocks:
                        self._graphs[key] = self._captured(key)

    def graph_of(self, plan: StepPlan) -> DecodeGraph | None:
        """The smallest graph that computes a step; None if there is none."""
        spans = plan.spans
        if not all(span.n_tokens == 1 and span.samples for span in spans):
            return None
        batch = bucket_of(len(spans), BATCHES)
        blocks = bucket_of(blocks_for(max(span.start for span in spans) + 1), self._widths)
        return None if batch is None or blocks is None else self._graphs.get(GraphKey(batch, blocks))

    def _captured(self, key: GraphKey) -> DecodeGraph:
        self.staging.begin()
        nothing = np.zeros(0, np.int64)
        inputs = _put(key, self._scratch_block, [], nothing, self.staging)
        self.staging.send()
        replay, logits = self._capture(lambda: self._compute(inputs))
        return DecodeGraph(key, self._scratch_block, self.staging, replay, logits)

    def _compute(self, inputs: DecodeInputs) -> torch.Tensor:
        step = _decode_context(inputs, self._kv, self._flash)
        return self._model.forward(inputs.ids, inputs.positions, step)


def _put(
    key: GraphKey, scratch_block: int, spans: Sequence[Span], ids: NDArray[np.int64], staging: Staged
) -> DecodeInputs:
    """Rows behind those of the spans are padding: one token, in a block that nobody owns."""
    batch, n = key.batch, len(spans)
    padded_ids, positions = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    slots = np.full(batch, scratch_block * KV_BLOCK_TOKENS, np.int64)
    table = np.full((batch, key.blocks), scratch_block, np.int32)
    padded_ids[:n] = ids
    for row, (request, start, _, _) in enumerate(spans):
        blocks = request.block_table
        place, offset = divmod(start, KV_BLOCK_TOKENS)
        positions[row] = start
        slots[row] = blocks[place] * KV_BLOCK_TOKENS + offset
        table[row, : place + 1] = blocks[: place + 1]
    lengths = (positions + 1).astype(np.int32)
    return DecodeInputs(*(staging.put(array) for array in (padded_ids, positions, slots, lengths, table)))


def _decode_context(inputs: DecodeInputs, kv: list[LayerKV], flash: Flash | None) -> StepContext:
    """Nothing here is copied from the host, and no shape depends on a value: it is captured with the step."""
    n, n_blocks = inputs.block_table.shape
    rows = torch.arange(n, device=inputs.ids.device)
    if flash == "FA3":
        packed = PackedSpans(
            torch.arange(n + 1, dtype=torch.int32, device=inputs.ids.device),
            longest=1,
            longest_context=n_blocks * KV_BLOCK_TOKENS,
            block_table=inputs.block_table,
            context_lengths=inputs.lengths,
        )
        return StepContext(kv, inputs.slots, [], [], rows, [], packed, packed)
    queries = [queries_of_blocks(inputs.block_table, inputs.lengths)]
    return StepContext(kv, inputs.slots, queries, [], rows, queries)


def _capture_in_pool() -> Capture:
    """All graphs share their memory: one runs at a time, and what it leaves is used before the next."""
    pool = torch.cuda.graph_pool_handle()  # CUDA only, to the end of the file

    def capture(compute: Compute) -> tuple[Callable[[], None], torch.Tensor]:
        compute()  # kernels are loaded and chosen at their first use, which cannot be captured
        graph = torch.cuda.CUDAGraph()
        # Threads of other managers may use the device meanwhile. Garbage may be a graph of somebody who is gone, and to
        # destroy one in the midst of a capture spoils that.
        with no_gc(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = compute()
        return graph.replay, logits

    return capture
