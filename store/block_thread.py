"""The thread that owns a block store: lookups before reads before writes.

It asks and writes the index, and hands payload work to threads: some that read and verify, one
that writes. So a turn that waits for its history waits neither for a spill nor for the blocks of
another, and a restore is as fast as disk and checksums allow. No write is begun while reads wait.

Invariants: transfers of one direction are answered in the order submitted, deletes and writes keep
their order; what left the disk is told after the result of the write that caused it, and only while
no write is half done, so it never contradicts a result that goes the same way.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

from sessionkv.errors import StoreError, StoreUnavailable
from sessionkv.store.answers import (
    Answers,
    Checked,
    DiskEvicted,
    DiskLost,
    Held,
    LookedUp,
    Results,
)
from sessionkv.store.block_stats import BlockStoreStats
from sessionkv.store.block_store import BlockStore
from sessionkv.store.block_work import Fallen, Look, Piece, Search, Work
from sessionkv.store.gates import Gates
from sessionkv.store.payload_jobs import ReadJob, WriteJob
from sessionkv.store.threads import Threads
from sessionkv.types import (
    BlockHash,
    DiskBlock,
    DiskQuery,
    DiskReceipt,
    MoveOutcome,
    Tier,
    Transfer,
    TransferResult,
)

_log = logging.getLogger(__name__)
_J = TypeVar("_J", ReadJob, WriteJob)

MAX_LOOKUPS = 4096
MAX_TRANSFERS = 4096
MAX_SEARCHES = 256
# Some milliseconds, for which a turn's lookup may have to wait.
_SEARCH_KEYS = 2048
# One wait for the disk and one index transaction for so many bytes.
_WRITE_PIECE_BYTES = 64 * 1024**2
# As large as a system reads ahead, since disks want large reads, and small enough that all readers
# share a restore.
_READ_PIECE_BYTES = 8 * 1024**2
# Two keep a disk busy: one verifies while the other reads. More pay where pages are in memory.
_READERS = max(2, min(8, (os.cpu_count() or 1) // 2))
_READ_PIECES = 2 * _READERS


class BlockThread:
    """Owns a block store from :meth:`start` to :meth:`close`.

    Attributes:
        stats: Figures as of when the thread was last idle.
    """

    def __init__(self, blocks: BlockStore, inbox: Answers, gates: Gates) -> None:
        """Prepare; nothing runs yet."""
        self._blocks = blocks
        self._inbox = inbox
        self._gates = gates
        self.stats: BlockStoreStats = blocks.stats()
        self._changed = threading.Condition()
        self._lookups: deque[tuple[int, DiskQuery] | int] = deque()
        self._searches: deque[Search] = deque()
        self._reads: deque[Work] = deque()
        self._writes: deque[Work | Fallen | Look | tuple[BlockHash, ...]] = deque()
        # Pieces under way, in the order begun.
        self._reading: deque[Piece[ReadJob]] = deque()
        self._writing: deque[Piece[WriteJob]] = deque()
        self._answered_s = {True: 0.0, False: 0.0}  # when reads and writes last were
        self._held: set[int] = set()
        self._asked_for_room: deque[SimpleQueue[bool]] = deque()
        self._closing = False
        self._give_up_s = float("inf")
        self._readers = Threads("store-read", _READERS, self._wake)
        self._writer = Threads("store-write", 1, self._wake)
        self._thread = threading.Thread(target=self._run, name="store-blocks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._readers.start()
        self._writer.start()
        self._thread.start()

    def lookup(self, ticket: int, query: DiskQuery) -> None:
        """Queue a question; answered by :class:`LookedUp`, with None when too many wait."""
        with self._changed:
            if self._closing or len(self._lookups) >= MAX_LOOKUPS:
                self._inbox.put(LookedUp(ticket, None))
                return
            self._lookups.append((ticket, query))
            self._changed.notify()

    def search(self, ticket: int, keys: Sequence[BlockHash]) -> None:
        """Queue a question; answered by :class:`Held`, with None when too many wait."""
        with self._changed:
            if self._closing or len(self._searches) >= MAX_SEARCHES:
                self._inbox.put(Held(ticket, None))
                return
            self._searches.append(Search(ticket, keys))
            self._changed.notify()

    def release(self, receipt_id: int) -> None:
        """Queue the end of a receipt's leases.

        Raises:
            StoreError: It is not held.
        """
        with self._changed:
            if receipt_id not in self._held:
                raise StoreError(f"receipt {receipt_id} is not held", receipt_id=receipt_id)
            self._held.discard(receipt_id)
            self._lookups.append(receipt_id)
            self._changed.notify()

    def transfer(self, transfer: Transfer, views: Sequence[memoryview], reply_to: Results) -> None:
        """Queue a transfer; answered by one result, at once when too many wait."""
        work = Work(transfer, views, reply_to)
        with self._changed:
            queue = self._reads if work.is_read else self._writes
            if self._closing or len(queue) >= MAX_TRANSFERS:
                reply_to.put(refused(transfer))
                return
            queue.append(work)
            self._changed.notify()

    def ranks_fell(self, keys: Sequence[BlockHash]) -> None:
        """Queue a note that the ranks of blocks may have fallen, after the writes that wait."""
        with self._changed:
            if not self._closing:
                self._writes.append(Fallen(tuple(keys)))
                self._changed.notify()

    def delete(self, keys: Sequence[BlockHash]) -> None:
        """Queue a delete, after the writes that wait."""
        with self._changed:
            if not self._closing:
                self._writes.append(tuple(keys))
                self._changed.notify()

    def check(self, ticket: int) -> None:
        """Queue a look at the files, after the writes that wait; answered by a :class:`Checked`."""
        with self._changed:
            if self._closing:
                self._inbox.put(Checked(ticket, StoreUnavailable("the store is closed")))
                return
            self._writes.append(Look(ticket))
            self._changed.notify()

    def make_room(self, timeout_s: float) -> bool:
        """Have blocks leave the disk so that there is room; whether some did in that time.

        Called from another thread, which waits.
        """
        done: SimpleQueue[bool] = SimpleQueue()
        with self._changed:
            if self._closing:
                return False
            self._asked_for_room.append(done)
            self._changed.notify()
        try:
            return done.get(timeout=timeout_s)
        except Empty:
            return False

    def close(self, deadline_s: float) -> int | None:
        """Go on until ``deadline_s`` (monotonic), then answer the rest as not done.

        Returns:
            Number of moves that were dropped; None when the thread does not end.
        """
        with self._changed:
            self._closing = True
            self._give_up_s = deadline_s
            self._changed.notify()
        # Pieces that are under way at the deadline are finished.
        self._thread.join(max(0.0, deadline_s - time.monotonic()) + 1.0)
        if self._thread.is_alive():
            return None
        self._readers.close()
        self._writer.close()
        for asked in self._lookups:
            if not isinstance(asked, int):
                self._inbox.put(LookedUp(asked[0], None))
        for search in self._searches:
            self._inbox.put(Held(search.ticket, None))
        dropped = 0
        for work in (*self._reads, *self._writes):
            if isinstance(work, Work):
                dropped += len(work.transfer.moves) - len(work.outcomes)
                work.reply_to.put(refused(work.transfer, done=work.outcomes))
            elif isinstance(work, Look):
                self._inbox.put(Checked(work.ticket, StoreUnavailable("the store is closed")))
        self._blocks.close()
        return dropped

    # -- what to do next -------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            if not self._has_work():
                self._rest()
            with self._changed:
                self._changed.wait_for(lambda: self._next() is not None or self._is_over())
                step = self._next()
            if step is None:
                return
            step()

    def _next(self) -> Callable[[], None] | None:
        """What can be done now without waiting. Only this thread takes from the queues."""
        may_begin = time.monotonic() < self._give_up_s
        if self._asked_for_room:
            return self._give_room
        if self._lookups and may_begin:
            return self._answer
        if self._reading and self._reading[0].is_done:
            return self._finish_read
        if may_begin and len(self._reading) < _READ_PIECES and self._unread() is not None:
            return self._begin_read
        if self._searches and may_begin:
            return self._search
        if self._writing:
            return self._finish_write if self._writing[0].is_done else None
        return self._begin_write if may_begin and self._writes and not self._reads else None

    def _is_over(self) -> bool:
        is_late = time.monotonic() >= self._give_up_s
        nothing_runs = not self._reading and not self._writing
        return self._closing and nothing_runs and (is_late or not self._has_work())

    def _has_work(self) -> bool:
        return bool(self._lookups or self._searches or self._reads or self._writes)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _rest(self) -> None:
        self._blocks.settle()
        self._publish()

    def _publish(self) -> None:
        try:
            self.stats = self._blocks.stats()
        except (OSError, StoreError) as error:
            _log.warning("the figures of the disk tier are not to be had: %s", error)

    # -- doing it --------------------------------------------------------------------------------

    def _give_room(self) -> None:
        self._asked_for_room.popleft().put(self._blocks.make_room())

    def _answer(self) -> None:
        asked = self._lookups.popleft()
        if isinstance(asked, int):
            self._blocks.release(asked)
            return
        ticket, query = asked
        self._gates.pass_through("before_lookup")
        receipt: DiskReceipt | None = None
        try:
            receipt = self._blocks.lookup(query)
            with self._changed:
                self._held.add(receipt.receipt_id)
        except Exception:  # noqa: BLE001 the thread must live; no answer is a miss
            _log.exception("a lookup failed")
        self._inbox.put(LookedUp(ticket, receipt))

    def _search(self) -> None:
        """Look for some keys of the first search: nobody's turn waits for it."""
        search = self._searches[0]
        end = search.start + _SEARCH_KEYS
        try:
            search.found |= self._blocks.held(search.keys[search.start : end])
        except Exception:  # noqa: BLE001 the thread must live; nothing more is found
            _log.exception("a search failed")
            end = len(search.keys)
        search.start = end
        if end >= len(search.keys):
            self._searches.popleft()
            self._inbox.put(Held(search.ticket, frozenset(search.found)))

    def _unread(self) -> Work | None:
        """The first transfer of which no reader has the whole yet."""
        return next((work for work in self._reads if not work.is_begun), None)

    def _begin_read(self) -> None:
        work = self._unread()
        if work is None:
            return
        moves, views = work.next_piece(_READ_PIECE_BYTES)
        piece: Piece[ReadJob] = Piece(work, len(moves))
        try:
            job = self._blocks.begin_read([DiskBlock(m.record, m.src) for m in moves], views)
            piece = Piece(work, len(moves), job, self._readers.run(job))
        except Exception:  # noqa: BLE001 the thread must live to answer the others
            _log.exception("a read failed")
        self._reading.append(piece)

    def _finish_read(self) -> None:
        piece = self._reading.popleft()
        self._take_in(piece, self._blocks.finish_read)
        if piece.work.is_done:
            self._reads.popleft()
            self._finish(piece.work)

    def _begin_write(self) -> None:
        work = self._writes[0]
        if not isinstance(work, Work):
            self._writes.popleft()
            if isinstance(work, Fallen):
                self._blocks.ranks_fell(work.keys)
            elif isinstance(work, Look):
                self._look(work)
            else:
                self._blocks.delete(work, keep_continued=True)
            return
        moves, views = work.next_piece(_WRITE_PIECE_BYTES)
        piece: Piece[WriteJob] = Piece(work, len(moves))
        try:
            blocks = [(move.record, view) for move, view in zip(moves, views, strict=True)]
            job = self._blocks.begin_write(blocks)
            piece = Piece(work, len(moves), job, self._writer.run(job))
        except Exception:  # noqa: BLE001 the thread must live to answer the others
            _log.exception("a write failed")
        self._tell_lost()
        self._writing.append(piece)

    def _look(self, asked: Look) -> None:
        error = self._blocks.look()
        self._tell_lost()
        self._publish()  # before the answer: who has it may ask for the figures
        self._inbox.put(Checked(asked.ticket, error))

    def _tell_lost(self) -> None:
        if self._blocks.take_lost():
            self._inbox.put(DiskLost())

    def _finish_write(self) -> None:
        piece = self._writing.popleft()
        self._take_in(piece, self._blocks.finish_write)
        if piece.work.is_done:
            self._writes.popleft()
            self._finish(piece.work)

    @staticmethod
    def _take_in(piece: Piece[_J], finish: Callable[[_J], list[MoveOutcome]]) -> None:
        """Add a piece's outcomes to its transfer's."""
        outcomes = [MoveOutcome.IO_ERROR] * piece.size
        if piece.job is not None:
            try:
                outcomes = finish(piece.job)
            except Exception:  # noqa: BLE001 the thread must live to answer the others
                _log.exception("a transfer failed")
        piece.work.outcomes += outcomes

    def _finish(self, work: Work) -> None:
        if not self._has_work():
            self._publish()  # before the answer: who has it may ask for the figures
        now_s = time.monotonic()
        # Pieces of the transfer before may still have been under way when this one began.
        busy_s = now_s - max(work.begun_s or now_s, self._answered_s[work.is_read])
        self._answered_s[work.is_read] = now_s
        work.reply_to.put(TransferResult(work.transfer.transfer_id, tuple(work.outcomes), busy_s))
        head = self._writes[0] if self._writes else None
        is_half_done = isinstance(head, Work) and head.begun_s is not None
        if not is_half_done and (gone := self._blocks.evicted()):
            self._inbox.put(DiskEvicted(gone))


def refused(transfer: Transfer, done: Sequence[MoveOutcome] = ()) -> TransferResult:
    """The answer to a transfer that is not carried out past the moves in ``done``."""
    outcome = MoveOutcome.MISSING if transfer.src is Tier.DISK else MoveOutcome.NO_ROOM
    left = len(transfer.moves) - len(done)
    return TransferResult(transfer.transfer_id, (*done, *[outcome] * left), 0.0)
