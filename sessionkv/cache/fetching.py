"""Moves up: blocks of sequences' gaps copied from host and disk into their device blocks.

The source is held and the device block is filling until the move is answered. What arrives is
published at once, whatever became of the sequence; what does not is a miss.

A move may be promised before it is answered: every step and copy to come is behind it then, so
that what it brings can be used and matched, but it still reads and writes. It holds both its ends
until it is answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sessionkv.cache.gap import Gap, Load
from sessionkv.cache.residency import Residency
from sessionkv.types import (
    BlockHash,
    BlockMove,
    Fetched,
    MissReason,
    MoveOutcome,
    Tier,
    Transfer,
    TransferResult,
)

MOVES_PER_FETCH = 64
"""Small enough that computing soon learns how fast loads are, large enough that an answer, after
which the sequence is looked at again, costs little beside its blocks."""

_WHY_LOST = {
    MoveOutcome.CORRUPT: MissReason.CORRUPT,
    MoveOutcome.MISSING: MissReason.EVICTED,
}


class Fetcher:
    """Fetches in flight.

    Attributes:
        in_flight: Loads that will be published, by key.
    """

    def __init__(self, residency: Residency, transfer_ids: Iterator[int]) -> None:
        self._residency = residency
        self._transfer_ids = transfer_ids
        self._loads: dict[int, tuple[Gap, list[Load]]] = {}
        self._promised: dict[int, list[Load]] = {}
        self.in_flight: dict[BlockHash, Load] = {}

    def __len__(self) -> int:
        """Transfers in flight."""
        return len(self._loads) + len(self._promised)

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._loads or transfer_id in self._promised

    def loads(self) -> Iterator[tuple[Gap, Load]]:
        """All blocks on their way and not promised."""
        return ((gap, load) for gap, loads in self._loads.values() for load in loads)

    def promised(self) -> Iterator[Load]:
        """Blocks of promised transfers: their sources, and those that arrive, are held."""
        return (load for loads in self._promised.values() for load in loads)

    def transfers_of(self, seq_id: int) -> set[int]:
        """Transfers that bring blocks to a running sequence, and are neither promised nor answered.

        O(transfers in flight).
        """
        return {
            transfer_id
            for transfer_id, (gap, _) in self._loads.items()
            if gap.alive and gap.seq_id == seq_id
        }

    def claim(self, gap: Gap, wanted: Mapping[Tier, int]) -> tuple[Transfer, ...]:
        """Start loading a gap's last unclaimed blocks, so many of each tier, the last ones first.

        Their sources are held already.
        """
        transfers: list[Transfer] = []
        for tier, count in wanted.items():
            loads = gap.claim(tier, count)
            for end in range(len(loads), 0, -MOVES_PER_FETCH):
                transfers.append(self._start(gap, loads[max(end - MOVES_PER_FETCH, 0) : end]))
        return tuple(transfers)

    def _start(self, gap: Gap, loads: list[Load]) -> Transfer:
        transfer_id = next(self._transfer_ids)
        for load in loads:
            load.transfer_id = transfer_id
            if not load.private:
                self.in_flight[load.record.key] = load
        self._loads[transfer_id] = gap, loads
        moves = tuple(BlockMove(load.record, load.place, load.block) for load in loads)
        return Transfer(transfer_id, loads[0].source, Tier.DEVICE, moves)

    def promise(self, result: TransferResult) -> Fetched | None:
        """Take in what a transfer is going to be answered with; as :meth:`finish` otherwise.

        All steps and copies to come must be behind its copies.
        """
        gap, loads = self._loads.pop(result.transfer_id)
        self._promised[result.transfer_id] = loads
        outcomes = zip(loads, result.outcomes, strict=True)
        self._residency.device.lease_chain(
            load.block for load, outcome in outcomes if outcome is MoveOutcome.OK
        )
        return self._take_in(gap, loads, result)

    def finish(self, result: TransferResult) -> Fetched | None:
        """Take in an answer; not None where the sequence still runs and nothing was promised."""
        promised = self._promised.pop(result.transfer_id, None)
        if promised is not None:
            arrived = (load.block for load in reversed(promised) if not load.is_lost)
            self._residency.device.release_chain(arrived)
            self._release_sources(promised)
            return None
        gap, loads = self._loads.pop(result.transfer_id)
        fetched = self._take_in(gap, loads, result)
        self._release_sources(loads)
        return fetched

    def _release_sources(self, loads: list[Load]) -> None:
        self._residency.host.release_chain(load.place for load in loads if load.source is Tier.HOST)

    def _take_in(self, gap: Gap, loads: list[Load], result: TransferResult) -> Fetched | None:
        lost: dict[int, MissReason] = {}
        for load, outcome in zip(loads, result.outcomes, strict=True):
            load.outcome = outcome
            gap.loading[load.source] -= 1
            self.in_flight.pop(load.record.key, None)
            if outcome is MoveOutcome.OK:
                self._arrived(load, gap)
            else:
                self._failed(load, gap)
                lost[load.position] = _WHY_LOST.get(outcome, MissReason.NOT_STORED)
        return Fetched(gap.seq_id, len(loads) - len(lost), lost) if gap.alive else None

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

    def _arrived(self, load: Load, gap: Gap) -> None:
        self._residency.counters.count_move(load.source, Tier.DEVICE, succeeded=True)
        if not load.private or not gap.alive:
            self.publish(load)
        if not gap.alive:
            self._residency.device.release(load.block)

    def _failed(self, load: Load, gap: Gap) -> None:
        corrupt = load.outcome is MoveOutcome.CORRUPT
        self._residency.counters.count_move(load.source, Tier.DEVICE, succeeded=False)
        self._residency.counters.corrupt += corrupt
        if load.entry is not None:
            self._residency.lose_host(load.entry, corrupt=corrupt)
        elif load.outcome in _WHY_LOST:
            self._residency.lose_disk(load.record.key, corrupt=corrupt)
        if not gap.alive:
            self._residency.device.abandon_fill(load.block)
