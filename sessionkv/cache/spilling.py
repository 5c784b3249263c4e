"""Moves down: copies that make room before it is needed, and idle writing to disk.

*Spills* copy the blocks that are next to go to the tier below, so that dropping them loses nothing:
device to host, host to disk, and device to disk where there is no host tier. *Writes* bring blocks
that were asked for to disk. A block leaves the upper tier only after its copy has arrived. A copy
that fails makes its block droppable all the same: it is only a cache, and progress comes first. So
does a tier that hangs: see :mod:`~sessionkv.cache.silence`.

How many blocks of a tier are kept clean ahead of need is learned: twice as many as were ever taken
of it between two plans, so that a copy ordered now may be under way while the next are taken.

The source is held and a target on the host is filling until the move is answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sessionkv.cache.block_pool import BlockPool
from sessionkv.cache.prefix_index import Entry
from sessionkv.cache.residency import Residency
from sessionkv.types import BlockHash, BlockMove, MoveOutcome, Tier, Transfer, TransferResult

MAX_SPILLS = 64
"""Device blocks on their way down at a time."""
MAX_WRITES = 32
"""Blocks on their way to disk at a time, for each of: making host room, and idle writing."""
MOVES_PER_TRANSFER = 16
"""Small enough that the first blocks are free while the others are still copied."""
MOST_TO_DISK = 1 / 2
"""Of the device, but for one transfer, what may be on its way straight to disk at a time: a disk
that hangs keeps that much. Bounds small devices only."""

REST = 8
"""Nobody looks for blocks to copy while but one part in so many is missing of those kept clean."""

_Copy = tuple[Entry, BlockMove]


@dataclass(slots=True, eq=False)
class _Job:
    """One transfer in flight and the content it copies."""

    transfer: Transfer
    entries: list[Entry]
    written: bool


def _to_disk(entry: Entry, block: int) -> _Copy:
    """The disk finds the place itself."""
    return entry, BlockMove(entry.record, block, -1)


class Spiller:
    """Plans and takes in moves down. Which blocks go is the pools' order; leased ones never do."""

    def __init__(
        self, residency: Residency, transfer_ids: Iterator[int], *, clean_ahead_blocks: int
    ) -> None:
        self._residency = residency
        self._transfer_ids = transfer_ids
        self._ahead = {Tier.DEVICE: clean_ahead_blocks, Tier.HOST: clean_ahead_blocks}
        self._jobs: dict[int, _Job] = {}
        self._requested: dict[BlockHash, None] = {}
        self._writing: set[BlockHash] = set()
        self._overtaken: set[BlockHash] = set()
        self._host_wanted = 0
        self._at_rest: tuple[int, ...] | None = None
        self._device_at_rest: tuple[int, int, int] | None = None

    def __len__(self) -> int:
        """Transfers in flight."""
        return len(self._jobs)

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._jobs

    def transfers(self) -> list[Transfer]:
        """Transfers in flight."""
        return [job.transfer for job in self._jobs.values()]

    # -- requests

    def request(self, keys: Iterable[BlockHash]) -> None:
        """Write these blocks to disk, in order, after those asked for before."""
        if self._residency.disk:
            self._requested.update(dict.fromkeys(keys))
            self._at_rest = None

    @property
    def dirty_count(self) -> int:
        """Blocks asked for that are not on disk yet, and all others on their way there."""
        return len(self._requested) + len(self._writing - self._requested.keys())

    def any_unwritten(self, keys: Iterable[BlockHash]) -> bool:
        """Whether one of the blocks is asked for, or on its way to disk."""
        return any(key in self._requested or key in self._writing for key in keys)

    def drop_requests(self) -> None:
        """Forget what is asked for and not under way."""
        self._requested.clear()

    # -- planning

    def plan(self) -> list[Transfer]:
        """Moves to start now. O(blocks moved or dropped)."""
        residency = self._residency
        wanted, residency.wanted = residency.wanted, 0
        self._learn_demand(Tier.DEVICE, max(residency.taken, wanted))
        residency.taken = 0
        if not (wanted or self._host_wanted or self._requested) and self._has_room:
            return []
        # A decode step changes nothing here: what needed no moves before needs none now.
        device, host = residency.device, residency.host
        books = (residency.version, device.num_free, host.num_free, device.num_releases)
        if not wanted and books == self._at_rest:
            return []
        # The host first: what is under way there does not stand before what is clean behind it.
        planned = self._spill_host()
        planned += self._spill_device(wanted)
        if self._host_wanted:
            planned += self._spill_host()
        planned += self._write_requested()
        self._at_rest = None if planned or self._requested else books
        return planned

    @property
    def _has_room(self) -> bool:
        """Whether enough is free in both tiers that nothing has to be clean."""
        device, host = self._residency.device, self._residency.host
        return device.num_free >= self._ahead[Tier.DEVICE] and (
            host.num_free >= self._ahead[Tier.HOST] or not host.num_blocks
        )

    def _learn_demand(self, tier: Tier, taken: int) -> None:
        """Keep so much clean that whoever takes as many again waits for nothing.

        At most half of the device and of what its copies take of the host.
        """
        ahead = self._ahead[tier]
        if 2 * taken <= ahead or not ahead:
            return
        above, below = self._residency.device.num_blocks, self._residency.host.num_blocks
        most = below if tier is Tier.HOST else min(above, below or above) // 2
        self._ahead[tier] = max(ahead, min(2 * taken, most))

    def _spill_device(self, wanted: int) -> list[Transfer]:
        """Room on the device: drop what is clean if it is wanted now, copy what is next."""
        residency = self._residency
        device = residency.device
        below = self._tier_below_device()
        if below is None:
            return []
        if not wanted and self._device_rests():
            return []
        # Dropping at once, not at the next try, makes each round of a small host tier count: its
        # blocks may be displaced by the next spills.
        residency.evict_device(residency.clean_run(device, max(wanted - device.num_free, 0)))
        short = self._await_moves(Tier.DEVICE, wanted - device.num_free)
        spilling = self._num_in_flight(Tier.DEVICE)
        lacking = max(wanted, self._ahead[Tier.DEVICE]) - device.num_free - spilling
        room = MAX_SPILLS - spilling
        if below is Tier.DISK:
            room = min(room, self._room_to_disk())
        copies: list[_Copy] = []
        coldest = device.coldest(max(lacking, 0))
        num_clean = lacking if len(coldest) == lacking else device.num_blocks
        self._device_at_rest = (device.num_releases, device.num_cached, num_clean)
        dirty = [block for block in coldest if not residency.device_is_clean(block)]
        for block in dirty:
            if len(copies) >= room:
                break
            if len(copies) < short:
                device.await_move(block)
            self._spill_block(block, below, copies, urgent=wanted > 0)
        if len(copies) < len(dirty):
            self._device_at_rest = None
        if below is Tier.HOST:
            self._learn_demand(Tier.HOST, len(copies) + self._host_wanted)
        return self._start(Tier.DEVICE, below, copies, written=False)

    def _device_rests(self) -> bool:
        """Whether what is next to go is clean, as far as that was seen before. O(1).

        What arrives for a sequence becomes nobody's to go, so until something is released the
        blocks then seen are the next to go still, but for those taken since. Some may be missing:
        to look at all of them again for each block that is taken would cost more than its copy.
        """
        if self._device_at_rest is None:
            return False
        device, ahead = self._residency.device, self._ahead[Tier.DEVICE]
        num_releases, num_cached, num_clean = self._device_at_rest
        left = num_clean - (num_cached - device.num_cached)
        enough = ahead - ahead // REST - device.num_free
        return num_releases == device.num_releases and left >= enough

    def _spill_block(self, block: int, below: Tier, copies: list[_Copy], *, urgent: bool) -> None:
        residency = self._residency
        entry = residency.entry_of(residency.device, block)
        target = -1
        if below is Tier.HOST:
            if residency.host_has_no_place_for(entry.record.key):
                entry.host_refused = True  # the device may drop it without
                return
            room = residency.allocate_host(urgent=urgent)
            if room is None:
                self._host_wanted += 1
                if urgent and (entry.on_disk or residency.disk_is_silent):
                    # It has a copy, if a slower one, or the host gets no room: do not wait.
                    entry.host_refused = True
                return
            target = room
        copies.append((entry, BlockMove(entry.record, block, target)))

    def _spill_host(self) -> list[Transfer]:
        """Room on the host: write what is next to go and not on disk."""
        residency = self._residency
        wanted, self._host_wanted = self._host_wanted, 0
        if not residency.spill_to_disk or not residency.host.num_blocks:
            return []
        short = self._await_moves(Tier.HOST, wanted - residency.host.num_free)
        spilling = self._num_in_flight(Tier.HOST)
        lacking = max(wanted, self._ahead[Tier.HOST]) - residency.host.num_free - spilling
        dirty = [
            block
            for block in residency.host.coldest(max(lacking, 0))
            if residency.is_to_be_written(block)
        ]
        for block in dirty[: max(short, 0)]:
            residency.host.await_move(block)
        copies = [
            _to_disk(residency.entry_of(residency.host, block), block)
            for block in dirty[: max(MAX_WRITES - spilling, 0)]
        ]
        return self._start(Tier.HOST, Tier.DISK, copies, written=False)

    def _write_requested(self) -> list[Transfer]:
        """Idle writing, oldest request first; from the host where it has the block."""
        residency = self._residency
        if not self._requested or residency.disk_is_silent:
            return []
        room = MAX_WRITES - sum(len(job.entries) for job in self._jobs.values() if job.written)
        from_device: list[_Copy] = []
        from_host: list[_Copy] = []
        device_room = self._room_to_disk()
        while self._requested and len(from_device) + len(from_host) < room:
            key = next(iter(self._requested))
            entry = residency.index.get(key)
            if entry is None or entry.on_disk or key in self._writing:
                pass
            elif entry.host is not None:
                from_host.append(_to_disk(entry, entry.host))
            elif entry.device is not None and not residency.is_growing(entry):
                # A tail that grows is left out: its longer self will be asked for.
                if len(from_device) >= device_room:
                    break
                from_device.append(_to_disk(entry, entry.device))
            del self._requested[key]
        return [
            *self._start(Tier.DEVICE, Tier.DISK, from_device, written=True),
            *self._start(Tier.HOST, Tier.DISK, from_host, written=True),
        ]

    def _tier_below_device(self) -> Tier | None:
        if self._residency.host.num_blocks:
            return Tier.HOST
        return Tier.DISK if self._residency.spill_to_disk else None

    def _num_in_flight(self, source: Tier) -> int:
        return sum(
            len(job.entries)
            for job in self._jobs.values()
            if job.transfer.src is source and not job.written
        )

    def _room_to_disk(self) -> int:
        """How many more blocks of the device may be on their way to disk."""
        most = max(int(MOST_TO_DISK * self._residency.device.num_blocks), MOVES_PER_TRANSFER)
        under_way = sum(
            len(job.entries)
            for job in self._jobs.values()
            if job.transfer.src is Tier.DEVICE and job.transfer.dst is Tier.DISK
        )
        return most - under_way

    def _await_moves(self, source: Tier, short: int) -> int:
        """Somebody is short of so many blocks: note which in flight are awaited; what is left."""
        for job in self._jobs.values():
            if job.transfer.src is source and not job.written:
                for move in job.transfer.moves[: max(short, 0)]:
                    self._pool(source).await_move(move.src)
                short -= len(job.entries)
        return short

    def _start(
        self, source: Tier, target: Tier, copies: list[_Copy], *, written: bool
    ) -> list[Transfer]:
        pool = self._pool(source)
        transfers = []
        for start in range(0, len(copies), MOVES_PER_TRANSFER):
            part = copies[start : start + MOVES_PER_TRANSFER]
            for _, move in part:
                pool.lease_for_move(move.src)
            moves = tuple(move for _, move in part)
            transfer = Transfer(next(self._transfer_ids), source, target, moves)
            entries = [entry for entry, _ in part]
            self._jobs[transfer.transfer_id] = _Job(transfer, entries, written)
            if target is Tier.DISK:
                self._writing.update(entry.record.key for entry in entries)
            transfers.append(transfer)
        return transfers

    # -- answers

    def overdue(self, now: float) -> tuple[int, ...]:
        """Transfers in flight to tiers that count as refusing from now on. O(transfers)."""
        if not self._jobs:
            return ()
        owing = {job.transfer.dst for job in self._jobs.values()}
        silent = self._residency.silence.listen(owing, now)
        if not silent:
            return ()
        self._at_rest = self._device_at_rest = None
        return tuple(i for i, job in self._jobs.items() if job.transfer.dst in silent)

    def disk_evicted(self, keys: Iterable[BlockHash]) -> None:
        """Records left the disk; told before the answer of a write, that may have been its record.

        The parts of a large write end one by one, and an early one may have gone before the last.
        """
        self._overtaken.update(key for key in keys if key in self._writing)

    def disk_lost(self) -> None:
        """All records left the disk; an answer under way may be of one of them or of a new one."""
        self._overtaken |= self._writing

    def finish(self, result: TransferResult) -> None:
        """Take in an answer. Sources have kept their place in the order of eviction."""
        job = self._jobs.pop(result.transfer_id)
        self._at_rest = None
        transfer = job.transfer
        if transfer.dst in self._residency.silence.tiers:
            self._device_at_rest = None  # what only that tier could hold may not be dropped now
        self._residency.silence.heard(transfer.dst)
        pool = self._pool(transfer.src)
        for entry, move, outcome in zip(job.entries, transfer.moves, result.outcomes, strict=True):
            succeeded = outcome is MoveOutcome.OK
            self._residency.counters.count_move(transfer.src, transfer.dst, succeeded=succeeded)
            if transfer.dst is Tier.HOST:
                self._residency.answered_by_host(entry, move.dst, succeeded=succeeded)
            else:
                self._answered_by_disk(entry, succeeded=succeeded)
            pool.release(move.src)

    def _answered_by_disk(self, entry: Entry, *, succeeded: bool) -> None:
        key = entry.record.key
        is_there = succeeded and key not in self._overtaken
        self._writing.discard(key)
        self._overtaken.discard(key)
        self._residency.answered_by_disk(entry, succeeded=is_there)

    def _pool(self, tier: Tier) -> BlockPool:
        return self._residency.device if tier is Tier.DEVICE else self._residency.host
