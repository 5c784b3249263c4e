"""A tier that answers no copy for long counts as refusing, until it answers again."""

from __future__ import annotations

import pytest

from sessionkv.cache.silence import SILENCE_S, Silence
from sessionkv.types import MoveOutcome, Tier
from tests.builders.kv_world import T, World, always


def test_a_tier_is_silent_once_when_it_owes_an_answer_for_so_long() -> None:
    silence = Silence()
    both = (Tier.HOST, Tier.DISK)
    assert silence.listen([Tier.DISK], 10.0) == set()
    assert silence.listen(both, 10.0 + SILENCE_S / 2) == set()
    assert silence.listen(both, 10.0 + SILENCE_S) == {Tier.DISK}
    assert silence.listen([Tier.DISK], 99.0) == set()
    assert silence.tiers == {Tier.DISK}


def test_any_answer_ends_silence_and_begins_the_time_anew() -> None:
    silence = Silence()
    silence.listen([Tier.DISK], 0.0)
    silence.heard(Tier.DISK)
    assert silence.listen([Tier.DISK], SILENCE_S) == set()
    assert silence.listen([Tier.DISK], 2 * SILENCE_S) == {Tier.DISK}
    silence.heard(Tier.DISK)
    assert not silence.tiers


@pytest.mark.parametrize(("host", "disk", "below"), [(0, 20, Tier.DISK), (8, 0, Tier.HOST)])
def test_blocks_are_dropped_that_a_hanging_tier_could_hold(
    host: int, disk: int, below: Tier
) -> None:
    world = World(device_blocks=8, host_blocks=host, disk_blocks=disk)
    world.turn(T(32))
    other = world.admit(world.chain([1] * 9))
    assert other is not None
    assert not world.stage(other, 9)
    spills = world.plan_transfers()
    assert [(t.dst, len(t.moves)) for t in spills] == [(below, 3)]
    assert world.kv.overdue(0.0) == ()
    assert not world.stage(other, 9)  # what is not under way may still be copied down
    assert world.kv.overdue(SILENCE_S) == tuple(t.transfer_id for t in spills)
    assert world.kv.overdue(SILENCE_S) == ()
    assert world.kv.silent_tiers == {below}
    world.compute(other)
    world.check()
    sources = {move.src for move in spills[0].moves}
    assert not sources & set(world.kv.block_table(other.seq_id))
    lost = [key for key in world.chain(T(32)).hashes if world.kv.was_evicted(key)]
    assert len(lost) == 3
    assert world.log == spills  # nothing more was offered
    world.finish(other)

    world.drain()
    assert not world.kv.silent_tiers
    world.turn([2] * 31)
    assert len(world.log) > len(spills)
    world.assert_idle()


def test_a_host_that_a_hanging_disk_keeps_full_is_not_waited_for() -> None:
    world = World(device_blocks=4, host_blocks=2, disk_blocks=20)
    world.turn(T(8))
    world.turn([2] * 15)  # both blocks of the first went to the host
    on_host = [key for key in world.kv.resident_keys() if world.kv.tiers_of(key) == (Tier.HOST,)]
    world.kv.request_clean(on_host)
    writes = world.plan_transfers()
    assert [(t.src, t.dst, len(t.moves)) for t in writes] == [(Tier.HOST, Tier.DISK, 2)]
    world.kv.overdue(0.0)
    run = world.admit(world.chain([3] * 7))
    assert run is not None
    assert not world.stage(run, 7)
    assert world.plan_transfers() == []
    assert not world.stage(run, 7)  # the host may get room any moment
    assert world.kv.overdue(SILENCE_S) == (writes[0].transfer_id,)
    assert world.plan_transfers() == []
    assert world.stage(run, 7)
    world.execute()
    world.check()
    world.finish(run)
    world.drain()
    world.assert_idle()


def test_a_failure_is_an_answer() -> None:
    world = World(device_blocks=8, disk_blocks=20)
    world.turn(T(32))
    world.kv.request_clean(world.kv.resident_keys())
    world.plan_transfers()
    world.kv.overdue(0.0)
    world.kv.overdue(SILENCE_S)
    assert world.kv.silent_tiers
    world.drain(always(MoveOutcome.IO_ERROR))
    assert not world.kv.silent_tiers
