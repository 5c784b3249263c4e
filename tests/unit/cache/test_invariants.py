"""The integrity check finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sessionkv.cache.invariants import InvariantBroken
from sessionkv.cache.prefix_index import Entry
from tests.builders.kv_world import T, World


def busy_world() -> World:
    """Cached blocks and a tail, a copy of the first on the host, one running sequence."""
    world = World(device_blocks=12, host_blocks=4, disk_blocks=9)
    world.turn(T(10))
    run = world.admit(world.chain([1] * 9))
    assert run is not None
    world.stage_now(run, 9)
    world.execute()
    world.check()
    return world


def leak_a_lease(world: World) -> None:
    world.kv._residency.device.lease(0)


def lose_a_lease(world: World) -> None:
    world.kv._residency.device.release(world.kv.block_table(2)[0])


def name_a_block_twice(world: World) -> None:
    index = world.kv._residency.index
    record = world.chain([9] * 4).block_record(0)
    index.add(Entry(record, device=next(iter(index)).device))


def forget_to_unname(world: World) -> None:
    world.kv._residency.device.forget(0)


def keep_an_empty_entry(world: World) -> None:
    world.kv._residency.index.add(Entry(world.chain([9] * 4).block_record(0)))


def lose_a_child(world: World) -> None:
    world.kv._residency.index._children.clear()


def free_twice(world: World) -> None:
    world.kv._residency.device._free.append(11)


def commit_past_the_table(world: World) -> None:
    world.kv._running.get(2).committed = 99


def write_a_committed_block(world: World) -> None:
    world.kv._running.get(2).committed = 3


def end_without_telling_waiters(world: World) -> None:
    world.kv._running.fillers[world.chain(T(4)).hashes[0]] = 77


@pytest.mark.parametrize(
    "damage",
    [
        leak_a_lease,
        lose_a_lease,
        name_a_block_twice,
        forget_to_unname,
        keep_an_empty_entry,
        lose_a_child,
        free_twice,
        commit_past_the_table,
        write_a_committed_block,
        end_without_telling_waiters,
    ],
)
def test_damage_to_the_books_is_found(damage: Callable[[World], None]) -> None:
    world = busy_world()
    damage(world)
    with pytest.raises(InvariantBroken):
        world.kv.check()


def test_it_is_an_assertion_so_that_one_handler_takes_all() -> None:
    assert issubclass(InvariantBroken, AssertionError)
