"""Bytes on disk, index and lock files included, stay under the cap at every moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.types import MoveOutcome
from tests.builders.engine import allocated
from tests.builders.store import IDENTITY, ROOT, block, geometry, payload


@pytest.mark.parametrize(
    ("cap_bytes", "block_bytes", "count"),
    [(2**20, 65_536, 100), (2**20, 4096, 250), (3 * 2**20, 300_000, 40)],
)
def test_never_above_the_cap_and_one_record(
    tmp_path: Path, cap_bytes: int, block_bytes: int, count: int
) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        shape = geometry(block_bytes)
        store = BlockStore(directory, IDENTITY, shape, cap_bytes=cap_bytes)
        record_bytes = 4096 + shape.block_bytes
        highest = 0
        for i in range(count):
            record = block(ROOT, [i] * 4)
            view = memoryview(payload(record, shape.block_bytes))
            assert store.write(record, view) is MoveOutcome.OK
            found = allocated(directory.blocks_path)
            highest = max(highest, found)
            assert found <= cap_bytes + record_bytes
        stats = store.stats()
        assert stats.used_bytes == allocated(directory.blocks_path) <= cap_bytes
        assert stats.evicted_blocks == count - stats.blocks > 0
        assert highest > cap_bytes // 2  # the room is used
        assert store.verify() == (stats.blocks, 0)
        store.close()
