"""Moves of whole blocks between tiers: asked for by the pure cache, carried out by the movers.

The cache leases both ends of a move before it emits the :class:`Transfer` and keeps them leased
until it is told the :class:`TransferResult`; the mover touches only the bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from sessionkv.types.blocks import BlockRecord, Tier


class BlockMove(NamedTuple):
    """One block to copy. A tuple, as thousands are made at a time.

    Attributes:
        record: Identity of the content; disk writes store it, disk reads verify it.
        src: Block id in the source tier, or slot number when that is DISK.
        dst: Block id in the target tier; -1 when that is DISK, where the store picks the slot.
    """

    record: BlockRecord
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Moves from one tier to another, carried out as one job and answered by one result."""

    transfer_id: int
    src: Tier
    dst: Tier
    moves: tuple[BlockMove, ...]


class MoveOutcome(enum.Enum):
    """What became of one :class:`BlockMove`. All but OK are a miss and a counter, not an error."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    NO_ROOM = "no_room"
    IO_ERROR = "io_error"


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Answer to a :class:`Transfer`: one outcome for each move, in order."""

    transfer_id: int
    outcomes: tuple[MoveOutcome, ...]
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A block found on disk; ``slot`` stays leased until its receipt is released."""

    record: BlockRecord
    slot: int


@dataclass(frozen=True, slots=True)
class DiskReceipt:
    """How far a chain reaches on disk, with the slots leased.

    Attributes:
        receipt_id: Handle to release the leases with, exactly once.
        blocks: Full blocks in chain order, without those that only memory has.
        tail: Best match among the children of the last block reached (or of the parent asked about,
            when none was): the one sharing most leading tokens, at least one; may be a full block
            of which only some first slots are of use.
    """

    receipt_id: int
    blocks: tuple[DiskBlock, ...]
    tail: DiskBlock | None
