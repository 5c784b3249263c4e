"""The free slots in the index: exact below the end, through gaps, reuse and damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from sessionkv.store.slot_map import SlotMap


@pytest.fixture
def env(tmp_path: Path) -> Iterator[lmdb.Environment]:
    opened = lmdb.open(str(tmp_path), max_dbs=2)
    yield opened
    opened.close()


def free(slots: SlotMap, txn: lmdb.Transaction) -> tuple[list[int], list[int]]:
    """Free slots with disk space, and without."""
    return list(slots.free(txn, has_space=True)), list(slots.free(txn, has_space=False))


def test_a_new_one_has_no_slots(env: lmdb.Environment) -> None:
    slots = SlotMap(env)
    with env.begin() as txn:
        assert (slots.end(txn), free(slots, txn)) == (0, ([], []))


def test_slots_passed_over_are_free(env: lmdb.Environment) -> None:
    slots = SlotMap(env)
    with env.begin(write=True) as txn:
        slots.named(txn, 0)
        slots.named(txn, 3)
        assert (slots.end(txn), free(slots, txn)) == (4, ([1, 2], []))
        slots.named(txn, 2)
        assert (slots.end(txn), free(slots, txn)) == (4, ([1], []))


def test_a_slot_is_in_one_state(env: lmdb.Environment) -> None:
    slots = SlotMap(env)
    with env.begin(write=True) as txn:
        for slot in range(300):
            slots.named(txn, slot)
        slots.unnamed(txn, 7, has_space=True)
        slots.unnamed(txn, 256, has_space=True)
        slots.unnamed(txn, 5, has_space=False)
        assert free(slots, txn) == ([7, 256], [5])
        slots.unnamed(txn, 7, has_space=False)
        assert free(slots, txn) == ([256], [5, 7])
        slots.named(txn, 5)
        slots.named(txn, 256)
        assert free(slots, txn) == ([], [7])


def test_a_transaction_that_is_dropped_changes_nothing(env: lmdb.Environment) -> None:
    slots = SlotMap(env)
    with env.begin(write=True) as txn:
        slots.named(txn, 1)
    with env.begin(write=True) as txn:
        slots.named(txn, 9)
        slots.unnamed(txn, 1, has_space=False)
        txn.abort()
    with env.begin() as txn:
        assert (slots.end(txn), free(slots, txn)) == (2, ([0], []))


def test_damage(env: lmdb.Environment) -> None:
    slots = SlotMap(env)
    meta, rows = env.open_db(b"meta"), env.open_db(b"free")
    with env.begin(write=True) as txn:
        slots.named(txn, 0)
        for row in (b"\0", b"\0\0\0\0\2", b"\0\0\0\0\0\0", b"\7\0\0\0\0"):
            txn.put(row, b"", db=rows)
        # A slot past the end, and rows of no shape: only what may be true is told.
        assert list(slots.free(txn, has_space=True)) == []
        txn.put(b"end", b"\2\0\0\0" + bytes(8), db=meta)
        assert slots.end(txn) is None
