"""In which order the cached blocks of one tier go.

By rank of retention; in a rank unfilled tails before full blocks; then least recently released
first, so that a chain, which is released from its end, goes from its end. One list a class (rank
and fill), each in order of release. A released block joins the list of rank 0, whatever its rank,
and moves to its own when it comes to the cold end: a rank that rises costs nothing until it
matters. Ranks that have fallen must be told (:meth:`EvictionOrder.settle`), since nobody looks at
the warm end of a list.

Knows blocks by number and asks for their rank; knows no leases, contents or tiers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator

_Place = tuple[int, bool]
"""Rank, and whether the block is full: the order of the lists."""


class _Class:
    """Blocks of one class, coldest first.

    Nearly all come in order of release and are appended. The others, whose rank has changed, are
    kept beside and merged in when somebody looks.
    """

    __slots__ = ("_sorted", "late", "ordered")

    def __init__(self) -> None:
        self.ordered: OrderedDict[int, None] = OrderedDict()
        self.late: dict[int, None] = {}
        self._sorted: list[tuple[int, int]] | None = None

    def put(self, block: int, stamps: list[int]) -> dict[int, None]:
        """Add a block where its stamp says; the dict that holds it, to be deleted from."""
        stamp, ordered = stamps[block], self.ordered
        if not ordered or stamp > stamps[next(reversed(ordered))]:
            ordered[block] = None
            return ordered
        if stamp < stamps[next(iter(ordered))]:
            ordered[block] = None
            ordered.move_to_end(block, last=False)
            return ordered
        self.late[block] = None
        self._sorted = None
        return self.late

    def coldest_first(self, stamps: list[int]) -> Iterator[int]:
        """All blocks; the class must not change meanwhile."""
        if not self.late:
            return iter(self.ordered)
        if self._sorted is None:
            self._sorted = sorted((stamps[block], block) for block in self.late)
        # What was sorted may have left since, or come back with another stamp.
        late = (pair for pair in self._sorted if pair[1] in self.late)
        usual = ((stamps[block], block) for block in self.ordered)
        return (block for _, block in heapq.merge(usual, late))


class EvictionOrder:
    """Order of the cached blocks among ``num_blocks``."""

    def __init__(self, num_blocks: int, rank_of: Callable[[int], int]) -> None:
        """Start empty.

        Args:
            num_blocks: Blocks are numbered below it.
            rank_of: Rank of a block that is in the order, now.
        """
        self._rank_of = rank_of
        self._classes: dict[_Place, _Class] = {(0, False): _Class(), (0, True): _Class()}
        self._fresh = self._classes[0, False].ordered, self._classes[0, True].ordered
        self._place: list[_Place] = [(0, True)] * num_blocks
        self._stamps = [0] * num_blocks
        self._newest = self._oldest = self._num_settled = 0
        self.held_by: list[dict[int, None] | None] = [None] * num_blocks
        """Of each block the dict to delete it from, None where it is not in the order. Read, and
        emptied by :meth:`take_out`, in the loop over a whole history."""

    def __len__(self) -> int:
        return sum(len(held.ordered) + len(held.late) for held in self._classes.values())

    def __contains__(self, block: int) -> bool:
        return self.held_by[block] is not None

    @property
    def num_added(self) -> int:
        """How often a block has joined so far, or has come to go sooner."""
        return self._newest - self._oldest + self._num_settled

    def add(self, block: int, *, full: bool, to_cold_end: bool = False) -> None:
        """A block was released: the last to go of its class, or the first."""
        into = self._fresh[full]
        into[block] = None
        self.held_by[block] = into
        self._place[block] = (0, full)
        if to_cold_end:
            self._oldest -= 1
            self._stamps[block] = self._oldest
            into.move_to_end(block, last=False)
        else:
            self._newest += 1
            self._stamps[block] = self._newest

    def take_out(self, block: int) -> bool:
        """The block is held, or free; whether it was in the order."""
        held_by = self.held_by[block]
        if held_by is None:
            return False
        del held_by[block]
        self.held_by[block] = None
        return True

    def settle(self, block: int) -> None:
        """The rank of a block may have fallen: it goes to its place among those of its new one."""
        if self.held_by[block] is None:
            return
        rank, full = self._place[block]
        true_rank = self._rank_of(block)
        if true_rank < rank:
            self._num_settled += 1
            self._move((block,), (true_rank, full))

    def coldest(self, count: int, passing_over: Container[int] = ()) -> list[int]:
        """Up to ``count`` blocks in the order in which they are to go.

        Moves blocks whose rank has risen to their lists on the way: each is moved once for each
        time it was released, so the cost is O(count) amortised.
        """
        found: list[int] = []
        done: set[_Place] = set()
        while len(found) < count and (waiting := self._classes.keys() - done):
            place = min(waiting)
            done.add(place)
            self._collect(place, count, passing_over, found)
        return found

    def _collect(
        self, place: _Place, count: int, passing_over: Container[int], found: list[int]
    ) -> None:
        rank, full = place
        rank_of, wanted = self._rank_of, count - len(found)
        risen: dict[int, list[int]] = {}
        for block in self._classes[place].coldest_first(self._stamps):
            if block in passing_over:
                continue
            true_rank = rank_of(block)
            if true_rank > rank:
                risen.setdefault(true_rank, []).append(block)
                continue
            found.append(block)
            wanted -= 1
            if not wanted:
                break
        for true_rank, blocks in risen.items():
            self._move(blocks, (true_rank, full))

    def _move(self, blocks: Iterable[int], place: _Place) -> None:
        """Blocks go to the list of their rank: the loop over a whole history."""
        held_by, stamps, place_of = self.held_by, self._stamps, self._place
        into = self._classes.get(place)
        if into is None:
            into = self._classes[place] = _Class()
        for block in blocks:
            if (listed := held_by[block]) is not None:
                del listed[block]
            held_by[block] = into.put(block, stamps)
            place_of[block] = place
