"""States, leases and the order of eviction of one tier's blocks: exact ids, exact order."""

from __future__ import annotations

import pytest

from sessionkv.cache.block_pool import BlockPool, BlockState, LeaseError
from sessionkv.types import BlockHash, Tier


class Ranks(dict[BlockHash, int]):
    """A retention view that tests write into."""

    def rank(self, key: BlockHash, tier: Tier) -> int:
        return self.get(key, 0)

    def take_fallen(self) -> tuple[BlockHash, ...]:
        return ()


def key(block: int) -> BlockHash:
    return BlockHash(bytes([block]) * 32)


def pool_of(count: int, ranks: Ranks | None = None) -> BlockPool:
    return BlockPool(Tier.DEVICE, count, retention=ranks)


def cache(pool: BlockPool, *blocks: int, unfilled: bool = False) -> None:
    """Blocks just allocated become cached in this order: the last is the warmest."""
    for block in blocks:
        pool.finish_fill(block, key(block), unfilled=unfilled)
        pool.release(block)


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    assert not pool.problems()
    return pool.num_free, pool.num_filling, pool.num_leased, pool.num_cached


def full_pool(count: int, ranks: Ranks | None = None) -> BlockPool:
    pool = pool_of(count, ranks)
    cache(pool, *pool.allocate(count))
    return pool


def test_a_block_is_in_one_state_at_a_time() -> None:
    pool = pool_of(3)
    assert counts(pool) == (3, 0, 0, 0)
    (block,) = pool.allocate(1)
    assert (pool.state(block), counts(pool)) == (BlockState.FILLING, (2, 1, 0, 0))
    pool.finish_fill(block, key(1))
    assert (pool.state(block), counts(pool)) == (BlockState.LEASED, (2, 0, 1, 0))
    pool.release(block)
    assert (pool.state(block), counts(pool)) == (BlockState.CACHED, (2, 0, 0, 1))
    pool.forget(block)
    assert (pool.state(block), counts(pool)) == (BlockState.FREE, (3, 0, 0, 0))


def test_free_blocks_are_given_in_order_and_the_last_freed_first() -> None:
    pool = full_pool(4)
    assert pool.key(2) == key(2)
    pool.forget(1)
    pool.forget(3)
    assert pool.allocate(2) == [3, 1]


def test_more_than_is_free_is_refused_whole() -> None:
    pool = pool_of(2)
    with pytest.raises(LeaseError, match="3 blocks"):
        pool.allocate(3)
    assert counts(pool) == (2, 0, 0, 0)


def test_a_double_release_raises_and_changes_nothing() -> None:
    pool = full_pool(1)
    with pytest.raises(LeaseError, match="released twice"):
        pool.release(0)
    assert counts(pool) == (0, 0, 0, 1)


def test_a_writer_must_end_its_writing_before_its_lease() -> None:
    pool = pool_of(1)
    pool.allocate(1)
    with pytest.raises(LeaseError, match="being written"):
        pool.release(0)
    assert counts(pool) == (0, 1, 0, 0)
    pool.abandon_fill(0)
    assert counts(pool) == (1, 0, 0, 0)


def test_a_free_block_cannot_be_held() -> None:
    pool = pool_of(1)
    with pytest.raises(LeaseError, match="is free"):
        pool.lease(0)
    with pytest.raises(LeaseError, match="is free"):
        pool.lease_for_move(0)


def test_a_private_block_is_freed_with_its_last_lease() -> None:
    pool = pool_of(1)
    pool.allocate(1)
    pool.lease(0)
    pool.finish_fill(0, None)
    pool.release(0)
    assert counts(pool) == (0, 0, 1, 0)
    pool.release(0)
    assert counts(pool) == (1, 0, 0, 0)


def test_an_abandoned_block_stays_with_who_reads_it() -> None:
    pool = pool_of(1)
    pool.allocate(1)
    pool.lease(0)
    pool.abandon_fill(0)
    assert (pool.state(0), pool.key(0)) == (BlockState.LEASED, None)
    pool.release(0)
    assert counts(pool) == (1, 0, 0, 0)


def test_forgetting_a_held_block_frees_it_later() -> None:
    pool = full_pool(1)
    pool.lease(0)
    pool.forget(0)
    assert counts(pool) == (0, 0, 1, 0)
    pool.release(0)
    assert counts(pool) == (1, 0, 0, 0)


def test_cached_blocks_are_forgotten_together_in_the_order_given() -> None:
    pool = full_pool(4)
    pool.take_freed()
    assert pool.forget_cached([2, 0]) == [key(2), key(0)]
    assert counts(pool) == (2, 0, 0, 2)
    assert pool.take_freed() == (2, 0)
    assert pool.allocate(2) == [0, 2]
    pool.lease(1)
    for block in (0, 1):  # being written, held
        with pytest.raises(LeaseError, match="not cached"):
            pool.forget_cached([block])
    assert counts(pool) == (0, 2, 1, 1)


def test_only_an_unfilled_block_of_one_holder_is_reopened() -> None:
    pool = pool_of(2)
    pool.allocate(2)
    cache(pool, 0, unfilled=True)
    cache(pool, 1)
    pool.lease(0)
    pool.lease(0)
    with pytest.raises(LeaseError, match="cannot be written"):
        pool.reopen(0)
    pool.release(0)
    pool.reopen(0)
    assert (pool.state(0), pool.key(0)) == (BlockState.FILLING, key(0))
    pool.lease(1)
    with pytest.raises(LeaseError, match="cannot be written"):
        pool.reopen(1)


def test_the_least_recently_held_goes_first() -> None:
    pool = full_pool(4)
    pool.lease(0)
    pool.lease(2)
    pool.release(2)
    pool.release(0)
    assert pool.coldest(9) == [1, 3, 2, 0]
    assert pool.coldest(2) == [1, 3]
    assert pool.coldest(0) == []


def test_held_blocks_never_go() -> None:
    pool = full_pool(3)
    pool.lease(0)
    assert pool.coldest(3) == [1, 2]


def test_the_end_of_a_chain_goes_before_its_start() -> None:
    pool = full_pool(3)
    for block in (0, 1, 2):
        pool.lease(block)
    pool.release_chain([2, 1, 0])
    assert pool.coldest(3) == [2, 1, 0]


def test_unfilled_tails_go_first_within_a_rank() -> None:
    ranks = Ranks({key(0): 1, key(1): 1})
    pool = pool_of(4, ranks)
    pool.allocate(4)
    cache(pool, 0, 2)
    cache(pool, 1, 3, unfilled=True)
    assert pool.coldest(4) == [3, 2, 1, 0]


def test_lower_ranks_go_first_and_each_rank_by_last_use() -> None:
    ranks = Ranks({key(0): 2, key(1): 1, key(2): 7, key(4): 1})
    pool = full_pool(6, ranks)
    assert pool.coldest(6) == [3, 5, 1, 4, 0, 2]


def test_a_rank_given_after_the_release_counts() -> None:
    ranks = Ranks()
    pool = full_pool(3, ranks)
    ranks[key(0)] = 1
    assert pool.coldest(3) == [1, 2, 0]


def test_a_pin_that_lapses_lets_its_blocks_go_like_others() -> None:
    ranks = Ranks({key(0): 2, key(1): 2})
    pool = full_pool(3, ranks)
    assert pool.coldest(3) == [2, 0, 1]
    ranks.clear()
    pool.settle(0)
    pool.settle(1)
    assert pool.coldest(3) == [0, 1, 2]


def test_asking_for_the_coldest_changes_no_state() -> None:
    ranks = Ranks({key(1): 3})
    pool = full_pool(3, ranks)
    assert pool.coldest(3) == pool.coldest(3) == [0, 2, 1]
    assert counts(pool) == (0, 0, 0, 3)


def test_demoted_blocks_are_the_next_to_go() -> None:
    pool = full_pool(4)
    for block in (2, 3):
        pool.lease(block)
    for block in (2, 3):
        pool.release(block, to_cold_end=True)
    assert pool.coldest(4) == [3, 2, 0, 1]


def test_a_block_used_while_it_is_moved_is_warm_afterwards() -> None:
    pool = full_pool(3)
    pool.lease_for_move(0)
    pool.lease_for_move(1)
    pool.lease(0)
    pool.release(0)
    pool.release(0)
    pool.release(1)
    assert pool.coldest(3) == [1, 2, 0]


def test_freed_blocks_are_told_once_and_only_while_free() -> None:
    pool = full_pool(3)
    pool.forget(2)
    pool.forget(0)
    assert pool.allocate(1) == [0]
    assert pool.take_freed() == (2,)
    assert pool.take_freed() == ()
