"""What the store's threads answer, as plain data for the inbox of whoever asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sessionkv.errors import StoreError
from sessionkv.store.questions import Reply
from sessionkv.types import BlockHash, DiskReceipt, TransferResult


@dataclass(frozen=True, slots=True)
class Committed:
    """The journal's answer to one commit: durable, or refused with ``error``."""

    ticket: int
    error: StoreError | None


@dataclass(frozen=True, slots=True)
class Answered:
    """The journal's answer to one question; with ``error`` when it could not be read."""

    ticket: int
    reply: Reply
    error: StoreError | None = None


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The block store's answer to one lookup; None when it cannot tell. Receipts are released."""

    ticket: int
    receipt: DiskReceipt | None


@dataclass(frozen=True, slots=True)
class DiskEvicted:
    """Blocks that are on disk no longer: for room, for a longer one, or because they were bad."""

    keys: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class DiskLost:
    """Somebody took the block store's files away: nothing that was on disk before is there."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The answer to a look at the block store's files; with ``error`` where none can be written."""

    ticket: int
    error: StoreError | None


@dataclass(frozen=True, slots=True)
class Held:
    """Which of the blocks asked for are on disk; None when it cannot tell."""

    ticket: int
    keys: frozenset[BlockHash] | None


StoreAnswer = (
    Committed | Answered | LookedUp | TransferResult | DiskEvicted | DiskLost | Checked | Held
)


class Answers(Protocol):
    """Where answers go. Called from the store's threads; must be thread-safe and never wait."""

    def put(self, item: StoreAnswer, /) -> None:
        """Take one answer."""
        ...


class Results(Protocol):
    """Where results of transfers go; as :class:`Answers`, for one who takes nothing else."""

    def put(self, item: TransferResult, /) -> None:
        """Take one result."""
        ...
