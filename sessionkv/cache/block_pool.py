"""Ids of the blocks of one tier (device or host): which are free, held, and next to go.

Each block is exactly one of *filling* (one writer, a sequence or a transfer, whose writing counts
as its lease; others may hold it besides), *leased* (not filling, held by at least one), *cached*
(held by none, named by the index) and *free*. Leases forbid eviction; retention only orders it. A
block without a key is in no index and is freed with its last lease.

Which cached block goes first is said by :mod:`sessionkv.cache.eviction_order`.

Knows ids and keys only: no contents, no index, no other tier.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from sessionkv.cache.eviction_order import EvictionOrder
from sessionkv.cache.ledger import TierLedger
from sessionkv.cache.retention_view import RetentionView, Unretained
from sessionkv.types import BlockHash, Tier


class LeaseError(RuntimeError):
    """A lease, a block or a receipt was used in a way that its state forbids: a defect."""


class BlockState(enum.Enum):
    """What a block is; see the module's docstring."""

    FREE = "free"
    FILLING = "filling"
    LEASED = "leased"
    CACHED = "cached"


class BlockPool:
    """Free list, leases and eviction order of ``num_blocks`` blocks. All calls O(blocks named)."""

    def __init__(
        self, tier: Tier, num_blocks: int, *, retention: RetentionView | None = None
    ) -> None:
        self.tier = tier
        self.num_blocks = num_blocks
        self._rank = (Unretained() if retention is None else retention).rank
        self._free = list(range(num_blocks - 1, -1, -1))
        self._freed: dict[int, None] = {}
        self._num_filling = 0
        self._leases = [0] * num_blocks
        self._filling = bytearray(num_blocks)
        self._unfilled = bytearray(num_blocks)
        self._awaited = bytearray(num_blocks)
        self._keys: list[BlockHash | None] = [None] * num_blocks
        self._order = EvictionOrder(num_blocks, self._rank_of)
        self._moving: set[int] = set()

    # -- questions

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_filling(self) -> int:
        """Blocks being written."""
        return self._num_filling

    @property
    def num_cached(self) -> int:
        """Blocks held by none and named by the index."""
        return len(self._order) - len(self._moving)

    @property
    def num_leased(self) -> int:
        """Blocks held by at least one and not being written."""
        return self.num_blocks - self.num_free - self._num_filling - self.num_cached

    @property
    def num_releases(self) -> int:
        """How often a block has become cached so far, or goes sooner than it did before."""
        return self._order.num_added

    def ledger(self) -> TierLedger:
        """Blocks by state."""
        return TierLedger(
            total=self.num_blocks,
            free=self.num_free,
            filling=self._num_filling,
            leased=self.num_leased,
            cached=self.num_cached,
        )

    def key(self, block: int) -> BlockHash | None:
        """Key under which the index names the block, None for a private or free one."""
        return self._keys[block]

    def rank_of(self, key: BlockHash) -> int:
        """How late a block of this content leaves the tier; see :class:`RetentionView`."""
        return self._rank(key, self.tier)

    def num_leases(self, block: int) -> int:
        """Holders of the block, its writer among them."""
        return self._leases[block]

    def state(self, block: int) -> BlockState:
        """State of one block."""
        if self._filling[block]:
            return BlockState.FILLING
        if self._leases[block]:
            return BlockState.LEASED
        return BlockState.CACHED if block in self._order else BlockState.FREE

    def problems(self) -> list[str]:
        """Contradictions inside the pool, for the integrity check. O(blocks)."""
        found = []
        free = set(self._free)
        if len(free) != len(self._free):
            found.append("a block is free twice")
        for block in range(self.num_blocks):
            idle = self._leases[block] == 0
            cached = block in self._order
            if (block in free) != (idle and not cached):
                found.append(f"block {block} is free and held, or neither")
            if cached and idle and self._keys[block] is None:
                found.append(f"block {block} is evictable and has no key")
            if cached and not idle and block not in self._moving:
                found.append(f"block {block} is evictable and held")
            if self._filling[block] and idle:
                found.append(f"block {block} is written by nobody")
        ordered = self._order.coldest(self.num_blocks)
        if sorted(ordered) != [b for b in range(self.num_blocks) if b in self._order]:
            found.append("order and blocks differ")
        return found

    # -- filling

    def allocate(self, count: int) -> list[int]:
        """Take free blocks; each is filling and held once, by its writer.

        Raises:
            LeaseError: There are fewer free blocks.
        """
        if count > len(self._free):
            raise LeaseError(f"{count} blocks of {self.tier} asked for, {len(self._free)} are free")
        free, freed = self._free, self._freed
        leases, filling = self._leases, self._filling
        blocks = [free.pop() for _ in range(count)]
        for block in blocks:
            leases[block] = filling[block] = 1
            freed.pop(block, None)
        self._num_filling += count
        return blocks

    def finish_fill(self, block: int, key: BlockHash | None, *, unfilled: bool = False) -> None:
        """The writer is done and keeps its lease; ``key`` None leaves the block private."""
        self._end_fill(block)
        self._keys[block] = key
        self._unfilled[block] = unfilled

    def abandon_fill(self, block: int) -> None:
        """The writer gives up and ends its lease; the block is freed with the last one."""
        self._end_fill(block)
        self._keys[block] = None
        self.release(block)

    def reopen(self, block: int) -> None:
        """The only holder of an unfilled block goes on writing it; the index may still name it."""
        if self._leases[block] != 1 or self._filling[block] or not self._unfilled[block]:
            raise LeaseError(f"block {block} of {self.tier} cannot be written in place")
        self._filling[block] = 1
        self._num_filling += 1

    def _end_fill(self, block: int) -> None:
        if not self._filling[block]:
            raise LeaseError(f"block {block} of {self.tier} is not being written")
        self._filling[block] = 0
        self._num_filling -= 1

    # -- leases

    def lease(self, block: int) -> None:
        """Hold a cached, leased or filling block."""
        self.lease_chain((block,))

    def lease_chain(self, blocks: Iterable[int]) -> None:
        """Hold blocks, as :meth:`lease` does each: the loop over a whole history."""
        leases, held_by, moving = self._leases, self._order.held_by, self._moving
        for block in blocks:
            listed = held_by[block]
            if listed is not None:
                del listed[block]
                held_by[block] = None
                if moving:
                    moving.discard(block)
            elif leases[block] == 0:
                raise LeaseError(f"block {block} of {self.tier} is free")
            leases[block] += 1

    def lease_for_move(self, block: int) -> None:
        """Hold a block while it is copied away: not a use, so it keeps its place in the order.

        It is passed over there until it is released. If a sequence holds it meanwhile, its release
        counts as a use after all.
        """
        if block in self._order:
            self._moving.add(block)
        elif self._leases[block] == 0:
            raise LeaseError(f"block {block} of {self.tier} is free")
        self._leases[block] += 1

    def release(self, block: int, *, to_cold_end: bool = False) -> None:
        """End one lease; with the last one the block is cached, or free where it has no key.

        Raises:
            LeaseError: Nobody holds the block.
        """
        left = self._leases[block] - 1
        if left < 0:
            raise LeaseError(f"block {block} of {self.tier} released twice")
        self._leases[block] = left
        if left:
            return
        if self._filling[block]:
            self._leases[block] = 1
            raise LeaseError(f"block {block} of {self.tier} released while being written")
        moved = block in self._moving
        self._moving.discard(block)
        if self._keys[block] is None:
            if moved:
                self._unlist(block)
            self._to_free(block)
            return
        if moved:
            return
        self._awaited[block] = 0
        self._order.add(block, full=not self._unfilled[block], to_cold_end=to_cold_end)

    def release_chain(self, blocks: Iterable[int], *, to_cold_end: bool = False) -> None:
        """Release blocks in the order given: the last one will be the last of them to go.

        With ``to_cold_end`` the other way round: the last one will be the next to go.
        """
        for block in blocks:
            self.release(block, to_cold_end=to_cold_end)

    def forget(self, block: int) -> None:
        """The index no longer names the block: it is free now, or with its last lease."""
        self._keys[block] = None
        if self._leases[block] == 0:
            self._unlist(block)
            self._to_free(block)

    def forget_cached(self, blocks: Iterable[int]) -> list[BlockHash]:
        """As :meth:`forget` of cached blocks that nobody holds, in a tight loop; their keys.

        Raises:
            LeaseError: One of them is not cached; those before it are forgotten.
        """
        leases, keys_of, held_by = self._leases, self._keys, self._order.held_by
        unfilled, awaited, freed, free = self._unfilled, self._awaited, self._freed, self._free
        keys: list[BlockHash] = []
        for block in blocks:
            listed, key = held_by[block], keys_of[block]
            if listed is None or key is None or leases[block]:
                raise LeaseError(f"block {block} of {self.tier} is not cached")
            del listed[block]
            held_by[block] = keys_of[block] = None
            unfilled[block] = awaited[block] = 0
            free.append(block)
            freed[block] = None
            keys.append(key)
        return keys

    def take_freed(self) -> tuple[int, ...]:
        """Blocks that became free since the last call and still are."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def _to_free(self, block: int) -> None:
        self._unfilled[block] = self._awaited[block] = 0
        self._free.append(block)
        self._freed[block] = None

    def _unlist(self, block: int) -> None:
        if not self._order.take_out(block):
            raise LeaseError(f"block {block} of {self.tier} is free")

    # -- order of eviction

    def coldest(self, count: int) -> list[int]:
        """Up to ``count`` cached blocks in the order in which they are to go. O(count) amortised.

        Those on their way down are passed over.
        """
        return self._order.coldest(count, self._moving) if count > 0 else []

    def settle(self, block: int) -> None:
        """The rank of a block's content may have fallen."""
        self._order.settle(block)

    def await_move(self, block: int) -> None:
        """Somebody waits until the block can go: noted until it goes or is used again."""
        self._awaited[block] = 1

    def is_awaited(self, block: int) -> bool:
        """Whether somebody waited for the block to go; see :meth:`await_move`."""
        return bool(self._awaited[block])

    def _rank_of(self, block: int) -> int:
        key = self._keys[block]
        return 0 if key is None else self._rank(key, self.tier)
