"""What a larger tier would have kept, against caches that really are larger."""

from collections import OrderedDict

import pytest

from sessionkv.cache.ghosts import Ghosts
from sessionkv.types import BlockHash


def key(number: int) -> BlockHash:
    return BlockHash(b"%d" % number)


def hits(trace: list[int], blocks: int) -> tuple[int, Ghosts]:
    """Hits of a plain LRU cache of so many blocks, and its ghosts."""
    held: OrderedDict[int, None] = OrderedDict()
    ghosts, found = Ghosts(), 0
    for number in trace:
        if number in held:
            found += 1
            held.move_to_end(number)
            continue
        ghosts.look_up([key(number)])
        if len(held) == blocks:
            ghosts.left([key(held.popitem(last=False)[0])])
        held[number] = None
    return found, ghosts


@pytest.mark.parametrize("more", [1, 2, 4, 8])
def test_so_many_more_hits_as_a_larger_cache_has(more: int) -> None:
    trace = [*range(12)] * 4  # a loop that is longer than the cache: each use is a miss
    found, ghosts = hits(trace, 4)
    larger, _ = hits(trace, 4 + more)
    assert found == 0
    assert dict(ghosts.by_size()).get(more, 0) == larger == (36 if more == 8 else 0)


def test_distances_are_counted_by_the_next_power_of_two() -> None:
    ghosts = Ghosts()
    ghosts.left(map(key, range(8)))  # 7 left last: one more block would have kept it
    for number in (7, 6, 5, 4, 0):
        ghosts.look_up([key(number)])
    assert ghosts.by_size() == [(1, 1), (2, 2), (4, 4), (8, 5)]
    assert ghosts.num_wanted == 5


def test_each_departure_counts_once_and_memory_is_bounded() -> None:
    ghosts = Ghosts(limit=2)
    ghosts.left([key(1), key(2), key(3)])
    assert len(ghosts) == 2
    ghosts.look_up([key(1), key(3), key(3)])
    assert ghosts.by_size() == [(1, 1)]
    ghosts.left([key(3)])
    ghosts.look_up([key(3)])
    assert ghosts.by_size() == [(1, 2)]
