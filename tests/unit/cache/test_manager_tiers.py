"""Blocks between device, host and disk: order, leases, failures, idle writing. Exact keys."""

from __future__ import annotations

import pytest

from sessionkv.cache import residency
from sessionkv.cache.block_pool import LeaseError
from sessionkv.types import BlockHash, MoveOutcome, Tier, Transfer, TransferResult
from tests.builders.kv_world import B, Run, T, World, always

DOWN = (Tier.DEVICE, Tier.HOST)


def counts(world: World, tier: Tier) -> tuple[int, int, int, int]:
    ledger = world.kv.ledger()
    of = ledger.device if tier is Tier.DEVICE else ledger.host
    return of.free, of.filling, of.leased, of.cached


def ways(transfers: list[Transfer]) -> list[tuple[Tier, Tier, int]]:
    return [(t.src, t.dst, len(t.moves)) for t in transfers]


def running(world: World, token_ids: list[int]) -> Run:
    return world.admit_now(world.chain(token_ids))


def keys(world: World, token_ids: list[int]) -> list[BlockHash]:
    chain = world.chain(token_ids)
    tail = chain.tail_record(len(chain))
    return [*chain.hashes, *([tail.key] if tail else [])]


def crowd_out(world: World, token_ids: list[int]) -> None:
    """Other turns until the device has nothing of ``token_ids`` left."""
    for round_ in range(30):
        if not set(keys(world, token_ids)) & world.device_keys():
            return
        world.turn([60 + round_] * (4 * world.device_blocks - 5))
    raise AssertionError("the device still has it")


# -- down


def test_room_is_made_by_copying_the_coldest_down_then_dropping_it() -> None:
    world = World(device_blocks=4, host_blocks=4)
    world.turn(T(8))
    world.turn([1] * 8)
    chain = world.chain([2] * 4)
    assert world.admit(chain) is not None
    run = world.runs[3]
    assert not world.stage(run, 4)
    planned = world.plan_transfers()
    assert ways(planned) == [(*DOWN, 1)]
    assert planned[0].moves[0].record.key == keys(world, T(8))[1]
    assert planned[0].moves[0].record.key in world.device_keys()
    world.drain()
    assert world.stage(run, 4)
    world.check()
    assert keys(world, T(8))[1] not in world.device_keys()
    match = world.kv.match(world.chain(T(9)))
    assert (match.device_tokens, match.host_tokens) == (4, 4)


def test_a_block_on_its_way_down_can_be_matched_and_stays() -> None:
    world = World(device_blocks=4, host_blocks=4)
    world.turn(T(16))
    assert not world.stage(running(world, [1] * 4), 4)
    world.plan_transfers()
    using = running(world, T(17))
    assert using.admission.device_tokens == 16
    world.drain()
    world.check()
    world.read(using, 16)


def test_without_a_lower_tier_the_coldest_are_dropped_at_once() -> None:
    world = World(device_blocks=4)
    world.turn(T(16))
    world.turn([1] * 8)
    assert world.log == []
    assert world.kv.match(world.chain(T(17))).num_tokens == 8
    gone = keys(world, T(16))[2:]
    assert [world.kv.was_evicted(key) for key in keys(world, T(16))] == [False, False, True, True]
    world.turn(T(17)[:13])
    assert not world.kv.was_evicted(gone[0])


def test_without_a_host_blocks_go_from_device_to_disk() -> None:
    world = World(device_blocks=4, disk_blocks=9)
    world.turn(T(16))
    world.turn([1] * 16)
    assert ways(world.log)[0][:2] == (Tier.DEVICE, Tier.DISK)
    assert set(world.disk.records) == set(keys(world, T(16)))
    run = running(world, T(16))
    assert run.admission.disk_tokens == 15


def test_a_full_host_writes_to_disk_before_it_drops() -> None:
    world = World(device_blocks=4, host_blocks=2, disk_blocks=20)
    for token in range(1, 6):
        world.turn([token] * 16)
        world.check()
    seen = {(transfer.src, transfer.dst) for transfer in world.log}
    assert seen == {DOWN, (Tier.HOST, Tier.DISK)}
    first = world.turn([1] * 16)
    assert first.admission.cached_tokens == 15


@pytest.mark.parametrize("outcome", [MoveOutcome.NO_ROOM, MoveOutcome.IO_ERROR])
@pytest.mark.parametrize(("host", "disk"), [(4, 0), (0, 9), (2, 9)])
def test_a_spill_that_fails_does_not_stop_progress(
    outcome: MoveOutcome, host: int, disk: int
) -> None:
    world = World(device_blocks=4, host_blocks=host, disk_blocks=disk)
    for token in range(1, 5):
        world.turn([token] * 16, outcome=always(outcome))
    world.assert_idle()
    assert world.kv.was_evicted(keys(world, [1] * 16)[-1])


def test_a_disk_that_keeps_nothing_does_not_stop_progress() -> None:
    world = World(device_blocks=4, host_blocks=2, disk_blocks=1)
    for token in range(1, 9):
        world.turn([token] * 16)
    world.assert_idle()


def test_pinned_blocks_leave_after_all_others_whatever_their_age() -> None:
    world = World(device_blocks=4, host_blocks=0)
    pinned = set(keys(world, T(8)))

    class Pins:
        def rank(self, key: BlockHash, tier: Tier) -> int:
            return 2 if key in pinned and tier is Tier.DEVICE else 0

        def take_fallen(self) -> tuple[BlockHash, ...]:
            return ()

    world = World(device_blocks=4, retention=Pins())
    world.turn(T(8))
    for token in range(1, 6):
        world.turn([token] * 8)
    assert pinned <= world.device_keys()
    world.turn([9] * 16)
    assert not pinned & world.device_keys()


def test_some_blocks_are_kept_clean_ahead_and_then_it_rests() -> None:
    world = World(device_blocks=16, host_blocks=8, clean_ahead=2)
    for token in range(1, 5):
        world.turn([token] * 16)
    # Twice what a turn takes, but no more than half of the host.
    assert ways(world.make_room()) == [(*DOWN, 4)]
    assert world.make_room() == []
    run = running(world, [9] * 17)
    assert world.stage(run, 16)
    assert not world.stage(run, 17)


def test_moves_in_flight_are_bounded() -> None:
    world = World(device_blocks=200, host_blocks=200)
    for token in range(1, 3):
        world.turn([token] * 400)
    run = running(world, [9] * 799)
    assert not world.stage(run, 799)
    assert ways(world.plan_transfers()) == [(*DOWN, 16)] * 4
    assert world.plan_transfers() == []


# -- up


def test_a_prefix_is_fetched_from_the_host_and_stays_there_too() -> None:
    world = World(device_blocks=4, host_blocks=8)
    world.turn(T(12))
    crowd_out(world, T(12))
    run = running(world, T(13))
    (transfer,) = run.admission.transfers
    assert (transfer.src, transfer.dst) == (Tier.HOST, Tier.DEVICE)
    assert [move.record.key for move in transfer.moves] == keys(world, T(12))
    assert [move.dst for move in transfer.moves] == list(run.admission.block_ids)
    assert counts(world, Tier.DEVICE)[1] == counts(world, Tier.HOST)[2] == 3
    world.drain()
    assert run.fetched is not None
    assert (run.fetched.cached_tokens, run.fetched.host_tokens) == (12, 12)
    assert world.kv.tiers_of(keys(world, T(12))[0]) == (Tier.DEVICE, Tier.HOST)
    world.check()


def test_one_admission_may_draw_from_all_tiers() -> None:
    world = World(device_blocks=5, host_blocks=2, disk_blocks=20)
    world.turn(T(16))
    world.turn([1] * 8)
    world.turn([2] * 8)
    world.turn([*T(4), 3])
    run = running(world, T(17))
    admission = run.admission
    assert admission.device_tokens
    assert admission.device_tokens + admission.host_tokens + admission.disk_tokens == 16
    world.drain()
    assert run.computed == 16
    world.check()


def test_another_sequence_waits_for_a_block_in_flight() -> None:
    world = World(device_blocks=8, host_blocks=16)
    world.turn(T(12))
    crowd_out(world, T(12))
    run = running(world, T(13))
    (transfer,) = run.admission.transfers
    match = world.kv.match(world.chain(T(14)))
    assert (match.num_tokens, match.waits_for_transfer) == (0, transfer.transfer_id)
    world.drain()
    match = world.kv.match(world.chain(T(14)))
    assert (match.device_tokens, match.waits_for_transfer) == (12, None)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize(
    "outcome", [MoveOutcome.CORRUPT, MoveOutcome.MISSING, MoveOutcome.IO_ERROR]
)
def test_the_front_stops_at_a_block_that_did_not_arrive_and_goes_on_behind_it(
    failing: int, outcome: MoveOutcome
) -> None:
    world = World(device_blocks=4, host_blocks=8)
    world.turn(T(12))
    crowd_out(world, T(12))
    run = running(world, T(13))
    world.complete(0, lambda _, at: outcome if at == failing else MoveOutcome.OK)
    assert run.fetched is not None
    assert run.fetched.cached_tokens == failing * B
    assert run.fetched.corrupt_blocks == (outcome is MoveOutcome.CORRUPT)
    assert run.fetched.corrupt_blocks + run.fetched.failed_blocks == 1
    lost = keys(world, T(12))[failing]
    assert world.kv.tiers_of(lost) == ()
    assert world.kv.was_evicted(lost)
    assert world.kv.was_corrupt(lost) == (outcome is MoveOutcome.CORRUPT)
    world.stage_now(run, 13)
    end = (failing + 1) * B
    assert world.plan == [(run, end if failing < 2 else 13)]
    world.execute()
    world.compute(run)
    assert run.brought.tokens[Tier.HOST] == 8
    world.check()


class PinnedTail:
    """Keeps the tail of ``T(10)`` on the device when the blocks before it have gone."""

    key = keys(World(), T(10))[2]

    def rank(self, key: BlockHash, tier: Tier) -> int:
        return 2 if key == self.key else 0

    def take_fallen(self) -> tuple[BlockHash, ...]:
        return ()


def test_a_tail_that_would_be_copied_is_left_when_blocks_before_it_are_fetched() -> None:
    world = World(device_blocks=5, host_blocks=8, retention=PinnedTail())
    world.turn(T(10))
    world.turn([1] * 16)
    run = running(world, [*T(9), 1, 1])
    assert (run.admission.host_tokens, run.admission.device_tokens) == (8, 0)
    assert run.admission.copies == ()
    world.drain(always(MoveOutcome.MISSING))
    world.check()


def test_a_tail_on_the_device_past_fetched_blocks_is_left_as_it_is() -> None:
    tail = PinnedTail.key
    world = World(device_blocks=5, host_blocks=8, retention=PinnedTail())
    world.turn(T(10))
    world.turn([1] * 16)
    assert [world.kv.tiers_of(key)[0] for key in keys(world, T(10))] == [Tier.HOST] * 2 + [
        Tier.DEVICE
    ]
    run = running(world, T(12))
    assert (run.admission.host_tokens, run.admission.device_tokens) == (8, 0)
    world.drain(always(MoveOutcome.MISSING))
    world.check()
    assert run.computed == 0
    world.compute(run)
    world.check()
    assert tail in world.device_keys()


def test_a_sequence_may_end_while_its_blocks_are_on_their_way() -> None:
    world = World(device_blocks=4, host_blocks=8)
    world.turn(T(12))
    crowd_out(world, T(12))
    run = running(world, T(13))
    world.finish(run)
    assert counts(world, Tier.DEVICE)[1] == 3
    world.complete(0, lambda _, at: MoveOutcome.IO_ERROR if at == 1 else MoveOutcome.OK)
    world.check()
    world.assert_idle()
    assert world.kv.match(world.chain(T(13))).device_tokens == 4


def test_what_has_arrived_is_cached_when_its_sequence_ends_before_the_rest() -> None:
    world = World(device_blocks=4, host_blocks=6, disk_blocks=20)
    world.turn(T(10))
    world.kv.request_clean(keys(world, T(10)))
    world.make_room()
    world.turn([1] * 8)
    world.turn([2] * 16)
    world.turn([3] * 8)
    run = running(world, T(12))
    assert (run.admission.host_tokens, run.admission.disk_tokens) == (8, 2)
    (disk,) = (i for i, transfer in enumerate(world.pending) if transfer.src is Tier.DISK)
    world.complete(disk)
    world.finish(run)
    world.check()
    assert keys(world, T(10))[2] in world.device_keys()
    world.drain()
    world.check()
    world.assert_idle()
    assert set(keys(world, T(10))) <= world.device_keys()


def test_a_tail_from_below_is_continued_and_its_old_record_dropped() -> None:
    world = World(device_blocks=4, disk_blocks=20)
    world.turn(T(10))
    crowd_out(world, T(10))
    tail = keys(world, T(10))[2]
    assert tail in world.disk.records
    run = world.turn(T(11))
    assert (run.admission.disk_tokens, run.admission.cached_tokens) == (10, 10)
    world.kv.request_clean(world.kv.resident_keys())
    world.make_room()
    assert tail not in world.disk.records
    assert keys(world, T(11))[2] in world.disk.records


@pytest.mark.parametrize(("host", "disk"), [(16, 0), (0, 20)])
def test_a_tail_from_below_that_did_not_grow_is_cached_above(host: int, disk: int) -> None:
    world = World(device_blocks=4, host_blocks=host, disk_blocks=disk)
    world.turn(T(10))
    crowd_out(world, T(10))
    run = running(world, T(12))
    world.drain()
    assert run.computed == 10
    world.finish(run)
    world.check()
    tail = keys(world, T(10))[2]
    assert world.kv.tiers_of(tail) == (Tier.DEVICE, Tier.HOST if host else Tier.DISK)
    assert running(world, T(12)).admission.device_tokens == 10


def test_unknown_transfers_are_refused() -> None:
    world = World(host_blocks=2)
    with pytest.raises(LeaseError, match="not in flight"):
        world.kv.finish_transfer(TransferResult(5, (), 0.0))


# -- what is asked of the disk


def test_the_disk_is_asked_from_the_first_block_that_memory_lacks() -> None:
    world = World(device_blocks=8, disk_blocks=20)
    world.turn(T(8))
    chain = world.chain(T(19))
    world.kv._residency.index.entries[chain.hashes[1]].disk_below = True
    query = world.kv.disk_query(chain)
    assert query is not None
    assert query.keys == tuple(chain.hashes[2:4])
    assert (query.parent, query.first_token) == (chain.hashes[1], 8)
    assert query.token_ids == tuple(T(19)[8:])


def test_a_new_turn_of_a_resident_session_asks_nothing() -> None:
    world = World(device_blocks=8, disk_blocks=20)
    assert world.kv.disk_query(world.chain(T(10))) is not None
    world.turn(T(10))
    assert world.kv.disk_query(world.chain(T(20))) is None
    assert world.kv.disk_query(world.chain([1] * 5)) is not None


def test_the_disk_is_asked_for_children_that_only_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MAX_MOVED_DOWN", 0)
    world = World(device_blocks=4, disk_blocks=20)
    world.turn(T(12))
    assert world.kv.disk_query(world.chain(T(20))) is None
    world.kv.request_clean(keys(world, T(12)))
    world.make_room()
    world.turn([1] * 8)
    query = world.kv.disk_query(world.chain(T(20)))
    assert query is not None
    assert query.keys == tuple(world.chain(T(20)).hashes[2:4])


def test_disk_off_is_never_asked() -> None:
    assert World(host_blocks=2).kv.disk_query(World().chain(T(10))) is None


# -- idle writing


def test_blocks_are_written_in_the_order_asked_for_and_full_and_partial_alike() -> None:
    world = World(disk_blocks=20)
    world.turn(T(10))
    wanted = keys(world, T(10))
    world.kv.request_clean(wanted)
    assert world.kv.dirty_count() == 3
    (transfer,) = world.plan_transfers()
    assert (transfer.src, transfer.dst) == (Tier.DEVICE, Tier.DISK)
    assert [(move.record.key, move.dst) for move in transfer.moves] == [(k, -1) for k in wanted]
    assert world.kv.dirty_count() == 3
    assert world.kv.tiers_of(wanted[0]) == (Tier.DEVICE,)
    world.drain()
    assert world.kv.dirty_count() == 0
    assert world.disk.writes == wanted
    assert world.kv.tiers_of(wanted[0]) == (Tier.DEVICE, Tier.DISK)
    world.kv.request_clean(wanted)
    assert world.plan_transfers() == []
    assert world.kv.dirty_count() == 0


def test_a_failed_write_does_not_keep_a_flush_waiting() -> None:
    world = World(disk_blocks=20)
    world.turn(T(10))
    world.kv.request_clean(keys(world, T(10)))
    world.make_room(always(MoveOutcome.NO_ROOM))
    assert world.kv.dirty_count() == 0
    assert world.disk.records == {}
    world.kv.request_clean(keys(world, T(10)))
    world.make_room()
    assert len(world.disk.records) == 3


def test_a_tail_that_is_being_continued_is_not_written() -> None:
    world = World(disk_blocks=20)
    world.turn(T(10))
    run = running(world, T(12))
    world.kv.request_clean(keys(world, T(10)))
    world.make_room()
    assert world.disk.writes == keys(world, T(10))[:2]
    world.finish(run)


def test_a_tail_that_is_being_written_is_copied_by_who_continues_it() -> None:
    world = World(disk_blocks=20)
    world.turn(T(10))
    world.kv.request_clean(keys(world, T(10)))
    world.plan_transfers()
    run = running(world, T(12))
    assert [copy.num_tokens for copy in run.copies] == [2]
    world.drain()
    assert world.stage(run, 12)
    world.execute()
    world.check()


def test_without_a_disk_nothing_is_dirty() -> None:
    world = World(host_blocks=4)
    world.turn(T(10))
    world.kv.request_clean(keys(world, T(10)))
    assert world.kv.dirty_count() == 0


def test_what_the_store_drops_is_dirty_again_or_gone() -> None:
    world = World(device_blocks=4, disk_blocks=20)
    world.turn(T(12))
    world.kv.request_clean(keys(world, T(12)))
    world.make_room()
    world.kv.on_disk_evicted(keys(world, T(12))[:1])
    assert world.kv.tiers_of(keys(world, T(12))[0]) == (Tier.DEVICE,)
    crowd_out(world, T(12))
    assert world.kv.was_evicted(keys(world, T(12))[0])
    assert not world.kv.was_evicted(keys(world, T(12))[1])
    world.kv.on_disk_evicted(keys(world, T(12))[1:])
    assert world.kv.was_evicted(keys(world, T(12))[1])


def test_what_the_store_drops_before_it_answers_the_write_is_not_there() -> None:
    world = World(device_blocks=4, disk_blocks=20)
    world.turn(T(12))
    first, second = keys(world, T(12))[:2]
    world.kv.request_clean([first, second])
    (write,) = world.plan_transfers()
    world.kv.on_disk_evicted([first])
    world.kv.finish_transfer(TransferResult(write.transfer_id, (MoveOutcome.OK,) * 2, 0.0))
    world.pending.clear()
    assert world.kv.tiers_of(first) == (Tier.DEVICE,)
    assert world.kv.tiers_of(second) == (Tier.DEVICE, Tier.DISK)
    world.kv.request_clean([first])
    world.make_room()
    assert world.kv.tiers_of(first) == (Tier.DEVICE, Tier.DISK)


# -- forgetting


def test_forgotten_blocks_are_free_at_once_in_every_tier() -> None:
    world = World(device_blocks=4, host_blocks=4, disk_blocks=20)
    world.turn(T(12))
    crowd_out(world, T(12))
    world.turn(T(8))
    wanted = keys(world, T(12))
    assert any(world.kv.tiers_of(key) for key in wanted)
    assert world.kv.forget(wanted) == tuple(wanted)
    assert not any(world.kv.tiers_of(key) for key in wanted)
    assert not any(world.kv.was_evicted(key) for key in wanted)
    world.disk.delete(wanted)
    world.check()
    assert running(world, T(13)).admission.cached_tokens == 0


def test_forgotten_blocks_in_use_are_free_with_their_last_lease() -> None:
    world = World(host_blocks=4)
    world.turn(T(12))
    run = running(world, T(14))
    assert world.stage(run, 14)
    assert world.kv.forget(keys(world, T(12))) == ()
    world.execute()
    world.check()
    assert world.kv.match(world.chain(T(14))).num_tokens == 0
    world.finish(run)
    assert counts(world, Tier.DEVICE) == (7, 0, 0, 1)


def test_what_is_forgotten_on_its_way_does_not_come_back() -> None:
    world = World(device_blocks=4, disk_blocks=20)
    world.turn(T(12))
    crowd_out(world, T(12))
    run = running(world, T(13))
    assert run.admission.disk_tokens == 12
    world.kv.forget(keys(world, T(12)))
    world.drain()
    assert world.kv.match(world.chain(T(13))).num_tokens == 0
    world.stage_now(run, 13)
    world.execute()
    world.finish(run)
    world.check()


def test_what_is_forgotten_on_its_way_down_does_not_arrive() -> None:
    world = World(device_blocks=4, host_blocks=4)
    world.turn(T(16))
    assert not world.stage(running(world, [1] * 4), 4)
    (transfer,) = world.plan_transfers()
    world.kv.forget([move.record.key for move in transfer.moves])
    world.drain()
    world.check()
    assert counts(world, Tier.HOST) == (4, 0, 0, 0)
    assert counts(world, Tier.DEVICE)[0] == 1


def test_a_forgotten_tail_on_its_way_to_an_ended_sequence_is_let_go() -> None:
    world = World(device_blocks=4, host_blocks=16)
    world.turn(T(10))
    crowd_out(world, T(10))
    run = running(world, T(12))
    world.kv.forget(keys(world, T(10)))
    world.finish(run)
    world.drain()
    world.check()
    assert not any(world.kv.tiers_of(key) for key in keys(world, T(10)))


def test_a_record_written_after_it_was_forgotten_is_to_be_deleted() -> None:
    world = World(disk_blocks=20)
    world.turn(T(8))
    wanted = keys(world, T(8))
    world.kv.request_clean(wanted)
    (transfer,) = world.plan_transfers()
    world.kv.forget(wanted)
    world.kv.finish_transfer(TransferResult(transfer.transfer_id, (MoveOutcome.OK,) * 2, 0.0))
    assert world.kv.take_stale() == tuple(wanted)
    assert world.kv.take_stale() == ()
    world.pending.clear()
    world.assert_idle()


# -- figures


def test_moves_and_evictions_are_counted_by_tier() -> None:
    world = World(device_blocks=4, host_blocks=2, disk_blocks=20)
    for token in (1, 2, 3):
        world.turn([token] * 16)
    world.turn([1] * 16)
    counters = world.kv.usage().counters
    moved: dict[tuple[Tier, Tier], int] = {}
    for transfer in world.log:
        way = (transfer.src, transfer.dst)
        moved[way] = moved.get(way, 0) + len(transfer.moves)
    assert counters.moved == moved
    assert counters.failed == {}
    assert counters.lost == 0
    assert counters.evicted[Tier.DEVICE] > 0
