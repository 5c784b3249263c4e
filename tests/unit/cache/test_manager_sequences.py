"""Running sequences at the cache manager: matches, tables, sharing, ends. Exact ids and counts."""

from __future__ import annotations

import pytest

from sessionkv.cache.block_pool import LeaseError
from sessionkv.cache.chain import TokenChain
from sessionkv.types import BlockCopy, BlockHash, Match
from tests.builders.kv_world import ROOT, B, T, World


def device(world: World) -> tuple[int, int, int, int]:
    tier = world.kv.ledger().device
    return tier.free, tier.filling, tier.leased, tier.cached


# -- matching


@pytest.mark.parametrize("length", range(1, 13))
def test_the_last_prompt_token_is_always_computed(length: int) -> None:
    world = World()
    world.turn(T(12))
    match = world.kv.match(world.chain(T(length)))
    assert match.num_tokens == match.device_tokens == length - 1


def test_a_match_is_a_question() -> None:
    world = World()
    world.turn(T(10))
    before = world.kv.ledger()
    first = world.kv.match(world.chain(T(14)))
    assert world.kv.match(world.chain(T(14))) == first
    assert world.kv.ledger() == before


def test_an_older_match_is_refused() -> None:
    world = World()
    world.turn(T(10))
    chain = world.chain(T(10))
    match = world.kv.match(chain)
    world.turn([1] * 30)
    with pytest.raises(LeaseError, match="changed since"):
        world.kv.admit(99, chain, match)


def test_a_match_of_nothing_needs_no_look_up() -> None:
    world = World()
    world.turn(T(10))
    admission = world.kv.admit(99, world.chain(T(10)), Match(0, 0, 0), room_tokens=10)
    assert admission is not None
    assert (admission.found_tokens, len(admission.block_ids)) == (0, 3)


def test_chains_of_another_identity_are_refused() -> None:
    world = World()
    stranger = TokenChain(BlockHash(b"x" * 32), B, tenant="local", token_ids=T(5))
    with pytest.raises(ValueError, match="another KV identity"):
        world.kv.match(stranger)
    with pytest.raises(ValueError, match="another KV identity"):
        world.kv.match(TokenChain(ROOT, 8, tenant="local", token_ids=T(5)))
    with pytest.raises(TypeError, match="TokenChain"):
        world.kv.match(T(5))


def test_tenants_do_not_share_full_or_partial_blocks() -> None:
    world = World()
    world.turn(T(10), tenant="a")
    assert world.kv.match(world.chain(T(10), "b")).num_tokens == 0
    assert world.kv.match(world.chain(T(10), "a")).num_tokens == 9


# -- the unfilled tail


def test_the_only_holder_continues_a_tail_in_place() -> None:
    world = World()
    first = world.turn(T(10))
    again = world.turn(T(15))
    assert first.admission.block_ids == ()
    assert again.admission.block_ids == (0, 1, 2)
    assert again.admission.copies == ()
    assert (again.admission.cached_tokens, device(world)) == (10, (4, 0, 0, 4))


def test_a_tail_held_by_another_is_copied() -> None:
    world = World()
    world.turn(T(10))
    one = world.admit(world.chain(T(12)))
    other = world.admit(world.chain([*T(10), 1, 2]))
    assert one is not None
    assert other is not None
    assert one.copies == ()
    assert one.admission.block_ids == (0, 1, 2)
    assert other.copies == (BlockCopy(src=2, dst=3, num_tokens=2),)
    assert other.admission.block_ids == (0, 1, 3)
    for run in (one, other):
        assert world.stage(run, 12)
    world.execute()
    world.check()


def test_a_full_block_that_matches_in_part_is_copied() -> None:
    world = World()
    world.turn(T(12))
    run = world.admit(world.chain([*T(6), 1, 1]))
    assert run is not None
    assert run.copies == (BlockCopy(src=1, dst=3, num_tokens=2),)
    assert run.admission.cached_tokens == 6
    assert world.stage(run, 8)
    world.execute()
    world.check()


def test_the_source_of_a_copy_is_held_until_the_step_is_committed() -> None:
    world = World()
    world.turn(T(8))
    run = world.admit(world.chain([*T(6), 1]))
    assert run is not None
    assert device(world)[1:3] == (1, 2)
    assert world.stage(run, 7)
    world.execute()
    assert device(world)[1:3] == (1, 1)


def test_a_copy_that_never_ran_leaves_nothing_to_match() -> None:
    world = World()
    world.turn(T(8))
    run = world.admit(world.chain([*T(6), 1]))
    assert run is not None
    world.finish(run)
    world.check()
    assert device(world) == (6, 0, 0, 2)


def test_a_grown_tail_takes_the_place_of_its_shorter_self() -> None:
    world = World()
    world.turn(T(10))
    world.turn(T(11))
    assert len(world.kv.resident_keys()) == 3
    shorter = world.chain(T(10)).tail_record(10)
    assert shorter is not None
    assert shorter.key not in world.kv.resident_keys()
    assert world.kv.match(world.chain(T(11))).num_tokens == 10


def test_a_tail_that_did_not_grow_is_what_it_was() -> None:
    world = World()
    world.turn(T(10))
    keys = world.kv.resident_keys()
    run = world.admit(world.chain(T(12)))
    assert run is not None
    assert world.stage(run, 12)
    world.execute(failing=[run])
    assert world.kv.resident_keys() == keys
    world.check()
    assert world.turn(T(12)).admission.cached_tokens == 10


@pytest.mark.parametrize(("kept", "matched"), [(None, 11), (11, 11), (10, 10), (9, 9), (8, 8)])
def test_a_tail_is_cut_to_what_was_kept(kept: int | None, matched: int) -> None:
    world = World()
    run = world.admit(world.chain(T(11)))
    assert run is not None
    assert world.stage(run, 11)
    world.execute()
    world.finish(run, kept)
    world.check()
    assert world.kv.match(world.chain(T(20))).num_tokens == matched


def test_full_blocks_past_the_cut_stay_under_their_own_names() -> None:
    world = World()
    run = world.admit(world.chain(T(9)))
    assert run is not None
    assert world.stage(run, 9)
    world.execute()
    world.finish(run, 5)
    assert world.kv.match(world.chain(T(20))).num_tokens == 8


# -- one plan


def test_full_blocks_staged_in_a_plan_are_shared_within_it() -> None:
    world = World()
    one = world.admit(world.chain(T(10)))
    assert one is not None
    assert world.stage(one, 10)
    other = world.admit(world.chain([*T(8), 1, 2]))
    assert other is not None
    assert other.admission.device_tokens == 8
    assert other.admission.block_ids == (0, 1)
    assert world.kv.dependents(one.seq_id) == (other.seq_id,)
    assert world.stage(other, 10)
    world.execute()
    assert world.kv.dependents(one.seq_id) == ()
    world.check()


def test_who_read_from_a_failed_filler_fails_with_it_transitively() -> None:
    world = World(device_blocks=12)
    runs = []
    for length in (5, 9, 13):
        run = world.admit(world.chain(T(length)))
        assert run is not None
        assert world.stage(run, length)
        runs.append(run)
    assert world.kv.dependents(runs[0].seq_id) == (runs[1].seq_id, runs[2].seq_id)
    world.execute(failing=[runs[0]])
    assert device(world) == (12, 0, 0, 0)
    assert world.kv.resident_keys() == ()


def test_a_borrower_cannot_commit_on_a_prefix_that_was_never_written() -> None:
    world = World()
    one = world.admit(world.chain(T(5)))
    assert one is not None
    assert world.stage(one, 5)
    other = world.admit(world.chain(T(7)))
    assert other is not None
    assert world.stage(other, 7)
    world.kv.finish(one.seq_id)
    with pytest.raises(LeaseError, match="no sound prefix"):
        world.kv.commit(other.seq_id, 7)
    world.kv.finish(other.seq_id)
    world.kv.unstage()
    world.assert_idle()
    assert device(world)[0] == 8


def test_what_is_staged_is_not_matchable_once_the_plan_is_gone() -> None:
    world = World()
    one = world.admit(world.chain(T(10)))
    assert one is not None
    assert world.stage(one, 10)
    assert world.kv.match(world.chain(T(10))).num_tokens == 8
    world.plan = []
    world.kv.unstage()
    assert world.kv.match(world.chain(T(10))).num_tokens == 0


def test_a_match_of_staged_blocks_ends_with_their_plan() -> None:
    world = World()
    one = world.admit(world.chain(T(10)))
    assert one is not None
    assert world.stage(one, 10)
    chain = world.chain(T(10))
    match = world.kv.match(chain)
    world.plan = []
    world.kv.unstage()
    with pytest.raises(LeaseError, match="changed since"):
        world.kv.admit(99, chain, match)


def test_the_next_block_of_a_running_filler_is_waited_for() -> None:
    world = World()
    one = world.admit(world.chain(T(13)))
    assert one is not None
    assert world.kv.match(world.chain(T(13))).waits_for == one.seq_id
    assert world.stage(one, 4)
    staged = world.kv.match(world.chain(T(13)))
    assert (staged.num_tokens, staged.waits_for) == (4, one.seq_id)
    world.execute()
    committed = world.kv.match(world.chain(T(13)))
    assert (committed.num_tokens, committed.waits_for) == (4, one.seq_id)
    assert world.kv.match(world.chain([*T(4), *[1] * 9])).waits_for is None
    world.finish(one)
    assert world.kv.match(world.chain(T(13))).waits_for is None


def test_a_block_that_could_not_be_used_whole_is_not_waited_for() -> None:
    world = World()
    assert world.admit(world.chain(T(8))) is not None
    assert world.kv.match(world.chain(T(4))).waits_for is None


def test_the_same_block_computed_twice_is_kept_once() -> None:
    world = World()
    runs = [world.admit(world.chain(T(9))) for _ in range(2)]
    for run in runs:
        assert run is not None
        assert world.stage(run, 9)
    world.execute()
    assert device(world) == (2, 2, 4, 0)
    for run in runs:
        assert run is not None
        world.finish(run)
    world.check()
    assert device(world) == (5, 0, 0, 3)
    assert world.kv.usage().counters.duplicates == 3


# -- tables, ends, misuse


def test_reserve_adds_blocks_at_the_end_or_none_at_all() -> None:
    world = World(device_blocks=4)
    run = world.admit(world.chain(T(20)))
    assert run is not None
    assert world.kv.reserve(run.seq_id, 5) == (0, 1)
    assert world.kv.reserve(run.seq_id, 8) == ()
    assert world.kv.reserve(run.seq_id, 17) is None
    assert list(world.kv.block_table(run.seq_id)) == [0, 1]
    assert world.kv.reserve(run.seq_id, 16) == (2, 3)


def test_an_admission_reserves_all_of_its_room_or_nothing() -> None:
    world = World(device_blocks=4)
    world.turn(T(8))
    chain = world.chain(T(20))
    before = world.kv.ledger()
    for room_tokens, admitted in ((17, False), (16, True)):
        match = world.kv.match(chain)
        admission = world.kv.admit(7, chain, match, room_tokens=room_tokens)
        assert (admission is not None) == admitted
        if admission is None:
            assert world.kv.ledger() == before
        else:
            assert admission.block_ids == (0, 1, 2, 3)


def test_freed_blocks_are_reported_once() -> None:
    world = World()
    run = world.admit(world.chain(T(9)))
    assert run is not None
    assert world.stage(run, 9)
    world.finish(run)
    assert sorted(world.kv.take_freed()) == [0, 1, 2]
    assert world.kv.take_freed() == ()


def test_misuse_raises() -> None:
    world = World()
    run = world.admit(world.chain(T(9)))
    assert run is not None
    with pytest.raises(LeaseError, match="runs already"):
        world.admit(world.chain(T(9)), seq_id=run.seq_id)
    with pytest.raises(LeaseError, match="commits 5 tokens after 0 in 0 blocks"):
        world.kv.commit(run.seq_id, 5)
    world.kv.finish(run.seq_id)
    with pytest.raises(LeaseError, match="not running"):
        world.kv.finish(run.seq_id)
    with pytest.raises(LeaseError, match="not running"):
        world.kv.block_table(run.seq_id)


def test_a_commit_cannot_go_back() -> None:
    world = World()
    run = world.admit(world.chain(T(9)))
    assert run is not None
    assert world.stage(run, 7)
    world.execute()
    with pytest.raises(LeaseError, match="commits 6 tokens after 7"):
        world.kv.commit(run.seq_id, 6)


def test_preempted_blocks_go_first_and_come_back_with_their_tail() -> None:
    world = World(device_blocks=7)
    world.turn([1] * 12)
    run = world.admit(world.chain(T(10)))
    assert run is not None
    assert world.stage(run, 10)
    world.execute()
    world.preempt(run)
    resumed = world.admit(run.chain, seq_id=run.seq_id)
    assert resumed is not None
    assert resumed.admission.cached_tokens == 9
    world.finish(resumed)
    world.turn([2] * 7)
    world.check()
    assert world.kv.match(world.chain([1] * 13)).num_tokens == 12


def test_without_prefix_cache_nothing_is_kept_or_matched() -> None:
    world = World(prefix_cache=False, host_blocks=2)
    run = world.admit(world.chain(T(10)))
    assert run is not None
    assert world.stage(run, 10)
    assert world.kv.match(world.chain(T(10))).num_tokens == 0
    assert world.kv.match(world.chain(T(10))).waits_for is None
    world.execute()
    assert world.kv.match(world.chain(T(10))).num_tokens == 0
    world.finish(run)
    world.check()
    assert device(world) == (8, 0, 0, 0)
    assert world.plan_transfers() == []


# -- figures


def test_look_ups_count_when_they_have_run_and_not_after_a_preemption() -> None:
    world = World(device_blocks=12)
    world.turn(T(9))
    counters = world.kv.usage().counters
    assert (counters.looked_up, counters.hit) == (2, 0)
    never_ran = world.admit(world.chain(T(13)))
    assert never_ran is not None
    world.finish(never_ran)
    assert (counters.looked_up, counters.hit) == (2, 0)
    run = world.admit(world.chain(T(13)))
    assert run is not None
    assert world.stage(run, 13)
    world.execute()
    assert (counters.looked_up, counters.hit) == (5, 2)
    world.preempt(run)
    resumed = world.admit(run.chain, seq_id=run.seq_id)
    assert resumed is not None
    assert world.stage(resumed, 13)
    world.execute()
    assert (counters.looked_up, counters.hit) == (5, 2)


def test_unused_slots_are_counted() -> None:
    world = World()
    world.turn(T(10))
    run = world.admit(world.chain([1] * 5))
    assert run is not None
    assert world.stage(run, 5)
    assert world.kv.usage().wasted_device_slots == 2 + 8
    world.execute()
    assert world.kv.usage().wasted_device_slots == 2 + 3
