"""Copying a block away is no use of it: the order of eviction stays as it was."""

from __future__ import annotations

import pytest

from sessionkv.cache.block_pool import BlockPool, BlockState, LeaseError
from sessionkv.types import BlockHash, Tier


def cached_pool(count: int) -> BlockPool:
    """Blocks 0 to count - 1, all cached, 0 the coldest."""
    pool = BlockPool(Tier.DEVICE, count)
    for block in pool.allocate(count):
        pool.finish_fill(block, BlockHash(bytes([block]) * 32))
    for block in range(count):
        pool.release(block)
    return pool


def test_a_warm_block_that_is_written_to_disk_does_not_become_the_next_to_go() -> None:
    pool = cached_pool(4)
    for block in (2, 3):
        pool.lease_for_move(block)
    for block in (2, 3):
        pool.release(block)
    assert pool.coldest(4) == [0, 1, 2, 3]


def test_a_moving_block_is_passed_over_and_counted_as_leased() -> None:
    pool = cached_pool(3)
    pool.lease_for_move(0)
    assert pool.coldest(3) == [1, 2]
    assert (pool.num_cached, pool.num_leased, pool.state(0)) == (2, 1, BlockState.LEASED)
    assert pool.problems() == []
    pool.release(0)
    assert pool.coldest(3) == [0, 1, 2]
    assert (pool.num_cached, pool.num_leased) == (3, 0)


def test_a_use_during_the_move_counts() -> None:
    pool = cached_pool(3)
    pool.lease_for_move(0)
    pool.lease(0)
    pool.release(0)
    assert pool.coldest(3) == [1, 2]
    pool.release(0)
    assert pool.coldest(3) == [1, 2, 0]
    assert pool.problems() == []


def test_a_moving_block_that_is_forgotten_is_freed_with_the_move() -> None:
    pool = cached_pool(2)
    pool.lease_for_move(1)
    pool.forget(1)
    assert pool.num_free == 0
    pool.release(1)
    assert (pool.num_free, pool.num_cached, pool.coldest(2)) == (1, 1, [0])
    assert pool.problems() == []


def test_a_free_block_cannot_be_moved() -> None:
    pool = BlockPool(Tier.DEVICE, 1)
    with pytest.raises(LeaseError, match="free"):
        pool.lease_for_move(0)
