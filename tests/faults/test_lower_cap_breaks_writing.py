"""A store reopened with a lower cap keeps what was used last and takes new blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.types import MoveOutcome
from tests.builders.store import IDENTITY, ROOT, block, geometry, payload, query

BLOCK = 65_536


@pytest.mark.parametrize("cap_bytes", [2**20, 3 * 2**20])
def test_trims_to_the_new_cap(tmp_path: Path, cap_bytes: int) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=2**23)
        records = [block(ROOT, [i] * 4) for i in range(75)]
        store.write_many([(r, memoryview(payload(r, BLOCK))) for r in records])
        assert disk_bytes(directory.blocks_path) > 5 * 2**20
        store.release(store.lookup(query([3] * 4)).receipt_id)
        store.close()

        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=cap_bytes)
        assert disk_bytes(directory.blocks_path) <= cap_bytes
        kept = store.stats().blocks
        assert kept >= cap_bytes // (BLOCK + 4096) - 4
        gone = [r for r in records if r.token_ids[0] != 3][: 75 - kept]
        assert store.evicted() == tuple(r.key for r in gone)
        assert store.verify() == (kept, 0)
        extra = block(ROOT, [200] * 4)
        assert store.write(extra, memoryview(payload(extra, BLOCK))) is MoveOutcome.OK
        assert len(store.lookup(query([200] * 4)).blocks) == 1
        assert store.stats().used_bytes == disk_bytes(directory.blocks_path) <= cap_bytes
        store.close()


def test_a_cap_that_the_index_alone_exceeds_starts_empty(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(4096), cap_bytes=2**25)
        records = [block(ROOT, [i] * 4) for i in range(1500)]
        store.write_many([(r, memoryview(payload(r))) for r in records])
        store.close()
        store = BlockStore(directory, IDENTITY, geometry(4096), cap_bytes=400_000)
        assert store.stats().blocks == 0
        assert disk_bytes(directory.blocks_path) <= 400_000
        assert store.write(records[0], memoryview(payload(records[0]))) is MoveOutcome.OK
        store.close()
