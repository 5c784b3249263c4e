"""What waits for the thread of the blocks, and the parts of it that are under way.

Values of that thread; must not know how they are carried out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sessionkv.store.answers import Results
from sessionkv.store.block_store import BATCH_RECORDS
from sessionkv.store.payload_jobs import ReadJob, WriteJob
from sessionkv.store.threads import Running
from sessionkv.types import BlockHash, BlockMove, MoveOutcome, Tier, Transfer

_J = TypeVar("_J", ReadJob, WriteJob)


@dataclass(slots=True)
class Work:
    """A transfer under way; ``views`` has one buffer for each move.

    Attributes:
        reply_to: Takes the result.
        begun: Moves handed out so far.
        begun_s: When the first was, None before.
        outcomes: Of the moves done so far, in order.
    """

    transfer: Transfer
    views: Sequence[memoryview]
    reply_to: Results
    begun: int = 0
    begun_s: float | None = None
    outcomes: list[MoveOutcome] = field(default_factory=list)

    @property
    def is_read(self) -> bool:
        """Whether it comes from the disk."""
        return self.transfer.src is Tier.DISK

    @property
    def is_begun(self) -> bool:
        """Whether every move was handed out."""
        return self.begun_s is not None and self.begun == len(self.transfer.moves)

    @property
    def is_done(self) -> bool:
        """Whether every move has its outcome."""
        return self.is_begun and len(self.outcomes) == len(self.transfer.moves)

    def next_piece(self, most_bytes: int) -> tuple[Sequence[BlockMove], Sequence[memoryview]]:
        """The moves to hand out next, which counts them as begun. All blocks have one size."""
        if self.begun_s is None:
            self.begun_s = time.monotonic()
        block_bytes = max(1, self.views[0].nbytes) if self.views else 1
        start = self.begun
        count = max(1, min(BATCH_RECORDS, most_bytes // block_bytes))
        self.begun = min(start + count, len(self.transfer.moves))
        return self.transfer.moves[start : self.begun], self.views[start : self.begun]


@dataclass(frozen=True, slots=True)
class Piece(Generic[_J]):
    """Part of a transfer, handed to a thread; ``job`` is None when that could not be done."""

    work: Work
    size: int
    job: _J | None = None
    running: Running | None = None

    @property
    def is_done(self) -> bool:
        """Whether its thread has ended it."""
        return self.running is None or self.running.done


@dataclass(frozen=True, slots=True)
class Fallen:
    """Blocks whose ranks may have fallen."""

    keys: tuple[BlockHash, ...]


@dataclass(slots=True)
class Search:
    """Somebody wants to know which of these blocks are on disk.

    Attributes:
        start: Keys before it were looked for.
        found: Those of them that are there.
    """

    ticket: int
    keys: Sequence[BlockHash]
    start: int = 0
    found: set[BlockHash] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Look:
    """Somebody wants to know whether the files are there."""

    ticket: int
