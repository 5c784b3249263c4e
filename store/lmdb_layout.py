"""The layout of an LMDB 0.9 data file, as far as it is checked before LMDB maps it.

After ``mdb.c`` (MDB_page, MDB_node, MDB_db, MDB_meta), on a 64-bit machine, in its own byte order::

    page   number u64, pad u16, flags u16, lower u16, upper u16; then u16 offsets of nodes, a gap,
           and the nodes. A long value's pages have their count u32 in place of the two bounds.
    node   size of the value or child's page, low and high u16; flags u16; size of the key u16; key;
           value, or the number of the first page that holds it

Knows nothing of what is stored.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

PAGE_HEADER, NODE_HEADER = 16, 8
BRANCH, LEAF, OVERFLOW, META, LEAF2, SUBPAGE = 0x01, 0x02, 0x04, 0x08, 0x20, 0x40
"""Flags of pages."""
BIG, SUBTREE, DUPLICATES = 0x01, 0x02, 0x04
"""Flags of nodes."""
INTEGER_KEY, DUPSORT, DUPFIXED = 0x08, 0x04, 0x10
"""Flags of trees."""
NUM_ROOTS = 2
NO_PAGE = 2**64 - 1
MAX_DEPTH = 32
TREE = struct.Struct("=IHHQQQQQ")
_MAX_PAGE_BYTES = 0x8000
_ROOT_BYTES = PAGE_HEADER + 136
ROOTS_BYTES = _MAX_PAGE_BYTES + _ROOT_BYTES
"""The roots lie before this byte, whatever the page size."""
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1


class Unsound(ValueError):
    """The file is not as LMDB writes one."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What is recorded of a tree; ``pad`` is the size of a key where all have one."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class Root:
    """What the latest transaction left."""

    page_bytes: int
    free: Tree
    main: Tree
    last_page: int
    txn: int


def newest_root(data: bytes | mmap.mmap) -> Root:
    """The root that LMDB would go by; ``data`` begins where the file does.

    Raises:
        Unsound: It is no LMDB file of this kind, or a root is damaged.
    """
    first = _root_at(data, 0, 0)
    second = _root_at(data, first.page_bytes, 1)
    if first.page_bytes != second.page_bytes:
        raise Unsound("the roots have different page sizes")
    if first.txn == second.txn != 0:
        raise Unsound("the roots are of one transaction")
    newest = second if second.txn > first.txn else first
    if newest.last_page < NUM_ROOTS - 1:
        raise Unsound(f"the last page is {newest.last_page}")
    return newest


def _root_at(data: bytes | mmap.mmap, offset: int, number: int) -> Root:
    if offset + _ROOT_BYTES > len(data):
        raise Unsound("the file ends in its roots")
    page, _, flags = struct.unpack_from("=QHH", data, offset)
    start = offset + PAGE_HEADER
    magic, version = struct.unpack_from("=II", data, start)
    if (magic, version, flags & META, page) != (_MAGIC, _DATA_VERSION, META, number):
        raise Unsound(f"root {number} is not one of LMDB 0.9")
    free = Tree(*TREE.unpack_from(data, start + 24))
    main = Tree(*TREE.unpack_from(data, start + 24 + TREE.size))
    last, txn = struct.unpack_from("=QQ", data, start + 24 + 2 * TREE.size)
    size = free.pad
    if not 256 <= size <= _MAX_PAGE_BYTES or size & (size - 1):
        raise Unsound(f"a page size of {size}")
    if txn and txn % 2 != number:
        raise Unsound(f"root {number} is of transaction {txn}")
    return Root(size, free, main, last, txn)
