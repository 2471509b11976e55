from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from roseinfer.errors import InvariantError
from roseinfer.executor import KV_BLOCK_TOKENS
from roseinfer.kv_cache import KVCache, blocks_for

N_BLOCKS = 12
request_ids = st.integers(0, 5)


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
        free = [*self.cache._free, *range(self.cache._num_touched, N_BLOCKS)]
        assert len(free) + len(blocks) == N_BLOCKS
        assert set(blocks) | set(free) == set(range(N_BLOCKS))
        assert self.cache.used_tokens == len(blocks) * KV_BLOCK_TOKENS

    @invariant()
    def tables_stay_as_they_were_given_out(self) -> None:
        assert self.cache._owned == self.owned
        assert self.cache.owners() == self.owned.keys()


test_free_and_owned_blocks_are_the_whole_after_any_operations = Bookkeeping.TestCase  # case B3


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
