"""The order in which blocks go: exact, also where ranks rise and fall. Against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sessionkv.cache.eviction_order import EvictionOrder


class Ordered:
    """An order whose ranks a test sets, and what it has to be."""

    def __init__(self, num_blocks: int) -> None:
        self.ranks = [0] * num_blocks
        self.order = EvictionOrder(num_blocks, self.ranks.__getitem__)
        self.stamps: dict[int, tuple[bool, int]] = {}
        self._clock = 0

    def add(self, block: int, *, full: bool = True, cold: bool = False) -> None:
        self._clock += 1
        self.order.add(block, full=full, to_cold_end=cold)
        self.stamps[block] = full, -self._clock if cold else self._clock

    def take_out(self, block: int) -> None:
        assert self.order.take_out(block) == (self.stamps.pop(block, None) is not None)

    def rank(self, block: int, rank: int) -> None:
        fell = rank < self.ranks[block]
        self.ranks[block] = rank
        if fell:
            self.order.settle(block)

    def expected(self) -> list[int]:
        return sorted(self.stamps, key=lambda b: (self.ranks[b], *self.stamps[b]))


def test_blocks_go_by_rank_then_tails_first_then_least_recently_released() -> None:
    made = Ordered(8)
    for block in range(8):
        made.add(block, full=block not in (5, 6))
    for block, rank in ((0, 53), (1, 1), (2, 103), (5, 1), (7, 2)):
        made.rank(block, rank)
    assert made.order.coldest(8) == [6, 3, 4, 5, 1, 7, 0, 2]


def test_a_pin_that_ends_in_the_middle_of_the_pinned_puts_its_blocks_among_their_like() -> None:
    made = Ordered(6)
    for block in range(6):
        made.add(block)
    for block in (1, 3, 4):
        made.rank(block, 53)
    for block in (0, 2, 5):
        made.rank(block, 1)
    assert made.order.coldest(6) == [0, 2, 5, 1, 3, 4]
    made.rank(3, 1)  # neither the coldest of the pinned nor of those it joins
    assert made.order.coldest(6) == [0, 2, 3, 5, 1, 4]
    made.rank(4, 0)
    assert made.order.coldest(2) == [4, 0]


def test_a_block_that_is_pinned_late_goes_where_its_last_use_puts_it() -> None:
    made = Ordered(4)
    for block in range(4):
        made.add(block)
    made.rank(0, 1)
    made.rank(1, 53)
    made.rank(3, 53)
    assert made.order.coldest(4) == [2, 0, 1, 3]
    made.rank(0, 53)
    assert made.order.coldest(4) == [2, 0, 1, 3]
    made.rank(2, 53)
    assert made.order.coldest(4) == [0, 1, 2, 3]


def test_what_is_demoted_is_the_first_of_its_rank() -> None:
    made = Ordered(4)
    for block in (0, 1):
        made.add(block)
    for block in (2, 3):
        made.add(block, cold=True)
        made.rank(block, 1)
    made.rank(0, 1)
    assert made.order.coldest(4) == [1, 3, 2, 0]


def test_blocks_passed_over_keep_their_place() -> None:
    made = Ordered(3)
    for block in range(3):
        made.add(block)
    assert made.order.coldest(2, {0}) == [1, 2]
    assert made.order.coldest(3) == [0, 1, 2]
    assert len(made.order) == 3


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "demote", "out", "rank", "rank", "look"]),
        st.integers(0, 11),
        st.sampled_from([0, 1, 2, 3, 53]),
        st.booleans(),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_order_is_always_that_of_a_sorted_list(steps) -> None:
    made = Ordered(12)
    for kind, block, number, full in steps:
        if kind in ("add", "demote") and block not in made.stamps:
            made.add(block, full=full, cold=kind == "demote")
        elif kind == "out":
            made.take_out(block)
        elif kind == "rank":
            made.rank(block, number)
        elif kind == "look":
            assert made.order.coldest(number) == made.expected()[:number]
        assert len(made.order) == len(made.stamps)
    assert made.order.coldest(12) == made.expected()
    assert [b for b in range(12) if b in made.order] == sorted(made.stamps)
