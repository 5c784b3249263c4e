"""A disk that is full before the cap: blocks make room for blocks; else off, and on again later."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

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
