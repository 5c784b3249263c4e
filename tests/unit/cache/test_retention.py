import pytest

from sessionkv.cache import retention as module
from sessionkv.cache.retention import Retention
from sessionkv.cache.retention_view import PINNED
from sessionkv.errors import PinRefused
from sessionkv.types import Tier
from tests.builders.tree import TENANT, Sessions, full_hashes, tail_key

P = PINNED + 50  # the default priority


def ranks(s, keys, tier):
    return [s.tree.retention.rank(key, tier) for key in keys]


def test_rank_is_unretained_retained_or_pinned_in_that_tier():
    s = Sessions()
    s.open("a")
    s.turn("a", range(10))
    keys = [*full_hashes(range(10)), tail_key(list(range(10)))]
    assert ranks(s, [*keys, b"unknown"], Tier.HOST) == [1, 1, 1, 0]
    s.commit(s.tree.pin(TENANT, "a", tier="device", now=3.0))
    assert ranks(s, keys, Tier.DEVICE) == [P, P, P]
    assert ranks(s, keys, Tier.HOST) == [1, 1, 1]
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=3.0))
    assert ranks(s, keys, Tier.DEVICE) == [1, 1, 1]
    assert ranks(s, keys, Tier.HOST) == [P, P, P]
    s.commit(s.tree.unpin(TENANT, "a", now=4.0))
    assert ranks(s, keys, Tier.HOST) == [1, 1, 1]


def test_of_several_pins_in_a_tier_the_highest_priority_counts():
    s = Sessions()
    s.open("a")
    s.turn("a", range(5))
    s.commit(s.tree.fork(TENANT, "a", "b", now=3.0))
    s.turn("b", range(5, 9))
    first, second = full_hashes(range(9))
    s.commit(s.tree.pin(TENANT, "a", tier="host", priority=30, now=3.0))
    s.commit(s.tree.pin(TENANT, "b", tier="host", priority=70, now=3.0))
    assert ranks(s, [first, second], Tier.HOST) == [PINNED + 70, PINNED + 70]
    s.commit(s.tree.pin(TENANT, "b", tier="host", priority=10, now=4.0))
    assert ranks(s, [first, second], Tier.HOST) == [PINNED + 30, PINNED + 10]
    s.commit(s.tree.unpin(TENANT, "a", now=5.0))
    assert ranks(s, [first, second], Tier.HOST) == [PINNED + 10, PINNED + 10]
    assert s.tree.retention.pinned_bytes(Tier.HOST) == 200


def test_pins_follow_their_head():
    s = Sessions()
    s.open("a")
    s.turn("a", range(5))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=3.0))
    s.turn("a", range(5, 13))
    hashes = full_hashes(range(13))
    assert ranks(s, hashes, Tier.HOST) == [P, P, P]
    s.commit(s.tree.fork(TENANT, "a", "b", now=3.0))
    s.commit(s.tree.rewind(TENANT, "a", 1, now=4.0))
    assert ranks(s, hashes, Tier.HOST) == [P, 1, 1]
    s.commit(s.tree.delete(TENANT, "a"))
    assert ranks(s, hashes, Tier.HOST) == [1, 1, 1]


def test_a_shared_block_is_pinned_in_every_tier_that_a_pin_names():
    s = Sessions()
    s.open("a")
    s.turn("a", range(5))
    s.commit(s.tree.fork(TENANT, "a", "b", now=3.0))
    s.commit(s.tree.pin(TENANT, "a", tier="device", now=3.0))
    s.commit(s.tree.pin(TENANT, "b", tier="host", now=3.0))
    [shared] = full_hashes(range(5))
    assert [s.tree.retention.rank(shared, tier) for tier in Tier] == [P, P, 1]
    s.commit(s.tree.unpin(TENANT, "a", now=4.0))
    assert [s.tree.retention.rank(shared, tier) for tier in Tier] == [1, P, 1]


def test_equal_content_of_another_session_is_pinned_with_it():
    s = Sessions()
    for name in ("a", "b"):
        s.open(name)
        s.turn(name, range(5))
    [key] = full_hashes(range(5))
    for name in ("a", "b"):
        s.commit(s.tree.pin(TENANT, name, tier="host", now=3.0))
    assert s.tree.retention.pinned_bytes(Tier.HOST) == 100
    s.commit(s.tree.delete(TENANT, "a"))
    assert s.tree.retention.rank(key, Tier.HOST) == P
    s.commit(s.tree.delete(TENANT, "b"))
    assert s.tree.retention.rank(key, Tier.HOST) == 0


def test_a_pin_falls_off_at_its_end_and_session_and_log_stay():
    s = Sessions()
    s.open("a")
    s.turn("a", range(5))
    [key] = full_hashes(range(5))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=10.0, ttl_s=5.0, priority=7))
    assert s.tree.expire(14.9) is None
    assert not s.tree.retention.pin_lapsed(key)
    change = s.commit(s.tree.expire(15.0))
    assert len(change.ops) == 1
    head = s.tree.head(TENANT, "a")
    assert (head.pin_tier, head.pin_expires_s, head.pin_priority) == ("", None, 0)
    assert s.tree.retention.rank(key, Tier.HOST) == 1
    assert s.tree.retention.pin_lapsed(key)
    assert s.tokens("a") == list(range(5))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=16.0))
    assert not s.tree.retention.pin_lapsed(key)
    assert s.tree.expire(1e9) is None


def test_a_longer_pin_outlives_the_end_of_the_first():
    s = Sessions()
    s.open("a")
    s.turn("a", range(5))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=10.0, ttl_s=5.0))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=11.0, ttl_s=9.0))
    assert s.tree.expire(19.0) is None
    assert len(s.tree.expire(20.0).ops) == 1


def test_of_two_heads_the_later_end_counts():
    s = Sessions()
    s.open("a")
    s.turn("a", range(5))
    s.commit(s.tree.fork(TENANT, "a", "b", now=3.0))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=10.0, ttl_s=5.0))
    s.commit(s.tree.pin(TENANT, "b", tier="host", now=10.0, ttl_s=9.0))
    [key] = full_hashes(range(5))
    s.commit(s.tree.expire(16.0))
    assert s.tree.retention.rank(key, Tier.HOST) == P
    assert not s.tree.retention.pin_lapsed(key)
    s.commit(s.tree.expire(19.0))
    assert s.tree.retention.rank(key, Tier.HOST) == 1


def test_pins_end_after_a_restart_too():
    s = Sessions()
    s.open("a")
    s.turn("a", range(5))
    s.commit(s.tree.pin(TENANT, "a", tier="host", now=10.0, ttl_s=5.0))
    s.restart()
    [key] = full_hashes(range(5))
    assert s.tree.retention.rank(key, Tier.HOST) == P
    s.commit(s.tree.expire(15.0))
    assert s.tree.retention.rank(key, Tier.HOST) == 1


def test_pins_are_refused_past_80_percent_of_the_cap_each_block_once():
    held = Retention(block_bytes=10, caps={Tier.HOST: 100})
    keys = [bytes([i]) for i in range(9)]
    held.check_pin(Tier.HOST, keys[:8])
    held.own(keys[:6])
    held.pin((Tier.HOST, 50), keys[:6])
    held.check_pin(Tier.HOST, keys[:8])
    with pytest.raises(PinRefused) as error:
        held.check_pin(Tier.HOST, keys)
    assert error.value.details == {"tier": "host", "needed_bytes": 90, "allowed_bytes": 80}
    with pytest.raises(PinRefused) as error:
        held.check_pin(Tier.DISK, keys[:1])
    assert error.value.details == {"tier": "disk", "needed_bytes": 10, "allowed_bytes": 0}


def test_letting_go_of_what_is_not_owned_raises():
    held = Retention(block_bytes=10, caps={})
    held.own([b"a"])
    assert held.disown([b"a"]) == [b"a"]
    with pytest.raises(KeyError):
        held.disown([b"a"])


def test_memory_of_lapsed_pins_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_LAPSED", 2)
    held = Retention(block_bytes=10, caps={})
    held.note_lapsed([b"a", b"b", b"c"])
    assert [held.pin_lapsed(key) for key in (b"a", b"b", b"c")] == [False, True, True]
