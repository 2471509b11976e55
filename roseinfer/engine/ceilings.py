"""What this machine can do at best, measured: products of packed linear layers, and reading memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from roseinfer.engine.linear import make_linear

_ROWS: Final = {"cpu": 256, "cuda": 8192}
_SHAPES: Final = {
    "cpu": ((3072, 768), (768, 3072)),  # GPT-2's MLP, [out, in]
    "cuda": ((8192, 8192),),  # what a GPU can do at best takes more work than that
}
_READ_BYTES: Final = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
_REPEATS: Final = 7


def linear_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplications and additions per second of the layers that the native models are made of.

    On CPU the mean of the two shapes of GPT-2's MLP at 256 rows, on CUDA a square product of 8192; the median of a few
    repeats each. float16 on a CPU: what the weights are kept in, as in the engine.
    """
    half = dtype == torch.float16 and device.type == "cpu"
    computed_in = torch.float32 if half else dtype
    rates, rows = [], _ROWS[device.type]
    for shape in _SHAPES[device.type]:
        weight = torch.randn(shape, device=device, dtype=computed_in)
        x = torch.randn(rows, shape[1], device=device, dtype=computed_in)
        layer = make_linear(weight, None, half=half)
        rates.append(2 * rows * weight.numel() / _seconds(partial(layer, x), device))
    return statistics.mean(rates)


def read_bytes_per_s(device: torch.device) -> float:
    """Bytes per second at which one operator reads memory that no cache holds."""
    num_bytes = _READ_BYTES[device.type]
    data = torch.ones(num_bytes // 4, device=device)
    return num_bytes / _seconds(data.sum, device)


def _seconds(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """The median time of one call, over repeats of as many calls as take 20 ms."""
    with torch.inference_mode():
        work()
        once_s = _timed(work, 1, device)
        calls = max(1, int(0.02 / once_s))
        return statistics.median(_timed(work, calls, device) / calls for _ in range(_REPEATS))


def _timed(work: Callable[[], torch.Tensor], calls: int, device: torch.device) -> float:
    _finish(device)
    start_s = time.perf_counter()
    for _ in range(calls):
        work()
    _finish(device)
    return time.perf_counter() - start_s


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
