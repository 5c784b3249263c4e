"""Computing from the front and loading from the back of one prefix, block by block."""

from __future__ import annotations

import pytest

from sessionkv.cache.block_pool import LeaseError
from sessionkv.types import MoveOutcome, Tier, Transfer, TransferResult
from tests.builders.kv_world import B, T, World, always


def on_host(num_tokens: int, *, tail: int = 0) -> World:
    """``T(num_tokens + tail)`` on the host alone, ready to be found."""
    world = World(device_blocks=10, host_blocks=40)
    world.turn(T(num_tokens + tail))
    world.turn([1] * 39)
    world.turn([2] * 39)
    return world


def on_disk(num_tokens: int) -> World:
    world = World(device_blocks=10, disk_blocks=40)
    world.turn(T(num_tokens))
    world.turn([1] * 39)
    return world


def positions(world: World, transfers: tuple[Transfer, ...], seq_id: int) -> list[int]:
    table = list(world.kv.block_table(seq_id))
    return [table.index(move.dst) for transfer in transfers for move in transfer.moves]


def test_loads_come_from_the_back_and_computing_from_the_front() -> None:
    world = on_host(20)
    run = world.admit_now(world.chain(T(21)), claim=0)
    assert run.admission.transfers == ()
    meeting = world.kv.advance(run.seq_id)
    assert (meeting.front_tokens, meeting.limit_tokens, meeting.end_tokens) == (0, None, 20)
    assert meeting.unclaimed == {Tier.HOST: [0, 1, 2, 3, 4], Tier.DISK: []}
    assert positions(world, world.claim(run, 2), run.seq_id) == [3, 4]
    meeting = world.kv.advance(run.seq_id)
    assert (meeting.limit_tokens, meeting.loading[Tier.HOST]) == (12, 2)
    world.stage(run, 8)
    world.execute()
    assert positions(world, world.claim(run, 5), run.seq_id) == [2]
    assert not world.stage(run, 21)  # all that is left is on its way
    world.complete(0)
    assert run.computed == 8
    world.complete(0)
    assert (run.computed, run.over) == (20, True)
    assert run.brought.tokens == {Tier.DEVICE: 0, Tier.HOST: 12, Tier.DISK: 0}
    world.compute(run)
    world.finish(run)
    world.check()
    world.assert_idle()


def test_what_computing_passed_is_no_longer_held_and_not_claimed() -> None:
    world = on_host(20)
    run = world.admit_now(world.chain(T(21)), claim=0)
    assert world.kv.ledger().host.leased == 5
    world.stage(run, 12)
    world.execute()
    assert world.kv.advance(run.seq_id).unclaimed[Tier.HOST][-2:] == [3, 4]
    assert world.kv.ledger().host.leased == 2
    assert positions(world, world.claim(run, 9), run.seq_id) == [3, 4]
    world.finish(run)
    world.drain()
    world.check()
    world.assert_idle()


def test_a_block_known_to_be_on_disk_is_not_written_again_when_it_was_computed() -> None:
    world = on_disk(20)
    run = world.admit_now(world.chain(T(21)), claim=1)
    world.stage(run, 16)
    world.execute()
    world.drain()
    world.advance(run)
    chain = world.chain(T(21))
    assert [world.kv.tiers_of(key) for key in chain.hashes] == [(Tier.DEVICE, Tier.DISK)] * 5


def test_computing_may_not_pass_what_is_being_loaded() -> None:
    world = on_host(20)
    run = world.admit_now(world.chain(T(21)), claim=1)
    with pytest.raises(LeaseError, match="being loaded"):
        world.kv.commit(run.seq_id, 17)


def test_all_may_be_computed_and_nothing_loaded() -> None:
    world = on_host(20, tail=2)
    run = world.admit_now(world.chain(T(24)), claim=0)
    assert run.admission.cached_tokens == 22
    world.stage(run, 21)
    world.execute()
    assert world.kv.advance(run.seq_id).over
    assert world.kv.ledger().host.leased == 0
    world.compute(run)
    world.finish(run)
    world.check()
    world.assert_idle()


def test_a_tail_is_loaded_first_and_continued_last() -> None:
    world = on_host(16, tail=2)
    run = world.admit_now(world.chain(T(24)), claim=1)
    assert positions(world, run.admission.transfers, run.seq_id) == [4]
    world.drain()
    assert run.computed == 0
    world.stage(run, 24)
    assert world.plan == [(run, 16)]
    world.execute()
    world.advance(run)
    assert (run.computed, run.over) == (18, True)
    world.compute(run)
    world.finish(run)
    world.check()


def test_a_loaded_tail_that_is_not_reached_stays_cached() -> None:
    world = on_host(16, tail=2)
    run = world.admit_now(world.chain(T(24)), claim=1)
    world.drain()
    world.finish(run)
    world.check()
    tail = world.chain(T(18)).tail_record(18)
    assert tail is not None
    assert tail.key in world.device_keys()
    world.assert_idle()


@pytest.mark.parametrize("lost", range(5))
def test_a_lost_block_is_computed_where_it_lies(lost: int) -> None:
    world = on_disk(20)
    run = world.admit_now(world.chain(T(21)))
    world.complete(0, lambda _, at: MoveOutcome.CORRUPT if at == lost else MoveOutcome.OK)
    assert run.computed == lost * B
    world.compute(run)
    assert run.brought.tokens[Tier.DISK] == 16
    world.finish(run)
    world.check()
    world.assert_idle()


def test_another_sequence_waits_for_the_front_of_one_that_fetches() -> None:
    world = on_host(20)
    run = world.admit_now(world.chain(T(21)), claim=1)
    match = world.kv.match(world.chain(T(22)))
    assert (match.num_tokens, match.waits_for) == (0, run.seq_id)
    world.stage(run, 8)
    world.execute()
    match = world.kv.match(world.chain(T(22)))
    assert (match.num_tokens, match.waits_for) == (8, run.seq_id)
    world.claim(run)
    match = world.kv.match(world.chain(T(22)))
    assert match.waits_for_transfer is not None


def test_what_a_sequence_of_the_plan_computes_is_read_rather_than_loaded_again() -> None:
    world = on_host(20)
    run = world.admit_now(world.chain(T(21)), claim=0)
    world.stage(run, 12)
    match = world.kv.match(world.chain([*T(12), 9, 9]))
    assert (match.device_tokens, match.host_tokens) == (12, 0)


@pytest.mark.parametrize("how", ["finish", "preempt"])
def test_it_may_end_with_blocks_in_every_state(how: str) -> None:
    world = on_host(20)
    run = world.admit_now(world.chain(T(21)), claim=1)
    world.drain()  # position 4 is there
    world.claim(run, 1)  # 3 is on its way
    world.claim(run, 1)
    world.complete(1, always(MoveOutcome.CORRUPT))  # 2 is lost
    world.stage(run, 4)
    world.execute()  # 0 is computed, 1 unclaimed
    getattr(world, how)(run)
    world.check()
    assert world.kv.ledger().device.leased == world.kv.ledger().host.leased - 1 == 0
    (transfer,) = world.pending
    world.pending.clear()
    world.kv.finish_transfer(TransferResult(transfer.transfer_id, (MoveOutcome.IO_ERROR,), 0.0))
    world.check()
    world.assert_idle()


def test_tiers_have_a_cursor_each() -> None:
    world = World(device_blocks=8, host_blocks=3, disk_blocks=40)
    world.turn(T(24))
    world.turn([1] * 31)
    tiers = [world.kv.tiers_of(key)[:1] for key in world.chain(T(24)).hashes]
    assert len(set(tiers)) > 1, "the test needs several tiers"
    run = world.admit_now(world.chain(T(25)), claim=1)
    sources = [transfer.src for transfer in run.admission.transfers]
    meeting = world.kv.advance(run.seq_id)
    assert [meeting.loading[tier] for tier in sources] == [1] * len(sources)
    world.drain()
    world.compute(run)
    world.finish(run)
    world.check()
    world.assert_idle()
