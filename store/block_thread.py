"""The thread that owns a block store: lookups before reads before writes.

Work is taken in small pieces (one lookup, one block read, one batch written), so that a turn that
waits for its history is at most one piece behind a spill.

Invariants: transfers of one direction are answered in the order submitted, deletes and writes keep
their order; what left the disk is told after the result of the write that caused it, and only while
no write is half done, so it never contradicts a result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sessionkv.errors import StoreError
from sessionkv.store.answers import Answers, DiskEvicted, LookedUp
from sessionkv.store.block_stats import BlockStoreStats
from sessionkv.store.block_store import BlockStore
from sessionkv.store.gates import Gates
from sessionkv.types import (
    BlockHash,
    BlockMove,
    DiskBlock,
    DiskQuery,
    DiskReceipt,
    MoveOutcome,
    Tier,
    Transfer,
    TransferResult,
)

_log = logging.getLogger(__name__)

MAX_LOOKUPS = 4096
MAX_TRANSFERS = 4096
# About 25 ms of a disk that writes 350 MB/s: how long a lookup may wait for a spill.
_WRITE_PIECE_BYTES = 8 * 1024**2
_WRITE_PIECE_BLOCKS = 64


@dataclass(slots=True)
class _Job:
    """A transfer under way; ``views`` has one buffer for each move."""

    transfer: Transfer
    views: Sequence[memoryview]
    outcomes: list[MoveOutcome] = field(default_factory=list)
    busy_s: float = 0.0

    @property
    def is_read(self) -> bool:
        return self.transfer.src is Tier.DISK


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
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job | tuple[BlockHash, ...]] = deque()
        self._held: set[int] = set()
        self._closing = False
        self._give_up_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="store-blocks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def lookup(self, ticket: int, query: DiskQuery) -> None:
        """Queue a question; answered by :class:`LookedUp`, with None when too many wait."""
        with self._changed:
            if self._closing or len(self._lookups) >= MAX_LOOKUPS:
                self._inbox.put(LookedUp(ticket, None))
                return
            self._lookups.append((ticket, query))
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

    def transfer(self, transfer: Transfer, views: Sequence[memoryview]) -> None:
        """Queue a transfer; answered by one result, at once when too many wait."""
        job = _Job(transfer, views)
        with self._changed:
            queue = self._reads if job.is_read else self._writes
            if self._closing or len(queue) >= MAX_TRANSFERS:
                self._inbox.put(refused(transfer))
                return
            queue.append(job)
            self._changed.notify()

    def delete(self, keys: Sequence[BlockHash]) -> None:
        """Queue a delete, after the writes that wait."""
        with self._changed:
            if not self._closing:
                self._writes.append(tuple(keys))
                self._changed.notify()

    def close(self, deadline_s: float) -> int | None:
        """Go on until ``deadline_s`` (monotonic), then answer the rest as not done.

        Returns:
            Number of moves that were dropped; None when the thread does not end.
        """
        with self._changed:
            self._closing = True
            self._give_up_s = deadline_s
            self._changed.notify()
        # A piece that is under way at the deadline is finished.
        self._thread.join(max(0.0, deadline_s - time.monotonic()) + 1.0)
        if self._thread.is_alive():
            return None
        for asked in self._lookups:
            if not isinstance(asked, int):
                self._inbox.put(LookedUp(asked[0], None))
        dropped = 0
        for job in (*self._reads, *self._writes):
            if isinstance(job, _Job):
                dropped += len(job.transfer.moves) - len(job.outcomes)
                self._inbox.put(refused(job.transfer, done=job.outcomes))
        self._blocks.close()
        return dropped

    def _run(self) -> None:
        while True:
            if not self._has_work():
                self._publish()
            with self._changed:
                self._changed.wait_for(lambda: self._has_work() or self._closing)
                if time.monotonic() >= self._give_up_s or not self._has_work():
                    return
            # Only this thread takes from the queues.
            if self._lookups:
                self._answer(self._lookups.popleft())
            elif self._reads:
                self._read_piece(self._reads[0])
            else:
                self._write_piece(self._writes[0])

    def _has_work(self) -> bool:
        return bool(self._lookups or self._reads or self._writes)

    def _publish(self) -> None:
        try:
            self.stats = self._blocks.stats()
        except (OSError, StoreError) as error:
            _log.warning("the figures of the disk tier are not to be had: %s", error)

    def _answer(self, asked: tuple[int, DiskQuery] | int) -> None:
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

    def _read_piece(self, job: _Job) -> None:
        started_s = time.monotonic()
        if job.transfer.moves:
            number = len(job.outcomes)
            move = job.transfer.moves[number]
            try:
                block = DiskBlock(move.record, move.src)
                outcome = self._blocks.read(block, job.views[number])
            except Exception:  # noqa: BLE001 the thread must live to answer the others
                _log.exception("a read failed")
                outcome = MoveOutcome.IO_ERROR
            job.outcomes.append(outcome)
        job.busy_s += time.monotonic() - started_s
        if len(job.outcomes) == len(job.transfer.moves):
            self._reads.popleft()
            self._finish(job)

    def _write_piece(self, job: _Job | tuple[BlockHash, ...]) -> None:
        if not isinstance(job, _Job):
            self._writes.popleft()
            self._blocks.delete(job)
            return
        started_s = time.monotonic()
        number = len(job.outcomes)
        piece = job.transfer.moves[number : number + self._piece_blocks(job)]
        job.outcomes += self._write(piece, job.views[number : number + len(piece)])
        job.busy_s += time.monotonic() - started_s
        if len(job.outcomes) == len(job.transfer.moves):
            self._writes.popleft()
            self._finish(job)

    def _write(self, moves: Sequence[BlockMove], views: Sequence[memoryview]) -> list[MoveOutcome]:
        try:
            return self._blocks.write_many(
                [(move.record, view) for move, view in zip(moves, views, strict=True)]
            )
        except Exception:  # noqa: BLE001 the thread must live to answer the others
            _log.exception("a write failed")
            return [MoveOutcome.IO_ERROR] * len(moves)

    @staticmethod
    def _piece_blocks(job: _Job) -> int:
        block_bytes = max(1, job.views[0].nbytes) if job.views else 1  # all have one size
        return max(1, min(_WRITE_PIECE_BLOCKS, _WRITE_PIECE_BYTES // block_bytes))

    def _finish(self, job: _Job) -> None:
        if not self._has_work():
            self._publish()  # before the answer: who has it may ask for the figures
        self._inbox.put(TransferResult(job.transfer.transfer_id, tuple(job.outcomes), job.busy_s))
        head = self._writes[0] if self._writes else None
        if not (isinstance(head, _Job) and head.outcomes) and (gone := self._blocks.evicted()):
            self._inbox.put(DiskEvicted(gone))


def refused(transfer: Transfer, done: Sequence[MoveOutcome] = ()) -> TransferResult:
    """The answer to a transfer that is not carried out past the moves in ``done``."""
    outcome = MoveOutcome.MISSING if transfer.src is Tier.DISK else MoveOutcome.NO_ROOM
    left = len(transfer.moves) - len(done)
    return TransferResult(transfer.transfer_id, (*done, *[outcome] * left), 0.0)
