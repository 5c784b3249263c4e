"""Clean ahead of need: who takes a block finds one that can go, and who had to wait is counted."""

from __future__ import annotations

import pytest

from sessionkv.cache.retention_view import Unretained
from sessionkv.types import BlockHash, MoveOutcome, Tier
from tests.builders.kv_world import T, World, always


def waited(world: World) -> dict[Tier, int]:
    return dict(world.kv.usage().counters.waited)


def evicted(world: World, tier: Tier) -> int:
    return world.kv.usage().counters.evicted.get(tier, 0)


def step(world: World) -> None:
    """What the engine does between two turns at least once: order moves, take in answers."""
    world.plan_transfers()
    world.drain()


@pytest.mark.parametrize(("host", "disk"), [(64, 0), (0, 400), (40, 400)])
@pytest.mark.parametrize("turn_tokens", [7, 20, 45])
def test_under_steady_pressure_nobody_waits(host: int, disk: int, turn_tokens: int) -> None:
    world = World(device_blocks=32, host_blocks=host, disk_blocks=disk, clean_ahead=4)
    for number in range(60):
        run = world.admit(world.chain([100 + number] * turn_tokens))
        assert run is not None
        assert world.stage(run, turn_tokens)
        world.execute()
        world.finish(run)
        step(world)
    assert evicted(world, Tier.DEVICE) >= 60 * (turn_tokens // 4) - 32
    if host and disk:
        assert evicted(world, Tier.HOST) > 0
    assert not any(waited(world).values())
    world.check()


def test_several_who_take_blocks_between_two_plans_find_enough() -> None:
    world = World(device_blocks=48, host_blocks=96, clean_ahead=4)
    for number in range(20):
        runs = [world.admit(world.chain([100 + number, i] * 8)) for i in range(2)]
        for run in runs:
            assert run is not None
            assert world.stage(run, 16)
        world.execute()
        for run in runs:
            world.finish(run)
        step(world)
    assert evicted(world, Tier.DEVICE) > 48
    assert not any(waited(world).values())


def test_those_that_wait_for_a_copy_are_counted_one_by_one() -> None:
    world = World(device_blocks=8, host_blocks=16)  # nothing is kept clean ahead
    world.turn(T(32))
    run = world.admit(world.chain([1] * 12))
    assert run is not None
    assert not world.stage(run, 12)
    world.make_room()
    assert world.stage(run, 12)
    assert (evicted(world, Tier.DEVICE), waited(world)[Tier.DEVICE]) == (3, 3)
    world.execute()
    world.finish(run)
    assert (evicted(world, Tier.HOST), waited(world).get(Tier.HOST, 0)) == (0, 0)


def test_of_several_only_those_that_are_not_clean_yet_count() -> None:
    world = World(device_blocks=16, host_blocks=16, clean_ahead=2)
    for token in range(1, 9):
        world.turn([token] * 8)
        step(world)
    assert world.kv.usage().device.clean_blocks == 4
    run = world.admit(world.chain([99] * 24))
    assert run is not None
    assert not world.stage(run, 24)
    world.make_room()
    assert world.stage(run, 24)
    assert (evicted(world, Tier.DEVICE), waited(world)[Tier.DEVICE]) == (6, 2)


def test_a_wait_that_came_to_nothing_is_forgotten_when_the_block_is_used_again() -> None:
    world = World(device_blocks=5, host_blocks=8)
    world.turn(T(16))
    run = world.admit(world.chain([1] * 8))
    assert run is not None
    assert not world.stage(run, 8)
    world.plan_transfers()
    world.finish(run)
    world.drain()
    again = world.admit(world.chain(T(17)))
    assert again is not None
    assert again.computed == 16
    world.finish(again)
    other = world.admit(world.chain([2] * 8))
    assert other is not None
    assert world.stage(other, 8)
    assert (evicted(world, Tier.DEVICE), waited(world)[Tier.DEVICE]) == (1, 0)


def test_each_block_of_a_tier_is_clean_or_dirty() -> None:
    world = World(device_blocks=16, host_blocks=8, disk_blocks=50)
    world.turn(T(18))
    usage = world.kv.usage()
    assert (usage.device.clean_blocks, usage.device.dirty_blocks) == (0, 5)
    world.kv.request_clean(world.kv.resident_keys()[:2])
    assert world.kv.usage().queued_blocks == 2
    world.make_room()
    usage = world.kv.usage()
    assert (usage.device.clean_blocks, usage.device.dirty_blocks) == (2, 3)
    assert usage.queued_blocks == 0
    world.turn([1] * 64)  # everything of the first goes to the host
    usage = world.kv.usage()
    assert (usage.host.clean_blocks, usage.host.dirty_blocks) == (2, 3)
    assert (usage.device.clean_blocks, usage.device.dirty_blocks) == (0, 16)


def test_a_copy_that_failed_leaves_its_block_dirty() -> None:
    world = World(device_blocks=8, host_blocks=0, disk_blocks=50)
    world.turn(T(12))
    world.kv.request_clean(world.kv.resident_keys())
    world.make_room(always(MoveOutcome.IO_ERROR))
    assert world.kv.usage().device.dirty_blocks == 3
    world.kv.request_clean(world.kv.resident_keys())
    world.make_room()
    assert world.kv.usage().device.dirty_blocks == 0


def test_without_spilling_to_disk_only_what_is_asked_for_is_written() -> None:
    world = World(
        device_blocks=8, host_blocks=4, disk_blocks=50, clean_ahead=2, spill_to_disk=False
    )
    for token in range(1, 9):
        world.turn([token] * 16)
        step(world)
    assert world.disk.writes == []
    assert evicted(world, Tier.HOST) > 0
    world.kv.request_clean(world.kv.resident_keys())
    world.make_room()
    assert set(world.disk.writes) == set(world.kv.resident_keys())


class Asked(Unretained):
    """Counts how often somebody looks for what is next to go."""

    count = 0

    def rank(self, key: BlockHash, tier: Tier) -> int:
        self.count += tier is Tier.DEVICE
        return super().rank(key, tier)


def test_what_arrives_for_a_sequence_makes_nobody_look_for_what_is_next_to_go() -> None:
    asked = Asked()
    world = World(device_blocks=16, host_blocks=32, clean_ahead=2, retention=asked)
    for token in (1, 2, 3, 4, 5):
        world.turn([token] * 24)
        step(world)
    run = world.admit(world.chain([1] * 25), claim=1)
    assert run is not None
    for _ in range(3):
        step(world)
    world.plan_transfers()
    looked, answered = asked.count, 0
    while not run.over:
        answered += len(world.claim(run, 1))
        step(world)
    assert answered > 3
    assert asked.count == looked
    world.finish(run)
    world.plan_transfers()
    assert asked.count > looked


class Kept(Unretained):
    """Some blocks are retained until they are let go."""

    def __init__(self) -> None:
        self.keys: set[BlockHash] = set()
        self.fallen: tuple[BlockHash, ...] = ()

    def rank(self, key: BlockHash, tier: Tier) -> int:
        return int(key in self.keys)

    def let_go(self) -> None:
        self.fallen = tuple(self.keys)
        self.keys.clear()

    def take_fallen(self) -> tuple[BlockHash, ...]:
        fallen, self.fallen = self.fallen, ()
        return fallen


def test_blocks_that_are_next_to_go_once_nobody_retains_them_are_copied_then() -> None:
    kept = Kept()
    world = World(device_blocks=16, host_blocks=32, clean_ahead=4, retention=kept)
    kept.keys.update(world.chain(T(8)).hashes)
    for start in range(0, 800, 100):
        world.turn(T(8, start))
    step(world)
    assert world.plan_transfers() == []
    kept.let_go()
    copied = {move.record.key for transfer in world.plan_transfers() for move in transfer.moves}
    assert copied == set(world.chain(T(8)).hashes)
