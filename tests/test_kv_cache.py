from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.errors import InvariantError
from roseinfer.executor import KV_BLOCK_TOKENS
from roseinfer.kv_cache import KVCache, blocks_for

N_BLOCKS = 12
operations = st.lists(st.tuples(st.integers(0, 5), st.integers(1, N_BLOCKS * KV_BLOCK_TOKENS)), max_size=60)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_block_is_taken_for_every_begun_sixteen_tokens(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


@given(operations)
def test_free_and_owned_blocks_are_the_whole_after_any_operations(
    wishes: list[tuple[int, int]],
) -> None:  # case B3
    cache = KVCache(N_BLOCKS)
    owned: dict[int, list[int]] = {}
    for request_id, n_tokens in wishes:
        if request_id in owned:
            cache.free(request_id)
            del owned[request_id]
        elif cache.can_allocate(n_tokens):
            owned[request_id] = list(cache.allocate(request_id, n_tokens))
            assert len(owned[request_id]) == blocks_for(n_tokens)
        cache.check()
        blocks = [block for table in owned.values() for block in table]
        assert len(set(blocks)) == len(blocks), "two requests share a block"
        assert set(blocks) <= set(range(N_BLOCKS))
        assert cache.used_tokens == len(blocks) * KV_BLOCK_TOKENS
        assert cache.owners() == owned.keys()
        left = cache.capacity_tokens - cache.used_tokens
        assert cache.can_allocate(left)
        assert not cache.can_allocate(left + 1)


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
