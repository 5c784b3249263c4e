"""Slots and bytes of one block store: the cap, the order of eviction, leases.

A slot is exactly one of: *used* (the index names it), *free* (it does not, on disk too; with disk
space or without), *taken* (free, and being written), *spare* (was taken, not written).

Which slots are free, the index knows; kept in memory is only what is under way: slots taken, spare
or leased. Invariants: :meth:`Space.take` gives only slots whose index delete is on disk and that
nobody leases; eviction never touches a leased slot; other identities' folders go before any of our
own blocks.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path

import lmdb

from sessionkv.store.block_index import BlockIndex
from sessionkv.store.directory import disk_bytes
from sessionkv.store.full_disk import NO_SPACE
from sessionkv.store.index_entry import Entry
from sessionkv.store.segments import SegmentFiles

# Left free on the file system for the journal, whatever the cap: a cache must not stop turns.
_RESERVE_BYTES, _RESERVE_PART = 64 * 1024**2, 20
_EVICT_AT_ONCE = 1024
_RECLAIM_AT_ONCE = 8
# What the index may grow by in one batch: at worst it copies itself, up to what 64 records and as
# many notes of use touch.
_INDEX_SLACK_BYTES = (64 * 1024, 2 * 1024**2)
# A crash leaves disk space in at most the batch under way and the one that failed before it.
_LEFT_BY_CRASH = 256
_ANY_RANK = 255
# Uses noted in memory: so many are written at once, and past so many the oldest are forgotten.
_NOTES_AT_ONCE, _MAX_NOTES = 256, 16_384


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
        rank_of: Callable[[bytes], int],
    ) -> None:
        """Give back the space that a crash left in unused slots. O(1) in the number of blocks."""
        self.cap_bytes = cap_bytes
        self.evictions = 0
        self.evicted: list[bytes] = []
        self._folder = folder
        self._index = index
        self._segments = segments
        self._slot_bytes = slot_bytes
        self._rank_of = rank_of
        self._leases: Counter[int] = Counter()
        self._out: set[int] = set()  # taken and spare
        self._spare: list[int] = []
        self._notes: dict[bytes, None] = {}
        self._fallen: dict[bytes, None] = {}
        self._disk_is_full = False
        self._foreign = _other_folders(folder)
        self._end = index.end_slot() or 0
        segments.truncate(self._end)
        # Slots are taken lowest first, so what was being written lies in the first of them.
        for slot in self._free(_LEFT_BY_CRASH, has_space=False):
            segments.punch(slot)

    @property
    def end_slot(self) -> int:
        """One past the last slot ever taken."""
        return self._end

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
        return self._segments.used_bytes() + self._index.used_bytes() + self.foreign_bytes

    def fits_one(self) -> bool:
        """Whether the cap has room for any record at all."""
        return self._slot_bytes + self._index.used_bytes() + self._slack() <= self.cap_bytes

    def note(self, keys: Iterable[bytes]) -> None:
        """The blocks were used, the last one last; in memory until :meth:`write_notes`."""
        for key in keys:
            self._notes.pop(key, None)
            self._notes[key] = None
        while len(self._notes) > _MAX_NOTES:
            del self._notes[next(iter(self._notes))]

    def note_fallen(self, keys: Iterable[bytes]) -> None:
        """The ranks of the blocks may have fallen; in memory until :meth:`write_notes`."""
        self._fallen.update(dict.fromkeys(keys))
        if len(self._fallen) > _MAX_NOTES:
            self.write_notes(at_least=_NOTES_AT_ONCE)

    def write_notes(self, *, at_least: int = 1) -> None:
        """Take noted uses and ranks into the order, where there are so many of a kind.

        Raises:
            lmdb.Error: The disk failed; nothing was lost.
        """
        while len(self._notes) >= at_least:
            keys = list(islice(self._notes, _NOTES_AT_ONCE))
            self._index.write(partial(self._index.touch, keys=keys))
            for key in keys:
                del self._notes[key]
        while len(self._fallen) >= at_least:
            keys = list(islice(self._fallen, _NOTES_AT_ONCE))
            ranks = {key: self._rank_of(key) for key in keys}
            self._index.write(partial(self._index.set_ranks, ranks=ranks))
            for key in keys:
                del self._fallen[key]

    def take(self, ranks: Sequence[int]) -> list[int]:
        """A slot with disk space for each rank, evicting others' blocks and then our coldest.

        ``ranks`` descend: those of the blocks to be written. Fewer slots where everything else is
        leased, or of a higher rank than the blocks it would make room for. Every slot taken is to
        be handed to :meth:`used` or :meth:`give_back`.

        Raises:
            OSError: The disk is full and nothing can be evicted, or failed.
            lmdb.Error: As OSError.
        """
        slots: list[int] = []
        count = len(ranks)
        self._disk_is_full = False
        try:
            while self._spare and len(slots) < count:
                slots.append(self._spare.pop())
            self._allocate(slots, self._free(count - len(slots), has_space=True))
            if len(slots) < count:
                self._take_holes(slots, count)
            if len(slots) < count:
                self._allocate(slots, self._evict(ranks[len(slots) :], release=False))
            if not slots and count and self._disk_is_full:
                raise OSError(errno.ENOSPC, "the disk is full and no block can be evicted")
        except BaseException:
            self.give_back(slots)
            raise
        return sorted(slots)

    def used(self, slots: Iterable[int]) -> None:
        """Taken slots that an index entry on disk names now."""
        self._out.difference_update(slots)

    def give_back(self, slots: Iterable[int]) -> None:
        """Taken slots that no index entry names."""
        self._spare += slots

    def lease(self, slots: Iterable[int]) -> None:
        """Keep slots from being taken, each until as many calls of :meth:`release`."""
        self._leases.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        """End leases."""
        for slot in slots:
            self._leases[slot] -= 1
            if not self._leases[slot]:
                del self._leases[slot]

    def trim(self) -> None:
        """Get under the cap: others' folders, then unused space, then our coldest blocks.

        Raises:
            OSError: The file system cannot give back a part of a file, or the disk failed.
        """
        while (over := self.used_bytes() - self.cap_bytes) > 0:
            if self._drop_foreign() or self.release_space():
                continue
            count = min(-(-over // self._slot_bytes), _EVICT_AT_ONCE)
            if not self._evict([_ANY_RANK] * count, release=True):
                return  # the rest is leased

    def reclaim(self) -> bool:
        """The disk is full: give back some space even if the index cannot grow by a page.

        Returns:
            Whether there was any to give.
        """
        if self._drop_foreign() or self.release_space():
            return True
        return bool(self._evict([_ANY_RANK] * _RECLAIM_AT_ONCE, release=True))

    def release_space(self) -> bool:
        """Give back the disk space of some unused slots; False when none has any.

        Raises:
            OSError: The file system cannot give back a part of a file, or the disk failed.
            lmdb.Error: The disk failed.
        """
        if self._release_spare():
            return True
        slots = self._free(_EVICT_AT_ONCE, has_space=True)

        def work(txn: lmdb.Transaction) -> None:
            for slot in slots:
                self._index.slots.unnamed(txn, slot, has_space=False)

        if slots:
            self._punch(slots)
            self._index.write(work)
        return bool(slots)

    def recover(self, named: bytearray) -> None:
        """Free the slots of which neither an entry (``named``, a byte each) nor the index knows.

        Raises:
            lmdb.Error: The disk failed.
        """

        def work(txn: lmdb.Transaction) -> None:
            known = {*self._index.slots.free(txn, has_space=True), *self._out}
            known.update(self._index.slots.free(txn, has_space=False))
            for slot, is_named in enumerate(named[: self._index.slots.end(txn)]):
                if not is_named and slot not in known:
                    self._index.slots.unnamed(txn, slot, has_space=True)

        self._index.write(work)

    def _free(self, count: int, *, has_space: bool) -> list[int]:
        """The first free slots that nobody leases, takes or keeps."""
        with self._index.reading() as txn:
            rows = self._index.slots.free(txn, has_space=has_space)
            usable = (slot for slot in rows if slot not in self._out and slot not in self._leases)
            return list(islice(usable, count))

    def _take_holes(self, slots: list[int], count: int) -> None:
        """Extend ``slots`` to ``count`` as far as cap and disk allow."""
        while (missing := count - len(slots)) and not self._disk_is_full:
            fitting = min(missing, self._room() // self._slot_bytes)
            if fitting > 0:
                holes = self._free(fitting, has_space=False)
                new = range(self._end, self._end + fitting - len(holes))
                self._allocate(slots, [*holes, *new])
            elif not self._drop_foreign():
                return

    def _allocate(self, slots: list[int], candidates: Sequence[int]) -> None:
        """Take the candidates, with disk space where they had none; notes a full disk."""
        for number, slot in enumerate(candidates):
            self._out.add(slot)
            try:
                self._segments.allocate(slot)
            except OSError as error:
                self._segments.punch(slot)
                self._out.difference_update(candidates[number:])
                if error.errno not in NO_SPACE:
                    raise
                self._disk_is_full = True
                return
            slots.append(slot)
            self._end = max(self._end, slot + 1)

    def _room(self) -> int:
        """Bytes that new slots may take; notes whether it is the disk that has no more."""
        disk = os.statvfs(self._folder)
        reserve = min(_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // _RESERVE_PART)
        free = disk.f_bavail * disk.f_frsize - reserve
        self._disk_is_full = free < self._slot_bytes
        return min(free, self.cap_bytes - self.used_bytes() - self._slack())

    def _evict(self, ranks: Sequence[int], *, release: bool) -> list[int]:
        """Forget the coldest blocks; their slots, ready to be taken (or holes, when released).

        One for each of ``ranks``, until the next to go has a higher rank than that.
        """

        def work(txn: lmdb.Transaction) -> list[Entry]:
            gone: list[Entry] = []
            for rank in ranks:
                entry = self._index.coldest(txn, self._leases, self._rank_of)
                if entry is None or entry.rank > rank:
                    break
                self._index.remove(txn, entry.key, has_space=not release)
                gone.append(entry)
            if release:
                # Before the commit, which may need the room. Should it fail, or the process end
                # here, the entries name empty slots: misses, found by their headers.
                self._punch(entry.slot for entry in gone)
            return gone

        try:
            self.write_notes()
        except lmdb.Error:
            if not release:
                raise
            # On a full disk the order is a little older; what is given back makes room for it.
        gone = self._index.write(work)
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

    def _release_spare(self) -> bool:
        spare, self._spare = self._spare, []
        self._punch(spare)
        self._out.difference_update(spare)
        return bool(spare)

    def _punch(self, slots: Iterable[int]) -> None:
        """Give back the disk space of slots, neighbours in one call."""
        size = self._segments.slots_per_segment
        numbered = enumerate(sorted(slots))
        for _, run in groupby(numbered, key=lambda item: (item[1] - item[0], item[1] // size)):
            run_slots = [slot for _, slot in run]
            if not self._segments.punch(run_slots[0], len(run_slots)):
                raise OSError(errno.EOPNOTSUPP, "this file system cannot give back parts of a file")

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
