"""A bit flipped anywhere in the store is a miss or does no harm; it is never served."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.types import MoveOutcome
from tests.builders.store import IDENTITY, chain, geometry, payload, query

BLOCK = 4096
CHAINS = [[i] * 18 for i in range(6)]
MORE = [7, 7, 7]
CAP = 2**24


def in_child(work: Callable[[], None]) -> int:
    """Exit status of ``work`` in a fork, so that a signal fails one test and not the run."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001 the parent sees only the status
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fill(path: Path) -> tuple[Path, Path]:
    """A store of a few chains; its segment file and its index."""
    with StoreDirectory.open(path) as directory:
        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=CAP)
        for tokens in CHAINS:
            store.write_many([(r, memoryview(payload(r, BLOCK))) for r in chain(tokens)])
        store.close()
        folder = directory.blocks_path / IDENTITY.hex()
    return folder / "segment-000000.kv", folder / "index" / "data.mdb"


def served(store: BlockStore) -> int:
    """Blocks handed on, each checked to be the right one."""
    count = 0
    for tokens in CHAINS:
        receipt = store.lookup(query(tokens))
        right = {r.key: r for r in (*chain(tokens), *chain([*tokens, *MORE]))}
        for found in (*receipt.blocks, *([receipt.tail] if receipt.tail else [])):
            into = bytearray(BLOCK)
            if store.read(found, memoryview(into)) is MoveOutcome.OK:
                assert right[found.record.key] == found.record
                assert into == payload(found.record, BLOCK)
                count += 1
        store.release(receipt.receipt_id)
    return count


def flip(data: bytes, rng: random.Random) -> bytes:
    harmed = bytearray(data)
    harmed[rng.randrange(len(harmed))] ^= 1 << rng.randrange(8)
    return bytes(harmed)


def test_flips_in_segment_files(tmp_path: Path) -> None:
    rng = random.Random(11)
    path = tmp_path / "store"
    segment, index = fill(path)
    whole, whole_index = segment.read_bytes(), index.read_bytes()
    misses = 0
    for _ in range(200):
        segment.write_bytes(flip(whole, rng))
        index.write_bytes(whole_index)
        with StoreDirectory.open(path) as directory:
            store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=CAP)
            count = served(store)
            assert count in (29, 30)
            assert store.stats().corrupt_blocks + store.stats().missing_blocks == 30 - count
            misses += 30 - count
            store.close()
    assert misses > 70  # headers are half of this store, and mostly padding


@pytest.mark.slow
def test_flips_in_the_index(tmp_path: Path) -> None:
    rng = random.Random(12)
    path = tmp_path / "store"
    segment, index = fill(path)
    whole, whole_index = segment.read_bytes(), index.read_bytes()

    def work() -> None:
        with StoreDirectory.open(path) as directory:
            store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=CAP)
            served(store)
            records = [r for tokens in CHAINS for r in chain([*tokens, *MORE])]
            written = store.write_many([(r, memoryview(payload(r, BLOCK))) for r in records])
            assert set(written) == {MoveOutcome.OK}
            served(store)
            store.close()

    for _ in range(150):
        segment.write_bytes(whole)
        index.parent.mkdir(exist_ok=True)
        index.write_bytes(flip(whole_index, rng))
        assert in_child(work) == 0
