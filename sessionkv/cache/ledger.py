"""Counts of the KV cache as plain data: where blocks are now, and what has happened so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from sessionkv.types import Tier


@dataclass(frozen=True, slots=True)
class TierLedger:
    """Blocks of one tier by state; the four always sum to ``total``."""

    total: int
    free: int
    filling: int
    leased: int
    cached: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the cache holds now. Bytes are counts times the size of an extent."""

    device: TierLedger
    host: TierLedger
    sequences: int
    transfers_in_flight: int

    @property
    def idle(self) -> bool:
        """Nothing is held: no sequence, no transfer, no lease."""
        tiers = (self.device, self.host)
        return not (
            self.sequences
            or self.transfers_in_flight
            or any(tier.filling or tier.leased for tier in tiers)
        )


@dataclass(frozen=True, slots=True)
class Contents:
    """Known content that one tier of memory holds.

    Attributes:
        clean_blocks: Blocks that a lower tier holds too.
        dirty_blocks: The others; the two sum to all blocks of known content.
        unused_slots: Token slots of these blocks that hold no KV; growing tails not counted.
    """

    clean_blocks: int
    dirty_blocks: int
    unused_slots: int


@dataclass(slots=True)
class Counters:
    """What has happened since the start, in blocks.

    Attributes:
        looked_up: Full prompt blocks that admissions looked for; not those after a preemption.
        hit: How many of them were found.
        evicted: By tier, blocks dropped from it to make room.
        waited: By tier, those of them whose copy to a lower tier somebody had to wait for.
        lost: Blocks that left every tier.
        moved: By source and target, blocks whose copy succeeded.
        failed: By source and target, blocks whose copy did not.
        corrupt: Blocks whose bytes were found damaged.
        duplicates: Blocks computed while the same content was cached already.
    """

    looked_up: int = 0
    hit: int = 0
    evicted: dict[Tier, int] = field(default_factory=dict)
    waited: dict[Tier, int] = field(default_factory=dict)
    lost: int = 0
    moved: dict[tuple[Tier, Tier], int] = field(default_factory=dict)
    failed: dict[tuple[Tier, Tier], int] = field(default_factory=dict)
    corrupt: int = 0
    duplicates: int = 0

    def count_evictions(self, tier: Tier, count: int, *, waited: int) -> None:
        """So many blocks were dropped from ``tier``; for ``waited`` of them somebody waited."""
        if not count:
            return
        self.evicted[tier] = self.evicted.get(tier, 0) + count
        self.waited[tier] = self.waited.get(tier, 0) + waited

    def count_move(self, source: Tier, target: Tier, *, succeeded: bool) -> None:
        """A copy of a block was answered."""
        counts = self.moved if succeeded else self.failed
        counts[source, target] = counts.get((source, target), 0) + 1


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """The ledger, the counters and the waste, as of one moment.

    Attributes:
        device: Contents of the device.
        host: Contents of the host.
        wasted_device_slots: Token slots of all allocated device blocks that hold no KV.
        queued_blocks: Blocks asked to be on disk that are not yet.
        indexed_blocks: Distinct blocks of content in memory.
    """

    ledger: Ledger
    counters: Counters
    device: Contents
    host: Contents
    wasted_device_slots: int
    queued_blocks: int
    indexed_blocks: int
