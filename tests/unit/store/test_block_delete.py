"""Deleting blocks that others on disk stand on."""

from __future__ import annotations

from pathlib import Path

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.types import BlockHash
from tests.builders.store import IDENTITY, chain, geometry, payload, query

SHARED = list(range(8))
MINE, THEIRS = [*SHARED, 10, 11, 12, 13, 14], [*SHARED, 20, 21, 22, 23]


def present(store: BlockStore, token_ids: list[int]) -> int:
    receipt = store.lookup(query(token_ids))
    store.release(receipt.receipt_id)
    return len(receipt.blocks)


def keys(token_ids: list[int]) -> list[BlockHash]:
    return [record.key for record in chain(token_ids)]


def test_what_other_blocks_stand_on_stays_in_whatever_order(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**26)
        for mine in (keys(MINE), keys(MINE)[::-1]):
            records = [*chain(MINE), chain(THEIRS)[2]]
            store.write_many([(record, memoryview(payload(record))) for record in records])
            store.delete(mine, keep_continued=True)
            assert (present(store, THEIRS), present(store, MINE)) == (3, 2)
            assert store.stats().blocks == 3
        store.delete(keys(THEIRS)[:2], keep_continued=True)
        assert present(store, THEIRS) == 3
        store.delete(keys(THEIRS)[::-1], keep_continued=True)
        assert store.stats().blocks == 0
        store.close()


def test_a_long_chain_goes_whole(tmp_path: Path) -> None:
    log = list(range(4 * 150 + 2))
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**26)
        store.write_many([(record, memoryview(payload(record))) for record in chain(log)])
        store.delete(keys(log)[::-1], keep_continued=True)
        assert store.stats().blocks == 0
        store.close()
