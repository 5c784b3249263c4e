"""Whether what a block index derives from its entries agrees with them, and putting that right.

Reads beside :class:`~sessionkv.store.block_index.BlockIndex` what that only ever looks rows up in.
For indexes that nobody else has open; O(blocks).
"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from sessionkv.store.block_index import BlockIndex, Entry


def check_rows(index: BlockIndex) -> Iterator[str]:
    """What does not agree, in words; nothing where all is well."""
    with index.reading() as txn:
        bad = index.count(txn) - sum(1 for _ in index.entries(txn))
        if bad:
            yield f"{bad} entries are damaged"
        lacking = sum(not _has_rows(txn, index, entry) for entry in index.entries(txn))
        if lacking:
            yield f"{lacking} entries lack a row by which they are found or evicted"
        stale = sum(1 for _ in _stale_rows(txn, index))
        if stale:
            yield f"{stale} rows belong to no entry"
        twice, lost = _slots(txn, index)
        if twice:
            yield f"{twice} slots are in use and free at once"
        if lost:
            yield f"{lost} slots are neither in use nor free"


def repair_rows(index: BlockIndex) -> int:
    """Remove damaged entries and stale rows, and write the rows that lack; how many entries.

    In one transaction. Slots that are lost are left to :meth:`BlockStore.verify`.
    """

    def work(txn: lmdb.Transaction) -> int:
        bad = [
            bytes(key)
            for key in txn.cursor(index._entries).iternext(values=False)
            if index.get(txn, bytes(key)) is None
        ]
        for key in bad:
            txn.delete(key, db=index._entries)
        for database, key, value in list(_stale_rows(txn, index)):
            txn.delete(key, value, db=database)
        for entry in list(index.entries(txn)):
            txn.put(entry.parent, index._kind(entry) + entry.key, db=index._children)
            txn.put(index._row(entry), entry.key, db=index._order)
            index.slots.named(txn, entry.slot)
        return len(bad)

    return index.write(work)


def _has_rows(txn: lmdb.Transaction, index: BlockIndex, entry: Entry) -> bool:
    child = index._kind(entry) + entry.key
    is_child = txn.cursor(index._children).set_key_dup(entry.parent, child)
    return is_child and txn.get(index._row(entry), db=index._order) == entry.key


def _stale_rows(
    txn: lmdb.Transaction, index: BlockIndex
) -> Iterator[tuple[lmdb._Database, bytes, bytes]]:
    """Rows that no entry bears out."""
    for raw_parent, raw_child in txn.cursor(index._children):
        parent, child = bytes(raw_parent), bytes(raw_child)
        entry = index.get(txn, child[1:])
        if entry is None or entry.parent != parent or index._kind(entry) != child[:1]:
            yield index._children, parent, child
    for raw_row, raw_key in txn.cursor(index._order):
        row, key = bytes(raw_row), bytes(raw_key)
        entry = index.get(txn, key)
        if entry is None or index._row(entry) != row:
            yield index._order, row, key


def _slots(txn: lmdb.Transaction, index: BlockIndex) -> tuple[int, int]:
    """How many slots are both named and free, and how many neither."""
    named = bytearray(index.slots.end(txn) or 0)
    for entry in index.entries(txn):
        if entry.slot < len(named):
            named[entry.slot] = 1
    twice = 0
    for has_space in (True, False):
        for slot in index.slots.free(txn, has_space=has_space):
            twice += named[slot]
            named[slot] = 1
    return twice, named.count(0)
