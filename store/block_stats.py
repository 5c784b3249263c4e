"""Figures of a block store: plain values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BlockStoreCounts:
    """Counts since open, added to by the block store."""

    lookups: int = 0
    found_blocks: int = 0
    read_blocks: int = 0
    written_blocks: int = 0
    superseded_blocks: int = 0
    corrupt_blocks: int = 0
    missing_blocks: int = 0
    io_errors: int = 0


@dataclass(frozen=True, slots=True)
class BlockStoreStats:
    """Figures of one block store at one moment.

    Attributes:
        enabled: Whether blocks are being written; lookups and reads go on regardless.
        reason: Why not, ``""`` when enabled.
        blocks: Blocks on disk.
        used_bytes: Everything under the cap as found on disk, metadata and other identities too.
        foreign_bytes: The part of other identities.
        lookups: Questions answered.
        found_blocks: Full blocks they found.
        read_blocks: Blocks read and found sound.
        written_blocks: Blocks stored.
        evicted_blocks: Forgotten to make room.
        superseded_blocks: Partial blocks dropped for a longer one.
        corrupt_blocks: Removed because their bytes were not what was stored.
        missing_blocks: Removed because their bytes were not there.
        io_errors: Reads that the device failed.
    """

    enabled: bool
    reason: str
    blocks: int
    used_bytes: int
    cap_bytes: int
    foreign_bytes: int
    leased_slots: int
    evicted_blocks: int
    lookups: int
    found_blocks: int
    read_blocks: int
    written_blocks: int
    superseded_blocks: int
    corrupt_blocks: int
    missing_blocks: int
    io_errors: int
