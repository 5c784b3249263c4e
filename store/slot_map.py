"""Which slots no index entry names, kept in the index's own transactions, so that both agree.

    free    state (1 byte: 0 = has disk space, 1 = has none), slot u32 BE -> empty
    meta    "end" -> one past the last slot that an entry ever named, u32 LE, under a checksum

Nothing is read at open but ``end``, and nothing is kept in memory: a slot is found by asking for
the first row. Invariants: below ``end``, a slot has a row or an entry, never both. A row that
damage made up can only send a new record to a slot that an entry names: the older of both is then
a miss, by its header. Must not know of files, leases or caps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import lmdb
import xxhash

_ROW = struct.Struct(">BI")
_WITH_SPACE, _HOLE = 0, 1
_NUMBER_BYTES = 4


class SlotMap:
    """The unnamed slots of one index. Used by one thread, inside the index's transactions."""

    def __init__(self, env: lmdb.Environment) -> None:
        """Open, or create in a new environment."""
        self._meta = env.open_db(b"meta")
        self._free = env.open_db(b"free")

    def end(self, txn: lmdb.Transaction) -> int | None:
        """One past the last slot ever named, 0 when there was none; None when it is damaged."""
        stored = bytes(txn.get(b"end", b"", db=self._meta))
        if not stored:
            return 0
        number, seal = stored[:_NUMBER_BYTES], stored[_NUMBER_BYTES:]
        return int.from_bytes(number, "little") if xxhash.xxh3_64_digest(number) == seal else None

    def named(self, txn: lmdb.Transaction, slot: int) -> None:
        """An entry names the slot from this transaction on."""
        end = self.end(txn) or 0
        for skipped in range(end, slot):
            txn.put(_ROW.pack(_WITH_SPACE, skipped), b"", db=self._free)
        if slot >= end:
            number = (slot + 1).to_bytes(_NUMBER_BYTES, "little")
            txn.put(b"end", number + xxhash.xxh3_64_digest(number), db=self._meta)
        else:
            for state in (_WITH_SPACE, _HOLE):
                txn.delete(_ROW.pack(state, slot), db=self._free)

    def unnamed(self, txn: lmdb.Transaction, slot: int, *, has_space: bool) -> None:
        """No entry names the slot from this transaction on; or its disk space came or went."""
        state, other = (_WITH_SPACE, _HOLE) if has_space else (_HOLE, _WITH_SPACE)
        txn.delete(_ROW.pack(other, slot), db=self._free)
        txn.put(_ROW.pack(state, slot), b"", db=self._free)

    def free(self, txn: lmdb.Transaction, *, has_space: bool) -> Iterator[int]:
        """Unnamed slots below the end that have disk space, or that have none; ascending."""
        end = self.end(txn) or 0
        state = _WITH_SPACE if has_space else _HOLE
        cursor = txn.cursor(self._free)
        if not cursor.set_range(_ROW.pack(state, 0)):
            return
        for raw_row in cursor.iternext(keys=True, values=False):
            row = bytes(raw_row)
            if len(row) != _ROW.size or row[0] != state:
                return
            slot = _ROW.unpack(row)[1]
            if slot < end:
                yield slot
