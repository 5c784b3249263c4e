"""Pages that an LMDB data file names and does not have, found without mapping it.

A file may be shorter than its newest root says: a page that a transaction took at the end and gave
back before it was committed is free, and is written when it is first used. Only a page that is
neither there nor free is lost; touching it through LMDB's map would end the process.

The layout read here is that of LMDB 0.9 (``mdb.c``: MDB_page, MDB_meta, MDB_node) on a 64-bit
machine, in its own byte order. Knows nothing of what is stored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

_PAGE = struct.Struct("=QHHHH")  # number, pad, flags, lower, upper
_NODE = struct.Struct("=HHHH")  # size or child: low, high; flags or child: highest; key size
_META = struct.Struct("=16x II 16x IHH32xQ 40xQ QQ")
_U64 = struct.Struct("=Q")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG_DATA = 1
_NO_PAGE = 2**64 - 1
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1


class BadPages(ValueError):
    """The list of free pages cannot be read."""


class _Root(NamedTuple):
    page_bytes: int
    free_root: int
    last_page: int
    txn_id: int


def num_lacking(data: Path) -> int:
    """How many pages the newest root of a data file needs, or may need, and the file lacks.

    O(1) where the file is as long as its root says, else O(free pages).

    Raises:
        BadPages: It is not an LMDB file, or its list of free pages is damaged.
        OSError: It cannot be read.
    """
    with data.open("rb") as file:
        root = _newest_root(file)
        num_there = file.seek(0, 2) // root.page_bytes
        if root.last_page < num_there:
            return 0
        pages = _free_pages(file, root)
        free = {number for number in pages if num_there <= number <= root.last_page}
        return root.last_page + 1 - num_there - len(free)


def _newest_root(file: BinaryIO) -> _Root:
    first = _root_in(file, 0)
    second = _root_in(file, first.page_bytes)
    if first.page_bytes != second.page_bytes:
        raise BadPages("the roots have different page sizes")
    return max(first, second, key=lambda root: root.txn_id)


def _root_in(file: BinaryIO, offset: int) -> _Root:
    file.seek(offset)
    head = file.read(_META.size)
    if len(head) < _META.size:
        raise BadPages("the file ends in its roots")
    magic, version, page_bytes, _, _, free_root, _, last_page, txn_id = _META.unpack(head)
    if magic != _MAGIC or version != _DATA_VERSION or not _PAGE.unpack_from(head)[2] & _META_PAGE:
        raise BadPages("not an LMDB data file")
    if page_bytes < _META.size or page_bytes & (page_bytes - 1):
        raise BadPages(f"a page size of {page_bytes}")
    return _Root(page_bytes, free_root, last_page, txn_id)


def _free_pages(file: BinaryIO, root: _Root) -> Iterator[int]:
    """Page numbers in the lists of the free database; each list is preceded by its length."""
    if root.free_root == _NO_PAGE:
        return
    for value in _values(file, root.page_bytes, root.free_root, seen=set()):
        if len(value) < _U64.size or len(value) % _U64.size:
            raise BadPages("a list of free pages has an impossible length")
        count, *pages = (number for (number,) in _U64.iter_unpack(value))
        if count != len(pages):
            raise BadPages("a list of free pages has another length than it says")
        yield from pages


def _values(file: BinaryIO, page_bytes: int, number: int, *, seen: set[int]) -> Iterator[bytes]:
    """Values of the tree below a page, in order."""
    if number in seen:
        raise BadPages(f"page {number} is named twice")
    seen.add(number)
    page = _read(file, page_bytes, number, 1)
    _, _, flags, lower, upper = _PAGE.unpack_from(page)
    if flags not in (_BRANCH, _LEAF) or not _PAGE.size <= lower <= upper <= page_bytes:
        raise BadPages(f"page {number} is not one of a tree")
    for place in range(_PAGE.size, lower, 2):
        (at,) = struct.unpack_from("=H", page, place)
        if not upper <= at <= page_bytes - _NODE.size:
            raise BadPages(f"a node of page {number} lies outside of it")
        low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
        if flags == _BRANCH:
            child = low | high << 16 | node_flags << 32
            yield from _values(file, page_bytes, child, seen=seen)
            continue
        size, start = low | high << 16, at + _NODE.size + key_bytes
        if node_flags & _BIG_DATA:
            if start + _U64.size > page_bytes:
                raise BadPages(f"a node of page {number} lies outside of it")
            (first,) = _U64.unpack_from(page, start)
            count = -(-(_PAGE.size + size) // page_bytes)
            extent = _read(file, page_bytes, first, count)
            if _PAGE.unpack_from(extent)[2] != _OVERFLOW:
                raise BadPages(f"page {first} is not one of a long value")
            yield extent[_PAGE.size : _PAGE.size + size]
        elif start + size <= page_bytes:
            yield page[start : start + size]
        else:
            raise BadPages(f"a node of page {number} lies outside of it")


def _read(file: BinaryIO, page_bytes: int, number: int, count: int) -> bytes:
    """Pages that follow each other, by what the first says of itself."""
    end = file.seek(0, 2)
    if (number + count) * page_bytes > end:
        raise BadPages(f"page {number} is not there")
    file.seek(number * page_bytes)
    found = file.read(count * page_bytes)
    if len(found) < count * page_bytes or _PAGE.unpack_from(found)[0] != number:
        raise BadPages(f"page {number} is not there")
    return found
