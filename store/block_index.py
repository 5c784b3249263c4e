"""Which blocks are on disk, in which slot, after which parent, and in which order they go.

One LMDB environment with four databases beside ``meta``:

    entries    block key -> slot, place in the order, parent, token ids, under a checksum
    children   parent -> kind and key of the blocks after it (sorted duplicates)
    order      (class, stamp, height, slot) -> key, ascending from the first to go
    free       the slots that no entry names (``store.slot_map``)

``kind`` is 0 for partial blocks and 1 for full ones; ``class`` is twice the rank of retention and
the kind, so that in each rank partial blocks go first. A stamp is taken from a counter whenever a
block is written or used. A parent must outlive its children, or they could not be reached: a block
that comes to the cold end with a child of a higher class, or used later, is moved up, lazily, to
just behind that child (same rank and stamp, height one more), so a chain is taken from its tail
and as a whole keeps the age of its latest use. A rank is kept with its block, so that the order
outlives a restart; one that has risen meanwhile counts when the block comes to the cold end.

Invariants: an entry that does not match its checksum is as none; rows of ``children`` and ``order``
may be stale after damage, so both are checked against ``entries`` wherever they are read. It is
asked, not loaded: opening it and keeping it open cost the same however many blocks there are. Must
not know of files, leases or caps.
"""

from __future__ import annotations

import enum
import logging
import shutil
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import lmdb
import msgpack

from sessionkv.store.directory import disk_bytes
from sessionkv.store.environment import DAMAGE, begin_read, open_environment, write
from sessionkv.store.file_guard import FileGuard
from sessionkv.store.index_entry import MAX_RANK, Entry, opened, sealed, slot_in
from sessionkv.store.slot_map import SlotMap

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ROW = struct.Struct(">BQII")
_PARTIAL, _FULL = b"\x00", b"\x01"
_DISTRUSTED = "damaged"
# Most children of one block that are looked at, for a partial match or for the order.
MAX_CHILDREN = 1024


class Table(enum.Enum):
    """What follows from the entries."""

    CHILDREN = "children"
    ORDER = "order"


class Row(NamedTuple):
    """A row of one of them."""

    table: Table
    key: bytes
    value: bytes


class BlockIndex:
    """Index of one block store. Used by one thread; owns its environment.

    The methods that take a transaction work inside :meth:`reading` or :meth:`write`.

    Attributes:
        block_size: Tokens of a full block.
        slots: The slots that no entry names. :meth:`put` and :meth:`remove` keep it.
        quarantined: Where a damaged index was moved to, None when there was none.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        """Open or create.

        Raises:
            StoreUnavailable: It cannot be opened.
        """
        self._path = path
        self.block_size = block_size
        self._full_bytes = 4 * block_size
        self._env, self.quarantined = open_environment(path, max_dbs=5)
        try:
            self._guard = FileGuard(path)
            self._meta = self._env.open_db(b"meta")
            self._entries = self._env.open_db(b"entries")
            self._children = self._env.open_db(b"children", dupsort=True, dupfixed=True)
            self._order = self._env.open_db(b"order")
            self._tables = {Table.CHILDREN: self._children, Table.ORDER: self._order}
            self.slots = SlotMap(self._env)
            with self.reading() as txn:
                self._stamp = self._newest_stamp(txn)
        except BaseException:
            self._env.close()
            raise

    def reading(self) -> lmdb.Transaction:
        """A read transaction, to be used as a context and ended before anything waits.

        Raises:
            lmdb.Error: It cannot be read, or somebody cut the file short.
        """
        self._guard.check()
        return begin_read(self._env)

    def write(self, work: Callable[[lmdb.Transaction], _T]) -> _T:
        """Run ``work`` (repeatable) in a transaction that is durable on return."""
        self._guard.check()
        done = write(self._env, work)
        self._guard.note()
        return done

    def is_there(self) -> bool:
        """Whether its file is whole, and still the one under its name."""
        return self._guard.is_there()

    def layout(self) -> dict[str, int]:
        """What :meth:`set_layout` stored, empty for a new index."""
        with self.reading() as txn:
            stored = txn.get(b"layout", db=self._meta)
        try:
            return dict(msgpack.unpackb(bytes(stored))) if stored else {}
        except (ValueError, msgpack.UnpackException):
            return {"damaged": 1}

    def set_layout(self, layout: dict[str, int]) -> None:
        """Say how the segment files are to be read."""
        packed: bytes = msgpack.packb(layout)
        self.write(lambda txn: txn.put(b"layout", packed, db=self._meta))

    def end_slot(self) -> int | None:
        """One past the last slot that was ever named; None when that is damaged."""
        with self.reading() as txn:
            return self.slots.end(txn)

    def get(self, txn: lmdb.Transaction, key: bytes) -> Entry | None:
        """The entry of a block, None when there is none. About 5 us."""
        value = txn.get(key, db=self._entries)
        return None if value is None else opened(key, bytes(value))

    def has(self, txn: lmdb.Transaction, key: bytes) -> bool:
        """Whether there is an entry of that name, damaged or not. About 1 us."""
        return txn.get(key, db=self._entries) is not None

    def slot_of(
        self, txn: lmdb.Transaction, key: bytes, parent: bytes, tokens: bytes
    ) -> int | None:
        """Slot of the block of that key, parent and tokens, None when there is none."""
        value = txn.get(key, db=self._entries)
        return None if value is None else slot_in(bytes(value), key, parent, tokens)

    def count(self, txn: lmdb.Transaction) -> int:
        """Number of blocks."""
        return int(txn.stat(self._entries)["entries"])

    def entries(self, txn: lmdb.Transaction, after: bytes = b"") -> Iterator[Entry]:
        """Blocks by key, those past ``after``; damaged ones are left out."""
        cursor = txn.cursor(self._entries)
        if cursor.set_range(after + b"\0"):
            for key, value in cursor:
                entry = opened(bytes(key), bytes(value))
                if entry is not None:
                    yield entry

    def children(
        self, txn: lmdb.Transaction, parent: bytes, *, full: bool | None = None
    ) -> Iterator[Entry]:
        """Blocks after ``parent``, partial ones first, at most :data:`MAX_CHILDREN`.

        ``full`` leaves only full ones, or only partial ones.
        """
        cursor = txn.cursor(self._children)
        first = _FULL if full else _PARTIAL
        if not cursor.set_range_dup(parent, first):
            return
        for value in islice(cursor.iternext_dup(), MAX_CHILDREN):
            if full is False and value[:1] != _PARTIAL:
                return
            entry = self.get(txn, bytes(value[1:]))
            if entry is not None and entry.parent == parent:
                yield entry

    def put(self, txn: lmdb.Transaction, entry: Entry) -> None:
        """Add a block that is not there, as the one used last; its slot is no longer free."""
        self._stamp += 1
        self.slots.named(txn, entry.slot)
        rank = min(entry.rank, MAX_RANK)
        entry = replace(entry, stamp=self._stamp, height=0, rank=rank)
        txn.put(entry.key, sealed(entry), db=self._entries)
        self.put_rows(txn, entry)

    def remove(self, txn: lmdb.Transaction, key: bytes, *, has_space: bool = True) -> Entry | None:
        """Forget a block; what was known of it, None when nothing was.

        Its slot is free once this is on disk; ``has_space`` says whether it keeps its disk space.
        """
        entry = self.get(txn, key)
        if entry is not None:
            self.slots.unnamed(txn, entry.slot, has_space=has_space)
            for row in self.rows_of(entry):
                self.delete_row(txn, row)
        txn.delete(key, db=self._entries)
        return entry

    def touch(self, txn: lmdb.Transaction, keys: Iterable[bytes]) -> None:
        """The blocks were used, the last one last."""
        for key in keys:
            entry = self.get(txn, key)
            if entry is not None:
                self._stamp += 1
                self._move(txn, entry, stamp=self._stamp, height=0, rank=entry.rank)

    def set_ranks(self, txn: lmdb.Transaction, ranks: Mapping[bytes, int]) -> None:
        """The blocks have these ranks now; each keeps its place by use. Others are passed over."""
        for key, rank in ranks.items():
            entry = self.get(txn, key)
            if entry is not None and entry.rank != rank:
                rank = min(rank, MAX_RANK)
                self._move(txn, entry, stamp=entry.stamp, height=entry.height, rank=rank)

    def coldest(
        self, txn: lmdb.Transaction, leased: Container[int], rank_of: Callable[[bytes], int]
    ) -> Entry | None:
        """The block that is to go first, not in a leased slot; None when there is none.

        Moves blocks up in the order whose rank, by ``rank_of``, has risen, and those that would go
        before their children. Amortised O(log blocks): once for each time that a block comes to
        the cold end.
        """
        cursor = txn.cursor(self._order)
        row = b""
        while cursor.set_range(row):
            row, key = bytes(cursor.key()), bytes(cursor.value())
            entry = self.get(txn, key)
            if entry is None or self._row(entry) != row:
                txn.delete(row, db=self._order)
            elif entry.slot in leased:
                row += b"\0"
            elif (rank := min(rank_of(key), MAX_RANK)) > entry.rank:
                self._move(txn, entry, stamp=entry.stamp, height=entry.height, rank=rank)
            elif not self._defer(txn, entry):
                return entry
        return None

    # What follows from the entries, for those who check it -------------------------------------

    def rows_of(self, entry: Entry) -> tuple[Row, ...]:
        """The rows that an entry must have."""
        child = Row(Table.CHILDREN, entry.parent, self._kind(entry) + entry.key)
        return child, Row(Table.ORDER, self._row(entry), entry.key)

    def rows(self, txn: lmdb.Transaction) -> Iterator[tuple[Row, Entry | None]]:
        """Every row, and the entry that it says it is of. O(blocks)."""
        for table, database in self._tables.items():
            for key, value in txn.cursor(database):
                row = Row(table, bytes(key), bytes(value))
                block = row.value[1:] if table is Table.CHILDREN else row.value
                yield row, self.get(txn, block)

    def has_row(self, txn: lmdb.Transaction, row: Row) -> bool:
        """Whether a row is there."""
        if row.table is Table.ORDER:
            return bool(txn.get(row.key, db=self._order) == row.value)
        return bool(txn.cursor(self._children).set_key_dup(row.key, row.value))

    def put_rows(self, txn: lmdb.Transaction, entry: Entry) -> None:
        """Write the rows of an entry."""
        for row in self.rows_of(entry):
            txn.put(row.key, row.value, db=self._tables[row.table])

    def delete_row(self, txn: lmdb.Transaction, row: Row) -> None:
        """Delete a row, if it is there."""
        txn.delete(row.key, row.value, db=self._tables[row.table])

    def remove_damaged(self, txn: lmdb.Transaction) -> int:
        """Remove the entries that do not match their checksums; how many. O(blocks)."""
        keys = [bytes(key) for key in txn.cursor(self._entries).iternext(values=False)]
        bad = [key for key in keys if self.get(txn, key) is None]
        for key in bad:
            txn.delete(key, db=self._entries)
        return len(bad)

    def used_bytes(self) -> int:
        """Bytes of disk that the index takes."""
        return disk_bytes(self._path)

    def close(self) -> None:
        """Close the environment."""
        with suppress(lmdb.Error):
            self._guard.check()  # closing touches the map of the lock file
        self._env.close()

    def _defer(self, txn: lmdb.Transaction, entry: Entry) -> bool:
        """Move a block whose children go later behind them; False when there is no such."""
        path = [entry]
        while True:
            later = self.children(txn, path[-1].key, full=True)
            newest = max(later, key=self._row, default=None)
            # Rows rise along the path, so it ends.
            if newest is None or self._row(newest) <= self._row(path[-1]):
                break
            path.append(newest)
        last = path.pop()
        for height, above in enumerate(reversed(path), last.height + 1):
            self._move(txn, above, stamp=last.stamp, height=height, rank=last.rank)
        return bool(path)

    def _move(
        self, txn: lmdb.Transaction, entry: Entry, *, stamp: int, height: int, rank: int
    ) -> None:
        moved = replace(entry, stamp=stamp, height=height, rank=rank)
        txn.delete(self._row(entry), db=self._order)
        txn.put(self._row(moved), entry.key, db=self._order)
        txn.put(entry.key, sealed(moved), db=self._entries)

    def _newest_stamp(self, txn: lmdb.Transaction) -> int:
        """The highest stamp of an entry that its row bears out, or 0. O(classes)."""
        newest = 0
        cursor = txn.cursor(self._order)
        is_there = cursor.last()
        while is_there:
            row = bytes(cursor.key())
            entry = self.get(txn, bytes(cursor.value()))
            if entry is None or self._row(entry) != row:
                is_there = cursor.prev()
                continue
            newest = max(newest, entry.stamp)
            # It is the last of its class: on to the class before.
            is_there = cursor.set_range(row[:1]) and cursor.prev()
        return newest

    def _kind(self, entry: Entry) -> bytes:
        return _FULL if len(entry.tokens) == self._full_bytes else _PARTIAL

    def _row(self, entry: Entry) -> bytes:
        is_full = len(entry.tokens) == self._full_bytes
        return _ROW.pack(2 * entry.rank + is_full, entry.stamp, entry.height, entry.slot)


def open_index(folder: Path, layout: dict[str, int], *, cap_bytes: int) -> BlockIndex:
    """The index in ``folder``; a damaged one, or one too large for the cap, starts anew.

    So does one whose segment files have another layout. Without its index a payload cannot be
    found, so segment files go with it.

    Raises:
        StoreUnavailable: It cannot be opened.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if any(folder.iterdir()):
        index = _kept_index(folder, layout, cap_bytes)
        if index is not None:
            return index
        _log.warning("the blocks in %s cannot be kept; starting empty", folder)
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    index = BlockIndex(folder / "index", layout["block_size"])
    index.set_layout(layout)
    return index


def distrust(folder: Path) -> None:
    """Have the index in ``folder`` start anew when it is opened the next time."""
    (folder / _DISTRUSTED).touch(0o600)


def _kept_index(folder: Path, layout: dict[str, int], cap_bytes: int) -> BlockIndex | None:
    """The index that is there, None when it cannot be gone on with."""
    if (folder / _DISTRUSTED).exists():
        return None
    index = None
    try:
        index = BlockIndex(folder / "index", layout["block_size"])
        is_sound = index.layout() == layout and index.end_slot() is not None
        if is_sound and index.used_bytes() <= cap_bytes // 2:
            return index
    except DAMAGE as error:
        _log.warning("the index in %s is damaged: %s", folder, error)
    except BaseException:
        if index is not None:
            index.close()
        raise
    if index is not None:
        index.close()
    return None
