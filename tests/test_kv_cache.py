from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roseinfer.errors import InvariantError
from roseinfer.executor import KV_BLOCK_TOKENS
from roseinfer.kv_cache import KVCache, blocks_for

N_BLOCKS = 12
request_ids = st.integers(0, 5)


def known(token_ids: Sequence[int]) -> Callable[[int, int], Sequence[int]]:
    return lambda start, end: token_ids[start:end]


def free_blocks(cache: KVCache) -> set[int]:
    return {block for block, is_free in enumerate(cache._is_free) if is_free}


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_block_is_taken_for_every_begun_sixteen_tokens(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


class Bookkeeping(RuleBasedStateMachine):
    """Any order of requests that come, go, ask for too much, or are freed by mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(N_BLOCKS)
        self.owned: dict[int, list[int]] = {}  # what each request was told that it owns

    @rule(request_id=request_ids, n_tokens=st.integers(0, (N_BLOCKS + 1) * KV_BLOCK_TOKENS))
    def allocate(self, request_id: int, n_tokens: int) -> None:
        n_left = N_BLOCKS - sum(map(len, self.owned.values()))
        assert self.cache.can_allocate(n_tokens) == (blocks_for(n_tokens) <= n_left)
        if request_id in self.owned or blocks_for(n_tokens) > n_left:
            with pytest.raises(InvariantError):
                self.cache.allocate(request_id, n_tokens)
        else:
            self.owned[request_id] = list(self.cache.allocate(request_id, n_tokens))
            assert len(self.owned[request_id]) == blocks_for(n_tokens)

    @rule(request_id=request_ids)
    def free(self, request_id: int) -> None:
        if self.owned.pop(request_id, None) is None:  # never allocated, or freed before
            with pytest.raises(InvariantError):
                self.cache.free(request_id)
        else:
            self.cache.free(request_id)

    @invariant()
    def free_and_owned_are_the_whole(self) -> None:
        self.cache.check()
        blocks = [block for table in self.owned.values() for block in table]
        assert len(free_blocks(self.cache)) + len(blocks) == N_BLOCKS
        assert set(blocks) | free_blocks(self.cache) == set(range(N_BLOCKS))
        assert self.cache.used_tokens == len(blocks) * KV_BLOCK_TOKENS

    @invariant()
    def tables_stay_as_they_were_given_out(self) -> None:
        assert self.cache._owned == self.owned
        assert self.cache.owners() == self.owned.keys()


test_free_and_owned_blocks_are_the_whole_after_any_operations = Bookkeeping.TestCase  # case B3


class Caching(RuleBasedStateMachine):
    """Requests over few different blocks of tokens, computed piece by piece, with what the memory would hold."""

    shares_blocks: bool

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(N_BLOCKS, prefix_cache=True, shares_blocks=self.shares_blocks)
        self.memory: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, once it is full
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}  # blocks

    @rule(
        request_id=request_ids,
        kinds=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        more=st.integers(0, 2),
    )
    def allocate(self, request_id: int, kinds: list[int], more: int) -> None:
        prompt = tuple(kind for kind in kinds for _ in range(KV_BLOCK_TOKENS))
        n_tokens = len(prompt) + more * KV_BLOCK_TOKENS
        prefix = self.cache.find_prefix(prompt)
        assert len(prefix) < len(kinds)  # the last token is computed
        for place, block in enumerate(prefix, start=1):
            assert self.memory[block] == prompt[: place * KV_BLOCK_TOKENS]
        taken = {block for table in self.tables.values() for block in table}
        shared = set(prefix) if self.shares_blocks else set()
        fits = blocks_for(n_tokens) - len(shared) <= N_BLOCKS - len(taken | shared)
        assert self.cache.can_allocate(n_tokens, prefix) == fits
        if request_id in self.tables or not fits:
            with pytest.raises(InvariantError):
                self.cache.allocate(request_id, n_tokens, prefix)
            return
        table = list(self.cache.allocate(request_id, n_tokens, prefix))
        assert len(table) == len(set(table)) == blocks_for(n_tokens)
        own = table[len(shared) :]
        assert not taken & set(own), "a block is handed out while it is in a table"
        held = [self.memory[block] for block in prefix]
        for block in own:
            self.memory.pop(block, None)
        if self.shares_blocks:
            assert table[: len(prefix)] == prefix
        else:
            self.memory.update(zip(table, held, strict=False))
        self.prompts[request_id], self.tables[request_id] = prompt, table
        self.computed[request_id] = len(prefix)

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def compute_a_block(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tables)))
        place, prompt = self.computed[request_id], self.prompts[request_id]
        if place * KV_BLOCK_TOKENS < len(prompt):
            block, end = self.tables[request_id][place], (place + 1) * KV_BLOCK_TOKENS
            assert sum(block in table for table in self.tables.values()) == 1, "written while shared"
            assert block not in (self.cache._prefixes or ()), "written while others may find it"
            self.memory[block] = prompt[:end]
            self.computed[request_id] = place + 1
            if data.draw(st.booleans(), label="publish"):
                self.cache.publish(request_id, known(prompt), end)

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def free(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tables)))
        for state in (self.prompts, self.tables, self.computed):
            del state[request_id]
        self.cache.free(request_id)

    @invariant()
    def free_referenced_and_cached_are_the_whole(self) -> None:
        self.cache.check()
        referenced = {block for table in self.tables.values() for block in table}
        parts = (free_blocks(self.cache), referenced, set(self.cache._run_of))
        assert sum(map(len, parts)) == len(set().union(*parts)) == N_BLOCKS
        assert self.cache.used_tokens == len(referenced) * KV_BLOCK_TOKENS
        assert self.cache._owned == self.tables


class Sharing(Caching):
    shares_blocks = True


class Copying(Caching):
    shares_blocks = False


test_shared_blocks_are_the_whole_and_hold_what_is_found_in_them = Sharing.TestCase  # cases B1, B3, B4
test_copied_blocks_are_the_whole_and_hold_what_is_found_in_them = Copying.TestCase  # cases B1, B3, B4


def test_a_request_cannot_own_two_tables() -> None:
    cache = KVCache(4)
    cache.allocate(1, 16)
    with pytest.raises(InvariantError):
        cache.allocate(1, 16)
    cache.check()


def test_more_than_is_free_cannot_be_allocated() -> None:
    cache = KVCache(4)
    cache.allocate(1, 3 * 16)
    with pytest.raises(InvariantError):
        cache.allocate(2, 17)
    cache.check()


def test_freeing_twice_is_an_error_not_a_second_block() -> None:
    cache = KVCache(4)
    cache.allocate(1, 16)
    cache.free(1)
    with pytest.raises(InvariantError):
        cache.free(1)
    cache.check()


def test_blocks_lie_one_behind_the_other_where_a_row_of_them_is_left() -> None:
    cache = KVCache(12)
    for request_id, n_blocks in enumerate((3, 2, 4, 2)):
        cache.allocate(request_id, n_blocks * 16)
    cache.free(1)
    assert cache.allocate(4, 16) == [3]
    cache.free(2)
    assert cache.allocate(5, 5 * 16) == [4, 5, 6, 7, 8]
    cache.free(0)
    assert cache.allocate(6, 4 * 16) == [0, 1, 2, 11]  # the row is one short
    cache.check()


def test_check_sees_a_lost_block() -> None:
    cache = KVCache(4)
    cache.allocate(1, 32).pop()
    with pytest.raises(InvariantError):
        cache.check()


def test_check_sees_a_block_with_two_owners() -> None:
    cache = KVCache(4)
    table = cache.allocate(1, 16)
    cache.allocate(2, 16)[0] = table[0]
    with pytest.raises(InvariantError):
        cache.check()


# ---- prefix cache ----

PROMPT = list(range(100, 164))  # four blocks


def cached(num_blocks: int = 16, **options: Any) -> KVCache:
    """A cache in which PROMPT and one more block were computed and left."""
    cache = KVCache(num_blocks, prefix_cache=True, **options)
    cache.allocate(0, 80)
    cache.publish(0, known([*PROMPT, *range(16)]), 80)
    cache.free(0)
    return cache


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (64, 3), (65, 4)])
def test_full_blocks_are_found_but_never_the_whole_prompt(length: int, blocks: int) -> None:  # case B1
    prompt = [*PROMPT, *range(16)][:length]
    assert len(cached().find_prefix(prompt)) == blocks


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    cache = KVCache(16)
    cache.allocate(0, 80)
    cache.publish(0, known(PROMPT), 64)
    cache.free(0)
    assert cache.find_prefix(PROMPT) == []
    assert len(free_blocks(cache)) == 16


def test_equal_tokens_behind_another_beginning_are_another_block() -> None:
    assert cached().find_prefix([1, *PROMPT[1:]]) == []
    assert cached().find_prefix([*PROMPT[16:], 1]) == []


def test_a_block_is_found_once_all_of_it_is_computed() -> None:
    cache = KVCache(16, prefix_cache=True)
    cache.allocate(0, 64)
    cache.publish(0, known(PROMPT), 31)
    assert len(cache.find_prefix(PROMPT)) == 1
    cache.publish(0, known(PROMPT), 32)
    assert len(cache.find_prefix(PROMPT)) == 2


def test_one_that_leaves_before_its_forward_pass_leaves_nothing() -> None:
    cache = KVCache(16, prefix_cache=True)
    cache.allocate(0, 64)
    cache.free(0)
    assert cache.find_prefix(PROMPT) == []
    assert len(free_blocks(cache)) == 16


class Same(int):
    """A token id whose hash collides with that of every other."""

    def __hash__(self) -> int:
        return 7


def test_equal_hashes_of_other_tokens_are_no_hit() -> None:  # case B5
    cache = KVCache(16, prefix_cache=True)
    first, other = [Same(i) for i in PROMPT], [Same(i + 1) for i in PROMPT]
    assert hash(tuple(first[:16])) == hash(tuple(other[:16]))
    cache.allocate(0, 64)
    cache.publish(0, known(first), 64)
    assert cache.find_prefix(other) == []
    assert cache.find_prefix([*first[:16], *other[16:]]) == cache.find_prefix(first)[:1]
    cache.allocate(1, 64)
    cache.publish(1, known(other), 64)
    assert not set(cache.find_prefix(first)) & set(cache.find_prefix(other))


def test_shared_blocks_are_in_both_tables_and_outlive_their_first_owner() -> None:
    cache = KVCache(16, prefix_cache=True)
    first = cache.allocate(0, 64)
    cache.publish(0, known(PROMPT), 64)
    second = cache.allocate(1, 64, cache.find_prefix(PROMPT))
    assert second[:3] == first[:3]
    assert second[3] not in first
    cache.free(0)
    assert cache.used_tokens == 64
    cache.check()


def test_a_copy_is_in_blocks_of_its_own_that_lie_one_behind_the_other() -> None:
    cache = KVCache(16, prefix_cache=True, shares_blocks=False)
    first = cache.allocate(0, 64)
    cache.publish(0, known(PROMPT), 64)
    second = cache.allocate(1, 64, cache.find_prefix(PROMPT))
    assert second == [4, 5, 6, 7]
    assert first == [0, 1, 2, 3]


def test_memory_that_is_left_in_pieces_of_one_size_is_handed_out_in_one_piece() -> None:
    cache = KVCache(16, prefix_cache=True, shares_blocks=False)
    for request_id in range(40):  # four at a time, each of four blocks, the last of them unfinished
        if request_id >= 4:
            cache.free(request_id - 4)
        table = cache.allocate(request_id, 64)
        assert table == list(range(table[0], table[0] + 4))
        cache.publish(request_id, known([request_id] * 50), 50)


def test_what_was_used_longest_ago_makes_room_for_one_piece_where_blocks_are_not_shared() -> None:
    cache = KVCache(8, prefix_cache=True, shares_blocks=False)
    for request_id in (0, 1):
        cache.allocate(request_id, 3 * 16)
        cache.publish(request_id, known([request_id] * 33), 33)
        cache.allocate(2 + request_id, 16)
    for request_id in (0, 1, 3):
        cache.free(request_id)
    assert len(free_blocks(cache)) == 1
    assert cache.allocate(4, 2 * 16) == [0, 1]
    cache.check()


def test_nothing_is_evicted_for_a_piece_that_cannot_be_had() -> None:
    cache = KVCache(12, prefix_cache=True, shares_blocks=False)
    for request_id, n_blocks in enumerate((3, 1, 4, 1)):
        cache.allocate(request_id, n_blocks * 16)
    cache.publish(0, known([7] * 48), 48)
    cache.free(0)
    cache.free(2)
    assert cache.allocate(4, 6 * 16) == [
        4,
        5,
        6,
        7,
        9,
        10,
    ]  # 3 and 8 are in use, so four is the longest piece
    assert len(cache.find_prefix([7] * 48)) == 2
    cache.check()


@pytest.mark.parametrize("shares_blocks", [True, False])
def test_the_least_recently_used_are_evicted_first(shares_blocks: bool) -> None:
    cache = KVCache(8, prefix_cache=True, shares_blocks=shares_blocks)
    prompts = [[i] * 33 for i in range(3)]
    for i in (0, 1):
        cache.allocate(i, 33, [])
        cache.publish(i, known(prompts[i]), 33)
        cache.free(i)
    assert [len(cache.find_prefix(prompt)) for prompt in prompts] == [2, 2, 0]
    cache.allocate(2, 16, cache.find_prefix(prompts[0])[:1])  # used again
    cache.free(2)
    cache.allocate(3, (6 if shares_blocks else 5) * 16)
    assert len(cache.find_prefix(prompts[1])) < 2
    assert len(cache.find_prefix(prompts[0])) >= 1


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    cache = cached(8)
    left = []
    for request_id in range(1, 9):
        left.append(len(cache.find_prefix([*PROMPT, 0])))
        cache.allocate(request_id, 16)
    assert left == [4, 4, 4, 4, 4, 3, 2, 1]  # three blocks were free, and one held what this prompt has not


def test_cached_blocks_are_nobodys_and_can_all_be_had() -> None:
    cache = cached(6)
    assert cache.used_tokens == 0
    assert cache.can_allocate(6 * 16)
    assert not cache.can_allocate(6 * 16 + 1)
    assert sorted(cache.allocate(1, 6 * 16)) == list(range(6))
    assert cache.find_prefix(PROMPT) == []


@pytest.mark.parametrize("shares_blocks", [True, False])
def test_what_was_found_cannot_be_had_for_something_else_as_well(shares_blocks: bool) -> None:
    cache = cached(6, shares_blocks=shares_blocks)
    prefix = cache.find_prefix(PROMPT)
    assert cache.can_allocate(6 * 16, prefix)
    assert not cache.can_allocate(7 * 16, prefix)
    table = cache.allocate(1, 6 * 16, prefix)
    assert sorted(table) == list(range(6))
    cache.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache._run_of.popitem(),
        lambda cache: cache._cached.popitem(),
        lambda cache: cache._users.__setitem__(0, 1),
        lambda cache: cache._give_back([next(iter(cache._run_of))]),
        lambda cache: cache._prefixes.put(0, (1,) * 16, min(free_blocks(cache))),
    ],
)
def test_check_sees_cached_blocks_that_are_not_where_they_should_be(damage: Any) -> None:
    cache = cached()
    cache.check()
    damage(cache)
    with pytest.raises(InvariantError):
        cache.check()
