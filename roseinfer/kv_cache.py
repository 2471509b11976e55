"""KV cache bookkeeping: abstract blocks of KV_BLOCK_TOKENS tokens, a block table per request.

It counts the same blocks whether the memory behind it is one contiguous run, paged, or simulated.

With a prefix cache, full blocks outlive their request until their memory is wanted, least recently used first. A
request that begins with the same tokens reads them where they are (`shares_blocks`, a paged layout), or starts with a
copy (a contiguous one, where a request's blocks are to lie one behind the other).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from roseinfer.errors import InvariantError
from roseinfer.executor import KV_BLOCK_TOKENS
from roseinfer.prefix_index import ROOT, PrefixIndex


def blocks_for(n_tokens: int) -> int:
    """Blocks that hold `n_tokens` tokens."""
    return -(-n_tokens // KV_BLOCK_TOKENS)


class KVCache:
    """Hands out blocks. A request's whole need (prompt + max_new_tokens) is reserved at once: no preemption.

    A block is free, or in the table of a request (of several, if shared), or cached: in no table, and kept.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool = False, shares_blocks: bool = True) -> None:
        self.num_blocks = num_blocks
        self.capacity_tokens = num_blocks * KV_BLOCK_TOKENS
        self.shares_blocks = shares_blocks
        self.caches_prefixes = prefix_cache
        self._prefixes = PrefixIndex() if prefix_cache else None
        self._is_free = bytearray(b"\1") * num_blocks
        self._num_free = num_blocks
        self._owned: dict[int, list[int]] = {}
        # What follows stays as it is without a prefix cache.
        self._users = [0] * num_blocks  # tables that a block is in
        self._chains: dict[
            int, tuple[int, int]
        ] = {}  # of each owner: blocks known so far, number of the last
        # Blocks that are kept and evicted together, by their first one, least recently used first. A contiguous
        # run stays one, so that a request of its size finds its memory in one piece.
        self._cached: dict[int, list[int]] = {}
        self._run_of: dict[int, int] = {}  # the key in `_cached` of each cached block

    @property
    def used_tokens(self) -> int:
        """Tokens that blocks are reserved for, rounded up to whole blocks. Cached ones are reserved for nobody."""
        return (self.num_blocks - self._num_free - len(self._run_of)) * KV_BLOCK_TOKENS

    def find_prefix(self, prompt_ids: Sequence[int]) -> list[int]:
        """Blocks that hold the beginning of a prompt, in order of position; [] without a prefix cache.

        Never the whole prompt: its last token is computed again, since the first output token is sampled from it.
        """
        if self._prefixes is None:
            return []
        return self._prefixes.find(prompt_ids, (len(prompt_ids) - 1) // KV_BLOCK_TOKENS)

    def can_allocate(self, n_tokens: int, prefix: Sequence[int] = ()) -> bool:
        """Whether `allocate` would succeed. `prefix` is what `find_prefix` found."""
        return blocks_for(n_tokens) <= self._spare(prefix)

    def allocate(self, request_id: int, n_tokens: int, prefix: Sequence[int] = ()) -> list[int]:
        """The block table of a request: int[blocks_for(n_tokens)], in order of position.

        It begins with `prefix`, which must not be written to, or, where blocks are not shared, with as many blocks
        that `prefix` is to be copied to before anything else is written: some of `prefix` may be in the table, too.
        """
        n_blocks = blocks_for(n_tokens)
        if request_id in self._owned or n_blocks > self._spare(prefix):
            raise InvariantError(f"request {request_id}: cannot allocate {n_blocks} blocks")
        if self._prefixes is None:
            table = self._owned[request_id] = self._take(n_blocks)
            return table
        shared = list(prefix) if self.shares_blocks else []
        for block in shared:
            if block in self._run_of:
                del self._cached[block], self._run_of[block]
        if not self.shares_blocks:
            # The first block last: a chain is of no use without its beginning.
            for run in (self._run_of.get(block) for block in reversed(prefix)):
                if run is not None:
                    self._cached[run] = self._cached.pop(run)
        n_blocks -= len(shared)
        row = b"\1" * n_blocks
        # One piece is worth more than what was not used for the longest, where it is read as one piece and can be had.
        wants_row = (
            not self.shares_blocks and row not in self._is_free and bytes(n_blocks) in bytes(self._users)
        )
        while self._num_free < n_blocks or (wants_row and row not in self._is_free):
            self._release(next(iter(self._cached)))
        table = self._owned[request_id] = shared + self._take(n_blocks)
        self._chains[request_id] = len(shared), self._prefixes.number(shared[-1]) if shared else ROOT
        for block in table:
            self._users[block] += 1
        return table

    def publish(self, request_id: int, known_ids: Callable[[int, int], Sequence[int]], n_tokens: int) -> None:
        """Keys and values of a request's first `n_tokens` exist: its full blocks can be found now.

        `known_ids(start, end)` gives the token ids of positions start .. end - 1.
        Where others hold the same tokens already, these are found from now on: they will be wanted the longest.
        """
        if self._prefixes is None:
            return
        table = self._owned[request_id]
        n_known, number = self._chains[request_id]
        n_full = n_tokens // KV_BLOCK_TOKENS
        for place in range(n_known, n_full):
            start = place * KV_BLOCK_TOKENS
            ids = tuple(known_ids(start, start + KV_BLOCK_TOKENS))
            number, replaced = self._prefixes.put(number, ids, table[place])
            run = None if replaced is None else self._run_of.get(replaced)
            if run is not None and not any(block in self._prefixes for block in self._cached[run]):
                self._release(run)
        self._chains[request_id] = n_full, number

    def free(self, request_id: int) -> None:
        """Takes a request's blocks back."""
        table = self._owned.pop(request_id, None)
        if table is None:
            raise InvariantError(f"request {request_id} owns no KV blocks")
        if self._prefixes is None:
            self._give_back(table)
            return
        del self._chains[request_id]
        for block in table:
            self._users[block] -= 1
        # The end of a chain is evicted before its beginning.
        for run in [[block] for block in reversed(table)] if self.shares_blocks else [table]:
            if any(self._users[block] for block in run):
                continue
            if any(block in self._prefixes for block in run):
                self._cached[run[0]] = run
                self._run_of.update(dict.fromkeys(run, run[0]))
            else:
                self._give_back(run)

    def _spare(self, prefix: Sequence[int]) -> int:
        """Blocks that a request which begins with `prefix` can have, those of `prefix` that it shares included."""
        spare = self._num_free + len(self._run_of)
        if prefix and self.shares_blocks:
            spare += sum(block not in self._run_of for block in prefix)
        return spare

    def _take(self, n_blocks: int) -> list[int]:
        """Free blocks, the lowest that lie one behind the other; where no such row is left, the lowest of all.

        Low ones first, since they were in use lately: what is never needed is never touched.
        """
        self._num_free -= n_blocks
        start = self._is_free.find(b"\1" * n_blocks)
        if start >= 0:
            self._is_free[start : start + n_blocks] = bytes(n_blocks)
            return list(range(start, start + n_blocks))
        blocks, block = list[int](), -1
        for _ in range(n_blocks):
            block = self._is_free.index(1, block + 1)
            self._is_free[block] = 0
            blocks.append(block)
        return blocks

    def _give_back(self, blocks: list[int]) -> None:
        n_blocks = len(blocks)
        self._num_free += n_blocks
        if n_blocks and blocks[-1] - blocks[0] == n_blocks - 1:  # they are in order, so in one piece
            self._is_free[blocks[0] : blocks[-1] + 1] = b"\1" * n_blocks
        else:
            for block in blocks:
                self._is_free[block] = 1

    def _release(self, run: int) -> None:
        """Makes a cached run free; nothing in it can be found any more."""
        assert self._prefixes is not None
        blocks = self._cached.pop(run)
        for block in blocks:
            del self._run_of[block]
            self._prefixes.drop(block)
        self._give_back(blocks)

    def owners(self) -> AbstractSet[int]:
        """Ids of the requests that own blocks."""
        return self._owned.keys()

    def check(self) -> None:
        """Raises InvariantError unless every block is free, cached, or in as many tables as it is counted in."""
        # Not a sort: tests of long runs check after every step, and it would take them minutes.
        seen = bytearray(self._is_free)
        n_blocks = seen.count(1)
        if n_blocks != self._num_free:
            raise InvariantError(f"KV blocks: {n_blocks} are free, {self._num_free} were counted")
        for blocks in (*self._cached.values(), *self._owned.values()):
            n_blocks += len(blocks)
            for block in blocks:
                if 0 <= block < self.num_blocks:  # else -1 would pass for the last one
                    seen[block] = 1
        shared = sum(users - 1 for users in self._users if users > 1) if self._prefixes is not None else 0
        if n_blocks - shared != self.num_blocks or 0 in seen:
            raise InvariantError("KV blocks: free + owned is not the whole, or a block is counted twice")
        if self._prefixes is not None:
            self._check_prefixes(self._prefixes)

    def _check_prefixes(self, prefixes: PrefixIndex) -> None:
        users = [0] * self.num_blocks
        for table in self._owned.values():
            for block in table:
                users[block] += 1
        if users != self._users or (not self.shares_blocks and max(users, default=0) > 1):
            raise InvariantError("KV blocks: in other tables than counted")
        if self._run_of != {block: run for run, blocks in self._cached.items() for block in blocks}:
            raise InvariantError("KV blocks: cached ones are not in their runs")
        if any(users[block] for block in self._run_of) or any(
            self._is_free[block] for block in prefixes.blocks()
        ):
            raise InvariantError("KV blocks: a cached one is in use, or a free one can be found")
