"""The index is asked, not loaded: opening it costs the same however many blocks it names."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from benchmarks.store.index import CHAIN_BLOCKS, IDENTITY, build, records, root
from sessionkv.store import environment
from sessionkv.store.block_index import BlockIndex
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.types import BlockHash, DiskQuery
from tests.builders.store import geometry

GEOMETRY = geometry(4096, 16)
FEW, MANY = 2 * CHAIN_BLOCKS, 20_000


def opened(directory: StoreDirectory) -> BlockStore:
    return BlockStore(directory, IDENTITY, GEOMETRY, cap_bytes=2**40)


def peak_bytes(directory: StoreDirectory) -> int:
    """Most Python memory in use at one moment of opening, asking for a history, and closing."""
    tracemalloc.start()
    try:
        store = opened(directory)
        chain = list(records(CHAIN_BLOCKS))
        tokens = tuple(token for record in chain for token in record.token_ids)
        keys = tuple(BlockHash(record.key) for record in chain)
        receipt = store.lookup(DiskQuery(keys, root(0), tokens, 0))
        assert len(receipt.blocks) == CHAIN_BLOCKS
        store.release(receipt.receipt_id)
        store.stats()
        store.close()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_blocks_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small files are checked page by page, which larger ones are not.
    monkeypatch.setattr(environment, "_damage", lambda *_: None)
    peaks = []
    for count in (FEW, FEW, MANY):
        path = tmp_path / str(len(peaks))
        build(path, count, GEOMETRY)
        with StoreDirectory.open(path) as directory:
            peaks.append(peak_bytes(directory))
    few, many = peaks[1:]  # the first pays for what is imported late
    assert many - few < MANY  # a byte a block would be more


def test_opening_reads_no_entry_but_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, FEW, GEOMETRY)
    read: list[bytes] = []
    get = BlockIndex.get

    def counting(index: BlockIndex, txn: object, key: bytes) -> object:
        read.append(key)
        return get(index, txn, key)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockIndex, "get", counting)
    monkeypatch.setattr(BlockIndex, "entries", lambda *_: pytest.fail("all entries were asked for"))
    with StoreDirectory.open(tmp_path) as directory:
        store = opened(directory)
        assert store.stats().blocks == FEW
        newest = list(records(FEW))[-1].key
        assert read == [newest]
        store.close()
    assert read == [newest]
