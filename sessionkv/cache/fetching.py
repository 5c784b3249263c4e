"""Moves up: blocks of one admission copied from host and disk into fresh device blocks.

The source host block is held and the device block is filling until the move is answered. What
arrives is published at once, whatever became of the sequence; what does not is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sessionkv.cache.prefix_index import Entry
from sessionkv.cache.residency import Residency
from sessionkv.types import (
    BlockHash,
    BlockMove,
    BlockRecord,
    MoveOutcome,
    Tier,
    Transfer,
    TransferResult,
)

_LOST = (MoveOutcome.MISSING, MoveOutcome.CORRUPT)


@dataclass(slots=True, eq=False)
class Load:
    """One block on its way to the device.

    Attributes:
        position: Index in the sequence's table.
        block: Device block being filled; its one lease is the sequence's, or the job's where the
            sequence has ended.
        source: HOST or DISK.
        place: Host block, or slot on disk.
        tokens: Slots of it that the sequence uses.
        private: The sequence will write behind the used slots, so the block is not published.
        entry: Index entry of a block on the host.
    """

    position: int
    record: BlockRecord
    block: int
    source: Tier
    place: int
    tokens: int
    private: bool
    entry: Entry | None = None
    transfer_id: int = -1
    outcome: MoveOutcome | None = None
    forgotten: bool = False


@dataclass(slots=True, eq=False)
class FetchJob:
    """All loads of one admission, in one transfer for each source tier.

    Attributes:
        alive: The sequence still wants them; else what arrives is cached and let go.
        pending: Ids of transfers not answered.
        loads: By position in the table.
    """

    seq_id: int
    loads: dict[int, Load]
    pending: set[int]
    alive: bool = True

    def failed(self) -> list[Load]:
        """Loads answered with anything but OK."""
        return [x for x in self.loads.values() if x.outcome not in (None, MoveOutcome.OK)]

    def tokens_from(self, source: Tier, length: int) -> int:
        """Tokens that a table of ``length`` blocks has from one tier."""
        loads = self.loads.values()
        return sum(x.tokens for x in loads if x.source is source and x.position < length)


class Fetcher:
    """Fetches in flight.

    Attributes:
        in_flight: Loads that will be published, by key.
    """

    def __init__(self, residency: Residency, transfer_ids: Iterator[int]) -> None:
        self._residency = residency
        self._transfer_ids = transfer_ids
        self._jobs: dict[int, FetchJob] = {}
        self.in_flight: dict[BlockHash, Load] = {}

    def __len__(self) -> int:
        """Transfers in flight."""
        return len(self._jobs)

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._jobs

    def jobs(self) -> set[FetchJob]:
        """Jobs with transfers in flight."""
        return set(self._jobs.values())

    def start(self, seq_id: int, loads: list[Load]) -> tuple[FetchJob, tuple[Transfer, ...]]:
        """Hold the sources and make one transfer for each source tier."""
        job = FetchJob(seq_id, {load.position: load for load in loads}, set())
        transfers = []
        for source in (Tier.HOST, Tier.DISK):
            mine = [load for load in loads if load.source is source]
            if mine:
                transfers.append(self._transfer(job, source, mine))
        return job, tuple(transfers)

    def _transfer(self, job: FetchJob, source: Tier, loads: list[Load]) -> Transfer:
        transfer_id = next(self._transfer_ids)
        for load in loads:
            load.transfer_id = transfer_id
            if source is Tier.HOST:
                self._residency.host.lease(load.place)
            if not load.private:
                self.in_flight[load.record.key] = load
        job.pending.add(transfer_id)
        self._jobs[transfer_id] = job
        moves = tuple(BlockMove(load.record, load.place, load.block) for load in loads)
        return Transfer(transfer_id, source, Tier.DEVICE, moves)

    def finish(self, result: TransferResult) -> FetchJob | None:
        """Take in an answer; the job when it was the last one of it."""
        job = self._jobs.pop(result.transfer_id)
        loads = [x for x in job.loads.values() if x.transfer_id == result.transfer_id]
        for load, outcome in zip(loads, result.outcomes, strict=True):
            load.outcome = outcome
            self.in_flight.pop(load.record.key, None)
            if outcome is MoveOutcome.OK:
                self._arrived(load, job)
            else:
                self._failed(load, job)
            if load.source is Tier.HOST:
                self._residency.host.release(load.place)
        job.pending.discard(result.transfer_id)
        return None if job.pending else job

    def forget(self, key: BlockHash) -> None:
        """Do not publish the block when it arrives."""
        if (load := self.in_flight.get(key)) is not None:
            load.forgotten = True

    def publish(self, load: Load) -> None:
        """Name an arrived block; one whose content was dropped meanwhile stays private."""
        dropped = load.entry is not None and not self._residency.is_indexed(load.entry)
        if load.forgotten or dropped:
            self._residency.device.finish_fill(load.block, None)
        else:
            disk = load.source is Tier.DISK
            self._residency.publish(load.record, load.block, on_disk=disk, disk_below=disk)

    def _arrived(self, load: Load, job: FetchJob) -> None:
        self._residency.counters.count_move(load.source, Tier.DEVICE, succeeded=True)
        if not load.private or not job.alive:
            self.publish(load)
        if not job.alive:
            self._residency.device.release(load.block)

    def _failed(self, load: Load, job: FetchJob) -> None:
        corrupt = load.outcome is MoveOutcome.CORRUPT
        self._residency.counters.count_move(load.source, Tier.DEVICE, succeeded=False)
        self._residency.counters.corrupt += corrupt
        if load.entry is not None:
            self._residency.lose_host(load.entry, corrupt=corrupt)
        elif load.outcome in _LOST:
            self._residency.lose_disk(load.record.key, corrupt=corrupt)
        if not job.alive:
            self._residency.device.abandon_fill(load.block)
