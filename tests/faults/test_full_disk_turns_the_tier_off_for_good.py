"""A disk that is full before the cap: blocks make room for blocks; else off, and on again later."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

from sessionkv.store.block_index import BlockIndex
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.store.segments import SegmentFiles
from sessionkv.types import DiskBlock, MoveOutcome
from tests.builders.store import IDENTITY, ROOT, block, geometry, payload, query

OK, NO_ROOM = MoveOutcome.OK, MoveOutcome.NO_ROOM
BLOCK = 65_536


class Disk:
    """A disk with room for some slots, as far as segment files are concerned."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(4)
    allocate = SegmentFiles.allocate

    def limited(files: SegmentFiles, slot: int) -> None:
        if disk_bytes(files._folder, "segment-*.kv") >= made.slots * (BLOCK + 4096):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(files, slot)

    monkeypatch.setattr(SegmentFiles, "allocate", limited)
    return made


def test_blocks_make_room_for_blocks(tmp_path: Path, disk: Disk) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=2**23)
        records = [block(ROOT, [i] * 4) for i in range(10)]
        for record in records:
            assert store.write(record, memoryview(payload(record, BLOCK))) is OK
        assert store.enabled
        assert store.evicted() == tuple(record.key for record in records[:6])
        assert store.verify() == (4, 0)
        store.close()


def test_off_when_nothing_can_go_and_on_again_when_space_returns(
    tmp_path: Path, disk: Disk
) -> None:
    disk.slots = 1
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=2**23, clock=disk.clock)
        first, second = block(ROOT, [1] * 4), block(ROOT, [2] * 4)
        views = {r.key: memoryview(payload(r, BLOCK)) for r in (first, second)}
        assert store.write(first, views[first.key]) is OK
        receipt = store.lookup(query([1] * 4))
        assert store.write(second, views[second.key]) is NO_ROOM
        assert (store.enabled, store.stats().reason) == (
            False,
            "[Errno 28] the disk is full and no block can be evicted",
        )
        # What is there is read all the same.
        into = memoryview(bytearray(BLOCK))
        assert store.read(DiskBlock(first, receipt.blocks[0].slot), into) is OK
        disk.slots = 3
        assert store.write(second, views[second.key]) is NO_ROOM  # not tried yet
        disk.now_s += 31
        assert store.write(second, views[second.key]) is OK
        assert (store.enabled, store.stats().reason) == (True, "")
        assert store.verify() == (2, 0)
        store.close()


def test_room_is_left_for_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small disk a twentieth stays free, however high the cap is."""
    total, page = 2 * 2**20, 4096

    def small_disk(path: Path) -> SimpleNamespace:
        free = total - disk_bytes(path.parent)
        return SimpleNamespace(f_blocks=total // page, f_frsize=page, f_bavail=free // page)

    monkeypatch.setattr("sessionkv.store.space.os.statvfs", small_disk)
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=2**23)
        for i in range(60):
            record = block(ROOT, [i] * 4)
            assert store.write(record, memoryview(payload(record, BLOCK))) is OK
        assert total // 2 < disk_bytes(directory.blocks_path) <= total - total // 20
        assert store.verify() == (store.stats().blocks, 0)
        store.close()


class FullIndex:
    """Makes the transactions of the index fail for want of space, ``times`` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        real = BlockIndex.write

        def write(index: BlockIndex, work: Any) -> Any:
            if self.times:
                self.times -= 1
                error = lmdb.DiskError("mdb_txn_commit: Input/output error")
                error.code = errno.EIO  # type: ignore[misc]
                raise error
            return real(index, work)

        monkeypatch.setattr(BlockIndex, "write", write)


def test_an_index_that_cannot_grow_gets_room_and_one_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullIndex(monkeypatch)
    clock = Disk(0)
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=2**23, clock=clock.clock)
        records = [block(ROOT, [i] * 4) for i in range(20)]
        views = [memoryview(payload(record, BLOCK)) for record in records]
        store.write_many(list(zip(records[:10], views, strict=False)))
        full.times = 1
        assert store.write(records[10], views[10]) is OK
        assert store.evicted() == ()  # the slot taken for it was room enough
        full.times = 3
        assert store.write(records[11], views[11]) is NO_ROOM
        assert not store.enabled
        full.times = 0
        clock.now_s += 31
        assert store.write(records[11], views[11]) is OK
        assert store.verify() == (12, 0)
        stats = store.stats()
        assert (stats.enabled, stats.used_bytes) == (True, disk_bytes(directory.blocks_path))
        store.close()
