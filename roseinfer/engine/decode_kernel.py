"""One query each against its whole context, compiled by numba for this CPU.

A context is cut into chunks of CHUNK_TOKENS; every chunk has a softmax of its own, and the chunks of a query are
weighed together at the end (Dao et al., "Flash-Decoding for long-context inference", 2023). So threads share the work
evenly however long each context is, and the numbers of a query depend neither on them nor on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from numba import types
from numba.extending import overload

CHUNK_TOKENS: Final = 64

_LOG2_E: Final = np.float32(1.4426950408889634)
_LOWEST_EXPONENT: Final = np.float32(-126)  # below it a float32 loses digits

# Of what fastmath allows, not that NaN and infinity lose their meaning.
_FAST: Final = {"reassoc", "contract", "nsz", "arcp"}
_compiled = numba.njit(nogil=True, fastmath=_FAST)


def compiled_kernel(*, bfloat16: bool) -> Callable[..., None]:
    """`_attend` for keys and values in float32 or, as their bits (uint16), in bfloat16.

    Compiled once for all layouts of a query, so that no step pays for it: seconds, or a tenth where its file is kept.
    """
    cache = types.Array(types.uint16 if bfloat16 else types.float32, 3, "C")
    integers, out = types.Array(types.int64, 1, "C"), types.Array(types.float32, 3, "C")
    query = types.Array(types.float32, 3, "A")
    signature = types.void(query, cache, cache, integers, integers, integers, types.float32, types.int64, out)
    function = _attend_bfloat16 if bfloat16 else _attend_float32
    try:
        compiled = numba.njit([signature], cache=True, nogil=True)(function)
    except Exception:  # no place for a file, a full disk, a file that is broken
        compiled = numba.njit([signature], nogil=True)(function)
    kernel: Callable[..., None] = compiled
    return kernel


def _widened(x: Any) -> Any:
    """A float32: of itself, or of the bits of a bfloat16."""


@overload(_widened, inline="always")
def _of_type(x: Any) -> Callable[[Any], Any]:
    def itself(x: Any) -> Any:
        return x

    def from_bits(x: Any) -> Any:
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

    return from_bits if x == types.uint16 else itself


@numba.njit(nogil=True, fastmath=_FAST, inline="always")
def _exp2(x: Any) -> Any:
    """2 to the x, for x <= 0, in float32: NumPy's is a call for each number, and this is a few instructions for 16.

    The fraction's power is its Chebyshev interpolation of degree 5 on [-1, 0]: a relative error below 3e-7.
    """
    x = max(x, _LOWEST_EXPONENT)  # in this order a NaN stays one
    whole = np.int32(x)
    f = x - np.float32(whole)
    power = np.float32(9.4687700e-4)
    power = power * f + np.float32(9.2091803e-3)
    power = power * f + np.float32(5.5298120e-2)
    power = power * f + np.float32(2.4017896e-1)
    power = power * f + np.float32(6.9314313e-1)
    power = power * f + np.float32(9.9999994e-1)
    return power * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@_compiled
def _attend_chunk(
    query: Any, keys: Any, values: Any, slots: Any, weights: Any, peaks: Any, totals: Any, sums: Any
) -> None:
    """`query` [heads, key_dim], times scale and log2(e), against the tokens in `slots` alone.

    peaks, totals [heads]: the largest score, and the sum of 2 ** (score - peak). sums [heads, value_dim]: the values,
    each times its 2 ** (score - peak). `weights` [heads, CHUNK_TOKENS] is scratch.
    """
    heads, kv_heads, n = len(query), keys.shape[1], len(slots)
    sharing = heads // kv_heads  # query heads of a key head
    # Token by token, as they lie in memory: head by head takes twice as long where no cache holds them.
    for token in range(n):
        slot = slots[token]
        for kv_head in range(kv_heads):
            for head in range(kv_head * sharing, (kv_head + 1) * sharing):
                score = np.float32(0)
                for i in range(query.shape[1]):
                    score += query[head, i] * _widened(keys[slot, kv_head, i])
                weights[head, token] = score
    for head in range(heads):
        peak = weights[head, 0]
        for token in range(1, n):
            peak = max(peak, weights[head, token])
        total = np.float32(0)
        for token in range(n):
            weight = _exp2(weights[head, token] - peak)
            weights[head, token] = weight
            total += weight
        peaks[head], totals[head] = peak, total
        for i in range(sums.shape[1]):
            sums[head, i] = 0
    for token in range(n):
        slot = slots[token]
        for kv_head in range(kv_heads):
            for head in range(kv_head * sharing, (kv_head + 1) * sharing):
                weight = weights[head, token]
                for i in range(sums.shape[1]):
                    sums[head, i] += weight * _widened(values[slot, kv_head, i])


@_compiled
def _merge(peaks: Any, totals: Any, sums: Any, out: Any) -> None:
    """The chunks of one query, [chunks, heads] and [chunks, heads, value_dim], into `out` [heads, value_dim]."""
    for head in range(len(out)):
        peak = peaks[0, head]
        for chunk in range(1, len(peaks)):
            peak = max(peak, peaks[chunk, head])
        total = np.float32(0)
        for i in range(out.shape[1]):
            out[head, i] = 0
        for chunk in range(len(peaks)):
            weight = _exp2(peaks[chunk, head] - peak)
            total += weight * totals[chunk, head]
            for i in range(out.shape[1]):
                out[head, i] += weight * sums[chunk, head, i]
        for i in range(out.shape[1]):
            out[head, i] /= total


@numba.njit(parallel=True, nogil=True, fastmath=_FAST)
def _attend(
    query: Any, keys: Any, values: Any, slots: Any, starts: Any, rows: Any, scale: Any, parts: Any, out: Any
) -> None:
    """query, out [n, heads, dim]; keys, values [slots, kv_heads, dim].

    Chunk c holds slots[starts[c] : starts[c + 1]] of query rows[c]; those of one query are neighbours. The chunks are
    computed in `parts`, each by one thread.
    """
    n, heads, key_dim = query.shape
    n_chunks, value_dim = len(rows), out.shape[2]
    peaks = np.empty((n_chunks, heads), np.float32)
    totals = np.empty((n_chunks, heads), np.float32)
    sums = np.empty((n_chunks, heads, value_dim), np.float32)
    for part in numba.prange(parts):
        scaled = np.empty((heads, key_dim), np.float32)
        weights = np.empty((heads, CHUNK_TOKENS), np.float32)
        for c in range(part * n_chunks // parts, (part + 1) * n_chunks // parts):
            # Loops, not slices: numba makes a parallel region of every assignment to one.
            for head in range(heads):
                for i in range(key_dim):
                    scaled[head, i] = query[rows[c], head, i] * (scale * _LOG2_E)
            its = slots[starts[c] : starts[c + 1]]
            _attend_chunk(scaled, keys, values, its, weights, peaks[c], totals[c], sums[c])
    first = 0
    for row in range(n):
        end = first
        while end < n_chunks and rows[end] == row:
            end += 1
        _merge(peaks[first:end], totals[first:end], sums[first:end], out[row])
        first = end


# Two names, so that each has a file of its own: numba writes those of one name without a lock.
def _attend_float32(
    query: Any, keys: Any, values: Any, slots: Any, starts: Any, rows: Any, scale: Any, parts: Any, out: Any
) -> None:
    _attend(query, keys, values, slots, starts, rows, scale, parts, out)


def _attend_bfloat16(
    query: Any, keys: Any, values: Any, slots: Any, starts: Any, rows: Any, scale: Any, parts: Any, out: Any
) -> None:
    _attend(query, keys, values, slots, starts, rows, scale, parts, out)
