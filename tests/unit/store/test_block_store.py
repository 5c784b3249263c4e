from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from sessionkv.errors import StoreError, StoreUnavailable
from sessionkv.store.block_index import BlockIndex
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.store.index_entry import Entry
from sessionkv.store.segments import SegmentFiles
from sessionkv.types import BlockRecord, DiskBlock, MoveOutcome
from tests.builders.store import IDENTITY, ROOT, block, chain, geometry, payload, query

OK, NO_ROOM, MISSING = MoveOutcome.OK, MoveOutcome.NO_ROOM, MoveOutcome.MISSING
SLOT_BYTES = 8192  # of 4096-byte blocks
MIB = 2**20


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    with StoreDirectory.open(tmp_path / "store") as opened:
        yield opened


def opened(directory: StoreDirectory, cap_bytes: int = 64 * MIB, **kwargs: object) -> BlockStore:
    identity = kwargs.pop("identity", IDENTITY)
    return BlockStore(directory, identity, geometry(), cap_bytes=cap_bytes, **kwargs)  # type: ignore[arg-type]


def put(store: BlockStore, *records: BlockRecord) -> list[MoveOutcome]:
    return store.write_many([(record, memoryview(payload(record))) for record in records])


def got(store: BlockStore, found: DiskBlock) -> bytes:
    into = bytearray(4096)
    assert store.read(found, memoryview(into)) is OK
    return bytes(into)


def present(store: BlockStore, token_ids: list[int]) -> int:
    """Full blocks of the chain on disk."""
    receipt = store.lookup(query(token_ids))
    store.release(receipt.receipt_id)
    return len(receipt.blocks)


def test_what_was_written_is_found_and_read_back(directory: StoreDirectory) -> None:
    store = opened(directory)
    records = chain(list(range(12)))
    assert put(store, *records) == [OK, OK, OK]
    receipt = store.lookup(query(list(range(12))))
    assert [found.record for found in receipt.blocks] == records
    assert receipt.tail is None
    assert [got(store, found) for found in receipt.blocks] == [bytes(payload(r)) for r in records]
    store.release(receipt.receipt_id)
    stats = store.stats()
    assert (stats.blocks, stats.written_blocks, stats.read_blocks) == (3, 3, 3)
    assert (stats.lookups, stats.found_blocks, stats.leased_slots) == (1, 3, 0)
    store.close()


def test_a_lookup_stops_at_the_first_difference(directory: StoreDirectory) -> None:
    store = opened(directory)
    put(store, *chain(list(range(16))))
    assert present(store, list(range(16))) == 4
    assert present(store, [*range(8), 99, 98, 97, 96]) == 2
    # Right keys and wrong tokens, and right tokens after a wrong parent, are no matches.
    asked = query(list(range(8)))
    forged = type(asked)(asked.keys, asked.parent, (0, 1, 2, 9, 4, 5, 6, 7), 0)
    receipt = store.lookup(forged)
    assert (receipt.blocks, receipt.tail is not None) == ((), True)
    elsewhere = store.lookup(type(asked)(asked.keys, asked.keys[0], asked.token_ids, 0))
    assert (elsewhere.blocks, elsewhere.tail) == ((), None)
    store.close()


def test_the_tail_is_the_child_that_shares_most(directory: StoreDirectory) -> None:
    store = opened(directory)
    first = block(ROOT, [0, 1, 2, 3])
    short, long = block(first.key, [7, 8]), block(first.key, [7, 9, 9, 9])
    other = block(first.key, [5])
    put(store, first, short, long, other)

    def tail(*rest: int) -> BlockRecord | None:
        receipt = store.lookup(query([0, 1, 2, 3, *rest]))
        assert [found.record for found in receipt.blocks] == [first]
        store.release(receipt.receipt_id)
        return receipt.tail.record if receipt.tail else None

    assert tail(7, 8, 1, 1, 1) == short
    assert tail(7, 9, 9) == long
    assert tail(5, 8) == other
    assert tail(6, 8) is None
    assert tail() is None
    store.close()


def test_a_longer_partial_block_replaces_the_shorter_one(directory: StoreDirectory) -> None:
    store = opened(directory)
    one, two, full = block(ROOT, [1]), block(ROOT, [1, 2]), block(ROOT, [1, 2, 3, 4])
    sibling = block(ROOT, [1, 9])
    put(store, one, sibling)
    assert put(store, two) == [OK]
    assert store.evicted() == (one.key,)
    assert put(store, full) == [OK]
    assert store.evicted() == (two.key,)
    assert store.evicted() == ()
    stats = store.stats()
    assert (stats.blocks, stats.superseded_blocks, stats.evicted_blocks) == (2, 2, 0)
    store.close()


def test_a_block_written_twice_is_stored_once(directory: StoreDirectory) -> None:
    store = opened(directory)
    record = block(ROOT, [1, 2, 3, 4])
    assert put(store, record, record) == [OK, OK]
    assert put(store, record) == [OK]
    assert (store.stats().blocks, store.stats().written_blocks) == (1, 1)
    store.close()


def test_everything_is_there_after_reopening(directory: StoreDirectory) -> None:
    store = opened(directory)
    records = chain(list(range(40)))
    put(store, *records)
    store.delete([records[3].key])
    assert slots_of(directory) == 10
    store.close()
    # The deleted one's slot was given back.
    assert slots_of(directory) == 9
    store = opened(directory)
    assert store.stats().blocks == 9
    assert present(store, list(range(40))) == 3
    assert store.verify() == (9, 0)
    put(store, records[3])
    assert present(store, list(range(40))) == 10
    store.close()


def test_receipts_are_released_exactly_once(directory: StoreDirectory) -> None:
    store = opened(directory)
    receipt = store.lookup(query([1, 2, 3, 4]))
    store.release(receipt.receipt_id)
    with pytest.raises(StoreError, match=f"receipt {receipt.receipt_id} is not held"):
        store.release(receipt.receipt_id)
    store.close()


def small(directory: StoreDirectory, slots: int) -> BlockStore:
    """A store that holds ``slots`` full blocks of 1 MiB."""
    cap = slots * (MIB + 4096) + MIB // 2
    return BlockStore(directory, IDENTITY, geometry(MIB), cap_bytes=cap)


def put_big(store: BlockStore, *records: BlockRecord) -> list[MoveOutcome]:
    return store.write_many([(record, memoryview(payload(record, MIB))) for record in records])


def test_the_block_used_longest_ago_goes_first(directory: StoreDirectory) -> None:
    store = small(directory, 4)
    a, b, c, d, e, f = (block(ROOT, [i] * 4) for i in range(6))
    put_big(store, a, b, c, d)
    assert present(store, [0] * 4) == 1
    assert put_big(store, e) == [OK]
    assert store.evicted() == (b.key,)
    assert put_big(store, f) == [OK]
    assert store.evicted() == (c.key,)
    assert store.stats().evicted_blocks == 2
    assert store.stats().used_bytes <= store.stats().cap_bytes
    store.close()


def test_use_outlives_a_restart(directory: StoreDirectory) -> None:
    store = small(directory, 4)
    a, b, c, d, e = (block(ROOT, [i] * 4) for i in range(5))
    put_big(store, a, b, c, d)
    present(store, [0] * 4)
    store.close()
    store = small(directory, 4)
    put_big(store, e)
    assert store.evicted() == (b.key,)
    store.close()


def test_a_chain_goes_from_its_tail_and_partial_blocks_before_full_ones(
    directory: StoreDirectory,
) -> None:
    store = small(directory, 5)
    old = chain(list(range(14)))  # three full blocks and a partial one
    put_big(store, *old)
    other = block(ROOT, [90] * 4)
    put_big(store, other)
    gone = []
    for i in range(4):
        put_big(store, block(ROOT, [100 + i] * 4))
        gone += store.evicted()
    assert gone == [old[3].key, old[2].key, old[1].key, old[0].key]
    store.close()


def test_a_parent_that_was_not_used_itself_stays_for_its_children(
    directory: StoreDirectory,
) -> None:
    store = small(directory, 4)
    parent = block(ROOT, [1] * 4)
    put_big(store, parent)
    strangers = [block(ROOT, [50 + i] * 4) for i in range(2)]
    put_big(store, *strangers)
    child = block(parent.key, [2] * 4)
    put_big(store, child)
    put_big(store, block(ROOT, [60] * 4))
    put_big(store, block(ROOT, [61] * 4))
    assert store.evicted() == (strangers[0].key, strangers[1].key)
    put_big(store, block(ROOT, [62] * 4))
    put_big(store, block(ROOT, [63] * 4))
    assert store.evicted() == (child.key, parent.key)
    store.close()


def test_leased_slots_are_neither_evicted_nor_overwritten(directory: StoreDirectory) -> None:
    store = small(directory, 2)
    a, b, c = (block(ROOT, [i] * 4) for i in range(3))
    put_big(store, a, b)
    held = [store.lookup(query([i] * 4)) for i in (0, 1)]
    assert put_big(store, c) == [NO_ROOM]
    assert store.enabled
    store.delete([a.key])
    assert put_big(store, c) == [NO_ROOM]  # the slot is still leased
    into = bytearray(MIB)
    assert store.read(held[0].blocks[0], memoryview(into)) is OK
    assert into == payload(a, MIB)
    assert present(store, [0] * 4) == 0
    store.release(held[0].receipt_id)
    assert put_big(store, c) == [OK]
    assert store.evicted() == ()
    assert store.read(held[0].blocks[0], memoryview(into)) is MISSING  # the receipt is over
    assert store.stats().leased_slots == 1
    store.close()


def test_other_identities_go_first_and_whole(directory: StoreDirectory) -> None:
    foreign = BlockStore(directory, b"\x01" * 32, geometry(MIB), cap_bytes=64 * MIB)
    put_big(foreign, *(block(ROOT, [i] * 4) for i in range(3)))
    foreign.close()
    store = small(directory, 4)
    assert store.stats().foreign_bytes > 3 * MIB
    a, b = block(ROOT, [1] * 4), block(ROOT, [2] * 4)
    assert put_big(store, a) == [OK]
    assert put_big(store, b) == [OK]
    assert (store.stats().foreign_bytes, store.stats().evicted_blocks) == (0, 0)
    assert [path.name for path in directory.blocks_path.iterdir()] == [IDENTITY.hex()]
    assert store.stats().used_bytes == disk_bytes(directory.blocks_path)
    store.close()


def test_identities_do_not_see_each_others_blocks(directory: StoreDirectory) -> None:
    one, two = opened(directory, identity=b"\x01" * 32), opened(directory, identity=b"\x02" * 32)
    put(one, block(ROOT, [1] * 4))
    assert (present(one, [1] * 4), present(two, [1] * 4)) == (1, 0)
    one.close()
    two.close()


def test_a_cap_without_room_for_a_record_is_refused(directory: StoreDirectory) -> None:
    store = opened(directory)
    put(store, block(ROOT, [1] * 4))
    store.close()
    with pytest.raises(StoreUnavailable, match="20000 bytes has no room for a record"):
        opened(directory, cap_bytes=20_000)
    assert disk_bytes(directory.blocks_path) <= 2**16
    opened(directory).close()


def test_a_view_of_the_wrong_size_is_refused(directory: StoreDirectory) -> None:
    store = opened(directory)
    with pytest.raises(StoreError, match="4096 bytes, not 4095"):
        store.write(block(ROOT, [1]), memoryview(bytearray(4095)))
    with pytest.raises(StoreError, match="4096 bytes, not 1"):
        store.read(DiskBlock(block(ROOT, [1]), 0), memoryview(bytearray(1)))
    store.close()


def test_a_slot_that_never_was_is_missing(directory: StoreDirectory) -> None:
    store = opened(directory)
    for slot in (0, 10**6):
        found = DiskBlock(block(ROOT, [1]), slot)
        assert store.read(found, memoryview(bytearray(4096))) is MISSING
    assert store.stats().missing_blocks == 2
    store.close()


def slots_of(directory: StoreDirectory) -> int:
    """Slots' worth of disk space that the segment files take."""
    return disk_bytes(directory.blocks_path, "*/*.kv") // SLOT_BYTES


def test_freed_slots_are_taken_again_after_reopening(directory: StoreDirectory) -> None:
    store = opened(directory)
    records = chain(list(range(80)))
    put(store, *records)
    for _ in range(3):
        store.delete([record.key for record in records[5:9]])
        store.close()
        assert slots_of(directory) == 16
        store = opened(directory)
        put(store, *records[5:9])
        assert slots_of(directory) == 20
        assert present(store, list(range(80))) == 20
    assert store.verify() == (20, 0)
    store.close()


def test_space_that_a_crash_left_in_unused_slots_is_given_back(
    directory: StoreDirectory, tmp_path: Path
) -> None:
    """The process ends between writing payloads and naming them: in slots used before, and new."""
    store = opened(directory)
    records = chain(list(range(80)))
    put(store, *records[:10])
    store.delete([record.key for record in records[:3]])
    store.close()
    assert slots_of(directory) == 7
    store = opened(directory)
    job = store.begin_write([(record, memoryview(payload(record))) for record in records[10:]])
    job.run()
    assert sorted(job.slots.values()) == [0, 1, 2, *range(10, 17)]
    assert slots_of(directory) == 17
    shutil.copytree(directory.path, tmp_path / "crashed")
    with StoreDirectory.open(tmp_path / "crashed") as other:
        crashed = opened(other)
        assert slots_of(other) == 7
        assert crashed.verify() == (7, 0)
        put(crashed, *records)
        assert crashed.verify() == (20, 0)
        crashed.close()
    assert store.finish_write(job) == [OK] * 10
    assert store.verify() == (17, 0)
    store.close()


def test_a_write_that_fails_keeps_its_slots_for_the_next(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(directory)
    records = chain(list(range(40)))

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentFiles, "write", failing)
        assert put(store, *records[:4]) == [MoveOutcome.IO_ERROR] * 4
    assert not store.enabled
    store.close()
    store = opened(directory)
    put(store, *records)
    assert slots_of(directory) == 10
    store.close()


def test_verify_frees_what_a_damaged_index_lost(directory: StoreDirectory) -> None:
    store = opened(directory)
    records = chain(list(range(40)))
    put(store, *records)
    store.close()
    index = BlockIndex(directory.blocks_path / IDENTITY.hex() / "index", 4)
    damaged = records[4].key
    index.write(lambda txn: txn.put(damaged, b"?" * 60, db=index._entries))
    index.close()
    store = opened(directory)
    assert present(store, list(range(40))) == 4
    assert store.verify() == (9, 0)
    put(store, records[4])
    assert slots_of(directory) == 10
    assert store.verify() == (10, 0)
    store.close()


def test_an_index_that_loses_what_is_written_starts_anew(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(directory)
    records = chain(list(range(12)))
    assert put(store, *records[:2]) == [OK, OK]
    name = BlockIndex.put

    def harming(index: BlockIndex, txn: lmdb.Transaction, entry: Entry) -> None:
        name(index, txn, entry)
        txn.put(entry.key, b"?" * 60, db=index._entries)

    with monkeypatch.context() as harmed:
        harmed.setattr(BlockIndex, "put", harming)
        assert put(store, records[2]) == [MoveOutcome.IO_ERROR]
    assert not store.enabled
    assert put(store, records[2]) == [NO_ROOM]
    assert present(store, list(range(12))) == 2  # what was stored is served still
    store.close()
    store = opened(directory)
    assert present(store, list(range(12))) == 0
    assert put(store, *records) == [OK, OK, OK]
    store.close()


def test_a_part_of_a_block_may_be_written_with_what_extends_it(directory: StoreDirectory) -> None:
    store = opened(directory)
    assert put(store, chain([1, 2])[0], chain([1, 2, 3])[0]) == [OK, OK]
    assert store.enabled
    assert store.stats().blocks == 1
    store.close()
