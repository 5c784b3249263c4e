"""The order in which blocks leave the disk, by rank of retention: exact keys, also after a restart.

Stores of a few 1 MiB blocks; each new block makes exactly one go.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.types import BlockHash, BlockRecord, MoveOutcome
from tests.builders.store import IDENTITY, ROOT, block, chain, geometry, payload, query

OK, NO_ROOM = MoveOutcome.OK, MoveOutcome.NO_ROOM
MIB = 2**20
LAST = 126  # as high as a rank goes


class Disk:
    """A store for ``slots`` blocks, with the ranks that its engine would know."""

    def __init__(self, path: Path, slots: int) -> None:
        self.path = path
        self.cap_bytes = slots * (MIB + 4096) + MIB // 2
        self.ranks: dict[bytes, int] = {}
        self._made = 0
        self.start()

    def start(self) -> None:
        self._directory = StoreDirectory.open(self.path)
        self.store = BlockStore(
            self._directory,
            IDENTITY,
            geometry(MIB),
            cap_bytes=self.cap_bytes,
            rank_of=lambda key: self.ranks.get(key, 0),
        )

    def stop(self) -> None:
        self.store.close()
        self._directory.close()

    def restart(self) -> None:
        """Of sessions that are not used again nothing is known afterwards."""
        self.stop()
        self.ranks.clear()
        self.start()

    def put(self, *records: BlockRecord, rank: int = 0) -> list[MoveOutcome]:
        self.ranks |= {record.key: rank for record in records}
        return self.store.write_many([(r, memoryview(payload(r, MIB))) for r in records])

    def fell(self, record: BlockRecord, rank: int) -> None:
        self.ranks[record.key] = rank
        self.store.ranks_fell([record.key])

    def use(self, token_ids: list[int]) -> None:
        self.store.release(self.store.lookup(query(token_ids)).receipt_id)

    def push_out(self, count: int) -> list[BlockHash]:
        """What goes, in order, for blocks that nothing has a higher rank than."""
        gone: list[BlockHash] = []
        for _ in range(count):
            self._made += 1
            assert self.put(block(ROOT, [1000 + self._made] * 4), rank=LAST) == [OK]
            gone += self.store.evicted()
        return gone


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "store", 6)
    yield made
    made.stop()


def six(disk: Disk, *ranks: int) -> list[BlockRecord]:
    """Six blocks written in this order with these ranks."""
    records = [block(ROOT, [i] * 4) for i in range(6)]
    for record, rank in zip(records, ranks, strict=True):
        assert disk.put(record, rank=rank) == [OK]
    return records


def test_lower_ranks_go_first_and_each_rank_by_last_use(disk: Disk) -> None:
    a, b, c, d, e, f = six(disk, 53, 1, 0, 103, 1, 0)
    disk.use([1] * 4)
    assert disk.push_out(6) == [r.key for r in (c, f, e, b, a, d)]


def test_the_order_outlives_a_restart(disk: Disk) -> None:
    a, b, c, d, e, f = six(disk, 53, 1, 0, 103, 1, 0)
    disk.use([1] * 4)
    disk.restart()
    assert disk.push_out(6) == [r.key for r in (c, f, e, b, a, d)]


def test_stamps_go_on_after_a_restart_whatever_the_ranks(disk: Disk) -> None:
    six(disk, 0, 0, 0, 0, 53, 1)
    disk.restart()
    extra = block(ROOT, [77] * 4)
    disk.put(extra, rank=0)
    assert disk.push_out(4)[-1] == extra.key


def test_a_rank_that_rose_counts_when_the_block_would_go(disk: Disk) -> None:
    a, b, c, d, e, f = six(disk, 0, 0, 0, 0, 0, 0)
    disk.ranks |= {a.key: 1, b.key: 53, d.key: 1}
    assert disk.push_out(6) == [r.key for r in (c, e, f, a, d, b)]


def test_a_rank_that_fell_counts_at_once_and_keeps_the_place_by_use(disk: Disk) -> None:
    a, b, c, d, e, f = six(disk, 53, 1, 53, 1, 53, 103)
    disk.fell(c, 1)
    disk.fell(f, 0)
    assert disk.push_out(6) == [r.key for r in (f, b, c, d, a, e)]


def test_a_fall_that_was_only_noted_is_written_when_the_store_is_closed(disk: Disk) -> None:
    a, _, _, d, _, _ = six(disk, 1, 1, 1, 1, 1, 1)
    disk.fell(d, 0)
    disk.restart()
    assert disk.push_out(2) == [d.key, a.key]


def test_nothing_makes_room_for_a_block_of_a_lower_rank(disk: Disk) -> None:
    a, _, c, *_ = six(disk, 1, 53, 1, 1, 1, 1)
    low, same, high = (block(ROOT, [50 + i] * 4) for i in range(3))
    assert disk.put(low, rank=0) == [NO_ROOM]
    assert disk.store.evicted() == ()
    assert disk.put(same, rank=1) == [OK]
    assert disk.store.evicted() == (a.key,)
    assert disk.put(high, rank=60) == [OK]
    assert disk.store.evicted() == (c.key,)


def test_of_a_batch_those_of_the_highest_rank_get_the_room(disk: Disk) -> None:
    a, b, *_ = six(disk, 0, 0, 53, 53, 53, 53)
    records = [block(ROOT, [50 + i] * 4) for i in range(4)]
    disk.ranks |= {r.key: rank for r, rank in zip(records, (0, 1, 2, 1), strict=True)}
    outcomes = disk.store.write_many([(r, memoryview(payload(r, MIB))) for r in records])
    assert outcomes == [NO_ROOM, OK, OK, NO_ROOM]
    assert disk.store.evicted() == (a.key, b.key)


def test_partial_blocks_go_first_within_a_rank(disk: Disk) -> None:
    first, second, tail = chain(list(range(10)))
    disk.put(first, second, tail, rank=1)
    others = [block(ROOT, [60 + i] * 4) for i in range(3)]
    disk.put(*others, rank=0)
    assert disk.push_out(6) == [*(r.key for r in others), tail.key, second.key, first.key]


def test_a_parent_stays_for_a_child_of_a_higher_rank(disk: Disk) -> None:
    parent = block(ROOT, [1] * 4)
    child = block(parent.key, [2] * 4)
    disk.put(parent, rank=0)
    disk.put(child, rank=53)
    others = [block(ROOT, [60 + i] * 4) for i in range(4)]
    disk.put(*others, rank=1)
    assert disk.push_out(6) == [*(r.key for r in others), child.key, parent.key]


def test_a_lower_cap_takes_pinned_blocks_too(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "store", 6)
    _, b, c, _, e, f = six(disk, 53, 1, 0, 103, 1, 0)
    disk.stop()
    disk.cap_bytes = 2 * (MIB + 4096) + MIB // 2
    disk.start()
    assert disk.store.evicted() == tuple(r.key for r in (c, f, b, e))
    disk.stop()
