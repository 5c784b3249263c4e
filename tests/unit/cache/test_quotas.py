"""Quotas of tenants: what was used last is within, the rest ranks as if nobody wanted it."""

import random
from collections import Counter

import pytest

from sessionkv.cache.retention import Retention
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


def ranks(held: Retention, tier: Tier, *names: str) -> list[int]:
    return [held.rank(key, tier) for key in keys(*names)]


def test_the_last_used_are_within_and_each_tier_counts_for_itself() -> None:
    held = retention(device=2, host=3)
    held.own(keys("a", "b", "c", "d"), tenant="t")
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
    held.own(keys("a", "b"), tenant="t")
    assert ranks(held, Tier.DEVICE, "x", "y", "z", "a", "b") == [1, 1, 1, 0, 1]


def test_of_a_log_that_is_used_the_start_stays() -> None:
    held = retention(device=3)
    log = keys("a", "b", "c", "d", "e")
    held.own(log, tenant="t")
    held.used(log, tenant="t")
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d", "e") == [1, 1, 1, 0, 0]
    held.used(keys("e", "unknown"), tenant="t")
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d", "e") == [1, 1, 0, 0, 1]


def test_what_nobody_owns_any_more_makes_room() -> None:
    held = retention(device=2)
    held.own(keys("a"), tenant="t")
    held.own(keys("b", "c"), tenant="t")
    held.own(keys("b"), tenant="t")
    assert held.disown(keys("b", "c"), tenant="t") == keys("c")
    assert ranks(held, Tier.DEVICE, "a", "b") == [0, 1]
    held.used(keys("a"), tenant="t")
    assert ranks(held, Tier.DEVICE, "a", "b") == [1, 1]
    held.disown(keys("a", "b"), tenant="t")
    assert held.quotas.figures("t")["device"]["retained_bytes"] == 0


def test_what_leaves_memory_counts_on_and_what_was_past_is_forgotten() -> None:
    held = retention(disk=2)
    held.own(keys("a", "b", "c"), tenant="t")
    held.forget(keys("a", "b", "c"), tenant="t")
    assert held.quotas.figures("t")["disk"] == {
        "quota_bytes": 20,
        "retained_bytes": 20,
        "past_bytes": 0,
    }
    held.take_fallen()
    held.own(keys("d"), tenant="t")
    assert held.take_fallen() == (BlockHash(b"b"),)
    assert held.quotas.figures("t")["disk"]["past_bytes"] == 0


def test_what_is_pinned_stays_within() -> None:
    held = retention(device=2)
    held.own(keys("a"), [(Tier.DEVICE, 50)], tenant="t")
    held.own(keys("b", "c", "d"), tenant="t")
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d") == [53, 0, 0, 1]


def test_what_is_pinned_no_longer_counts_as_used_longest_ago() -> None:
    held = retention(device=2)
    held.own(keys("a"), [(Tier.DEVICE, 50)], tenant="t")
    held.own(keys("b", "c"), tenant="t")
    held.unpin((Tier.DEVICE, 50), keys("a"), tenant="t")
    assert ranks(held, Tier.DEVICE, "a", "b", "c") == [1, 0, 1]
    held.own(keys("d"), tenant="t")
    assert ranks(held, Tier.DEVICE, "a", "b", "c", "d") == [0, 0, 1, 1]
    assert set(held.take_fallen()) == set(keys("a", "b"))
    held.disown(keys("a", "b", "c", "d"), tenant="t")
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
    held.own(keys("p", "q", "a"), tenant="t")
    assert ranks(held, Tier.DEVICE, "p", "q", "a") == [1, 1, 1]


def test_other_quotas_while_it_runs() -> None:
    held = retention(device=3)
    held.own(keys("a", "b", "c"), tenant="t")
    held.set_limits({"t": TenantQuota(device_bytes=10)}, has_tenants=True)
    assert ranks(held, Tier.DEVICE, "a", "b", "c") == [0, 0, 1]
    assert set(held.take_fallen()) == set(keys("a", "b"))
    held.set_limits({}, has_tenants=True)
    assert ranks(held, Tier.DEVICE, "a", "b", "c") == [1, 1, 1]
    assert held.quotas.past == {tier: set() for tier in Tier}


class Model:
    """The same by brute force: per tier the last used keys are within, pinned ones always."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.owners: Counter[BlockHash] = Counter()
        self.order: list[BlockHash] = []  # of use, the last at the end

    def use(self, names: list[BlockHash]) -> None:
        for key in names:
            if key in self.order:
                self.order.remove(key)
            self.order.append(key)

    @property
    def within(self) -> set[BlockHash]:
        return set(self.order[-self.limit :]) if self.limit else set()


@pytest.mark.parametrize("seed", range(20))
def test_against_a_model(seed: int) -> None:
    chance = random.Random(seed)
    limit = chance.randrange(5)
    held, model = retention(device=limit), Model(limit)
    for _ in range(200):
        names = keys(*chance.sample("abcdefghij", chance.randrange(1, 4)))
        what = chance.choice(("own", "own", "disown", "used"))
        if what == "own":
            held.own(names, tenant="t")
            model.owners.update(names)
            model.use(names)
        elif what == "disown":
            names = [key for key in names if model.owners[key]]
            held.disown(names, tenant="t")
            model.owners.subtract(names)
            model.order = [key for key in model.order if model.owners[key]]
        else:
            held.used(names, tenant="t")
            model.use([key for key in reversed(names) if model.owners[key]])
        kept = {key for key in model.owners if model.owners[key] and held.rank(key, Tier.DEVICE)}
        # What made room once stays past the quota until it is used again, also when there is room.
        assert kept <= model.within
        assert len(kept) == held.quotas.figures("t")["device"]["retained_bytes"] // 10 <= limit
        past = {key for key in model.owners if model.owners[key]} - kept
        assert held.quotas.past[Tier.DEVICE] == past
        if what == "own" and limit:
            assert names[-1] in kept
