"""Which block holds which tokens behind which prefix: what a request finds of the work of those before it.

A block's key is the number of the block before it in its chain, and its own token ids. The chain of hashes is the
dictionary's own, which compares the ids themselves when hashes are equal: a collision costs time, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from roseinfer.executor import KV_BLOCK_TOKENS

ROOT: Final = 0
"""The number that stands before the first block of every chain."""

Key = tuple[int, tuple[int, ...]]


class Entry(NamedTuple):
    """`number` names the tokens from position 0 to the end of this block, and no others, ever."""

    number: int
    block: int


class PrefixIndex:
    """Full blocks by the tokens that they hold and all that came before. It owns none of them."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._keys: dict[int, Key] = {}  # by block
        self._last_number = ROOT

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def find(self, token_ids: Sequence[int], max_blocks: int) -> list[int]:
        """The blocks of the longest known chain that `token_ids` begin with, `max_blocks` at most."""
        number, blocks = ROOT, list[int]()
        for end in range(KV_BLOCK_TOKENS, max_blocks * KV_BLOCK_TOKENS + 1, KV_BLOCK_TOKENS):
            entry = self._entries.get((number, tuple(token_ids[end - KV_BLOCK_TOKENS : end])))
            if entry is None:
                break
            number, block = entry
            blocks.append(block)
        return blocks

    def number(self, block: int) -> int:
        """The number of a known block."""
        return self._entries[self._keys[block]].number

    def put(self, parent: int, token_ids: tuple[int, ...], block: int) -> tuple[int, int | None]:
        """`block` holds these tokens behind `parent`. Returns its number, and the block that was known for them."""
        key = parent, token_ids
        entry = self._entries.get(key)
        if entry is None:
            self._last_number += 1
            number, replaced = self._last_number, None
        else:
            number, replaced = entry
            del self._keys[replaced]
        self._entries[key] = Entry(number, block)
        self._keys[block] = key
        return number, replaced

    def drop(self, block: int) -> None:
        """Forgets a block, if it is known. What was found behind it is never found again."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._entries[key]

    def blocks(self) -> set[int]:
        """All known blocks."""
        return set(self._keys)
