"""Whether an LMDB data file is built as LMDB builds one: every page, node and count of it.

To be asked before LMDB maps a file: it trusts what it finds there, and a wrong number ends the
process. All pages of one level of a tree are looked at together, as arrays over the file. Checked
are, for each tree that the newest root names: that pages are there, say their own number, are of
the right kind and are used once; that nodes lie in their page one next to the other, no byte
between them and none shared; that keys, separators and duplicates are in order; that long values
lie in pages of their own; that counts and depths are as recorded; that no free page is in use.
Pages that are neither free nor in use cost room and nothing else.

What is in a value is not looked at. The layout is that of LMDB 0.9 (``mdb.c``: MDB_page, MDB_node,
MDB_db, MDB_meta) on a 64-bit machine, in its own byte order. 0.4 to 1.2 GB/s of file, in memory;
holds the interpreter for tens of milliseconds at most. Must not know what is stored.
"""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sessionkv.store.key_order import Ints, KeyOrder, Keys, joined
from sessionkv.store.lmdb_layout import (
    BIG,
    BRANCH,
    DUPFIXED,
    DUPLICATES,
    DUPSORT,
    INTEGER_KEY,
    LEAF,
    LEAF2,
    MAX_DEPTH,
    NO_PAGE,
    NODE_HEADER,
    NUM_ROOTS,
    OVERFLOW,
    PAGE_HEADER,
    SUBPAGE,
    SUBTREE,
    TREE,
    Tree,
    Unsound,
    newest_root,
)

_CHUNK_PAGES = 1024
"""Leaves looked at together: few enough that their second look finds them in the processor."""

_READ_LIMIT_BYTES = 2**28
"""Larger files, which only tools check, are mapped: they might not fit into memory."""


class _Kind(enum.Enum):
    FREE = "free"  # lists of free pages
    MAIN = "main"  # names trees
    NAMED = "named"
    INNER = "inner"  # the duplicates of one key


@dataclass(slots=True)
class _Counts:
    branches: int = 0
    leaves: int = 0
    overflows: int = 0
    entries: int = 0
    # Of trees that hold duplicates; older writers do not count them with the tree they belong to.
    inner_branches: int = 0
    inner_leaves: int = 0


@dataclass(slots=True)
class _Nodes:
    """Nodes of some pages, in order. Offsets are bytes from the start of the file."""

    page: Ints  # index among the pages
    first: Ints  # index of each page's first node
    at: Ints
    key_bytes: Ints
    low: Ints  # size of the value, or low part of a child's number
    flags: Ints

    @property
    def keys(self) -> Keys:
        return Keys(self.at + NODE_HEADER, self.key_bytes)

    @property
    def value(self) -> Ints:
        return self.at + NODE_HEADER + self.key_bytes


def check_structure(data: Path) -> str | None:
    """What is wrong with a data file that nobody has open; None where nothing is. O(file).

    Raises:
        OSError: It cannot be read.
    """
    with data.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        if not size:
            return "the file is empty"
        with _contents(file, size) as mapped:
            try:
                _File(mapped).check()
            except Unsound as error:
                return str(error)
    return None


def _contents(file: FileIO, size: int) -> mmap.mmap:
    """The bytes of a file, read where they are few.

    A page that the disk cannot read is an error then; in a map it ends the process.
    """
    if size > _READ_LIMIT_BYTES:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    memory = mmap.mmap(-1, size)
    view = memoryview(memory)
    file.seek(0)
    start = 0
    while start < size and (count := file.readinto(view[start:])):
        start += count
    view.release()
    return memory


class _File:
    def __init__(self, mapped: mmap.mmap) -> None:
        self._bytes = mapped
        self._size = len(mapped)
        self.root = newest_root(mapped)
        self._page_bytes = self.root.page_bytes
        self._num_pages = min(self.root.last_page + 1, self._size // self._page_bytes)
        self._order = KeyOrder(mapped)
        # Any two, and any eight, neighbouring bytes as a number.
        self._u16 = self._windows("=u2")
        self._u64 = self._windows("=u8")
        self._used = np.zeros(self._num_pages, np.bool_)
        self._free = np.zeros(self._num_pages, np.bool_)
        # Random numbers for the ends of nodes: sums of them agree where the ends themselves do.
        rng = np.random.default_rng(0x5E55104)
        self._marks = rng.integers(2**63, size=self._page_bytes + 1, dtype=np.uint64)

    def check(self) -> None:
        """Everything.

        Raises:
            Unsound: Something is wrong.
        """
        self._check_tree("the free pages", self.root.free, _Kind.FREE)
        self._check_tree("the main tree", self.root.main, _Kind.MAIN)
        if bool(np.any(self._used & self._free)):
            raise Unsound(f"page {int(np.argmax(self._used & self._free))} is free and in use")

    def _windows(self, kind: str) -> NDArray[np.uint64]:
        width = np.dtype(kind).itemsize
        shape = (self._size - width + 1,)
        return np.ndarray(shape, kind, self._bytes, strides=(1,))

    # Trees ------------------------------------------------------------------------------------

    def _check_tree(self, name: str, tree: Tree, kind: _Kind) -> _Counts:
        """One tree with all that hangs below it; what was counted in it alone."""
        counts = _Counts()
        if tree.root == NO_PAGE:
            if any((tree.depth, tree.branches, tree.leaves, tree.overflows, tree.entries)):
                raise Unsound(f"{name} is empty and has counts")
            return counts
        if not 1 <= tree.depth <= MAX_DEPTH:
            raise Unsound(f"{name} has a depth of {tree.depth}")
        allowed = DUPSORT | DUPFIXED | (INTEGER_KEY if kind is _Kind.FREE else 0)
        needs_sort = tree.flags & DUPFIXED and kind is not _Kind.INNER
        if tree.flags & ~allowed or (needs_sort and not tree.flags & DUPSORT):
            raise Unsound(f"{name} has flags {tree.flags:#x}")
        pages = np.array([tree.root], np.uint64)
        above: list[_Nodes] = []
        for _ in range(1, tree.depth):
            numbers = self._taken(name, pages)
            counts.branches += len(numbers)
            nodes = self._nodes(name, numbers, BRANCH)
            self._check_branches(name, nodes, kind)
            above.append(nodes)
            pages = (nodes.low | nodes.flags << 32).astype(np.uint64)
        numbers = self._taken(name, pages)
        counts.leaves = len(numbers)
        edges = self._check_leaves(name, tree, numbers, counts, kind)
        self._check_separators(name, above, edges, numbers_only=kind is _Kind.FREE)
        self._compare(name, tree, counts)
        return counts

    def _check_branches(self, name: str, nodes: _Nodes, kind: _Kind) -> None:
        """Keys rise in each page; its first stands for all that is lower."""
        is_free = kind is _Kind.FREE
        if is_free and bool(np.any(np.delete(nodes.key_bytes, nodes.first) != 8)):
            raise Unsound("a list of free pages is of no transaction")
        passed = np.concatenate((nodes.first, nodes.first[1:] - 1))
        if not self._order.all_rise(nodes.keys, passed=passed, numbers=is_free):
            raise Unsound(f"keys of {name} are out of order")

    def _taken(self, name: str, pages: NDArray[np.uint64]) -> Ints:
        """Page numbers, none of them used before."""
        if bool(np.any((pages < NUM_ROOTS) | (pages >= self._num_pages))):
            raise Unsound(f"{name} names a page that is not there")
        numbers = pages.astype(np.int64)
        before = int(np.count_nonzero(self._used[numbers]))
        self._used[numbers] = True
        if before or len(np.unique(numbers)) != len(numbers):
            raise Unsound(f"{name} names a page that is in use elsewhere")
        starts = numbers * self._page_bytes
        if bool(np.any(self._u64[starts] != pages)):
            raise Unsound(f"a page of {name} says another number")
        return numbers

    def _nodes(self, name: str, numbers: Ints, kind: int) -> _Nodes:
        """The nodes of pages of a kind, each inside its page and beside the next."""
        starts = numbers * self._page_bytes
        flags, lower, upper = (self._u16[starts + i].astype(np.int64) for i in (10, 12, 14))
        if bool(np.any(flags != kind)):
            raise Unsound(f"a page of {name} is of another kind")
        if bool(np.any((lower <= PAGE_HEADER) | (lower > upper) | (upper > self._page_bytes))):
            raise Unsound(f"a page of {name} has wrong bounds")
        per_page = (lower - PAGE_HEADER) >> 1
        ends = np.cumsum(per_page)
        first = ends - per_page
        page = np.repeat(np.arange(len(numbers)), per_page)
        slots = (starts + PAGE_HEADER - 2 * first)[page] + 2 * np.arange(int(ends[-1]))
        within = self._u16[slots].astype(np.int64)
        if bool(np.any((within < upper[page]) | (within > self._page_bytes - NODE_HEADER))):
            raise Unsound(f"a node of {name} lies outside of its page")
        at = starts[page] + within
        head = self._u64[at]
        key_bytes = (head >> np.uint64(48)).astype(np.int64)
        node_flags = (head >> np.uint64(32) & np.uint64(0xFFFF)).astype(np.int64)
        low = (head & np.uint64(0xFFFFFFFF)).astype(np.int64)
        size = NODE_HEADER + key_bytes
        if kind != BRANCH:
            size += np.where(node_flags & BIG, 8, low)
        size += size & 1
        end = within + size
        if bool(np.any(end > self._page_bytes)):
            raise Unsound(f"a node of {name} goes on past its page")
        # From the first to the end of the page, each node ends where another begins.
        begins = np.add.reduceat(self._marks[within], first) + self._marks[self._page_bytes]
        if bool(np.any(begins != np.add.reduceat(self._marks[end], first) + self._marks[upper])):
            raise Unsound(f"nodes of {name} overlap or leave a gap")
        return _Nodes(page, first, at, key_bytes, low, node_flags)

    def _compare(self, name: str, tree: Tree, counts: _Counts) -> None:
        for noun, found, inner, recorded in (
            ("branch pages", counts.branches, counts.inner_branches, tree.branches),
            ("leaves", counts.leaves, counts.inner_leaves, tree.leaves),
            ("overflow pages", counts.overflows, 0, tree.overflows),
            ("entries", counts.entries, 0, tree.entries),
        ):
            if not found <= recorded <= found + inner:
                raise Unsound(f"{name} has {found} {noun} and says {recorded}")

    # Leaves -----------------------------------------------------------------------------------

    def _check_leaves(
        self, name: str, tree: Tree, numbers: Ints, counts: _Counts, kind: _Kind
    ) -> tuple[Keys, Keys]:
        """Leaves in order; first and last key of each."""
        is_packed = kind is _Kind.INNER and bool(tree.flags & DUPFIXED)
        firsts: list[Keys] = []
        lasts: list[Keys] = []
        for start in range(0, len(numbers), _CHUNK_PAGES):
            chunk = numbers[start : start + _CHUNK_PAGES]
            if is_packed:
                keys, first = self._packed(name, tree, chunk)
            else:
                nodes = self._nodes(name, chunk, LEAF)
                self._check_values(name, tree, nodes, counts, kind)
                keys, first = nodes.keys, nodes.first
            counts.entries += len(keys.at)
            firsts.append(keys.part(first))
            with_last = keys.after(lasts[-1]) if lasts else keys
            if not self._order.all_rise(with_last, numbers=kind is _Kind.FREE):
                raise Unsound(f"keys of {name} are out of order")
            lasts.append(keys.part(np.append(first[1:], len(keys.at)) - 1))
        return joined(firsts), joined(lasts)

    def _packed(self, name: str, tree: Tree, numbers: Ints) -> tuple[Keys, Ints]:
        """Keys of leaves that hold those of one size side by side; index of each page's first."""
        starts = numbers * self._page_bytes
        pads, flags, lower = (self._u16[starts + i].astype(np.int64) for i in (8, 10, 12))
        size, per_page = tree.pad, (lower - PAGE_HEADER) >> 1
        if not size or bool(np.any((flags != LEAF | LEAF2) | (pads != size) | (per_page < 1))):
            raise Unsound(f"a page of {name} is of another kind")
        if bool(np.any(per_page * size > self._page_bytes - PAGE_HEADER)):
            raise Unsound(f"a page of {name} has wrong bounds")
        at = _places(starts + PAGE_HEADER, per_page, size)
        return Keys(at, np.full(len(at), size)), np.cumsum(per_page) - per_page

    def _check_values(
        self, name: str, tree: Tree, nodes: _Nodes, counts: _Counts, kind: _Kind
    ) -> None:
        there = {int(flags) for flags in np.unique(nodes.flags)}
        allowed = {0, BIG}
        if kind is _Kind.MAIN:
            allowed |= {SUBTREE}
        elif kind is _Kind.NAMED and tree.flags & DUPSORT:
            allowed |= {DUPLICATES, SUBTREE | DUPLICATES}
        if not there <= allowed or (kind is _Kind.INNER and bool(np.any(nodes.low))):
            raise Unsound(f"a node of {name} has impossible flags or a value too many")
        value = nodes.value
        if BIG in there:
            is_big = nodes.flags == BIG
            self._check_long(name, value[is_big], nodes.low[is_big], counts)
        if DUPLICATES in there:
            is_dup = nodes.flags == DUPLICATES
            self._check_subpages(name, tree, value[is_dup], nodes.low[is_dup], counts)
        for index in np.flatnonzero(nodes.flags & SUBTREE) if there - {0, BIG, DUPLICATES} else ():
            self._check_subtree(name, int(value[index]), int(nodes.low[index]), counts, kind)
        if kind is _Kind.FREE:
            self._take_free(nodes)

    def _check_long(self, name: str, value: Ints, size: Ints, counts: _Counts) -> None:
        """Values in pages of their own."""
        numbers = self._taken(name, self._u64[value])
        starts = numbers * self._page_bytes
        low, high = (self._u16[starts + i].astype(np.int64) for i in (12, 14))
        there = low | high << 16
        need = (PAGE_HEADER - 1 + size) // self._page_bytes + 1
        # A value that was overwritten by a shorter one keeps its pages.
        if bool(np.any((self._u16[starts + 10] != OVERFLOW) | (there < need))):
            raise Unsound(f"a long value of {name} lies in pages of another kind")
        if bool(np.any(numbers + there > self._num_pages)):
            raise Unsound(f"a long value of {name} is not all there")
        rest = _places(numbers + 1, there - 1, 1)
        if bool(np.any(self._used[rest])) or len(np.unique(rest)) != len(rest):
            raise Unsound(f"{name} names a page that is in use elsewhere")
        self._used[rest] = True
        counts.overflows += int(there.sum())

    def _check_subpages(
        self, name: str, tree: Tree, value: Ints, size: Ints, counts: _Counts
    ) -> None:
        """Duplicates of a key that lie in its node. One of them was counted with the nodes."""
        if not tree.flags & DUPFIXED:
            raise Unsound(f"{name} has duplicates of several sizes")  # no store has
        if bool(np.any(size <= PAGE_HEADER)):
            raise Unsound(f"duplicates of {name} have wrong bounds")
        pad, flags, lower = (self._u16[value + i].astype(np.int64) for i in (8, 10, 12))
        count = (lower - PAGE_HEADER) >> 1
        is_kind = (flags & ~0x10) == (LEAF | LEAF2 | SUBPAGE)  # a mark that a copy keeps
        if not bool(np.all(is_kind & (pad > 0) & (count > 0))):
            raise Unsound(f"duplicates of {name} are of another kind")
        if bool(np.any(count * pad > size - PAGE_HEADER)):
            raise Unsound(f"duplicates of {name} have wrong bounds")
        counts.entries += int(count.sum()) - len(count)
        at = _places(value + PAGE_HEADER, count, pad)
        between = np.cumsum(count) - 1
        if not self._order.all_rise(Keys(at, np.repeat(pad, count)), passed=between):
            raise Unsound(f"duplicates of {name} are out of order")

    def _check_subtree(self, name: str, at: int, size: int, counts: _Counts, kind: _Kind) -> None:
        """A named tree, or the duplicates of a key that have a tree of their own."""
        if size != TREE.size:
            raise Unsound(f"{name} names a tree in {size} bytes")
        tree = Tree(*TREE.unpack_from(self._bytes, at))
        if kind is _Kind.MAIN:
            self._check_tree(f"a tree below {name}", tree, _Kind.NAMED)
            return
        inner = self._check_tree(f"duplicates of {name}", tree, _Kind.INNER)
        counts.entries += inner.entries - 1
        counts.inner_branches += inner.branches
        counts.inner_leaves += inner.leaves

    def _take_free(self, nodes: _Nodes) -> None:
        """Lists of free pages, each of one transaction."""
        rows = zip(nodes.keys.at, nodes.low, nodes.value, strict=True)
        for i, (key, size, at) in enumerate((int(k), int(n), int(v)) for k, n, v in rows):
            if nodes.key_bytes[i] != 8 or not 1 <= int(self._u64[key]) <= self.root.txn:
                raise Unsound("a list of free pages is of no transaction")
            if nodes.flags[i] == BIG:
                at = int(self._u64[at]) * self._page_bytes + PAGE_HEADER
            if size < 8 or size % 8 or int(self._u64[at]) != size // 8 - 1:
                raise Unsound("a list of free pages has another length than it says")
            pages = np.frombuffer(self._bytes[at + 8 : at + size], np.uint64)
            if bool(np.any(pages[1:] >= pages[:-1])):
                raise Unsound("a list of free pages is not in order")
            if bool(np.any((pages < NUM_ROOTS) | (pages > self.root.last_page))):
                raise Unsound("a list of free pages names one that is not there")
            pages = pages[pages < self._num_pages].astype(np.int64)
            if bool(np.any(self._free[pages])):
                raise Unsound("a page is free twice")
            self._free[pages] = True

    def _check_separators(
        self, name: str, above: list[_Nodes], edges: tuple[Keys, Keys], *, numbers_only: bool
    ) -> None:
        """Each separator is above all keys before its child, and not above the child's first."""
        firsts, lasts = edges
        leaf = np.arange(len(firsts.at))  # the first leaf below each page of the level
        for nodes in reversed(above):
            parts = np.delete(np.arange(len(nodes.at)), nodes.first)
            separator, child = nodes.keys.part(parts), leaf[parts]
            if not (
                self._order.rise(separator, firsts.part(child), or_equal=True, numbers=numbers_only)
                and self._order.rise(lasts.part(child - 1), separator, numbers=numbers_only)
            ):
                raise Unsound(f"a branch of {name} leads to other keys than it says")
            leaf = leaf[nodes.first]


def _places(starts: Ints, counts: Ints, step: Ints | int) -> Ints:
    """``counts[i]`` places from ``starts[i]`` on, ``step`` apart, one after the other."""
    first = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum())) - np.repeat(first, counts)
    steps = np.repeat(step, counts) if isinstance(step, np.ndarray) else step
    return np.repeat(starts, counts) + number * steps
