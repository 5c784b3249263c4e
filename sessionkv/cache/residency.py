"""Which content is in which tier: the index and both pools, always changed together.

Everything that puts content into a tier or takes it out goes through here, so that index and pools
name each other without exception, and content that leaves its last tier is remembered as evicted.
Knows no sequences, no transfers, no policy of when.
"""

from __future__ import annotations

from collections.abc import Sequence

from sessionkv.cache.block_pool import BlockPool, BlockState
from sessionkv.cache.evicted import EvictedKeys
from sessionkv.cache.ghosts import Ghosts
from sessionkv.cache.ledger import Contents, Counters
from sessionkv.cache.prefix_index import Entry, PrefixIndex
from sessionkv.cache.retention_view import RetentionView, Unretained
from sessionkv.cache.silence import Silence
from sessionkv.types import BlockHash, BlockRecord, Tier

MAX_MOVED_DOWN = 65_536
"""More than move while a sequence waits with a receipt."""


class Residency:
    """Index, device pool and host pool of one engine.

    Attributes:
        version: Grows whenever an answer of the index may have changed.
        wanted: Device blocks that somebody asked for and did not get since the last spill plan.
        taken: Device blocks that were allocated since then.
        stale: Keys whose record on disk is of no more use.
        fallen: Keys whose rank may have fallen, for the disk's order.
        num_moves: Blocks that left memory and are on disk, so far.
        moved_down: Of the last of these, the key (of a tail, its parent's) and the count then: a
            receipt asked for before does not have them.
        ghosts: For each tier what it has dropped lately.
        silence: Lower tiers that are offered nothing and waited for no longer, as they hang.
    """

    def __init__(
        self,
        block_size: int,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        disk: bool,
        spill_to_disk: bool = True,
        retention: RetentionView | None = None,
    ) -> None:
        self.block_size = block_size
        self.index = PrefixIndex()
        self._retention = retention or Unretained()
        self.device = BlockPool(Tier.DEVICE, num_device_blocks, retention=retention)
        self.host = BlockPool(Tier.HOST, num_host_blocks, retention=retention)
        self.disk = disk
        self.spill_to_disk = disk and spill_to_disk
        self.evicted = EvictedKeys()
        self.ghosts = {tier: Ghosts() for tier in Tier}
        self.counters = Counters()
        self.version = 0
        self.wanted = 0
        self.taken = 0
        self.stale: dict[BlockHash, None] = {}
        self.fallen: dict[BlockHash, None] = {}
        self.num_moves = 0
        self.moved_down: dict[BlockHash, int] = {}
        self.silence = Silence()

    # -- into a tier

    def publish(
        self,
        record: BlockRecord,
        block: int,
        *,
        on_disk: bool = False,
        disk_below: bool = False,
    ) -> None:
        """The writer of device block ``block`` is done: its content may be matched.

        The writer keeps its lease. Where the same content is on the device already, that block
        stays the known one and this one stays private: it is freed with its last lease.
        """
        entry = self.index.get(record.key)
        if entry is None:
            entry = Entry(record, on_disk=on_disk, disk_below=disk_below)
            self.index.add(entry)
            self.evicted.discard(record.key)
        elif entry.device is not None or entry.record != record:
            self.counters.duplicates += 1
            self.device.finish_fill(block, None)
            return
        entry.device = block
        entry.on_disk = entry.on_disk or on_disk
        self.device.finish_fill(block, record.key, unfilled=record.fill < self.block_size)
        self.version += 1

    def answered_by_host(self, entry: Entry, block: int, *, succeeded: bool) -> None:
        """The copy into host block ``block`` ended; it is cached unless its content was dropped."""
        if succeeded and entry.host is None and self.is_indexed(entry):
            entry.host = block
            unfilled = entry.record.fill < self.block_size
            self.host.finish_fill(block, entry.record.key, unfilled=unfilled)
            self.host.release(block)
            self.version += 1
            return
        entry.host_refused = True
        self.host.abandon_fill(block)

    def answered_by_disk(self, entry: Entry, *, succeeded: bool) -> None:
        """The write of a record ended; it is of no use if its content was dropped meanwhile."""
        if not succeeded:
            entry.disk_refused = True
        elif self.is_indexed(entry):
            entry.on_disk = True
            entry.disk_refused = False
        elif self.index.get(entry.record.key) is None:
            self.stale[entry.record.key] = None

    def is_indexed(self, entry: Entry) -> bool:
        """Whether the content is still known; it may have been dropped while a copy ran."""
        return self.index.get(entry.record.key) is entry

    def is_growing(self, entry: Entry) -> bool:
        """Whether a sequence continues the content on the device in place."""
        block = entry.device
        return block is not None and self.device.state(block) is BlockState.FILLING

    def contents(self, tier: Tier) -> Contents:
        """What DEVICE or HOST holds, block by block. O(blocks)."""
        on_device = tier is Tier.DEVICE
        blocks = dirty = unused = 0
        for entry in self.index:
            if (entry.device if on_device else entry.host) is None:
                continue
            blocks += 1
            dirty += not (entry.on_disk or (on_device and entry.host is not None))
            if not (on_device and self.is_growing(entry)):
                unused += self.block_size - entry.record.fill
        return Contents(blocks - dirty, dirty, unused)

    # -- out of a tier

    def device_is_clean(self, block: int) -> bool:
        """Whether dropping a cached device block loses nothing that the tier below could hold."""
        entry = self.entry_of(self.device, block)
        if entry.host is not None:
            return True
        if self.host.num_blocks:
            return entry.host_refused or Tier.HOST in self.silence.tiers
        return entry.on_disk or entry.disk_refused or not self._writes_to_disk

    def host_is_clean(self, block: int) -> bool:
        """The same for a cached host block; one that is on the device too loses nothing either."""
        return not self.is_to_be_written(block) or self._is_on_device(block)

    def is_to_be_written(self, block: int) -> bool:
        """Whether a cached host block is not on disk and may be brought there."""
        entry = self.entry_of(self.host, block)
        return self._writes_to_disk and not (entry.on_disk or entry.disk_refused)

    @property
    def _writes_to_disk(self) -> bool:
        return self.spill_to_disk and not self.disk_is_silent

    @property
    def disk_is_silent(self) -> bool:
        """Whether the disk hangs: it is offered nothing."""
        return Tier.DISK in self.silence.tiers

    def _is_on_device(self, block: int) -> bool:
        return self.entry_of(self.host, block).device is not None

    def evict_device(self, blocks: Sequence[int]) -> None:
        """Drop cached device blocks, in this order: the loop over a whole history."""
        device, entries = self.device, self.index.entries
        num_awaited = sum(map(device.is_awaited, blocks))
        self.counters.count_evictions(Tier.DEVICE, len(blocks), waited=num_awaited)
        self.version += bool(blocks)
        keys = device.forget_cached(blocks)
        self.ghosts[Tier.DEVICE].left(keys)
        for key in keys:
            entry = entries[key]
            entry.device = None
            if entry.host is None:
                self._left(entry)

    def evict_host(self, block: int) -> None:
        """Drop a cached host block."""
        entry = self.entry_of(self.host, block)
        self.counters.count_evictions(Tier.HOST, 1, waited=self.host.is_awaited(block))
        self.ghosts[Tier.HOST].left((entry.record.key,))
        self.host.forget(block)
        entry.host = None
        self._left(entry)

    def lose_host(self, entry: Entry, *, corrupt: bool) -> None:
        """The host copy cannot be read: nobody may match it any more."""
        if entry.host is None or not self.is_indexed(entry):
            return
        self.host.forget(entry.host)
        entry.host = None
        self._left(entry, corrupt=corrupt)

    def disk_evicted(self, key: BlockHash) -> None:
        """The store dropped the record to make room; it would not keep it the next time either."""
        self.ghosts[Tier.DISK].left((key,))
        entry = self.index.get(key)
        if entry is None:
            self.evicted.add(key)
        else:
            entry.on_disk = False
            entry.disk_refused = True
            entry.host_refused = False

    def lose_disk(self, key: BlockHash, *, corrupt: bool) -> None:
        """The record on disk is missing, or was damaged and is removed."""
        entry = self.index.get(key)
        if entry is None:
            self.evicted.add(key, corrupt=corrupt)
        else:
            entry.on_disk = False

    def lose_all_on_disk(self) -> None:
        """Nothing that was on disk is there any more. O(blocks in memory)."""
        for entry in self.index:
            entry.on_disk = False
        self.version += 1

    def drop(self, entry: Entry) -> None:
        """Forget content in memory; blocks still held are freed with their last lease."""
        if entry.device is not None:
            self.device.forget(entry.device)
        if entry.host is not None:
            self.host.forget(entry.host)
        self.index.remove(entry)
        self.version += 1

    def supersede(self, key: BlockHash, *, own_block: int, on_disk: bool) -> None:
        """A tail has grown: drop the record of its shorter self, in memory and on disk.

        Args:
            key: Key of the shorter tail.
            own_block: The device block it grew in, named anew by :meth:`publish`.
            on_disk: Whether a record is known to be on disk though memory may not name it.
        """
        entry = self.index.get(key)
        if entry is not None:
            if entry.device not in (None, own_block):
                return  # another sequence grows it too, from a block of its own
            on_disk = on_disk or entry.on_disk
            entry.device = None
            self.drop(entry)
        if on_disk:
            self.stale[key] = None

    def _left(self, entry: Entry, *, corrupt: bool = False) -> None:
        """Content left a tier; if that was the last in memory, its entry goes."""
        self.version += 1
        if entry.device is not None or entry.host is not None:
            return
        self.index.remove(entry)
        if not entry.on_disk:
            self.counters.lost += 1
            self.evicted.add(entry.record.key, corrupt=corrupt)
            return
        self._note_moved_down(entry.record)
        if (parent := self.index.get(entry.record.parent)) is not None:
            parent.disk_below = True

    def _note_moved_down(self, record: BlockRecord) -> None:
        moved = self.moved_down
        key = record.key if record.fill == self.block_size else record.parent
        self.num_moves += 1
        moved.pop(key, None)
        moved[key] = self.num_moves
        if len(moved) > MAX_MOVED_DOWN:
            del moved[next(iter(moved))]

    def entry_of(self, pool: BlockPool, block: int) -> Entry:
        """Content of a block that the index names."""
        key = pool.key(block)
        if key is None:
            raise KeyError(f"block {block} of {pool.tier} holds no known content")
        return self.index.entries[key]

    def highest_rank(self, key: BlockHash) -> int:
        """Rank of content in the tier that it is wanted in most."""
        rank = self._retention.rank
        return max(rank(key, Tier.DEVICE), rank(key, Tier.HOST), rank(key, Tier.DISK))

    # -- room

    def settle_fallen(self) -> None:
        """Blocks whose rank has fallen take their place in the order. O(those)."""
        for key in self._retention.take_fallen():
            if self.disk:
                self.fallen[key] = None
            entry = self.index.get(key)
            if entry is None:
                continue
            if entry.device is not None:
                self.device.settle(entry.device)
            if entry.host is not None:
                self.host.settle(entry.host)

    def allocate_device(self, count: int) -> list[int] | None:
        """Take device blocks for filling, dropping the coldest clean ones where needed.

        None when the blocks next to go are too few or must be copied first: nothing was changed,
        but the wish is noted for the next spill plan.
        """
        short = count - self.device.num_free
        if short > 0:
            self.settle_fallen()
            victims = self.clean_run(self.device, short)
            if len(victims) < short:
                self.wanted = max(self.wanted, count)
                return None
            self.evict_device(victims)
        self.taken += count
        return self.device.allocate(count)

    def allocate_host(self, *, urgent: bool) -> int | None:
        """Take one host block for filling, dropping the coldest if it is clean; else None.

        A block that the device has too is dropped only when ``urgent``: the device's copy would
        have to be spilled again, and two of them could take turns for ever.
        """
        if not self.host.num_free:
            victims = self.clean_run(self.host, 1)
            if not victims:
                return None
            if not urgent and self._is_on_device(victims[0]):
                return None
            self.evict_host(victims[0])
        return self.host.allocate(1)[0]

    def host_has_no_place_for(self, key: BlockHash) -> bool:
        """Whether the host is full of what has a higher rank: this would be the next to go."""
        coldest = () if self.host.num_free else self.host.coldest(1)
        return any(
            self.host.rank_of(self.entry_of(self.host, block).record.key) > self.host.rank_of(key)
            for block in coldest
        )

    def clean_run(self, pool: BlockPool, count: int) -> list[int]:
        """Up to ``count`` clean blocks from the cold end on, ending before the first that is not.

        Strictly in order: a warmer clean block does not go before a colder one that waits for its
        copy, so what is pinned goes last.
        """
        is_clean = self.device_is_clean if pool is self.device else self.host_is_clean
        run: list[int] = []
        for block in pool.coldest(count):
            if not is_clean(block):
                break
            run.append(block)
        return run
