"""Quotas of tenants: what was used last is within, the rest ranks as if nobody wanted it."""

import random
from dataclasses import dataclass

import pytest

from sessionkv.cache.retention import Pin, Retention
from sessionkv.errors import PinRefused
from sessionkv.types import BlockHash, Tier
from sessionkv.types.access import TenantQuota


def keys(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode()) for name in names]


def retention(**blocks: int) -> Retention:
    """Tenant ``t`` has so many blocks of 10 bytes in each tier named; ``free`` has no quota."""
    made = Retention(block_bytes=10, caps=dict.fromkeys(Tier, 1000))
    quota = TenantQuota(**{f"{tier}_bytes": 10 * count + 9 for tier, count in blocks.items()})
    made.set_limits({"t": quota}, has_tenants=True)
    return made


def own(held: Retention, *names: str, pins: tuple[Pin, ...] = (), tenant: str = "t") -> None:
    """Each key as a part of its own, numbered by its name."""
    for name in names:
        held.own(keys(name), pins, tenant=tenant, part=ord(name))


def disown(held: Retention, *names: str) -> list[BlockHash]:
    return [key for n in names for key in held.disown(keys(n), tenant="t", part=ord(n))]


def use(held: Retention, *names: str) -> None:
    held.used([(ord(name), keys(name)) for name in names], tenant="t")


def ranks(held: Retention, tier: Tier, *names: str) -> list[int]:
    return [held.rank(key, tier) for key in keys(*names)]


def test_the_last_used_are_within_and_each_tier_counts_for_itself() -> None:
    held = retention(device=2, host=3)
    own(held, "a", "b", "c", "d")
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d") == [0, 0, 1, 1]
    assert ranks(held, Tier.HOST, "a", "b", "c", "d") == [0, 1, 1, 1]
    assert ranks(held, Tier.DISK, "a", "b", "c", "d") == [1, 1, 1, 1]
    assert set(held.take_fallen()) == set(keys("a", "b"))
    assert held.quotas.figures("t") == {
        "device": {"quota_bytes": 20, "retained_bytes": 20, "past_bytes": 20},
        "host": {"quota_bytes": 30, "retained_bytes": 30, "past_bytes": 10},
    }


def test_others_are_not_touched() -> None:
    held = retention(device=1)
    held.own(keys("x", "y", "z"), tenant="free")
    own(held, "a", "b")
    assert ranks(held, Tier.DEVICE, "x", "y", "z", "a", "b") == [1, 1, 1, 0, 1]


def test_of_a_log_that_is_used_the_start_stays() -> None:
    held = retention(device=3)
    log = [(1, keys("a", "b")), (2, keys("c", "d", "e"))]
    for number, part in log:
        held.own(part, tenant="t", part=number)
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d", "e") == [0, 0, 1, 1, 1]
    held.used(reversed(log), tenant="t")
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d", "e") == [1, 1, 1, 0, 0]
    held.used(log, tenant="t")
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d", "e") == [0, 0, 1, 1, 1]


def test_to_use_what_is_within_costs_a_step_a_part() -> None:
    class Counted(bytes):
        looked_at = 0

        def __hash__(self) -> int:
            Counted.looked_at += 1
            return super().__hash__()

    held = retention(device=500, host=300, disk=100)
    log = [(i, [BlockHash(Counted(f"{i} {j}".encode())) for j in range(100)]) for i in range(4)]
    for number, part in log:
        held.own(part, tenant="t", part=number)
    held.used(log, tenant="t")
    Counted.looked_at = 0
    held.used(log, tenant="t")
    assert Counted.looked_at < 40


def test_a_log_longer_than_its_quota_does_not_go_in_and_out() -> None:
    held = retention(device=3)
    log = [(1, keys("a", "b")), (2, keys("c", "d", "e"))]
    for number, part in log:
        held.own(part, tenant="t", part=number)
    held.used(reversed(log), tenant="t")
    held.take_fallen()
    held.used(reversed(log), tenant="t")
    assert held.take_fallen() == ()
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d", "e") == [1, 1, 1, 0, 0]


def test_what_nobody_owns_any_more_makes_room() -> None:
    held = retention(device=2)
    own(held, "a", "b", "c")
    held.own(keys("b"), tenant="t", part=1)
    assert disown(held, "b", "c") == keys("c")
    assert ranks(held, Tier.DEVICE, "a", "b") == [0, 1]
    use(held, "a")
    assert ranks(held, Tier.DEVICE, "a", "b") == [1, 1]
    disown(held, "a")
    held.disown(keys("b"), tenant="t", part=1)
    assert held.quotas.figures("t")["device"]["retained_bytes"] == 0


def test_what_leaves_memory_counts_on_and_what_was_past_is_forgotten() -> None:
    held = retention(disk=2)
    own(held, "a", "b", "c")
    held.forget(keys("a", "b", "c"), tenant="t")
    assert held.quotas.figures("t")["disk"] == {
        "quota_bytes": 20,
        "retained_bytes": 20,
        "past_bytes": 0,
    }
    held.take_fallen()
    own(held, "d")
    assert held.take_fallen() == (BlockHash(b"b"),)
    assert held.quotas.figures("t")["disk"]["past_bytes"] == 0


def test_what_is_pinned_stays_within() -> None:
    held = retention(device=2)
    own(held, "a", pins=((Tier.DEVICE, 50),))
    own(held, "b", "c", "d")
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d") == [53, 0, 0, 1]


def test_what_is_pinned_no_longer_counts_as_when_it_was_used() -> None:
    held = retention(device=2)
    own(held, "a", pins=((Tier.DEVICE, 50),))
    own(held, "b", "c")
    held.unpin((Tier.DEVICE, 50), keys("a"), tenant="t")
    assert ranks(held, Tier.DEVICE, "a", "b", "c") == [1, 0, 1]
    own(held, "d")
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d") == [0, 0, 1, 1]
    assert set(held.take_fallen()) == set(keys("a", "b"))
    disown(held, "a", "b", "c", "d")
    assert held.quotas.figures("t")["device"]["retained_bytes"] == 0


def test_pins_of_a_tenant_count_once_and_cost_what_is_new() -> None:
    held = retention(device=2)
    pin = (Tier.DEVICE, 50)
    held.own(keys("a"), [pin], tenant="t")
    held.own(keys("x", "y", "z"), [pin], tenant="free")
    assert held.quotas.pinned_bytes("t", Tier.DEVICE) == 10
    held.check_quota("t", Tier.DEVICE, keys("a", "b"))
    with pytest.raises(PinRefused):
        held.check_quota("t", Tier.DEVICE, keys("b", "c"))
    held.pin((Tier.DEVICE, 70), keys("a"), tenant="t")
    held.unpin(pin, keys("a"), tenant="t")
    assert held.quotas.pinned_bytes("t", Tier.DEVICE) == 10
    held.unpin((Tier.DEVICE, 70), keys("a"), tenant="t")
    held.check_quota("t", Tier.DEVICE, keys("b", "c"))


def test_pins_of_a_tenant_fit_its_quota() -> None:
    held = retention(device=2)
    held.check_quota("t", Tier.DEVICE, keys("a", "b"))
    held.check_quota("t", Tier.HOST, keys("a", "b", "c"))
    held.check_quota("free", Tier.DEVICE, keys("a", "b", "c"))
    with pytest.raises(PinRefused) as raised:
        held.check_quota("t", Tier.DEVICE, keys("a", "b", "c"))
    assert raised.value.details == {"tier": "device", "needed_bytes": 30, "allowed_bytes": 29}


def test_a_refused_pin_tells_nothing_of_others() -> None:
    told = []
    for num_others in (79, 80):
        held = retention()
        held.own(keys(*map(str, range(num_others))), [(Tier.HOST, 50)], tenant="other")
        with pytest.raises(PinRefused) as raised:
            held.check_pin(Tier.HOST, keys("a", "b"))
        told.append(raised.value.to_wire())
    assert told[0] == told[1]


def test_public_blocks_count_for_nobody() -> None:
    held = retention(device=1)
    held.quotas.public.update(keys("p", "q"))
    held.own(keys("p", "q", "a"), tenant="t", part=1)
    assert ranks(held, Tier.DEVICE, "p", "q", "a") == [1, 1, 1]


def test_other_quotas_while_it_runs() -> None:
    held = retention(device=3)
    own(held, "a", "b", "c")
    held.set_limits({"t": TenantQuota(device_bytes=10)}, has_tenants=True)
    assert ranks(held, Tier.DEVICE, "a", "b", "c") == [0, 0, 1]
    assert set(held.take_fallen()) == set(keys("a", "b"))
    held.set_limits({}, has_tenants=True)
    assert ranks(held, Tier.DEVICE, "a", "b", "c") == [1, 1, 1]
    assert held.quotas.past == {tier: set() for tier in Tier}


PIN = (Tier.DEVICE, 50)


class Model:
    """The same by brute force."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.owned: dict[int, list[BlockHash]] = {}
        self.order: list[tuple[int, list[BlockHash]]] = []  # what is within of each, by use
        self.pinned: set[BlockHash] = set()

    @property
    def within(self) -> set[BlockHash]:
        return {key for _, part in self.order for key in part} - self.pinned

    def drop(self, number: int) -> None:
        self.order = [(other, part) for other, part in self.order if other != number]

    def use(self, number: int) -> None:
        self.drop(number)
        self.order.append((number, list(self.owned[number])))

    def cut(self) -> None:
        while len(self.within) > max(self.limit - len(self.pinned), 0):
            oldest = next(part for _, part in self.order if part and part[-1] not in self.pinned)
            oldest.pop()

    def is_past(self, key: BlockHash) -> bool:
        is_owned = any(key in part for part in self.owned.values())
        return is_owned and key not in self.within and key not in self.pinned


@dataclass(frozen=True)
class Turn:
    """Where a part begins and ends in the one log there is, and the part before it."""

    number: int
    start: int
    end: int
    before: "Turn | None"

    def up(self) -> list["Turn"]:
        return [self, *(self.before.up() if self.before else [])]


@pytest.mark.parametrize("seed", range(30))
def test_against_a_model(seed: int) -> None:
    chance = random.Random(seed)
    limit = chance.randrange(8)
    held, model = retention(device=limit), Model(limit)
    log, turns, pinned = keys(*"abcdefghij"), list[Turn](), list[Turn]()
    for number in range(1, 200):
        what = chance.choice(("own", "own", "disown", "used", "used", "pin", "unpin"))
        some = chance.choice(turns) if turns else None
        if what == "own":
            start = some.end if some else 0
            new = Turn(number, start, min(start + chance.randrange(1, 4), 10), some)
            model.owned[number] = log[new.start : new.end]
            held.own(model.owned[number], tenant="t", part=number)
            model.use(number)
            turns.append(new)
        elif what == "disown" and some and some not in pinned:
            if not any(turn.before == some for turn in turns):
                held.disown(model.owned.pop(some.number), tenant="t", part=some.number)
                model.drop(some.number)
                turns.remove(some)
        elif what == "used" and some:
            held.used([(t.number, model.owned[t.number]) for t in some.up()], tenant="t")
            for turn in some.up():
                model.use(turn.number)
        elif what == "pin" and some and len(pinned) < 2:
            held.pin(PIN, log[: some.end], tenant="t")
            pinned.append(some)
        elif what == "unpin" and pinned:
            held.unpin(PIN, log[: pinned.pop().end], tenant="t")
        model.pinned = set(log[: max((turn.end for turn in pinned), default=0)])
        model.cut()
        for key in log:
            assert (key in held.quotas.past[Tier.DEVICE]) == model.is_past(key)
        figures = held.quotas.figures("t")["device"]
        assert figures["retained_bytes"] == 10 * len(model.within | model.pinned)
