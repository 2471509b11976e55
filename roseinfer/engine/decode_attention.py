"""Attention of one query each on a CPU: every context is read where it lies, all of them in one call.

torch's own has to be called once for all contexts of one length that lie at equal distances, and comes to a third of
the bandwidth. Where numba is missing, or its kernel does not agree with torch's, that is what is left.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

_ONE_AT_A_TIME: Final = threading.Lock()
"""Where numba finds no OpenMP its threads take one caller at a time, and end the process at a second one."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """Where the contexts of some queries lie: chunk c is slots[starts[c] : starts[c + 1]], of query rows[c]."""

    n: int  # queries
    slots: NDArray[np.int64]
    starts: NDArray[np.int64]  # [chunks + 1]
    rows: NDArray[np.int64]  # [chunks]


def in_place(contexts: Sequence[NDArray[np.int64]]) -> Contexts:
    """Query i is the last token of `contexts[i]`, which holds a slot for each of its tokens. There is at least one."""
    from roseinfer.engine.decode_kernel import CHUNK_TOKENS

    lengths = np.array([len(slots) for slots in contexts], np.int64)
    chunks = -(-lengths // CHUNK_TOKENS)
    rows = np.repeat(np.arange(len(contexts)), chunks)
    within = np.arange(len(rows)) - (np.cumsum(chunks) - chunks)[rows]
    starts = (np.cumsum(lengths) - lengths)[rows] + CHUNK_TOKENS * within
    return Contexts(len(contexts), np.concatenate(contexts), np.append(starts, lengths.sum()), rows)


def attend_in_place(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: Contexts,
    scaling: float | None,
    out: torch.Tensor,
) -> None:
    """query [rows, heads, head_dim]; fills the first `contexts.n` rows of `out`, which is contiguous."""
    import numba

    kernel = _kernel(keys.dtype)
    assert kernel is not None
    query, out = query[: contexts.n], out[: contexts.n]
    mixed = out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    parts = min(threads, len(contexts.rows))
    with _ONE_AT_A_TIME:
        numba.set_num_threads(parts)
        kernel(
            query.float().numpy(),
            _bits(keys),
            _bits(values),
            contexts.slots,
            contexts.starts,
            contexts.rows,
            scale,
            parts,
            mixed.numpy(),
        )
    if mixed is not out:
        out.copy_(mixed)


@lru_cache
def in_place_works(dtype: torch.dtype) -> bool:
    """True where the kernel can be had for keys and values on a CPU in this dtype, and agrees with torch's own.

    Warns where numba is there and fails.
    """
    threads = torch.get_num_threads()
    try:
        return _kernel(dtype) is not None and _agrees(dtype)
    except Exception as error:  # numba's settings, its threads, its files: anything but a reason not to serve
        warnings.warn(
            f"decodes use torch's attention: numba's fails here ({error})", RuntimeWarning, stacklevel=2
        )
        return False
    finally:
        # numba, as it starts its own, sets how many torch's OpenMP has in this thread.
        torch.set_num_threads(threads)


def _agrees(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((1, 4, 16), (80, 2, 16), (80, 2, 16))
    )
    out = torch.empty_like(query)
    attend_in_place(query, keys, values, in_place([np.arange(80)]), None, out)
    shared = scaled_dot_product_attention(
        query.view(1, 2, 2, 16), keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    )
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    return torch.allclose(out.float(), shared.reshape(1, 4, 16).float(), rtol=tolerance, atol=tolerance)


@lru_cache
def _kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        from roseinfer.engine.decode_kernel import compiled_kernel
    except ImportError:
        return None
    return compiled_kernel(bfloat16=dtype == torch.bfloat16)


def _bits(cache: torch.Tensor) -> NDArray[np.float32] | NDArray[np.uint16]:
    return (cache.view(torch.uint16) if cache.dtype == torch.bfloat16 else cache).numpy()
