"""How the small arrays of a step reach the device: on CPU they are there; a GPU gets all of them in one copy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT: Final = 16
"""Of every array in a staged buffer, in bytes: no dtype's own size is larger."""

_STAGED_BYTES: Final = 16 * 2**20
"""Enough for a step of 16 thousand tokens, and for the slots of 800 thousand tokens of context, which come twice: once
for all queries and once for the last ones."""


class Direct:
    """Arrays become tensors where they are."""

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """A tensor that holds `array`; it may share its memory."""
        return torch.from_numpy(array)

    def begin(self) -> None:
        """A new step."""

    def send(self) -> None:
        """Nothing has to go anywhere."""


class Staged:
    """Arrays are gathered in one pinned buffer, which one copy takes to the device without waiting for it.

    Between `begin` and `send` every `put` gives a tensor on the device that has its values once `send` was called.
    The device's side is one buffer for all steps: what a step reads of it, it must read on the stream of `send`.
    Equal arrays put in equal order lie at equal addresses, which CUDA graphs rely on.
    """

    def __init__(self, device: torch.device, num_bytes: int = _STAGED_BYTES) -> None:
        self._device_side = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._pins = device.type == "cuda"
        self._used = 0
        self.begin()

    def begin(self) -> None:
        """A new step. Its host buffer is a fresh one: the copy of the last may still be under way."""
        # torch keeps pinned memory that is dropped until the copies that read it are done.
        self._host_side = torch.empty(len(self._device_side), dtype=torch.uint8, pin_memory=self._pins)
        self._host_bytes = self._host_side.numpy()
        self._used = 0

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """The tensor on the device that will hold `array`. What finds no room goes there by itself, and waits."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        end = start + array.nbytes
        if end > len(self._host_bytes):
            return torch.from_numpy(array).to(self._device_side.device)
        self._host_bytes[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._used = end
        return self._view(start, end, torch.from_numpy(array[:0]).dtype, array.shape)

    def _view(self, start: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return self._device_side[start:end].view(dtype).view(shape)

    def send(self) -> None:
        """Starts the copy of all that was put."""
        self._device_side[: self._used].copy_(self._host_side[: self._used], non_blocking=True)


Staging = Direct | Staged


def staging_for(device: torch.device) -> Staging:
    """What a step on this device is prepared with."""
    return Staged(device) if device.type == "cuda" else Direct()
