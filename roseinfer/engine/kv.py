"""The physical KV cache: two tensors a layer, kept by the engine and lent to one executor after another."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from roseinfer.engine.probe import LayerShape
from roseinfer.engine.step_context import LayerKV
from roseinfer.executor import KV_BLOCK_TOKENS


class KVPool:
    """Lends KV tensors. The next borrower of the same size gets the same memory once the last one is gone.

    A sweep makes an executor per cell: fresh memory each time would put page faults into its first steps.
    """

    def __init__(
        self, layers: Sequence[LayerShape], device: torch.device, dtype: torch.dtype, *, spare_blocks: int = 0
    ) -> None:
        """`spare_blocks` are added behind those that are asked for."""
        self._layers = layers
        self._spare_blocks = spare_blocks
        self._device = device
        self._dtype = dtype
        self._kv: list[LayerKV] = []
        self._num_blocks = 0
        self._borrower: weakref.ref[object] | None = None

    @property
    def bytes_per_token(self) -> int:
        """Of all layers together."""
        elements = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self._layers)
        return elements * self._dtype.itemsize

    def has(self, num_blocks: int) -> bool:
        """Tensors of this size are there, and nobody uses them."""
        in_use = self._borrower is not None and self._borrower() is not None
        return num_blocks == self._num_blocks and not in_use

    def tensors(self, num_blocks: int) -> list[LayerKV]:
        """Tensors for `num_blocks` blocks that nobody uses. Call `lend` with their new user."""
        if not self.has(num_blocks):
            self._kv = []  # free the old tensors before the new ones are made
            num_slots = (num_blocks + self._spare_blocks) * KV_BLOCK_TOKENS
            self._kv = [self._layer(layer, num_slots) for layer in self._layers]
            self._num_blocks = num_blocks
        return self._kv

    def lend(self, borrower: object) -> None:
        """The tensors last given out belong to `borrower` for as long as it lives."""
        self._borrower = weakref.ref(borrower)

    def _layer(self, layer: LayerShape, num_slots: int) -> LayerKV:
        # Left as it comes: no slot is read before its request wrote it, and memory that nobody needs is never touched.
        # Not on CUDA: kernels that read whole blocks weigh what lies behind a context with 0, and 0 x NaN is NaN.
        new = torch.zeros if self._device.type == "cuda" else torch.empty
        return (
            new(num_slots, layer.kv_heads, layer.key_dim, device=self._device, dtype=self._dtype),
            new(num_slots, layer.kv_heads, layer.value_dim, device=self._device, dtype=self._dtype),
        )
