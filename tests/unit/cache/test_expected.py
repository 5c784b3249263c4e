"""Sessions waited for while a tool runs: for how long, over whom, and who is never harmed."""

from __future__ import annotations

import pytest

from benchmarks.store.retention import run
from sessionkv.cache.expected import (
    DEFAULT_TTL_S,
    GAPS,
    LEAST_GAPS,
    MARGIN,
    MAX_TTL_S,
    ExpectedReturns,
)
from sessionkv.cache.retention import Retention
from sessionkv.cache.retention_view import EXPECTED, PINNED, RETAINED, UNRETAINED
from sessionkv.types import BlockHash, Tier

A, B = ("local", "a"), ("local", "b")


def keys(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode()) for name in names]


class Waiting:
    def __init__(self, max_blocks: int = 100) -> None:
        self.retention = Retention(block_bytes=1, caps={Tier.DEVICE: 100})
        self.returns = ExpectedReturns(self.retention, max_blocks=max_blocks)

    def own(self, *names: str) -> list[BlockHash]:
        self.retention.own(keys(*names))
        return keys(*names)

    def ranks(self, *names: str, tier: Tier = Tier.DEVICE) -> list[int]:
        return [self.retention.rank(key, tier) for key in keys(*names)]

    def gaps(self, *gaps_s: float, tenant: str = "local") -> None:
        for gap_s in gaps_s:
            self.returns.called((tenant, "learning"), (), None, 0.0)
            self.returns.turn_began((tenant, "learning"), gap_s)


def test_what_waits_for_a_tool_is_above_the_retained_and_below_every_pin() -> None:
    w = Waiting()
    held = w.own("1", "2")
    w.own("other", "pinned")
    w.retention.pin((Tier.DEVICE, 0), keys("pinned"))
    w.returns.called(A, held, None, 0.0)
    assert w.ranks("1", "2", "other", "pinned") == [EXPECTED, EXPECTED, RETAINED, PINNED]
    assert w.ranks("1", "other", tier=Tier.HOST) == [EXPECTED, RETAINED]
    assert w.ranks("1", tier=Tier.DISK) == [RETAINED]


def test_it_falls_when_its_time_is_over_and_that_is_told() -> None:
    w = Waiting()
    w.returns.called(A, w.own("1", "2"), keys("tail")[0], 10.0)
    w.own("tail")
    w.returns.expire(10.0 + DEFAULT_TTL_S - 0.1)
    assert w.ranks("1", "2", "tail") == [EXPECTED] * 3
    assert w.retention.take_fallen() == ()
    w.returns.expire(10.0 + DEFAULT_TTL_S)
    assert w.ranks("1", "2", "tail") == [RETAINED] * 3
    assert sorted(w.retention.take_fallen()) == keys("1", "2", "tail")
    assert (len(w.returns), w.returns.num_blocks) == (0, 0)


def test_a_turn_that_ends_otherwise_ends_the_wait() -> None:
    w = Waiting()
    w.returns.called(A, w.own("1"), None, 0.0)
    w.returns.turn_began(A, 5.0)
    w.returns.expire(5.0 + DEFAULT_TTL_S)  # the turn takes longer than the tool did
    assert w.ranks("1") == [EXPECTED]
    w.returns.forget(A)
    assert w.ranks("1") == [RETAINED]
    w.returns.forget(A)
    assert w.returns.num_blocks == 0


def test_a_turn_that_never_ends_is_not_waited_for_for_ever() -> None:
    w = Waiting()
    w.returns.called(A, w.own("1"), None, 0.0)
    w.returns.turn_began(A, 5.0)
    w.returns.expire(5.0 + MAX_TTL_S)
    assert w.ranks("1") == [RETAINED]


def test_the_next_call_of_a_session_holds_what_is_new_and_drops_the_old_tail() -> None:
    w = Waiting()
    w.returns.called(A, w.own("1"), w.own("t1")[0], 0.0)
    w.returns.turn_began(A, 3.0)
    w.returns.called(A, w.own("1", "2"), w.own("t2")[0], 4.0)
    assert w.ranks("1", "t1", "2", "t2") == [EXPECTED, RETAINED, EXPECTED, EXPECTED]
    assert w.retention.take_fallen() == tuple(keys("t1"))
    assert w.returns.num_blocks == 3
    w.returns.turn_began(A, 5.0)
    w.returns.called(A, w.own("1", "other"), None, 6.0)  # the history was edited
    assert w.ranks("1", "2", "other") == [EXPECTED, RETAINED, EXPECTED]


def test_what_two_sessions_hold_stays_for_the_other() -> None:
    w = Waiting()
    w.returns.called(A, w.own("1", "2"), None, 0.0)
    w.returns.called(B, w.own("1", "3"), None, 0.0)
    w.returns.forget(A)
    assert w.ranks("1", "2", "3") == [EXPECTED, RETAINED, EXPECTED]


def test_the_wait_is_what_nine_in_ten_calls_took_and_a_quarter_more() -> None:
    w = Waiting()
    w.gaps(*[1.0] * (LEAST_GAPS - 1))
    assert w.returns.ttl_s("local") == DEFAULT_TTL_S
    w.gaps(*[1.0] * (20 - LEAST_GAPS + 1))
    assert w.returns.ttl_s("local") == MARGIN
    w.gaps(*range(10, 20))
    assert w.returns.ttl_s("local") == 16 * MARGIN
    w.gaps(*[2.0] * GAPS)
    assert w.returns.ttl_s("local") == 2 * MARGIN
    w.gaps(*[1e9] * GAPS)
    assert w.returns.ttl_s("local") == MAX_TTL_S
    assert w.returns.ttl_s("another") == DEFAULT_TTL_S


def test_a_call_that_took_longer_than_it_was_waited_for_teaches_too() -> None:
    w = Waiting()
    for start_s in (0.0, 1000.0, 2000.0, 3000.0):
        w.returns.called(A, w.own("1"), None, start_s)
        w.returns.expire(start_s + 100.0)
        w.returns.turn_began(A, start_s + 100.0)
        w.returns.forget(A)
    assert w.returns.ttl_s("local") == 100 * MARGIN


def test_past_its_part_of_memory_the_longest_wait_ends_first() -> None:
    w = Waiting(max_blocks=4)
    w.returns.called(A, w.own("1", "2"), None, 0.0)
    w.returns.called(B, w.own("3", "4"), None, 1.0)
    w.returns.called(("local", "c"), w.own("5"), None, 2.0)
    assert w.ranks("1", "2", "3", "4", "5") == [RETAINED, RETAINED, *[EXPECTED] * 3]
    w.returns.called(("local", "d"), w.own(*"abcdefgh"), None, 3.0)  # more than there may be
    assert w.returns.num_blocks == 0
    assert w.ranks("a", "5") == [RETAINED, RETAINED]


def test_of_a_deleted_session_nothing_is_left_over() -> None:
    w = Waiting()
    w.returns.called(A, w.own("1"), None, 0.0)
    w.retention.disown(keys("1"))
    w.returns.expire(DEFAULT_TTL_S)
    assert w.ranks("1") == [UNRETAINED]


@pytest.mark.parametrize("seed", [1, 2])
def test_more_is_found_than_by_plain_order_of_use_and_nobody_pays_for_it(seed: int) -> None:
    # Half of what agents and people have fits, and passers-by push it out.
    found = run(num_sessions=16, num_turns=500, seed=seed)
    assert found["learned"].all > found["lru"].all + 0.05
    assert found["learned"].agents > found["lru"].agents + 0.1
    assert found["learned"].people > found["lru"].people - 0.02
