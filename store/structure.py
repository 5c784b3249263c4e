"""Whether an LMDB data file is built as LMDB builds one: every page, node and count of it.

To be asked before LMDB maps a file: it trusts what it finds there, and a wrong number ends the
process. All pages of one level of a tree are looked at together, as arrays over the file. Checked
are, for each tree that the newest root names: that pages are there, say their own number, are of
the right kind and are used once; that nodes lie in their page one next to the other, no byte
between them and none shared; that keys, separators and duplicates are in order; that long values
lie in pages of their own; that counts and depths are as recorded; that no free page is in use.
Pages that are neither free nor in use cost room and nothing else.

What is in a value is not looked at. The layout is that of LMDB 0.9 (``mdb.c``: MDB_page, MDB_node,
MDB_db, MDB_meta) on a 64-bit machine, in its own byte order. About 1 GB/s of file, in memory; holds
the interpreter for tens of milliseconds at most. Must not know what is stored.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_PAGE_HEADER, _NODE_HEADER = 16, 8
_BRANCH, _LEAF, _OVERFLOW, _META, _LEAF2, _SUBPAGE = 0x01, 0x02, 0x04, 0x08, 0x20, 0x40
_BIG, _SUBTREE, _DUPLICATES = 0x01, 0x02, 0x04
_DUPSORT, _DUPFIXED = 0x04, 0x10
_MAGIC, _DATA_VERSION, _NUM_ROOTS, _MAX_DEPTH = 0xBEEFC0DE, 1, 2, 32
_NO_PAGE = 2**64 - 1
_TREE = struct.Struct("=IHHQQQQQ")
_ROOT_BYTES = _PAGE_HEADER + 136
_CHUNK_PAGES = 1024
"""Leaves looked at together: few enough that their second look finds them in the processor."""


class Unsound(ValueError):
    """The file is not as LMDB writes one."""


@dataclass(frozen=True, slots=True)
class _Tree:
    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class _Root:
    page_bytes: int
    free: _Tree
    main: _Tree
    last_page: int
    txn: int


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
    def key(self) -> Ints:
        return self.at + _NODE_HEADER


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where keys lie, in order."""

    at: Ints
    size: Ints

    def part(self, which: NDArray[np.bool_] | Ints) -> _Keys:
        """Some of them."""
        return _Keys(self.at[which], self.size[which])


def check_structure(data: Path) -> str | None:
    """What is wrong with a data file that nobody has open; None where nothing is. O(file).

    Raises:
        OSError: It cannot be read.
    """
    with data.open("rb") as file:
        if file.seek(0, 2) < _ROOT_BYTES:
            return "the file ends in its first root"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            try:
                _File(mapped).check()
            except Unsound as error:
                return str(error)
    return None


class _File:
    def __init__(self, mapped: mmap.mmap) -> None:
        self._bytes = mapped
        self._size = len(mapped)
        self.root = self._newest_root()
        self._page_bytes = self.root.page_bytes
        self._num_pages = min(self.root.last_page + 1, self._size // self._page_bytes)
        # Any two, and any eight, neighbouring bytes as a number.
        self._u16 = self._windows("=u2")
        self._u64 = self._windows("=u8")
        self._big64 = self._windows(">u8")
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
        self._check_tree("the free pages", self.root.free, is_free=True)
        self._check_tree("the main tree", self.root.main)
        if bool(np.any(self._used & self._free)):
            raise Unsound(f"page {int(np.argmax(self._used & self._free))} is free and in use")

    def _windows(self, kind: str) -> NDArray[np.uint64]:
        width = np.dtype(kind).itemsize
        shape = (self._size - width + 1,)
        return np.ndarray(shape, kind, self._bytes, strides=(1,))

    # Roots ------------------------------------------------------------------------------------

    def _newest_root(self) -> _Root:
        first = self._root_at(0, 0)
        second = self._root_at(first.page_bytes, 1)
        if first.page_bytes != second.page_bytes:
            raise Unsound("the roots have different page sizes")
        if first.txn == second.txn != 0:
            raise Unsound("the roots are of one transaction")
        newest = second if second.txn > first.txn else first
        if newest.last_page < _NUM_ROOTS - 1:
            raise Unsound(f"the last page is {newest.last_page}")
        return newest

    def _root_at(self, offset: int, number: int) -> _Root:
        if offset + _ROOT_BYTES > self._size:
            raise Unsound("the file ends in its roots")
        page, _, flags = struct.unpack_from("=QHH", self._bytes, offset)
        start = offset + _PAGE_HEADER
        magic, version = struct.unpack_from("=II", self._bytes, start)
        if (magic, version, flags & _META, page) != (_MAGIC, _DATA_VERSION, _META, number):
            raise Unsound(f"root {number} is not one of LMDB 0.9")
        free = _Tree(*_TREE.unpack_from(self._bytes, start + 24))
        main = _Tree(*_TREE.unpack_from(self._bytes, start + 24 + _TREE.size))
        last, txn = struct.unpack_from("=QQ", self._bytes, start + 24 + 2 * _TREE.size)
        size = free.pad
        if not 256 <= size <= 0x8000 or size & (size - 1):
            raise Unsound(f"a page size of {size}")
        if txn and txn % 2 != number:
            raise Unsound(f"root {number} is of transaction {txn}")
        return _Root(size, free, main, last, txn)

    # Trees ------------------------------------------------------------------------------------

    def _check_tree(
        self, name: str, tree: _Tree, *, is_free: bool = False, is_inner: bool = False
    ) -> _Counts:
        """One tree with all that hangs below it; what was counted in it alone."""
        counts = _Counts()
        if tree.root == _NO_PAGE:
            if any((tree.depth, tree.branches, tree.leaves, tree.overflows, tree.entries)):
                raise Unsound(f"{name} is empty and has counts")
            return counts
        if not 1 <= tree.depth <= _MAX_DEPTH:
            raise Unsound(f"{name} has a depth of {tree.depth}")
        if tree.flags & _DUPFIXED and not (tree.flags & _DUPSORT or is_inner):
            raise Unsound(f"{name} has flags {tree.flags:#x}")
        if tree.flags & ~(_DUPSORT | _DUPFIXED | (0x08 if is_free else 0)):
            raise Unsound(f"{name} has flags {tree.flags:#x}")  # none that a store gives
        pages = np.array([tree.root], np.uint64)
        above: list[tuple[_Nodes, Ints]] = []
        for _ in range(1, tree.depth):
            numbers = self._taken(name, pages)
            counts.branches += len(numbers)
            nodes = self._nodes(name, numbers, _BRANCH)
            above.append((nodes, numbers))
            self._check_order(name, _Keys(nodes.key, nodes.key_bytes), nodes.first, is_free)
            pages = self._children(nodes)
            if is_free and bool(np.any(np.delete(nodes.key_bytes, nodes.first) != 8)):
                raise Unsound("a list of free pages is of no transaction")
        numbers = self._taken(name, pages)
        counts.leaves = len(numbers)
        edges = self._check_leaves(name, tree, numbers, counts, is_free, is_inner)
        self._check_separators(name, above, edges, is_free)
        self._compare(name, tree, counts)
        return counts

    def _taken(self, name: str, pages: NDArray[np.uint64]) -> Ints:
        """Page numbers, none of them used before."""
        if bool(np.any((pages < _NUM_ROOTS) | (pages >= self._num_pages))):
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
        if bool(np.any((lower <= _PAGE_HEADER) | (lower > upper) | (upper > self._page_bytes))):
            raise Unsound(f"a page of {name} has wrong bounds")
        per_page = (lower - _PAGE_HEADER) >> 1
        ends = np.cumsum(per_page)
        first = ends - per_page
        page = np.repeat(np.arange(len(numbers)), per_page)
        slots = (starts + _PAGE_HEADER - 2 * first)[page] + 2 * np.arange(int(ends[-1]))
        within = self._u16[slots].astype(np.int64)
        if bool(np.any((within < upper[page]) | (within > self._page_bytes - _NODE_HEADER))):
            raise Unsound(f"a node of {name} lies outside of its page")
        at = starts[page] + within
        head = self._u64[at]
        key_bytes = (head >> np.uint64(48)).astype(np.int64)
        node_flags = (head >> np.uint64(32) & np.uint64(0xFFFF)).astype(np.int64)
        low = (head & np.uint64(0xFFFFFFFF)).astype(np.int64)
        size = _NODE_HEADER + key_bytes
        if kind != _BRANCH:
            size += np.where(node_flags & _BIG, 8, low)
        size += size & 1
        end = within + size
        if bool(np.any(end > self._page_bytes)):
            raise Unsound(f"a node of {name} goes on past its page")
        # From the first to the end of the page, each node ends where another begins.
        begins = np.add.reduceat(self._marks[within], first) + self._marks[self._page_bytes]
        if bool(np.any(begins != np.add.reduceat(self._marks[end], first) + self._marks[upper])):
            raise Unsound(f"nodes of {name} overlap or leave a gap")
        return _Nodes(page, first, at, key_bytes, low, node_flags)

    @staticmethod
    def _children(nodes: _Nodes) -> NDArray[np.uint64]:
        return (nodes.low | nodes.flags << 32).astype(np.uint64)

    def _compare(self, name: str, tree: _Tree, counts: _Counts) -> None:
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
        self,
        name: str,
        tree: _Tree,
        numbers: Ints,
        counts: _Counts,
        is_free: bool,
        is_inner: bool,
    ) -> tuple[_Keys, _Keys]:
        """Leaves in order; first and last key of each."""
        firsts: list[_Keys] = []
        lasts: list[_Keys] = []
        for start in range(0, len(numbers), _CHUNK_PAGES):
            chunk = numbers[start : start + _CHUNK_PAGES]
            if is_inner and tree.flags & _DUPFIXED:
                first, last = self._check_packed(name, tree, chunk, counts)
            else:
                nodes = self._nodes(name, chunk, _LEAF)
                counts.entries += len(nodes.at)
                self._check_values(name, tree, nodes, counts, is_free, is_inner)
                keys = _Keys(nodes.key, nodes.key_bytes)
                if lasts:
                    keys = _Keys(
                        np.concatenate((lasts[-1].at[-1:], keys.at)),
                        np.concatenate((lasts[-1].size[-1:], keys.size)),
                    )
                self._check_order(name, keys, None, is_free)
                ends = np.append(nodes.first[1:], len(nodes.at)) - 1
                first = _Keys(nodes.key[nodes.first], nodes.key_bytes[nodes.first])
                last = _Keys(nodes.key[ends], nodes.key_bytes[ends])
            firsts.append(first)
            lasts.append(last)
        return _joined(firsts), _joined(lasts)

    def _check_packed(
        self, name: str, tree: _Tree, numbers: Ints, counts: _Counts
    ) -> tuple[_Keys, _Keys]:
        """Leaves that hold keys of one size side by side."""
        starts = numbers * self._page_bytes
        pads, flags, lower = (self._u16[starts + i].astype(np.int64) for i in (8, 10, 12))
        size, per_page = tree.pad, (lower - _PAGE_HEADER) >> 1
        if bool(np.any((flags != _LEAF | _LEAF2) | (pads != size) | (per_page < 1))) or not size:
            raise Unsound(f"a page of {name} is of another kind")
        if bool(np.any(per_page * size > self._page_bytes - _PAGE_HEADER)):
            raise Unsound(f"a page of {name} has wrong bounds")
        at = _places(starts + _PAGE_HEADER, per_page, size)
        self._check_order(name, _Keys(at, np.full(len(at), size)), None, False)
        counts.entries += len(at)
        ends = np.cumsum(per_page)
        sizes = np.full(len(numbers), size)
        return _Keys(at[ends - per_page], sizes), _Keys(at[ends - 1], sizes)

    def _check_values(
        self,
        name: str,
        tree: _Tree,
        nodes: _Nodes,
        counts: _Counts,
        is_free: bool,
        is_inner: bool,
    ) -> None:
        kinds = np.bincount(np.minimum(nodes.flags, 8), minlength=9)
        allowed = {0, _BIG, _SUBTREE, _DUPLICATES, _SUBTREE | _DUPLICATES}
        if any(kinds[kind] for kind in range(9) if kind not in allowed):
            raise Unsound(f"a node of {name} has impossible flags")
        if is_free and (kinds[_SUBTREE] or kinds[_DUPLICATES] or kinds[_SUBTREE | _DUPLICATES]):
            raise Unsound(f"a node of {name} has impossible flags")
        if (kinds[_DUPLICATES] or kinds[_SUBTREE | _DUPLICATES]) and not tree.flags & _DUPSORT:
            raise Unsound(f"{name} has duplicates and may not")
        value = nodes.key + nodes.key_bytes
        if kinds[_BIG]:
            is_big = nodes.flags == _BIG
            self._check_long(name, value[is_big], nodes.low[is_big], counts)
        if kinds[_DUPLICATES]:
            is_dup = nodes.flags == _DUPLICATES
            self._check_subpages(name, tree, value[is_dup], nodes.low[is_dup], counts)
        for kind in (_SUBTREE, _SUBTREE | _DUPLICATES):
            for index in np.flatnonzero(nodes.flags == kind) if kinds[kind] else ():
                self._check_subtree(name, int(value[index]), int(nodes.low[index]), kind, counts)
        if is_free:
            self._take_free(nodes, value)
        if is_inner and bool(np.any(nodes.low)):
            raise Unsound(f"a duplicate of {name} has a value")

    def _check_long(self, name: str, value: Ints, size: Ints, counts: _Counts) -> None:
        """Values in pages of their own."""
        numbers = self._taken(name, self._u64[value])
        starts = numbers * self._page_bytes
        low, high = (self._u16[starts + i].astype(np.int64) for i in (12, 14))
        there = low | high << 16
        need = (_PAGE_HEADER - 1 + size) // self._page_bytes + 1
        # A value that was overwritten by a shorter one keeps its pages.
        if bool(np.any((self._u16[starts + 10] != _OVERFLOW) | (there < need))):
            raise Unsound(f"a long value of {name} lies in pages of another kind")
        if bool(np.any(numbers + there > self._num_pages)):
            raise Unsound(f"a long value of {name} is not all there")
        rest = _places(numbers + 1, there - 1, 1)
        if bool(np.any(self._used[rest])) or len(np.unique(rest)) != len(rest):
            raise Unsound(f"{name} names a page that is in use elsewhere")
        self._used[rest] = True
        counts.overflows += int(there.sum())

    def _check_subpages(
        self, name: str, tree: _Tree, value: Ints, size: Ints, counts: _Counts
    ) -> None:
        """Duplicates of a key that lie in its node. One of them was counted with the nodes."""
        if not tree.flags & _DUPFIXED:
            raise Unsound(f"{name} has duplicates of several sizes")  # no store has
        if bool(np.any(size <= _PAGE_HEADER)):
            raise Unsound(f"duplicates of {name} have wrong bounds")
        pad, flags, lower = (self._u16[value + i].astype(np.int64) for i in (8, 10, 12))
        count = (lower - _PAGE_HEADER) >> 1
        is_kind = (flags & ~0x10) == (_LEAF | _LEAF2 | _SUBPAGE)  # a mark that a copy keeps
        if not bool(np.all(is_kind & (pad > 0) & (count > 0))):
            raise Unsound(f"duplicates of {name} are of another kind")
        if bool(np.any(count * pad > size - _PAGE_HEADER)):
            raise Unsound(f"duplicates of {name} have wrong bounds")
        counts.entries += int(count.sum()) - len(count)
        at = _places(value + _PAGE_HEADER, count, pad)
        first = np.cumsum(count) - count
        self._check_order(name, _Keys(at, np.repeat(pad, count)), first, False, whole=True)

    def _check_subtree(self, name: str, at: int, size: int, kind: int, counts: _Counts) -> None:
        """A named tree, or the duplicates of a key that have a tree of their own."""
        if size != _TREE.size:
            raise Unsound(f"{name} names a tree in {size} bytes")
        tree = _Tree(*_TREE.unpack_from(self._bytes, at))
        if kind == _SUBTREE:
            self._check_tree(f"a tree below {name}", tree)
            return
        inner = self._check_tree(f"duplicates of {name}", tree, is_inner=True)
        counts.entries += inner.entries - 1
        counts.inner_branches += inner.branches
        counts.inner_leaves += inner.leaves

    def _take_free(self, nodes: _Nodes, value: Ints) -> None:
        """Lists of free pages, each of one transaction."""
        for i in range(len(nodes.at)):
            key, size, at = int(nodes.key[i]), int(nodes.low[i]), int(value[i])
            if nodes.key_bytes[i] != 8 or not 1 <= int(self._u64[key]) <= self.root.txn:
                raise Unsound("a list of free pages is of no transaction")
            if nodes.flags[i] == _BIG:
                at = int(self._u64[at]) * self._page_bytes + _PAGE_HEADER
            if size < 8 or size % 8 or int(self._u64[at]) != size // 8 - 1:
                raise Unsound("a list of free pages has another length than it says")
            pages = np.frombuffer(self._bytes[at + 8 : at + size], np.uint64)
            if bool(np.any(pages[1:] >= pages[:-1])):
                raise Unsound("a list of free pages is not in order")
            if bool(np.any((pages < _NUM_ROOTS) | (pages > self.root.last_page))):
                raise Unsound("a list of free pages names one that is not there")
            pages = pages[pages < self._num_pages].astype(np.int64)
            if bool(np.any(self._free[pages])):
                raise Unsound("a page is free twice")
            self._free[pages] = True

    # Order ------------------------------------------------------------------------------------

    def _check_order(
        self,
        name: str,
        keys: _Keys,
        first: Ints | None,
        is_free: bool,
        *,
        whole: bool = False,
    ) -> None:
        """Each key is above the one before; with ``first`` in each page for itself.

        The first key of a branch page stands for all that is lower and is passed over, unless
        ``whole``.
        """
        if len(keys.at) < 2:
            return
        begins = self._eight(keys, 0)
        if is_free:
            begins = self._u64[np.minimum(keys.at, self._size - 8)]  # one may be empty
        goes_up, is_same = begins[1:] > begins[:-1], begins[1:] == begins[:-1]
        if first is not None:
            passed = first[1:] - 1
            if not whole:
                passed = np.concatenate((passed, first[first < len(goes_up)]))
            goes_up[passed], is_same[passed] = True, False
        if not bool(np.all(goes_up | is_same)):
            raise Unsound(f"keys of {name} are out of order")
        low = np.flatnonzero(is_same)
        if len(low) and (is_free or not self._rise(keys.part(low), keys.part(low + 1))):
            raise Unsound(f"keys of {name} are out of order")

    def _check_separators(
        self,
        name: str,
        above: list[tuple[_Nodes, Ints]],
        edges: tuple[_Keys, _Keys],
        is_free: bool,
    ) -> None:
        """Each separator is above all keys before its child, and not above the child's first."""
        firsts, lasts = edges
        leaf = np.arange(len(firsts.at))  # the first leaf below each page of the level
        for nodes, _ in reversed(above):
            is_first = np.zeros(len(nodes.at), np.bool_)
            is_first[nodes.first] = True
            parts = np.flatnonzero(~is_first)
            child = leaf[parts]
            separator = _Keys(nodes.key, nodes.key_bytes).part(parts)
            first, last = firsts.part(child), lasts.part(child - 1)
            if not (
                self._rise(separator, first, is_free, or_equal=True)
                and self._rise(last, separator, is_free)
            ):
                raise Unsound(f"a branch of {name} leads to other keys than it says")
            leaf = leaf[nodes.first]

    def _rise(
        self, low: _Keys, high: _Keys, is_free: bool = False, *, or_equal: bool = False
    ) -> bool:
        """Whether each of ``high`` is above its one of ``low``."""
        if is_free:
            if bool(np.any((low.size != 8) | (high.size != 8))):
                return False
            a, b = self._u64[low.at], self._u64[high.at]
            return bool(np.all(a <= b if or_equal else a < b))
        done = 0
        while len(low.at):
            a, b = self._eight(low, done), self._eight(high, done)
            if bool(np.any(a > b)):
                return False
            going = a == b
            low, high = low.part(going), high.part(going)
            done += 8
            ended = (low.size <= done) | (high.size <= done)
            shorter = low.size[ended] < high.size[ended]
            same = low.size[ended] == high.size[ended]
            if not bool(np.all(shorter | (same & or_equal))):
                return False
            low, high = low.part(~ended), high.part(~ended)
        return True

    def _eight(self, keys: _Keys, done: int) -> NDArray[np.uint64]:
        """Eight bytes of each key from byte ``done`` on, as a number; zeros past its end."""
        at = keys.at + done
        place = np.minimum(at, self._size - 8)
        left = np.clip(keys.size - done, 0, 8)
        value = self._big64[place].astype(np.uint64)
        if bool(np.any(place != at)):
            value = value << ((at - place) * 8).astype(np.uint64)
        if bool(np.any(left < 8)):
            value &= _MASKS[left]
        return value


_MASKS = np.array([(2 ** (8 * n) - 1) << (64 - 8 * n) for n in range(9)], np.uint64)


def _joined(parts: list[_Keys]) -> _Keys:
    return _Keys(
        np.concatenate([keys.at for keys in parts]), np.concatenate([keys.size for keys in parts])
    )


def _places(starts: Ints, counts: Ints, step: Ints | int) -> Ints:
    """``counts[i]`` places from ``starts[i]`` on, ``step`` apart, one after the other."""
    first = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum())) - np.repeat(first, counts)
    steps = np.repeat(step, counts) if isinstance(step, np.ndarray) else step
    return np.repeat(starts, counts) + number * steps
