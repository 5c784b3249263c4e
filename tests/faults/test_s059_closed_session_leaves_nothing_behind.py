"""Deleting a session frees exactly what it alone owned, in one go, and a shared prefix stays."""

import pytest

from sessionkv.errors import SessionNotFound
from sessionkv.types import Tier
from tests.builders.tree import TENANT, Sessions, full_hashes, tail_key

SHARED = list(range(8))


def test_of_two_sessions_with_one_prefix_the_other_keeps_it():
    s = Sessions()
    for name, own in (("a", range(50, 55)), ("b", range(60, 66))):
        s.open(name)
        s.turn(name, [*SHARED, *own])
    mine, theirs = [*SHARED, *range(50, 55)], [*SHARED, *range(60, 66)]
    change = s.commit(s.tree.delete(TENANT, "a"))
    assert sorted(change.freed_keys) == sorted(full_hashes(mine)[2:])
    kept = [*full_hashes(theirs), tail_key(theirs)]
    assert [s.tree.retention.rank(key, Tier.DISK) for key in kept] == [1, 1, 1, 1]
    assert s.tree.retention.num_keys == 4


def test_a_pin_goes_with_its_session_and_no_key_stays():
    s = Sessions()
    s.open("a")
    s.turn("a", SHARED)
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=3.0, ttl_s=60.0))
    s.commit(s.tree.delete(TENANT, "a"))
    assert s.tree.retention.pinned_bytes(Tier.HOST) == 0
    assert (s.tree.retention.num_keys, s.tree.num_nodes) == (0, 0)
    assert s.tree.expire(1e9) is None
    assert (s.journal.nodes, s.journal.heads) == ({}, {})


def test_second_deletion_is_not_found():
    s = Sessions()
    s.open("a")
    s.commit(s.tree.delete(TENANT, "a"))
    with pytest.raises(SessionNotFound):
        s.tree.delete(TENANT, "a")
