"""Entries and children: exact lookups, longest partial match, no change by asking."""

import random

import pytest

from sessionkv.cache.chain import full_key, partial_key
from sessionkv.cache.prefix_index import Entry, PrefixIndex, common_prefix
from sessionkv.types import BlockHash, BlockRecord, Tier

PARENT = BlockHash(b"p" * 32)
B = 4


def record(*token_ids: int, parent: BlockHash = PARENT) -> BlockRecord:
    key = (full_key if len(token_ids) == B else partial_key)(parent, token_ids)
    return BlockRecord(key, parent, token_ids)


def index_of(*records: BlockRecord, tier: Tier = Tier.DEVICE) -> PrefixIndex:
    index = PrefixIndex()
    for number, item in enumerate(records):
        device = number if tier is Tier.DEVICE else None
        index.add(Entry(item, device=device, host=None if tier is Tier.DEVICE else number))
    return index


def test_a_hit_needs_equal_key_parent_and_tokens() -> None:
    true = record(1, 2, 3, 4)
    index = index_of(true)
    assert index.find(true) is index.get(true.key) is not None
    assert index.find(BlockRecord(true.key, true.parent, (1, 2, 3, 5))) is None
    assert index.find(BlockRecord(true.key, BlockHash(b"q" * 32), true.token_ids)) is None
    assert index.find(record(4, 3, 2, 1)) is None


def test_a_key_is_added_once() -> None:
    index = index_of(record(1, 2, 3, 4))
    with pytest.raises(KeyError):
        index.add(Entry(record(1, 2, 3, 4)))


def test_removing_leaves_no_trace() -> None:
    one, other = record(1, 2, 3, 4), record(1, 2)
    index = index_of(one, other)
    index.remove(index.entries[one.key])
    assert [entry.record for entry in index.children(PARENT)] == [other]
    assert index.best_child(PARENT, [1, 2, 3]) == (index.entries[other.key], 2)
    index.remove(index.entries[other.key])
    assert (len(index), index.children(PARENT)) == (0, [])
    assert index.best_child(PARENT, [1, 2, 3]) is None


def test_the_longest_common_prefix_wins() -> None:
    index = index_of(record(1, 9, 9, 9), record(1, 2, 9, 9), record(1, 2, 3, 9), record(2, 2, 3, 4))
    best = index.best_child(PARENT, [1, 2, 3, 4])
    assert best is not None
    assert (best[0].record.token_ids, best[1]) == ((1, 2, 3, 9), 3)


def test_nothing_in_common_is_no_match() -> None:
    assert index_of(record(1, 2, 3, 4)).best_child(PARENT, [2, 2, 3]) is None
    assert index_of(record(1, 2, 3, 4)).best_child(BlockHash(b"q" * 32), [1]) is None


def test_children_of_another_parent_do_not_match() -> None:
    index = index_of(record(1, 2, 3, 4, parent=BlockHash(b"q" * 32)))
    assert index.best_child(PARENT, [1, 2, 3]) is None


def test_of_equal_matches_a_tail_that_ends_there_is_preferred() -> None:
    tail = record(1, 2)
    index = index_of(record(1, 2, 0, 0), tail, record(1, 2, 5, 0), record(1, 2, 9, 9))
    best = index.best_child(PARENT, [1, 2, 7])
    assert best is not None
    assert (best[0].record, best[1]) == (tail, 2)


def test_of_equal_matches_one_on_the_device_is_preferred() -> None:
    near, far = record(1, 2, 9), record(1, 2)
    index = PrefixIndex()
    index.add(Entry(near, device=0))
    index.add(Entry(far, host=0))
    best = index.best_child(PARENT, [1, 2, 3])
    assert best is not None
    assert (best[0].record, best[1]) == (near, 2)


def test_best_child_agrees_with_comparing_all() -> None:
    random_ = random.Random(7)
    for _ in range(300):
        index = PrefixIndex()
        for _ in range(random_.randrange(1, 12)):
            item = record(*(random_.randrange(3) for _ in range(random_.randrange(1, B + 1))))
            if index.find(item) is None:
                index.add(Entry(item, device=0))
        wanted = [random_.randrange(3) for _ in range(random_.randrange(1, B))]
        longest = max(common_prefix(e.record.token_ids, wanted) for e in index.children(PARENT))
        best = index.best_child(PARENT, wanted)
        assert (0 if best is None else best[1]) == longest
        if best is not None:
            assert common_prefix(best[0].record.token_ids, wanted) == longest
