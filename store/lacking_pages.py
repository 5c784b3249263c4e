"""Pages that an LMDB data file names and does not have, found without mapping it.

A file may be shorter than its newest root says: a page that a transaction took at the end and gave
back before it was committed is free, and is written when it is first used. Only a page that is
neither there nor free is lost; touching it through LMDB's map would end the process.

Knows nothing of what is stored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sessionkv.store.lmdb_layout import (
    BIG,
    BRANCH,
    LEAF,
    NO_PAGE,
    NODE_HEADER,
    OVERFLOW,
    PAGE_HEADER,
    ROOTS_BYTES,
    Root,
    Unsound,
    newest_root,
)

_PAGE = struct.Struct("=QHHHH")  # number, pad, flags, lower, upper
_NODE = struct.Struct("=HHHH")  # size or child: low, high; flags or child: highest; key size
_U64 = struct.Struct("=Q")


def num_lacking(data: Path) -> int:
    """How many pages the newest root of a data file needs, or may need, and the file lacks.

    O(1) where the file is as long as its root says, else O(free pages).

    Raises:
        Unsound: It is not an LMDB file, or its list of free pages is damaged.
        OSError: It cannot be read.
    """
    with data.open("rb") as file:
        root = newest_root(file.read(ROOTS_BYTES))
        num_there = file.seek(0, 2) // root.page_bytes
        if root.last_page < num_there:
            return 0
        pages = _free_pages(file, root)
        free = {number for number in pages if num_there <= number <= root.last_page}
        return root.last_page + 1 - num_there - len(free)


def _free_pages(file: BinaryIO, root: Root) -> Iterator[int]:
    """Page numbers in the lists of the free database; each list is preceded by its length."""
    if root.free.root == NO_PAGE:
        return
    for value in _values(file, root.page_bytes, root.free.root, seen=set()):
        if len(value) < _U64.size or len(value) % _U64.size:
            raise Unsound("a list of free pages has an impossible length")
        count, *pages = (number for (number,) in _U64.iter_unpack(value))
        if count != len(pages):
            raise Unsound("a list of free pages has another length than it says")
        yield from pages


def _values(file: BinaryIO, page_bytes: int, number: int, *, seen: set[int]) -> Iterator[bytes]:
    """Values of the tree below a page, in order."""
    if number in seen:
        raise Unsound(f"page {number} is named twice")
    seen.add(number)
    page = _read(file, page_bytes, number, 1)
    _, _, flags, lower, upper = _PAGE.unpack_from(page)
    if flags not in (BRANCH, LEAF) or not PAGE_HEADER <= lower <= upper <= page_bytes:
        raise Unsound(f"page {number} is not one of a tree")
    for place in range(PAGE_HEADER, lower, 2):
        (at,) = struct.unpack_from("=H", page, place)
        if not upper <= at <= page_bytes - NODE_HEADER:
            raise Unsound(f"a node of page {number} lies outside of it")
        low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
        if flags == BRANCH:
            child = low | high << 16 | node_flags << 32
            yield from _values(file, page_bytes, child, seen=seen)
            continue
        size, start = low | high << 16, at + NODE_HEADER + key_bytes
        if node_flags & BIG:
            if start + _U64.size > page_bytes:
                raise Unsound(f"a node of page {number} lies outside of it")
            (first,) = _U64.unpack_from(page, start)
            count = -(-(PAGE_HEADER + size) // page_bytes)
            extent = _read(file, page_bytes, first, count)
            if _PAGE.unpack_from(extent)[2] != OVERFLOW:
                raise Unsound(f"page {first} is not one of a long value")
            yield extent[PAGE_HEADER : PAGE_HEADER + size]
        elif start + size <= page_bytes:
            yield page[start : start + size]
        else:
            raise Unsound(f"a node of page {number} lies outside of it")


def _read(file: BinaryIO, page_bytes: int, number: int, count: int) -> bytes:
    """Pages that follow each other, by what the first says of itself."""
    end = file.seek(0, 2)
    if (number + count) * page_bytes > end:
        raise Unsound(f"page {number} is not there")
    file.seek(number * page_bytes)
    found = file.read(count * page_bytes)
    if len(found) < count * page_bytes or _PAGE.unpack_from(found)[0] != number:
        raise Unsound(f"page {number} is not there")
    return found
