"""KV cache bookkeeping: abstract blocks of KV_BLOCK_TOKENS tokens, a block table per request.

It counts the same blocks whether the memory behind it is one contiguous run, paged, or simulated.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from roseinfer.errors import InvariantError
from roseinfer.executor import KV_BLOCK_TOKENS


def blocks_for(n_tokens: int) -> int:
    """Blocks that hold `n_tokens` tokens."""
    return -(-n_tokens // KV_BLOCK_TOKENS)


class KVCache:
    """Hands out blocks. A request's whole need (prompt + max_new_tokens) is reserved at once: no preemption."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[int] = []  # a stack: the block freed last is warm in the cache and used first
        self._num_touched = 0  # blocks from this one on were never handed out, and are free too
        self._owned: dict[int, list[int]] = {}

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * KV_BLOCK_TOKENS

    @property
    def used_tokens(self) -> int:
        """Tokens that blocks are reserved for, rounded up to whole blocks."""
        return (self.num_blocks - self._num_free) * KV_BLOCK_TOKENS

    @property
    def _num_free(self) -> int:
        return self.num_blocks - self._num_touched + len(self._free)

    def can_allocate(self, n_tokens: int) -> bool:
        return blocks_for(n_tokens) <= self._num_free

    def allocate(self, request_id: int, n_tokens: int) -> list[int]:
        """The block table of a request: int[blocks_for(n_tokens)], in order of position."""
        n_blocks = blocks_for(n_tokens)
        if request_id in self._owned or n_blocks > self._num_free:
            raise InvariantError(f"request {request_id}: cannot allocate {n_blocks} blocks")
        kept = max(len(self._free) - n_blocks, 0)
        table = self._free[kept:]
        del self._free[kept:]
        table.reverse()
        untouched = self._num_touched
        self._num_touched += n_blocks - len(table)
        table += range(untouched, self._num_touched)
        self._owned[request_id] = table
        return table

    def free(self, request_id: int) -> None:
        """Takes a request's blocks back."""
        table = self._owned.pop(request_id, None)
        if table is None:
            raise InvariantError(f"request {request_id} owns no KV blocks")
        self._free += table[::-1]

    def owners(self) -> AbstractSet[int]:
        """Ids of the requests that own blocks."""
        return self._owned.keys()

    def check(self) -> None:
        """Raises InvariantError unless every block is either free or owned, once."""
        n_blocks = 0
        # Neither a sort nor a look at every block that there is: tests of long runs check after every step.
        seen = bytearray(self._num_touched)
        for blocks in (self._free, *self._owned.values()):
            n_blocks += len(blocks)
            for block in blocks:
                if 0 <= block < self._num_touched:  # else -1 would pass for the last one
                    seen[block] = 1
        if n_blocks != self._num_touched or 0 in seen or self._num_touched > self.num_blocks:
            raise InvariantError("KV blocks: free + owned is not the whole, or a block is counted twice")
