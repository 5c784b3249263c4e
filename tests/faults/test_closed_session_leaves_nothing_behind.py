"""Deleting a session frees exactly what it alone owned, in one go, and a shared prefix stays."""

import pytest

from sessionkv.errors import SessionNotFound, TurnCancelled
from sessionkv.types import Tier
from tests.builders.checksum import tokens
from tests.builders.doors import Hold, Later, open_door
from tests.builders.engine import GREEDY, engine_config, greedy
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


@pytest.mark.parametrize("keep", [True, False])
def test_closing_while_it_decodes_ends_the_turn_and_frees_its_blocks(tmp_path, keep):
    hold = Hold()
    config = engine_config(tmp_path, blocks=4096, host_blocks=64, disk_bytes=50_000_000)
    with open_door("engine", config, gate=hold.gate, runner={"script": hold.script}) as door:
        shared = tokens(8)
        for name in ("a", "b"):
            session = door.client.open(name)
            session.turn(tokens=[*shared, *[ord(name)] * 9], sampling=greedy(2))
        door.client.flush()
        gone = door.parts.tree.session_keys("local", "a").exclusive
        session = door.client.session("a")
        running = Later(lambda: session.turn(tokens=[1], sampling=greedy(None, ignore_eos=False)))
        while not session.info().running:
            pass
        session.close(keep=keep)
        assert isinstance(running.error(), TurnCancelled)
        session.close(keep=keep)
        hold.release()
        info = door.client.session("b").info()
        if keep:
            assert door.client.session("a").info().turns == 1
            assert info.bytes["device"].shared > 0
            door.client.delete("a")
            info = door.client.session("b").info()
        with pytest.raises(SessionNotFound):
            door.client.delete("a")
        assert [tier.shared for tier in info.bytes.values()] == [0, 0, 0]
        door.client.flush()
        assert len(gone) == 3  # two full blocks, and a tail that the running turn grew
        assert [door.parts.kv.tiers_of(key) for key in gone] == [()] * len(gone)
        owned = set(door.parts.tree.session_keys("local", "b").exclusive)
        # Full blocks of the cancelled turn may stay as cold cache: nothing retains them.
        assert {key for key in door.parts.kv.resident_keys() if retained(door, key)} <= owned
        result = door.client.session("b").turn(tokens=[3], sampling=GREEDY)
        assert result.cache.computed_tokens == 2
        door.assert_ledger()


def retained(door, key):
    return bool(door.parts.tree.retention.owners(key))
