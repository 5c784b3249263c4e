"""Room made for a restore never comes from the blocks that are being restored."""

from __future__ import annotations

import pytest

from sessionkv.types import MoveOutcome, Tier, Transfer
from tests.builders.kv_world import OK, B, T, World, always


def full_everywhere(world: World) -> None:
    """Device and host are full of others; the session of ``T(12)`` is on the host."""
    world.turn(T(12))
    world.turn([1] * 16)
    world.turn([2] * 8)
    assert [world.kv.tiers_of(key)[0] for key in world.chain(T(12)).hashes] == [Tier.HOST] * 3


@pytest.mark.parametrize("disk", [0, 2, 20])
def test_the_source_of_a_restore_is_never_chosen_to_make_room(disk: int) -> None:
    world = World(device_blocks=4, host_blocks=7, disk_blocks=disk)
    full_everywhere(world)
    run = world.admit_now(world.chain(T(13)))
    (fetch,) = run.admission.transfers
    sources = {move.src for move in fetch.moves}
    assert fetch.src is Tier.HOST
    assert world.kv.reserve(run.seq_id, 16) is not None or world.plan_transfers()
    for transfer in world.pending:
        if transfer is not fetch:
            assert not sources & {m.dst for m in transfer.moves if transfer.dst is Tier.HOST}
            assert not sources & {m.src for m in transfer.moves if transfer.src is Tier.HOST}
    while world.pending:
        world.complete(len(world.pending) - 1)
        world.check()
    world.compute(run)
    world.finish(run)
    for tokens in ([1] * 16, [2] * 8, T(13)):
        world.turn(tokens)
    world.assert_idle()


@pytest.mark.parametrize("outcome", [MoveOutcome.IO_ERROR, MoveOutcome.CORRUPT])
def test_holds_end_also_when_the_copy_fails(outcome: MoveOutcome) -> None:
    world = World(device_blocks=4, host_blocks=7, disk_blocks=2)
    full_everywhere(world)
    run = world.admit_now(world.chain(T(13)))

    def failing(transfer: Transfer, position: int) -> MoveOutcome:
        up = transfer.dst is Tier.DEVICE
        return (always(outcome) if up else OK)(transfer, position)

    world.drain(failing)
    assert run.fetched is not None
    assert run.fetched.cached_tokens == 0
    world.compute(run)
    world.finish(run)
    world.check()
    world.assert_idle()
    assert world.turn(T(13)).admission.cached_tokens == 3 * B
