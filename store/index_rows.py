"""Whether what a block index derives from its entries agrees with them, and putting that right.

For indexes that nobody else has open; O(blocks).
"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from sessionkv.store.block_index import BlockIndex, Row
from sessionkv.store.index_entry import Entry


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
        bad = index.remove_damaged(txn)
        for row in list(_stale_rows(txn, index)):
            index.delete_row(txn, row)
        for entry in list(index.entries(txn)):
            index.put_rows(txn, entry)
            index.slots.named(txn, entry.slot)
        return bad

    return index.write(work)


def _has_rows(txn: lmdb.Transaction, index: BlockIndex, entry: Entry) -> bool:
    return all(index.has_row(txn, row) for row in index.rows_of(entry))


def _stale_rows(txn: lmdb.Transaction, index: BlockIndex) -> Iterator[Row]:
    """Rows that no entry bears out."""
    for row, entry in index.rows(txn):
        if entry is None or row not in index.rows_of(entry):
            yield row


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
