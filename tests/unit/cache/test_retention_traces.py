"""Traces of sessions over device and host, and the exact order in which their blocks then go.

``a0`` is the first full block of session ``a``, ``a+`` its unfilled tail.
"""

from __future__ import annotations

from sessionkv.cache.expected import DEFAULT_TTL_S, ExpectedReturns
from sessionkv.cache.retention import Retention
from sessionkv.types import BlockHash, Tier
from tests.builders.kv_world import B, World

ALL_TIERS = dict.fromkeys(Tier, 10**6)


class Sessions:
    """Sessions over a cache: turns own their blocks, as the tree of turns makes them."""

    def __init__(self, device_blocks: int, host_blocks: int = 0) -> None:
        self.retention = Retention(block_bytes=1, caps=ALL_TIERS)
        self.returns = ExpectedReturns(self.retention, max_blocks=100)
        self.world = World(
            device_blocks=device_blocks, host_blocks=host_blocks, retention=self.retention
        )
        self.names: dict[BlockHash, str] = {}
        self.logs: dict[str, list[int]] = {}
        self.owned: dict[str, list[BlockHash]] = {}
        self._strangers = 0

    def turn(self, name: str, num_tokens: int, *, retained: bool = True) -> None:
        """The session's log grows; what it has in the end is its own."""
        log = self.logs.setdefault(name, [])
        log += [100 + ord(name)] * num_tokens
        chain = self.world.chain(log)
        tail = chain.tail_record(len(log))
        keys = [*chain.hashes, *([tail.key] if tail else [])]
        self.names |= {key: f"{name}{i}" for i, key in enumerate(chain.hashes)}
        if tail:
            self.names[tail.key] = f"{name}+"
        self.world.turn(log)
        if retained:
            self.retention.own(keys)
        self.retention.disown(self.owned.pop(name, []))
        if retained:
            self.owned[name] = keys

    def pin(self, name: str, priority: int, tier: Tier = Tier.DEVICE) -> None:
        self.retention.pin((tier, priority), self.owned[name])

    def unpin(self, name: str, priority: int, tier: Tier = Tier.DEVICE) -> None:
        self.retention.unpin((tier, priority), self.owned[name])

    def called(self, name: str, now: float) -> None:
        self.returns.called(("local", name), self.owned[name], None, now)

    def order(self, tier: Tier = Tier.DEVICE) -> str:
        """All that goes, first to last, one block at a time."""
        kv = self.world.kv
        kv.plan_transfers()
        pool = kv._residency.device if tier is Tier.DEVICE else kv._residency.host
        one_by_one: list[str] = []
        for block in pool.coldest(pool.num_blocks):
            key = pool.key(block)
            assert key is not None
            one_by_one.append(self.names.get(key, "?"))
        return " ".join(one_by_one)

    def evict(self, count: int) -> str:
        """What a stranger's blocks push out, in order."""
        self._strangers += 1
        before = self.world.device_keys()
        gone: list[str] = []
        run = self.world.admit_now(self.world.chain([self._strangers] * (count * B)))
        for tokens in range(B, count * B + 1, B):
            self.world.stage_now(run, tokens)
            self.world.execute()
            left = before - self.world.device_keys()
            gone += [self.names[key] for key in left]
            before -= left
        self.world.finish(run)
        return " ".join(gone)


def test_unretained_then_unpinned_then_pinned_by_priority_and_in_each_by_use_leaf_first() -> None:
    s = Sessions(17)
    s.turn("a", 8)
    s.turn("b", 10)
    s.turn("x", 8, retained=False)
    s.turn("c", 8)
    s.turn("d", 8)
    s.turn("e", 8)
    s.turn("f", 8)
    s.pin("a", 70)
    s.pin("c", 20)
    s.called("d", 0.0)
    assert s.order() == "x1 x0 b+ b1 b0 e1 e0 f1 f0 d1 d0 c1 c0 a1 a0"
    s.turn("b", 4)  # used again: its new tail takes the place of the old one
    assert s.order() == "x1 x0 b+ e1 e0 f1 f0 b2 b1 b0 d1 d0 c1 c0 a1 a0"


def test_the_order_is_that_in_which_blocks_really_go() -> None:
    s = Sessions(10)
    for name in "abcde":
        s.turn(name, 8)
    s.pin("b", 50)
    s.pin("a", 50)
    s.pin("d", 10)
    assert s.order() == "c1 c0 e1 e0 d1 d0 a1 a0 b1 b0"
    assert s.evict(10) == "c1 c0 e1 e0 d1 d0 a1 a0 b1 b0"


def test_pins_that_end_and_waits_that_run_out_put_blocks_back_among_their_like() -> None:
    s = Sessions(12)
    for name in "abcdef":
        s.turn(name, 8)
    s.pin("a", 50)
    s.pin("c", 50)
    s.called("b", 0.0)
    s.called("e", 1.0)
    assert s.order() == "d1 d0 f1 f0 b1 b0 e1 e0 a1 a0 c1 c0"
    s.unpin("c", 50)
    assert s.order() == "c1 c0 d1 d0 f1 f0 b1 b0 e1 e0 a1 a0"
    s.returns.expire(DEFAULT_TTL_S)
    assert s.order() == "b1 b0 c1 c0 d1 d0 f1 f0 e1 e0 a1 a0"
    s.retention.disown(s.owned["d"])
    assert s.order() == "d1 d0 b1 b0 c1 c0 f1 f0 e1 e0 a1 a0"
    assert s.evict(3) == "d1 d0 b1"


def test_of_what_sessions_share_the_best_counts() -> None:
    s = Sessions(9)
    s.turn("a", 8)
    s.owned["b"] = [*s.owned["a"][:1]]  # a fork that was rewound to the first block
    s.retention.own(s.owned["b"])
    s.turn("c", 8)
    s.turn("d", 8)
    s.pin("a", 20)
    s.pin("b", 60)
    s.pin("c", 40)
    assert s.order() == "d1 d0 a1 c1 c0 a0"
    s.retention.unpin((Tier.DEVICE, 60), s.owned["b"])
    assert s.order() == "d1 d0 a1 a0 c1 c0"
    s.retention.unpin((Tier.DEVICE, 20), s.owned["a"])
    s.retention.disown(s.owned["a"])
    assert s.order() == "a1 a0 d1 d0 c1 c0"


def test_each_tier_has_an_order_of_its_own() -> None:
    s = Sessions(8, host_blocks=20)
    for name in "abcd":
        s.turn(name, 8)
    s.pin("a", 50, Tier.HOST)
    s.pin("b", 50)
    assert s.order() == "a1 a0 c1 c0 d1 d0 b1 b0"
    s.turn("z", 32)
    assert s.order(Tier.HOST) == "c1 c0 d1 d0 b1 b0 a1 a0"
