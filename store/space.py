"""Slots and bytes of one block store: the cap, the order of eviction, leases.

A slot is exactly one of: *used* (the index names it), *taken* (being written), *withheld* (its
entry is deleted, a receipt still leases it), *ready* (has disk space, may be taken), a *hole* (has
none).

Invariants: :meth:`Space.take` gives only slots whose index delete is on disk and that nobody
leases; eviction never touches a leased slot; other identities' folders go before any of our own
blocks.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

import lmdb

from sessionkv.store.block_index import BlockIndex, Entry
from sessionkv.store.directory import disk_bytes
from sessionkv.store.segments import SegmentFiles

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Left free on the file system for the journal, whatever the cap: a cache must not stop turns.
_RESERVE_BYTES, _RESERVE_PART = 64 * 1024**2, 20
_EVICT_AT_ONCE = 1024
_RECLAIM_AT_ONCE = 8
# What the index may grow by in one batch: at worst it copies itself, up to what 64 records touch.
_INDEX_SLACK_BYTES = (64 * 1024, 2 * 1024**2)


class Space:
    """Who has which slot, and how many bytes all of it takes. Used by one thread.

    Attributes:
        cap_bytes: Most bytes of all folders beside and including ours.
        evictions: Blocks forgotten to make room, since open.
        evicted: Their keys; the owner takes them out.
    """

    def __init__(
        self,
        folder: Path,
        index: BlockIndex,
        segments: SegmentFiles,
        *,
        slot_bytes: int,
        cap_bytes: int,
        is_pinned: Callable[[bytes], bool],
    ) -> None:
        """Find out which slots the index uses and give the space of all others back."""
        self.cap_bytes = cap_bytes
        self.evictions = 0
        self.evicted: list[bytes] = []
        self._folder = folder
        self._index = index
        self._segments = segments
        self._slot_bytes = slot_bytes
        self._is_pinned = is_pinned
        self._leases: Counter[int] = Counter()
        self._withheld: set[int] = set()
        self._touched: dict[bytes, None] = {}
        self._disk_is_full = False
        self._foreign = _other_folders(folder)
        used = index.scan(segments.end_slot())
        self._end = max(used, default=-1) + 1
        segments.truncate(self._end)
        self._holes = [slot for slot in range(self._end) if slot not in used]
        self._ready: list[int] = []
        if not all(self._punch_runs(self._holes)):
            self._ready, self._holes = self._holes, []

    @property
    def leased_slots(self) -> int:
        """Slots that receipts lease."""
        return len(self._leases)

    @property
    def foreign_bytes(self) -> int:
        """Bytes of other identities' folders."""
        return sum(size for _, size in self._foreign)

    def used_bytes(self) -> int:
        """Bytes that everything under the cap takes, as found on disk."""
        return disk_bytes(self._folder) + self.foreign_bytes

    def fits_one(self) -> bool:
        """Whether the cap has room for any record at all."""
        return self._slot_bytes + self._index.used_bytes() + self._slack() <= self.cap_bytes

    def touch(self, keys: Iterable[bytes]) -> None:
        """The blocks were used, the last one last; kept in memory until the next eviction."""
        for key in keys:
            self._touched.pop(key, None)
            self._touched[key] = None

    def write_touched(self, txn: lmdb.Transaction) -> None:
        """Take noted uses into the order; :meth:`touched_written` once that is on disk."""
        self._index.touch(txn, self._touched)

    def touched_written(self) -> None:
        """The transaction of :meth:`write_touched` succeeded."""
        self._touched.clear()

    def take(self, count: int) -> list[int]:
        """Up to ``count`` slots with disk space, evicting others' blocks and then our coldest.

        Fewer where everything else is leased. Every slot taken is to be used by an index entry or
        handed to :meth:`give`.

        Raises:
            OSError: The disk is full and nothing can be evicted, or failed.
            lmdb.Error: As OSError.
        """
        slots = [self._ready.pop() for _ in range(min(count, len(self._ready)))]
        try:
            if len(slots) < count:
                self._allocate(slots, count)
            if len(slots) < count:
                slots += self._evict(count - len(slots), release=False)
            if not slots and count and self._disk_is_full:
                raise OSError(errno.ENOSPC, "the disk is full and no block can be evicted")
        except BaseException:
            self.give(slots)
            raise
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Slots that no index entry on disk names any longer (or never did)."""
        for slot in slots:
            if slot in self._leases:
                self._withheld.add(slot)
            else:
                self._ready.append(slot)

    def lease(self, slots: Iterable[int]) -> None:
        """Keep slots from being taken, each until as many calls of :meth:`release`."""
        self._leases.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        """End leases."""
        for slot in slots:
            self._leases[slot] -= 1
            if not self._leases[slot]:
                del self._leases[slot]
                if slot in self._withheld:
                    self._withheld.discard(slot)
                    self._ready.append(slot)

    def trim(self) -> None:
        """Get under the cap: others' folders, then unused space, then our coldest blocks.

        Raises:
            OSError: The file system cannot give back a part of a file, or the disk failed.
        """
        while (over := self.used_bytes() - self.cap_bytes) > 0:
            if self._drop_foreign() or self._release_ready():
                continue
            count = min(-(-over // self._slot_bytes), _EVICT_AT_ONCE)
            slots = self._evict(count, release=True)
            if not slots:
                return  # the rest is leased
            self._holes += slots

    def reclaim(self) -> None:
        """The disk is full: give back some space even if the index cannot grow by a page."""
        if not self._drop_foreign() and not self._release_ready():
            self._holes += self._evict(_RECLAIM_AT_ONCE, release=True)

    def _allocate(self, slots: list[int], count: int) -> None:
        """Extend ``slots`` to ``count`` as far as cap and disk allow."""
        self._disk_is_full = False
        room = self._room()
        while len(slots) < count:
            if room < self._slot_bytes or self._disk_is_full:
                if not self._drop_foreign():
                    return
                room = self._room()
                continue
            slot = self._holes.pop() if self._holes else self._end
            self._end = max(self._end, slot + 1)
            try:
                self._segments.allocate(slot)
            except OSError as error:
                self._holes.append(slot)
                if error.errno not in NO_SPACE:
                    raise
                self._segments.punch(slot)
                self._disk_is_full = True
                continue
            slots.append(slot)
            room -= self._slot_bytes

    def _room(self) -> int:
        """Bytes that new slots may take; notes whether it is the disk that has no more."""
        disk = os.statvfs(self._folder)
        reserve = min(_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // _RESERVE_PART)
        free = disk.f_bavail * disk.f_frsize - reserve
        self._disk_is_full = free < self._slot_bytes
        return min(free, self.cap_bytes - self.used_bytes() - self._slack())

    def _evict(self, count: int, *, release: bool) -> list[int]:
        """Forget the coldest blocks; their slots, ready to be taken (or holes, when released).

        A pinned block that comes to the cold end goes back to the hot one, until nothing else is
        left: amortised as often as blocks are used.
        """

        def work(txn: lmdb.Transaction) -> list[Entry]:
            self.write_touched(txn)
            gone: list[Entry] = []
            passed = 0
            while len(gone) < count:
                entry = self._index.coldest(txn, self._leases)
                if entry is None:
                    break
                if self._is_pinned(entry.key) and passed < self._index.count(txn):
                    passed += 1
                    self._index.touch(txn, (entry.key,))
                    continue
                self._index.remove(txn, entry.key)
                gone.append(entry)
            if release:
                # Before the commit, which may need the room. Should it fail, or the process end
                # here, the entries name empty slots: misses, found by their headers.
                self._punch_all(entry.slot for entry in gone)
            return gone

        gone = self._index.write(work)
        self.touched_written()
        self.evictions += len(gone)
        self.evicted += [entry.key for entry in gone]
        return [entry.slot for entry in gone]

    def _drop_foreign(self) -> bool:
        """Delete the folder of another identity that was used longest ago."""
        if not self._foreign:
            return False
        path, _ = self._foreign.pop(0)
        shutil.rmtree(path, ignore_errors=True)
        return True

    def _release_ready(self) -> bool:
        if not self._ready:
            return False
        self._punch_all(self._ready)
        self._holes += self._ready
        self._ready = []
        return True

    def _punch_all(self, slots: Iterable[int]) -> None:
        if not all(self._punch_runs(sorted(slots))):
            raise OSError(errno.EOPNOTSUPP, "this file system cannot give back parts of a file")

    def _punch_runs(self, slots: Iterable[int]) -> Iterable[bool]:
        """Punch ascending slots, neighbours in one call."""
        size = self._segments.slots_per_segment
        numbered = enumerate(slots)
        for _, run in groupby(numbered, key=lambda item: (item[1] - item[0], item[1] // size)):
            run_slots = [slot for _, slot in run]
            yield self._segments.punch(run_slots[0], len(run_slots))

    def _slack(self) -> int:
        least, most = _INDEX_SLACK_BYTES
        return min(self._index.used_bytes() + least, most)


def _other_folders(folder: Path) -> list[tuple[Path, int]]:
    """Folders beside ours with their bytes, the one used longest ago first."""
    others = []
    for path in folder.parent.iterdir():
        if path != folder and path.is_dir():
            index = path / "index" / "data.mdb"
            used_s = (index if index.exists() else path).stat().st_mtime
            others.append((used_s, path))
    return [(path, disk_bytes(path)) for _, path in sorted(others)]


def is_full(error: Exception) -> bool:
    """Whether a failure may mean that the disk is full."""
    if isinstance(error, lmdb.Error):
        # LMDB answers a short write, as a full disk makes it, with EIO.
        return getattr(error, "code", None) in (*NO_SPACE, errno.EIO)
    return isinstance(error, OSError) and error.errno in NO_SPACE
