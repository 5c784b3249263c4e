"""KV blocks on disk, for one KV identity: found by hash and tokens, verified before they are used.

    blocks/<identity>/index/          store.block_index
    blocks/<identity>/segment-*.kv    store.segments, records as in store.record

Invariants: a slot is reused only after the delete of its index entry is on disk, and never while a
receipt leases it; an entry is committed only after its payload is on disk; a payload that does not
match header and checksum is removed and never handed on; the bytes below ``blocks/``, metadata
included, stay within the cap (one record and one batch's index growth above it for a moment).
Folders of other identities are deleted first, whole.

Must not know of sessions, tiers above, sockets or threads: it is used by one thread. What takes
time, moving payloads, it hands out as jobs that may run on another: begin, run, finish.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count, islice

import lmdb

from sessionkv.errors import StoreError, StoreUnavailable
from sessionkv.store.block_index import distrust, open_index
from sessionkv.store.block_stats import BlockStoreCounts, BlockStoreStats
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.environment import DAMAGE, opening
from sessionkv.store.full_disk import is_full
from sessionkv.store.gates import OPEN_GATES, Gates
from sessionkv.store.index_changes import (
    check_named,
    disk_block,
    find_chain,
    name_records,
    remove_ends,
    remove_keys,
)
from sessionkv.store.index_entry import Entry
from sessionkv.store.payload_jobs import PayloadFiles, ReadJob, RecordAndView, WriteJob
from sessionkv.store.record import RecordLayout
from sessionkv.store.segments import SegmentFiles
from sessionkv.store.space import Space
from sessionkv.types import (
    BlockHash,
    BlockRecord,
    DiskBlock,
    DiskQuery,
    DiskReceipt,
    KVGeometry,
    MoveOutcome,
)

_log = logging.getLogger(__name__)

# Of the index and of how segment files are divided; a block store of another starts empty.
LAYOUT_VERSION = 2
# Most blocks written together: one wait for the disk and one index transaction.
BATCH_RECORDS = 64
_RETRY_S = 30.0
# Noted uses that are worth a transaction of their own.
_MANY_NOTES = 1024


def unranked(key: bytes) -> int:
    """Of blocks that are written: nobody retains them. Of others: as they were written."""
    del key
    return 0


class BlockStore:
    """Blocks of one KV identity in a locked store directory. Used by one thread at a time."""

    def __init__(
        self,
        directory: StoreDirectory,
        identity: bytes,
        geometry: KVGeometry,
        *,
        cap_bytes: int,
        rank_of: Callable[[bytes], int] = unranked,
        gates: Gates = OPEN_GATES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open or create; trims to the cap, so it may take as long as deleting does.

        Args:
            directory: Must outlive the block store.
            identity: Digest of everything that changes KV bytes; names the folder.
            geometry: Shape of the blocks; part of what the identity digests.
            cap_bytes: Most bytes of all block stores of the directory, metadata included; above 0.
            rank_of: Rank of retention of a block, as far as is known, else 0: blocks of a lower
                one go first. Asked on this thread, for blocks that are written, that are next to
                go, or that were named to :meth:`ranks_fell`.
            gates: Points where tests hold the thread.
            clock: Monotonic seconds.

        Raises:
            StoreUnavailable: It cannot be opened, a new one not be made, or the cap has no room for
                a single record.
        """
        directory.check_process()
        self._directory = directory
        self._layout = RecordLayout(identity, geometry)
        self._gates = gates
        self._clock = clock
        self._rank_of = rank_of
        self._counts = BlockStoreCounts()
        self._receipts: dict[int, list[int]] = {}
        self._receipt_ids = count(1)
        self._off_reason = ""
        self._retry_at_s = 0.0
        self._folder = directory.blocks_path / identity.hex()
        self._index_layout = layout_of(geometry)
        self._is_lost = False
        self._lost_news = False
        self._num_blocks = 0
        self._open_or_renew(cap_bytes)
        self._trim()
        if not self._space.fits_one():
            self.close()
            raise StoreUnavailable(f"the cap of {cap_bytes} bytes has no room for a record")

    def _open_or_renew(self, cap_bytes: int) -> None:
        """Open what is there, or start anew over damage."""
        with opening(self._folder):
            try:
                self._open(cap_bytes)
            except DAMAGE:
                distrust(self._folder)
                self._open(cap_bytes)

    def _open(self, cap_bytes: int) -> None:
        self._index = open_index(self._folder, self._index_layout, cap_bytes=cap_bytes)
        try:
            self._segments = SegmentFiles(self._folder, self._layout.slot_bytes)
            self._files = PayloadFiles(self._layout, self._segments, self._gates)
            self._space = Space(
                self._folder,
                self._index,
                self._segments,
                slot_bytes=self._layout.slot_bytes,
                cap_bytes=cap_bytes,
                rank_of=self._rank_of,
            )
        except BaseException:
            self._index.close()
            raise

    @property
    def enabled(self) -> bool:
        """Whether blocks are being written."""
        return not self._off_reason

    def lookup(self, query: DiskQuery) -> DiskReceipt:
        """How far a chain reaches on disk, with the slots leased; about 8 us a block.

        Every block found has the key, parent and tokens asked for. Release the receipt once.
        """
        self._directory.check_process()
        blocks: list[DiskBlock] = []
        tail = None
        try:
            with self._index.reading() as txn:
                tail = find_chain(txn, self._index, query, blocks)
        except lmdb.Error as error:
            self._turn_off(error)  # what was found before is as good as ever
        found = [*blocks, tail] if tail else blocks
        receipt = DiskReceipt(next(self._receipt_ids), tuple(blocks), tail)
        self._receipts[receipt.receipt_id] = [block.slot for block in found]
        self._space.lease(block.slot for block in found)
        # Deepest first, so that a chain goes from its tail.
        self._space.note(block.record.key for block in reversed(found))
        self._counts.lookups += 1
        self._counts.found_blocks += len(blocks)
        return receipt

    def held(self, keys: Sequence[BlockHash]) -> set[BlockHash]:
        """Which of these blocks are on disk; nothing is leased, and no use is noted."""
        self._directory.check_process()
        try:
            with self._index.reading() as txn:
                return {key for key in keys if self._index.has(txn, key)}
        except lmdb.Error as error:
            self._turn_off(error)
            return set()

    def release(self, receipt_id: int) -> None:
        """End the leases of a receipt.

        Raises:
            StoreError: No such receipt, or released already.
        """
        slots = self._receipts.pop(receipt_id, None)
        if slots is None:
            raise StoreError(f"receipt {receipt_id} is not held", receipt_id=receipt_id)
        self._space.release(slots)

    def read(self, block: DiskBlock, into: memoryview) -> MoveOutcome:
        """As :meth:`begin_read`, run and :meth:`finish_read` of one block, here and now."""
        job = self.begin_read((block,), (into,))
        job.run()
        return self.finish_read(job)[0]

    def begin_read(self, blocks: Sequence[DiskBlock], views: Sequence[memoryview]) -> ReadJob:
        """A job that reads each block into its view (``block_bytes`` long) and verifies it there.

        The caller runs it and hands it to :meth:`finish_read`. Several may be under way.
        """
        self._directory.check_process()
        for view in views:
            self._check_size(view)
        return ReadJob(self._files, blocks, views)

    def finish_read(self, job: ReadJob) -> list[MoveOutcome]:
        """One outcome for each block of a job that ran.

        On any but OK the view holds nothing of use. A record that is not the one asked for is
        removed from the index.
        """
        missing = len(job.blocks) - len(job.outcomes)
        outcomes = [*job.outcomes, *[MoveOutcome.IO_ERROR] * missing]
        for block, outcome in zip(job.blocks, outcomes, strict=True):
            if outcome is MoveOutcome.OK:
                self._counts.read_blocks += 1
            elif outcome is MoveOutcome.IO_ERROR:
                self._counts.io_errors += 1
            else:
                self._remove_bad(block, outcome)
        return outcomes

    def write(self, record: BlockRecord, payload: memoryview) -> MoveOutcome:
        """As :meth:`write_many` of one block."""
        return self.write_many(((record, payload),))[0]

    def write_many(self, blocks: Sequence[tuple[BlockRecord, memoryview]]) -> list[MoveOutcome]:
        """Store blocks; those answered OK are durable. One outcome each, in order.

        A block that is there already is OK. A partial block that a new one of the same parent
        extends is dropped in the same transaction. NO_ROOM: all else is leased, or writing is off.
        """
        outcomes: list[MoveOutcome] = []
        for start in range(0, len(blocks), BATCH_RECORDS):
            job = self.begin_write(blocks[start : start + BATCH_RECORDS])
            job.run()
            outcomes += self.finish_write(job)
        return outcomes

    def begin_write(self, blocks: Sequence[RecordAndView]) -> WriteJob:
        """A job that writes blocks (at most :data:`BATCH_RECORDS`) into slots taken for them.

        The caller runs it and hands it to :meth:`finish_write` before the next one is begun.
        """
        self._directory.check_process()
        for _, payload in blocks:
            self._check_size(payload)
        self.look()
        if self._is_lost or (self._off_reason and self._clock() < self._retry_at_s):
            return WriteJob(self._files, blocks, refused=True)
        return self._prepared(blocks)

    def finish_write(self, job: WriteJob) -> list[MoveOutcome]:
        """Name what a job wrote in the index; one outcome for each block, OK = durable."""
        if job.refused:
            return [MoveOutcome.NO_ROOM] * len(job.blocks)
        try:
            try:
                self._publish(job)
            except (OSError, lmdb.Error) as error:
                if not is_full(error):
                    raise
                self._space.reclaim()
                job = self._prepared(job.blocks)
                job.run()
                self._publish(job)
        except (OSError, lmdb.Error) as error:
            self._turn_off(error)
            outcome = MoveOutcome.NO_ROOM if is_full(error) else MoveOutcome.IO_ERROR
            return [outcome] * len(job.blocks)
        if self._off_reason:
            _log.warning("the disk tier is on again")
            self._off_reason = ""
        self._trim()
        return job.outcomes()

    def delete(self, keys: Sequence[BlockHash], *, keep_continued: bool = False) -> None:
        """Forget blocks; unknown ones are passed over. Leased slots are free when released.

        Args:
            keys: Of many, the end of a chain before its start.
            keep_continued: One stays that a block continues which is not named: a session may stand
                on it that the caller does not have in memory.
        """
        self._directory.check_process()
        work = remove_ends if keep_continued else remove_keys
        for start in range(0, len(keys), BATCH_RECORDS):
            batch = keys[start : start + BATCH_RECORDS]
            self._remove(partial(work, index=self._index, keys=batch))

    def ranks_fell(self, keys: Sequence[BlockHash]) -> None:
        """The ranks of these blocks may be lower than when they were last asked for."""
        try:
            self._space.note_fallen(keys)
        except lmdb.Error as error:
            self._turn_off(error)

    def evicted(self) -> tuple[BlockHash, ...]:
        """Keys that left the disk since the last call and are not there now.

        Those that :meth:`delete` was told of are not among them.
        """
        keys, self._space.evicted = self._space.evicted, []
        if not keys:
            return ()
        try:
            with self._index.reading() as txn:
                return tuple(BlockHash(key) for key in keys if self._index.get(txn, key) is None)
        except lmdb.Error as error:
            self._turn_off(error)
            return tuple(map(BlockHash, keys))

    def stats(self) -> BlockStoreStats:
        """Figures; bytes as found on disk. About 0.3 ms."""
        self._directory.check_process()
        try:
            with self._index.reading() as txn:
                blocks = 0 if self._is_lost else self._index.count(txn)
            self._num_blocks = blocks
        except lmdb.Error as error:
            self._turn_off(error)
            blocks = 0
        return BlockStoreStats(
            enabled=self.enabled,
            reason=self._off_reason,
            blocks=blocks,
            used_bytes=self._space.used_bytes(),
            cap_bytes=self._space.cap_bytes,
            foreign_bytes=self._space.foreign_bytes,
            leased_slots=self._space.leased_slots,
            evicted_blocks=self._space.evictions,
            **asdict(self._counts),
        )

    def make_room(self) -> bool:
        """Give some disk space back for what matters more; False when there was none to give."""
        try:
            return self._space.reclaim()
        except (OSError, lmdb.Error) as error:
            self._turn_off(error)
            return True  # space is given back before the index is written

    def settle(self) -> None:
        """Take noted uses into the order when there are many; for when there is nothing to do."""
        try:
            self._space.write_notes(at_least=_MANY_NOTES)
        except lmdb.Error as error:
            self._turn_off(error)

    def verify(self) -> tuple[int, int]:
        """Read every block; ``(sound, bad)``, the bad ones removed. O(bytes on disk).

        Slots that damage to the index had lost are free again. While no write is under way.
        """
        self._directory.check_process()
        scratch = memoryview(bytearray(self._layout.payload_bytes))
        named = bytearray(self._space.end_slot)
        counts = {True: 0, False: 0}
        after = b""
        while True:
            with self._index.reading() as txn:
                entries = list(islice(self._index.entries(txn, after), BATCH_RECORDS))
            for entry in entries:
                is_sound = self.read(disk_block(entry), scratch) is MoveOutcome.OK
                counts[is_sound] += 1
                if is_sound:
                    named[entry.slot] = 1
            if not entries:
                break
            after = entries[-1].key
        self._space.recover(named)
        return counts[True], counts[False]

    def close(self) -> None:
        """Write what is only in memory (the order of use), give unused space back, close the files.

        While no job is under way.
        """
        self._directory.check_process()
        try:
            self._space.write_notes()
            self._space.release_space()
        except (OSError, lmdb.Error) as error:
            _log.warning("the disk tier was not left in order: %s", error)
        self._segments.close()
        self._index.close()

    # -- files that somebody else removes --------------------------------------------------------

    def look(self) -> StoreUnavailable | None:
        """Notice files that were removed, renamed or cut short, and make new ones in their place.

        While no write is under way. A few calls of the system when all is well.

        Returns:
            Why nothing can be written, where that is so still.
        """
        gone = not self._directory.is_there()
        whole = not gone and self._index.is_there() and self._segments.are_there()
        if whole and not self._is_lost:
            return None
        where = self._directory.path if gone else self._folder
        reason = f"files of {where} were removed, renamed or cut short by another program"
        if not self._is_lost:
            self._lose(reason)
        if gone:
            return StoreUnavailable(
                f"{reason}: stop the engine and restore the store", directory=str(where)
            )
        # What is being read has a receipt: its files stay open until it is given back.
        if not self._receipts and self._clock() >= self._retry_at_s:
            self._renew(reason)
        if not self._is_lost:
            return None
        return StoreUnavailable(self._off_reason, retryable=True, directory=str(where))

    def take_lost(self) -> bool:
        """Whether everything that was on disk was found lost since the last call."""
        news, self._lost_news = self._lost_news, False
        return news

    def _lose(self, reason: str) -> None:
        """Say and count it, once; nothing is written until there are new files."""
        self._is_lost = self._lost_news = True
        try:
            with self._index.reading() as txn:
                self._counts.missing_blocks += self._index.count(txn)
        except lmdb.Error:
            self._counts.missing_blocks += self._num_blocks
        _log.error("the disk tier lost its blocks: %s", reason)
        self._off_reason, self._retry_at_s = reason, 0.0

    def _renew(self, reason: str) -> None:
        """Begin with an empty block store, as at a start."""
        cap_bytes, evictions, evicted = self._space.cap_bytes, self._space.evictions, []
        evicted += self._space.evicted
        self._segments.close()
        self._index.close()
        try:
            self._directory.blocks_path.mkdir(mode=0o700, exist_ok=True)
            if self._folder.exists():
                distrust(self._folder)
            self._open_or_renew(cap_bytes)
        except (OSError, StoreUnavailable) as error:
            self._off_reason = f"{reason}; they cannot be made anew: {error}"
            self._retry_at_s = self._clock() + _RETRY_S
            return
        self._space.evictions, self._space.evicted = evictions, evicted
        self._is_lost, self._off_reason = False, ""
        _log.info("the disk tier begins with an empty block store in %s", self._folder)

    # -- writing ---------------------------------------------------------------------------------

    def _prepared(self, blocks: Sequence[RecordAndView]) -> WriteJob:
        """A job with a slot for each block that is not there, as far as there are any."""
        job = WriteJob(self._files, blocks)
        try:
            with self._index.reading() as txn:
                job.known |= {r.key for r, _ in blocks if self._index.get(txn, r.key)}
            new = dict.fromkeys(r.key for r, _ in blocks if r.key not in job.known)
            ranks = {key: self._rank_of(key) for key in new}
            wanted_most = sorted(new, key=lambda key: -ranks[key])
            slots = self._space.take([ranks[key] for key in wanted_most])
            job.slots.update(zip(wanted_most, slots, strict=False))
        except (OSError, lmdb.Error) as error:
            job.error = error
        return job

    def _publish(self, job: WriteJob) -> None:
        """Make what a job wrote visible, in one transaction."""
        slots = job.slots.values()
        try:
            if job.error is not None:
                raise job.error
            self._space.note(job.known)
            self._space.write_notes()
            self._gates.pass_through("before_index_commit")
            name = partial(
                name_records, index=self._index, stored=job.named(), rank_of=self._rank_of
            )
            dropped = self._index.write(name)
        except BaseException:
            self._space.give_back(slots)
            raise
        self._gates.pass_through("after_index_commit")
        self._space.used(slots)
        gone = {entry.key for entry in dropped}
        with self._index.reading() as txn:
            check_named(txn, self._index, [s for s in job.named() if s[0].key not in gone])
        self._space.evicted += [entry.key for entry in dropped]
        self._counts.superseded_blocks += len(dropped)
        self._counts.written_blocks += len(slots)

    def _trim(self) -> None:
        """Get under the cap; where that fails, writing is off."""
        try:
            self._space.trim()
        except (OSError, lmdb.Error) as error:
            self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        """Write nothing for a while; over a damaged index, until the next open starts anew."""
        if self._is_lost:
            return  # there is nothing to write to, and it was said
        if not self._off_reason:
            _log.warning("the disk tier takes no blocks for now: %s", error)
        self._off_reason = str(error)
        self._retry_at_s = max(self._retry_at_s, self._clock() + _RETRY_S)
        if isinstance(error, DAMAGE) and self._retry_at_s < float("inf"):
            self._retry_at_s = float("inf")
            with suppress(OSError):
                distrust(self._folder)

    # -- removing --------------------------------------------------------------------------------

    def _remove_bad(self, block: DiskBlock, outcome: MoveOutcome) -> None:
        """Remove a block that was not what was stored, unless its key has another slot by now."""
        key = block.record.key
        if outcome is MoveOutcome.CORRUPT:
            self._counts.corrupt_blocks += 1
            _log.warning("block %s is corrupt on disk and was removed", key.hex())
        else:
            self._counts.missing_blocks += 1

        def work(txn: lmdb.Transaction) -> list[Entry | None]:
            entry = self._index.get(txn, key)
            is_it = entry is not None and entry.slot == block.slot
            return [self._index.remove(txn, key)] if is_it else []

        self._space.evicted += self._remove(work)

    def _remove(self, work: Callable[[lmdb.Transaction], list[Entry | None]]) -> list[bytes]:
        """Run a transaction that removes entries; the keys of those that were there."""
        try:
            return [entry.key for entry in self._index.write(work) if entry is not None]
        except lmdb.Error as error:
            self._turn_off(error)  # what could not be removed is found bad, or cold, again
            return []

    def _check_size(self, view: memoryview) -> None:
        if view.nbytes != self._layout.payload_bytes:
            raise StoreError(
                f"a block has {self._layout.payload_bytes} bytes, not {view.nbytes}",
                bytes=view.nbytes,
            )


def layout_of(geometry: KVGeometry) -> dict[str, int]:
    """What the index says of how its block store is laid out."""
    return {
        "version": LAYOUT_VERSION,
        "payload_bytes": geometry.block_bytes,
        "slot_bytes": RecordLayout(b"", geometry).slot_bytes,
        "block_size": geometry.block_size,
    }
