"""The sizes of an engine behind a server, which a run over HTTP does not hold: whoever started it says them."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from roseinfer.bench.flag_values import LARGEST
from roseinfer.bench.load_options import whole_option
from roseinfer.bench.options import flag
from roseinfer.errors import InputError

_OF_SERVERS = "Of the server that was measured, to predict its cells"

MaxBatchSize = Annotated[int | None, whole_option(help=f"{_OF_SERVERS}: requests in one step.")]
MaxNumBatchedTokens = Annotated[int | None, whole_option(help=f"{_OF_SERVERS}: token budget of a step.")]
KvCacheTokens = Annotated[int | None, whole_option(help=f"{_OF_SERVERS}: tokens that its KV cache holds.")]
MaxModelLen = Annotated[int | None, whole_option(help=f"{_OF_SERVERS}: tokens that one request may span.")]


class EngineSizes(NamedTuple):
    """Called as the flags of `run`; None: what a simulation takes by itself."""

    max_batch_size: int
    max_num_batched_tokens: int | None = None
    kv_cache_tokens: int | None = None
    max_model_len: int | None = None


def engine_sizes(
    max_batch_size: int | None,
    max_num_batched_tokens: int | None,
    kv_cache_tokens: int | None,
    max_model_len: int | None,
) -> EngineSizes | None:
    """What these flags say; None where none is given. Raises InputError for others without the batch size."""
    if max_batch_size is not None:
        sizes = EngineSizes(max_batch_size, max_num_batched_tokens, kv_cache_tokens, max_model_len)
        for field, size in sizes._asdict().items():
            if size is not None and not 1 <= size <= LARGEST:
                raise InputError(flag(field), size, f"must be a whole number from 1 to {LARGEST}")
        return sizes
    others = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_tokens": kv_cache_tokens,
        "max_model_len": max_model_len,
    }
    for field, size in others.items():
        if size is not None:
            raise InputError(flag(field), size, "needs --max-batch-size: how large a server's batches are")
    return None
