"""The store's door for the engine: questions in, answers into an inbox, disk work on two threads.

Journal and blocks have a thread each, so that making a turn durable never waits for a spill. No
method waits for the disk but :meth:`StoreWorker.close`. Called from any thread; the answers of one
thread come in order, those of both in any.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sessionkv.store.answers import (
    Answered,
    Answers,
    Checked,
    Committed,
    DiskEvicted,
    DiskLost,
    Held,
    LookedUp,
    Results,
    StoreAnswer,
)
from sessionkv.store.block_stats import BlockStoreStats
from sessionkv.store.block_store import BlockStore
from sessionkv.store.block_thread import BlockThread, refused
from sessionkv.store.gates import OPEN_GATES, Gates
from sessionkv.store.journal import Journal
from sessionkv.store.journal_reads import JournalFigures
from sessionkv.store.journal_thread import JournalThread
from sessionkv.store.questions import Question
from sessionkv.store.set_aside import SetAside
from sessionkv.types import BlockHash, DiskQuery, JournalOp, Transfer

__all__ = [
    "Answered",
    "Answers",
    "Checked",
    "CloseReport",
    "Committed",
    "DiskEvicted",
    "DiskLost",
    "Held",
    "LookedUp",
    "Results",
    "StoreAnswer",
    "StoreWorker",
]


_ROOM_TIMEOUT_S = 5.0
"""How long the journal waits for blocks to make room: they may be held up by the disk too."""


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What :meth:`StoreWorker.close` had to leave undone.

    Attributes:
        dropped_commits: Refused; their submitters were told.
        dropped_moves: Blocks not written or read; answered as such.
        is_stuck: A thread is held by the disk still; its environment was not closed.
    """

    dropped_commits: int
    dropped_moves: int
    is_stuck: bool


class StoreWorker:
    """Runs a journal and a block store. Owns both: :meth:`close` closes them."""

    def __init__(
        self,
        journal: Journal,
        blocks: BlockStore | None,
        inbox: Answers,
        *,
        gates: Gates = OPEN_GATES,
    ) -> None:
        """Start the threads.

        Args:
            journal: Used by no other thread from here on.
            blocks: None when the disk tier is off: lookups find nothing, transfers are refused.
            inbox: Takes :data:`StoreAnswer` values.
            gates: Points where tests hold the threads.
        """
        self._inbox = inbox
        self._journal_store = journal
        self._blocks = BlockThread(blocks, inbox, gates) if blocks is not None else None
        self._journal = JournalThread(journal, inbox, gates, self._make_room)
        self._journal.start()
        if self._blocks is not None:
            self._blocks.start()

    def commit(self, ticket: int, ops: Sequence[JournalOp]) -> None:
        """Make the changes durable as one; answered by :class:`Committed`, in order.

        After a refusal everything submitted before :meth:`accept_again` is refused too.

        Raises:
            Overloaded: Too many commits wait; nothing was queued.
        """
        self._journal.submit(ticket, ops)

    def accept_again(self, ticket: int) -> None:
        """The refusal of ``ticket`` was taken in: commits submitted from now on stand on their own.

        To be called for every refused ticket; only the one that failed itself has an effect.
        """
        self._journal.accept_again(ticket)

    def ask(self, ticket: int, question: Question) -> None:
        """Ask the journal; answered by :class:`Answered`, in order with the commits.

        Raises:
            Overloaded: Too much waits; nothing was queued.
        """
        self._journal.ask(ticket, question)

    def lookup(self, ticket: int, query: DiskQuery) -> None:
        """Ask how far a chain reaches on disk; answered by :class:`LookedUp`."""
        if self._blocks is None:
            self._inbox.put(LookedUp(ticket, None))
        else:
            self._blocks.lookup(ticket, query)

    def search(self, ticket: int, keys: Sequence[BlockHash]) -> None:
        """Ask which of these blocks are on disk; answered by one :class:`Held`.

        After the lookups and reads that wait; ``keys`` is not changed any more.
        """
        if self._blocks is None:
            self._inbox.put(Held(ticket, frozenset()))
        else:
            self._blocks.search(ticket, keys)

    def release(self, receipt_id: int) -> None:
        """End a receipt's leases, once.

        Raises:
            StoreError: It is not held.
        """
        if self._blocks is not None:
            self._blocks.release(receipt_id)

    def transfer(
        self, transfer: Transfer, views: Sequence[memoryview], *, reply_to: Results | None = None
    ) -> None:
        """Write to or read from disk; answered by one ``TransferResult``.

        Args:
            transfer: With DISK as source or target.
            views: One for each move, ``block_bytes`` long: where the bytes come from or go to. Not
                touched by others until the answer.
            reply_to: Who takes the answer; None for the inbox. What is told to the inbox alone,
                such as :class:`DiskEvicted`, may then come before or after it.
        """
        answers = reply_to or self._inbox
        if self._blocks is None:
            answers.put(refused(transfer))
        else:
            self._blocks.transfer(transfer, views, answers)

    def delete(self, keys: Sequence[BlockHash]) -> None:
        """Forget blocks, after the writes submitted before; the end of a chain before its start.

        One that a block on disk continues which is not named stays.
        """
        if self._blocks is not None:
            self._blocks.delete(keys)

    def ranks_fell(self, keys: Sequence[BlockHash]) -> None:
        """The ranks of these blocks, as the block store asks for them, may have fallen."""
        if self._blocks is not None:
            self._blocks.ranks_fell(keys)

    def check(self, ticket: int) -> None:
        """Whether blocks can be written where they were; answered by one :class:`Checked`.

        After the writes submitted before. Files that somebody removed are made anew, and
        :class:`DiskLost` comes first then.
        """
        if self._blocks is None:
            self._inbox.put(Checked(ticket, None))
        else:
            self._blocks.check(ticket)

    def stats(self) -> BlockStoreStats | None:
        """Figures of the block store when it was last idle; None when the disk tier is off."""
        return None if self._blocks is None else self._blocks.stats

    def journal_figures(self) -> JournalFigures:
        """Counts of the journal after its latest transaction."""
        return self._journal.figures

    def journal_bytes(self) -> int:
        """Bytes of disk the journal takes."""
        return self._journal_store.used_bytes()

    def journals_set_aside(self) -> tuple[SetAside, ...]:
        """Damaged journals that were moved aside and are there still."""
        return self._journal_store.set_aside()

    def _make_room(self) -> bool:
        """Blocks are a cache: they go where the journal finds the disk full."""
        return self._blocks is not None and self._blocks.make_room(_ROOM_TIMEOUT_S)

    def close(self, drain_s: float) -> CloseReport:
        """Finish what is queued within ``drain_s``, answer the rest as not done, close both.

        May take 2 s more where the disk holds a thread. To be called once.
        """
        deadline_s = time.monotonic() + drain_s
        dropped_moves = 0 if self._blocks is None else self._blocks.close(deadline_s)
        dropped_commits = self._journal.close(deadline_s)
        if dropped_commits is not None:
            self._journal_store.close()
        return CloseReport(
            dropped_commits or 0,
            dropped_moves or 0,
            dropped_commits is None or dropped_moves is None,
        )
