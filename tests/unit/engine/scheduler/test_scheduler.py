import pytest

from sessionkv.engine.scheduler.policy import Lane, LoadPolicy
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.sequence import SequenceState
from sessionkv.errors import NeverFits, Overloaded, PromptTooLong
from sessionkv.types import (
    BlockHash,
    BlockMove,
    BlockRecord,
    DiskBlock,
    DiskQuery,
    DiskReceipt,
    FinishReason,
    Match,
    MissReason,
    MoveOutcome,
    SampledToken,
    SamplingParams,
    StepOutput,
    Tier,
    Transfer,
    TransferResult,
)
from tests.builders.fake_kv import FakeKV
from tests.builders.schedules import (
    Claims,
    ComputeAll,
    Loop,
    Scripted,
    make_scheduler,
    make_sequence,
    spans,
)


def a_spill(transfer_id: int) -> Transfer:
    record = BlockRecord(BlockHash(b"k"), BlockHash(b"p"), (1,))
    return Transfer(transfer_id, Tier.DEVICE, Tier.HOST, (BlockMove(record, 0, 0),))


def ended(transfer_id: int, outcome: MoveOutcome = MoveOutcome.OK) -> TransferResult:
    return TransferResult(transfer_id, (outcome,), 0.1)


# ---- limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(60, 1, True), (60, 4, True), (60, 5, False), (60, None, True), (64, None, False)],
)
def test_prompt_and_max_tokens_must_fit_the_window(
    prompt: int, max_tokens: int | None, fits: bool
) -> None:
    scheduler = make_scheduler(FakeKV(100))
    sequence = make_sequence(1, range(prompt), max_tokens=max_tokens)
    if fits:
        scheduler.add(sequence, 0.0)
        assert scheduler.get(1).max_output_tokens == (max_tokens or 4)
        return
    with pytest.raises(PromptTooLong) as raised:
        scheduler.add(sequence, 0.0)
    assert raised.value.details == {"n_prompt": prompt, "max_tokens": max_tokens, "n_ctx": 64}


def test_what_can_never_fit_the_pool_is_refused_at_once() -> None:
    scheduler = make_scheduler(FakeKV(5))
    with pytest.raises(NeverFits) as raised:
        scheduler.add(make_sequence(1, range(18), max_tokens=4), 0.0)
    assert raised.value.details == {"needed_blocks": 6, "available_blocks": 5}
    scheduler.add(make_sequence(2, range(18), max_tokens=3), 0.0)
    scheduler.add(make_sequence(3, range(18), max_tokens=None), 0.0)
    assert scheduler.get(3).max_output_tokens == 3


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    scheduler = make_scheduler(FakeKV(5), max_queue=2)
    for seq_id in (1, 2):
        scheduler.add(make_sequence(seq_id, range(4)), 0.0)
    with pytest.raises(Overloaded) as raised:
        scheduler.add(make_sequence(3, range(4)), 0.0)
    assert raised.value.details["queued"] == 2
    assert 0 < raised.value.details["retry_after_s"] <= 30


# ---- batching ------------------------------------------------------------------------------


def test_chunks_share_the_budget_and_end_at_block_boundaries() -> None:
    scheduler = make_scheduler(FakeKV(20), step_tokens=10)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(13)), 0.0)
    scheduler.add(make_sequence(2, range(7)), 0.0)
    loop.run(4)
    assert [spans(plan) for plan in loop.plans] == [
        [(1, 0, 8), (2, 0, 2)],
        [(1, 8, 13), (2, 2, 7)],
        [(1, 13, 14), (2, 7, 8)],
        [(1, 14, 15), (2, 8, 9)],
    ]
    assert [[s.sample for s in plan.steps] for plan in loop.plans] == [
        [False, False],
        [True, True],
        [True, True],
        [True, True],
    ]


def test_decoding_goes_before_the_rest_of_a_long_prompt() -> None:
    scheduler = make_scheduler(FakeKV(20), step_tokens=8)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(4)), 0.0)
    loop.step()
    scheduler.add(make_sequence(2, range(24)), 0.0)
    loop.run(3)
    assert [spans(plan) for plan in loop.plans[1:]] == [
        [(1, 4, 5), (2, 0, 4)],
        [(1, 5, 6), (2, 4, 8)],
        [(1, 6, 7), (2, 8, 12)],
    ]


def test_prompts_get_small_steps_only_while_somebody_decodes() -> None:
    scheduler = make_scheduler(FakeKV(40), step_tokens=16, shared_tokens=6)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(18), max_tokens=3), 0.0)
    loop.run(2)
    scheduler.add(make_sequence(2, range(40)), 0.0)
    loop.run(4)
    assert [spans(plan) for plan in loop.plans] == [
        [(1, 0, 16)],
        [(1, 16, 18)],
        [(1, 18, 19), (2, 0, 4)],  # five are left beside the decode: to a block's end
        [(1, 19, 20), (2, 4, 8)],
        [(2, 8, 24)],
        [(2, 24, 40)],
    ]


def test_two_that_decode_leave_so_much_less() -> None:
    scheduler = make_scheduler(FakeKV(40), step_tokens=24, shared_tokens=8)
    loop = Loop(scheduler)
    for seq_id in (1, 2):
        scheduler.add(make_sequence(seq_id, range(4), max_tokens=4), 0.0)
    loop.step()
    scheduler.add(make_sequence(3, range(30)), 0.0)
    loop.step()
    assert [spans(plan) for plan in loop.plans] == [
        [(1, 0, 4), (2, 0, 4)],
        [(1, 4, 5), (2, 4, 5), (3, 0, 4)],  # six are left
    ]


def test_all_that_run_may_decode_in_one_step() -> None:
    scheduler = make_scheduler(FakeKV(40), step_tokens=16, shared_tokens=2)
    loop = Loop(scheduler)
    for seq_id in (1, 2, 3):
        scheduler.add(make_sequence(seq_id, range(2), max_tokens=2), 0.0)
    loop.run(2)
    assert [spans(plan) for plan in loop.plans] == [[(1, 0, 2), (2, 0, 2)], [(1, 2, 3), (2, 2, 3)]]


def test_no_more_run_at_once_than_allowed() -> None:
    scheduler = make_scheduler(FakeKV(20), max_running=2)
    loop = Loop(scheduler)
    for seq_id in (1, 2, 3):
        scheduler.add(make_sequence(seq_id, range(4), max_tokens=2), 0.0)
    loop.run(2)
    assert loop.order() == [1, 2]
    loop.run(1)
    assert loop.order() == [1, 2, 3]


def test_a_plan_carries_starts_new_blocks_and_ends_once() -> None:
    scheduler = make_scheduler(FakeKV(20))
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(4), max_tokens=3, stop_token_ids=frozenset({7})), 0.0)
    loop.run(4)
    scheduler.add(make_sequence(2, range(2)), 0.0)
    loop.run(2)
    first, second, third, fourth, _ = loop.plans
    assert [s.seq_id for s in first.starts] == [1]
    assert first.starts[0].block_ids == (0,)
    assert first.starts[0].stop_token_ids == {7}
    assert second.starts == third.starts == ()
    assert [p.steps[0].new_block_ids for p in (first, second, third)] == [(), (1,), ()]
    assert (third.ends, fourth.ends) == ((), (1,))
    assert [p.step_id for p in loop.plans] == [1, 2, 3, 4, 5]


# ---- ends ----------------------------------------------------------------------------------


def test_length_ends_a_sequence_and_blocks_stay_until_release() -> None:
    kv = FakeKV(20)
    scheduler = make_scheduler(kv)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(4), max_tokens=2), 0.0)
    loop.run(5)
    assert [(e.num_output_tokens, e.finish, e.stop_token_id) for e in loop.events] == [
        (1, None, None),
        (2, FinishReason.LENGTH, None),
    ]
    assert kv.tables == {1: [0, 1]}
    scheduler.release(1, keep_tokens=5)
    assert kv.calls[-1] == ("finish", 1, 5)
    with pytest.raises(KeyError):
        scheduler.release(1)


def test_release_before_the_end_is_refused() -> None:
    scheduler = make_scheduler(FakeKV(20))
    scheduler.add(make_sequence(1, range(4)), 0.0)
    with pytest.raises(ValueError, match="has not finished"):
        scheduler.release(1)


def test_a_stop_id_counts_from_min_tokens_on() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=3)
    scheduler = make_scheduler(FakeKV(20))
    loop = Loop(scheduler, token=lambda seq_id, step: 7)
    scheduler.add(make_sequence(1, range(4), sampling=sampling, stop_token_ids=frozenset({7})), 0.0)
    loop.run(9)
    last = loop.events[-1]
    assert (last.num_output_tokens, last.finish, last.stop_token_id) == (3, FinishReason.STOP, 7)
    assert last.token == SampledToken(7)


def test_cancel_at_known_tokens_ends_at_once_and_drops_what_follows() -> None:
    scheduler = make_scheduler(FakeKV(20))
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(4), max_tokens=9), 0.0)
    loop.run(5)
    event = scheduler.cancel_at(1, 2)
    assert event is not None
    assert (event.token, event.num_output_tokens, event.finish) == (None, 2, FinishReason.STOP)
    assert loop.step() is None
    assert scheduler.get(1).report().prompt_tokens == 4
    assert scheduler.cancel_at(1, 1) is None


def test_cancel_at_a_later_token_runs_until_there() -> None:
    scheduler = make_scheduler(FakeKV(20))
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(4), max_tokens=9), 0.0)
    loop.step()
    assert scheduler.cancel_at(1, 3, FinishReason.CANCELLED) is None
    loop.run(9)
    last = loop.events[-1]
    assert (last.num_output_tokens, last.finish) == (3, FinishReason.CANCELLED)
    assert last.token is not None


def test_cancel_at_during_a_step_ends_with_its_commit() -> None:
    scheduler = make_scheduler(FakeKV(20))
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(4), max_tokens=9), 0.0)
    loop.run(3)
    plan = scheduler.schedule(1.0)
    assert plan is not None
    assert scheduler.cancel_at(1, 2) is None
    [event] = scheduler.commit(plan, StepOutput(plan.step_id, {1: SampledToken(5)}), 1.0)
    assert (event.token, event.num_output_tokens, event.finish) == (None, 2, FinishReason.STOP)


def test_a_waiting_sequence_can_be_ended_with_nothing() -> None:
    scheduler = make_scheduler(FakeKV(20))
    scheduler.add(make_sequence(1, range(4)), 0.0)
    event = scheduler.cancel_at(1, 0, FinishReason.CANCELLED)
    assert event is not None
    assert (event.num_output_tokens, event.finish) == (0, FinishReason.CANCELLED)
    assert scheduler.schedule(0.0) is None
    scheduler.release(1)


# ---- cancel --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_cancel_between_steps_gives_everything_back(steps: int) -> None:
    kv = FakeKV(20)
    scheduler = make_scheduler(kv, step_tokens=4)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(7), max_tokens=2), 0.0)
    loop.run(steps)
    assert scheduler.cancel(1)
    assert not scheduler.cancel(1)
    assert (len(kv.free), kv.tables) == (20, {})
    scheduler.add(make_sequence(2, range(3)), 0.0)
    plan = loop.step()
    assert plan is not None
    # Once finished, it left the batch before; nothing was planned since, so it is told now too.
    assert plan.ends == ((1,) if steps else ())


def test_cancel_during_a_step_waits_for_its_end() -> None:
    kv = FakeKV(20)
    scheduler = make_scheduler(kv, step_tokens=4)
    scheduler.add(make_sequence(1, range(7)), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.cancel(1)
    assert 1 in kv.tables
    assert scheduler.commit(plan, StepOutput(plan.step_id), 0.0) == []
    assert kv.tables == {}
    assert kv.calls[-3:] == [("commit", 1, 4), ("finish", 1, None), ("unstage",)]


def test_cancel_while_fetching_gives_the_receipt_back_when_the_reads_are_over() -> None:
    scheduler, _, loop = fetching()
    loop.step()
    host, disk = scheduler.take_transfers()
    assert scheduler.cancel(1)
    assert scheduler.take_receipts() == []
    answer(scheduler, host, 0.2)
    assert scheduler.take_receipts() == []
    answer(scheduler, disk, 0.2)
    assert scheduler.take_receipts() == [77]
    assert scheduler.take_receipts() == []


# ---- failures ------------------------------------------------------------------------------


def test_a_failed_sequence_takes_its_readers_back_to_the_queue() -> None:
    kv = FakeKV(20)
    kv.depends = {1: (2,)}
    scheduler = make_scheduler(kv)
    loop = Loop(scheduler)
    for seq_id in (1, 2, 3):
        scheduler.add(make_sequence(seq_id, range(4), max_tokens=2), 0.0)
    loop.step(failed={1: "NaN in the logits"})
    assert [(e.seq_id, e.error is not None) for e in loop.events] == [(1, True), (3, False)]
    assert "NaN in the logits" in str(loop.events[0].error)
    assert ("commit", 1, 4) not in kv.calls
    assert ("commit", 2, 4) not in kv.calls
    plan = loop.step()
    assert plan is not None
    assert spans(plan) == [(3, 4, 5), (2, 0, 4)]
    assert sorted(plan.ends) == [1, 2]
    loop.run(3)
    assert scheduler.get(2).report().recomputed_tokens == 0


def test_a_step_that_raises_fails_its_sequences_and_no_others() -> None:
    kv = FakeKV(20)
    scheduler = make_scheduler(kv, max_running=1)
    for seq_id in (1, 2):
        scheduler.add(make_sequence(seq_id, range(4), max_tokens=1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    events = scheduler.fail_step(plan, RuntimeError("secret"))
    assert [(e.seq_id, e.error.code) for e in events if e.error] == [(1, "turn_failed")]
    assert "secret" not in str(events[0].error)
    assert ("commit", 1, 4) not in kv.calls
    loop = Loop(scheduler)
    loop.run(2)
    assert [(e.seq_id, e.finish) for e in loop.events] == [(2, FinishReason.LENGTH)]
    assert loop.plans[0].ends == (1,)


def test_plans_are_committed_one_at_a_time() -> None:
    scheduler = make_scheduler(FakeKV(20))
    scheduler.add(make_sequence(1, range(4)), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule(0.0)
    scheduler.fail_step(plan, RuntimeError())
    with pytest.raises(RuntimeError, match="not in flight"):
        scheduler.commit(plan, StepOutput(1), 0.0)


# ---- order ---------------------------------------------------------------------------------


def one_at_a_time(**config: object) -> Loop:
    return Loop(make_scheduler(FakeKV(50), step_tokens=4, max_running=1, **config))


def run_all(loop: Loop, steps: int = 80) -> list[int]:
    for _ in range(steps):
        loop.step()
        loop.release_finished()
    return loop.order()


def test_higher_priority_first_then_first_come() -> None:
    loop = one_at_a_time()
    for seq_id, priority in ((1, 0), (2, 0), (3, 5), (4, 0), (5, 5)):
        sequence = make_sequence(seq_id, range(4), max_tokens=1, priority=priority)
        loop.scheduler.add(sequence, 0.0)
    assert run_all(loop) == [3, 5, 1, 2, 4]


def test_waiting_lifts_a_low_priority_past_later_higher_ones() -> None:
    loop = one_at_a_time(ageing_s=1.0)
    loop.scheduler.add(make_sequence(1, range(4), max_tokens=1, priority=-2), 0.0)
    loop.now = 3.5
    loop.scheduler.add(make_sequence(2, range(4), max_tokens=1, priority=0), loop.now)
    assert run_all(loop) == [1, 2]


def test_tokens_are_shared_out_between_tenants_and_their_sessions() -> None:
    loop = one_at_a_time()
    groups = [("a", "x")] * 3 + [("a", "y")] * 2 + [("b", "z")] * 2
    for seq_id, group in enumerate(groups):
        loop.scheduler.add(make_sequence(seq_id, range(4), max_tokens=1, group=group), 0.0)
    assert run_all(loop) == [0, 5, 3, 6, 1, 4, 2]


def test_a_tenant_that_was_away_saves_up_no_claim() -> None:
    loop = one_at_a_time()
    for seq_id in range(6):
        loop.scheduler.add(make_sequence(seq_id, range(4), max_tokens=1, group=("a", "")), 0.0)
    loop.run(3)
    for seq_id in range(10, 14):
        group = ("b", "")
        loop.scheduler.add(make_sequence(seq_id, range(4), max_tokens=1, group=group), loop.now)
    assert run_all(loop)[3:] == [10, 3, 11, 4, 12, 5, 13]


def test_expired_names_what_goes_on_past_its_deadline() -> None:
    scheduler = make_scheduler(FakeKV(20))
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(4), max_tokens=1, deadline=5.0), 0.0)
    scheduler.add(make_sequence(2, range(4), deadline=7.0), 0.0)
    scheduler.add(make_sequence(3, range(4), deadline=6.0), 0.0)
    scheduler.add(make_sequence(4, range(4)), 0.0)
    assert scheduler.next_wake() == 5.0
    loop.step()
    assert scheduler.next_wake() == 6.0
    assert scheduler.expired(5.5) == []
    assert scheduler.expired(7.0) == [3, 2]
    assert scheduler.expired(7.0) == [3, 2]
    scheduler.cancel(3)
    scheduler.cancel(2)
    assert (scheduler.expired(9.0), scheduler.next_wake()) == ([], None)


# ---- room ----------------------------------------------------------------------------------


def test_the_last_admitted_of_the_lowest_priority_gives_way() -> None:
    kv = FakeKV(6)
    scheduler = make_scheduler(kv)
    loop = Loop(scheduler)
    for seq_id, priority in ((1, 0), (2, 3), (3, 0)):
        sequence = make_sequence(seq_id, range(7), max_tokens=6, priority=priority)
        scheduler.add(sequence, 0.0)
    loop.step()
    assert len(kv.free) == 0
    loop.step()
    loop.step()
    assert ("preempt", 3) in kv.calls
    assert ("preempt", 1) not in kv.calls
    assert scheduler.num_preemptions == 1
    assert loop.plans[-1].ends == (3,)


def test_a_preempted_sequence_resumes_first_and_exactly() -> None:
    kv = FakeKV(5)
    scheduler = make_scheduler(kv, max_queue=8)
    loop = Loop(scheduler)
    for seq_id in (1, 2):
        scheduler.add(make_sequence(seq_id, range(7), max_tokens=8), 0.0)
    loop.run(3)
    scheduler.add(make_sequence(3, range(2), max_tokens=1), loop.now)
    for _ in range(30):
        loop.step()
        loop.release_finished()
    assert ("preempt", 2) in kv.calls
    starts = [s for plan in loop.plans for s in plan.starts if s.seq_id == 2]
    assert len(starts) == 2
    assert starts[1].num_prompt_tokens == 7
    # Both saw the list grow, since it is the sequence's own.
    assert len(starts[1].token_ids) == 7 + 8
    outputs = [e.num_output_tokens for e in loop.events if e.seq_id == 2]
    assert outputs == list(range(1, 9))
    assert loop.order() == [1, 2, 3]
    ends = {e.seq_id: e.finish for e in loop.events if e.finish}
    assert ends == dict.fromkeys((1, 2, 3), FinishReason.LENGTH)


def test_recomputed_tokens_are_outside_the_first_report() -> None:
    kv = FakeKV(4)
    scheduler = make_scheduler(kv)
    loop = Loop(scheduler)
    for seq_id in (1, 2):
        scheduler.add(make_sequence(seq_id, range(7), max_tokens=6), 0.0)
    for _ in range(30):
        loop.step()
        if loop.events and loop.events[-1].finish:
            break
    victim = scheduler.get(2)
    scheduler.release(1)
    for _ in range(10):
        loop.step()
    report = victim.report()
    assert (report.prompt_tokens, report.computed_tokens, report.cached_tokens) == (7, 7, 0)
    assert report.recomputed_tokens == 8


def test_spills_under_way_are_waited_for_before_anybody_is_preempted() -> None:
    kv = FakeKV(4)
    scheduler = make_scheduler(kv)
    loop = Loop(scheduler)
    kv.spills = [a_spill(900)]
    kv._held_back = {900: [kv.free.pop()]}
    scheduler.add(make_sequence(1, range(4), max_tokens=9), 0.0)
    scheduler.add(make_sequence(2, range(7), max_tokens=2), 0.0)
    loop.step()
    plan = loop.step()
    assert plan is not None
    assert spans(plan) == [(2, 7, 8)]
    assert [t.transfer_id for t in scheduler.take_transfers()] == [900]
    assert scheduler.num_preemptions == 0
    scheduler.on_transfer(ended(900), loop.now)
    plan = loop.step()
    assert plan is not None
    assert spans(plan) == [(1, 4, 5)]
    assert scheduler.num_preemptions == 0


def test_a_sequence_without_room_is_not_passed_for_ever() -> None:
    kv = FakeKV(5)
    scheduler = make_scheduler(kv)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(8), max_tokens=1), 0.0)
    loop.step()  # finished, and holds its blocks until it is released
    scheduler.add(make_sequence(2, range(13), max_tokens=4), loop.now)
    for seq_id in range(10, 20):
        scheduler.add(make_sequence(seq_id, range(3), max_tokens=1), loop.now)
        loop.step(0.1)
        if seq_id in loop.order():
            scheduler.release(seq_id)
    # Small ones went past it for half a second and no longer.
    assert loop.order() == [1, 10, 11, 12, 13, 14]
    loop.release_finished()
    loop.run(1)
    assert loop.order()[6:] == [2, 15]


def test_higher_priority_still_passes_one_that_reserves() -> None:
    kv = FakeKV(4)
    scheduler = make_scheduler(kv)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(4), max_tokens=1), 0.0)
    loop.step()
    scheduler.add(make_sequence(2, range(13), max_tokens=4), loop.now)
    loop.step(1.0)
    scheduler.add(make_sequence(3, range(3), max_tokens=1), loop.now)
    scheduler.add(make_sequence(4, range(3), max_tokens=1, priority=1), loop.now)
    loop.step()
    loop.step()
    assert loop.order() == [1, 4]
    assert "without room: [2]" in scheduler.idle_reason()


# ---- tiers ---------------------------------------------------------------------------------


def fetching(policy: LoadPolicy | None = None, **how: int) -> tuple[Scheduler, FakeKV, Loop]:
    """Sequence 1, 18 tokens: 4 on the device, 8 on the host, 4 on disk, under receipt 77."""
    kv = FakeKV(20)
    kv.queries[0] = DiskQuery((), BlockHash(b"p"), (), 4)
    kv.matches[0] = Match(4, 8, 4)
    scheduler = make_scheduler(kv, policy=policy, **how)
    scheduler.add(make_sequence(1, range(18), max_tokens=1), 0.0)
    assert [seq_id for seq_id, _ in scheduler.take_lookups()] == [1]
    assert scheduler.take_lookups() == []
    assert scheduler.schedule(0.01) is None
    record = BlockRecord(BlockHash(b"k"), BlockHash(b"p"), (1, 2, 3, 4))
    scheduler.on_receipt(1, DiskReceipt(77, (DiskBlock(record, 0),), None))
    loop = Loop(scheduler)
    loop.now = 0.02
    return scheduler, kv, loop


def loaded(*sizes: int, small_tokens: int) -> Loop:
    """Sequences 1 and on whose first 8 tokens were loaded together; so many are to be computed."""
    kv = FakeKV(200)
    scheduler = make_scheduler(kv, step_tokens=100, small_tokens=small_tokens)
    for seq_id, size in enumerate(sizes, 1):
        kv.matches[seq_id] = Match(0, 8, 0)
        scheduler.add(make_sequence(seq_id, [seq_id] * (8 + size), max_tokens=2), 0.0)
    assert scheduler.schedule(0.0) is None
    for transfer in scheduler.take_transfers():
        answer(scheduler, transfer, 0.0)
    return Loop(scheduler)


def test_few_prompts_that_fit_a_small_step_are_computed_by_turns() -> None:
    loop = loaded(6, 6, 2, 6, small_tokens=8)
    loop.run(3)
    assert [spans(plan) for plan in loop.plans] == [
        [(1, 8, 14)],
        [(1, 14, 15), (2, 8, 14)],  # the third would make it nine
        [(2, 14, 15), (3, 8, 10)],
    ]
    loop.run(2)
    assert [spans(plan) for plan in loop.plans[3:]] == [
        [(3, 10, 11), (4, 8, 14)],
        [(4, 14, 15)],
    ]


def test_who_comes_new_does_not_overtake_a_prompt_that_was_left_to_the_next_step() -> None:
    loop = loaded(6, 6, small_tokens=8)
    loop.scheduler.add(make_sequence(3, [3, 3], max_tokens=2), 0.0)
    loop.run(3)
    assert [spans(plan) for plan in loop.plans] == [
        [(1, 8, 14)],
        [(1, 14, 15), (2, 8, 14)],
        [(2, 14, 15), (3, 0, 2)],
    ]


def test_prompts_that_come_together_are_computed_by_turns() -> None:
    scheduler = make_scheduler(FakeKV(200), step_tokens=100, small_tokens=8)
    for seq_id in (1, 2):
        scheduler.add(make_sequence(seq_id, [seq_id] * 6, max_tokens=2), 0.0)
    loop = Loop(scheduler)
    loop.run(2)
    assert [spans(plan) for plan in loop.plans] == [[(1, 0, 6)], [(1, 6, 7), (2, 0, 6)]]


@pytest.mark.parametrize(
    ("sizes", "small_tokens"), [((6, 6, 6), 0), ((9, 6, 6), 8), ((2,) * 9, 8)], ids=str
)
def test_prompts_are_computed_together_where_a_step_is_large_or_they_are_many(
    sizes: tuple[int, ...], small_tokens: int
) -> None:
    loop = loaded(*sizes, small_tokens=small_tokens)
    loop.step()
    assert spans(loop.plans[0]) == [(i, 8, 8 + size) for i, size in enumerate(sizes, 1)]


def answer(scheduler: Scheduler, transfer: Transfer, now: float, *lost: int) -> None:
    """All blocks arrive but those at the positions ``lost``."""
    outcomes = tuple(
        MoveOutcome.CORRUPT if move.src in lost else MoveOutcome.OK for move in transfer.moves
    )
    scheduler.on_transfer(TransferResult(transfer.transfer_id, outcomes, 0.1), now)


def where(scheduler: Scheduler) -> tuple[int, int, int, int]:
    report = scheduler.get(1).report()
    return report.device_tokens, report.host_tokens, report.disk_tokens, report.computed_tokens


def computed(scheduler: Scheduler) -> list[tuple[int, int, MissReason | None]]:
    return [(part.start, part.end, part.reason) for part in scheduler.get(1).accounting.computed]


def test_fetches_run_beside_and_the_sequence_joins_when_all_are_answered() -> None:
    scheduler, _, loop = fetching()
    assert loop.step() is None
    host, disk = scheduler.take_transfers()
    assert [(host.src, len(host.moves)), (disk.src, len(disk.moves))] == [
        (Tier.HOST, 2),
        (Tier.DISK, 1),
    ]
    assert scheduler.take_transfers() == []
    answer(scheduler, disk, 0.1)
    assert scheduler.take_receipts() == []
    assert loop.step() is None
    answer(scheduler, host, 0.3)
    loop.now = 0.3
    loop.step()
    assert scheduler.take_receipts() == [77]
    assert spans(loop.plans[0]) == [(1, 16, 18)]
    assert loop.plans[0].starts[0].num_cached_tokens == 16
    assert len(loop.plans[0].starts[0].block_ids) == 5
    assert where(scheduler) == (4, 8, 4, 2)
    assert computed(scheduler) == [(16, 18, None)]
    report = scheduler.get(1).report()
    assert report.queue_ms == pytest.approx(20)
    assert report.fetch_ms == pytest.approx(280)
    assert report.ttft_ms == pytest.approx(300)


def test_the_front_is_computed_while_the_back_is_loaded_and_new_tokens_run_last() -> None:
    policy = Scripted([Claims(12, {Tier.DISK: 1}), Claims(12)])
    scheduler, kv, loop = fetching(policy, step_tokens=4)
    first = loop.step()
    (disk,) = scheduler.take_transfers()
    assert [move.src for move in disk.moves] == [3]
    table = tuple(kv.block_table(1))
    assert spans(first) == [(1, 4, 8)]
    assert first.starts[0].block_ids == table[:2]
    assert first.starts[0].num_cached_tokens == 4
    second = loop.step()
    assert spans(second) == [(1, 8, 12)]
    assert second.steps[0].new_block_ids == table[2:3]
    assert loop.step() is None
    assert scheduler.idle_reason().startswith("sequences: 1 fetching")
    answer(scheduler, disk, 0.5)
    last = loop.step()
    assert spans(last) == [(1, 16, 18)]
    assert last.ends == (1,)
    assert last.starts[0].block_ids == table
    assert last.starts[0].num_cached_tokens == 16
    assert scheduler.take_receipts() == [77]
    assert where(scheduler) == (4, 0, 4, 10)
    sooner = MissReason.RECOMPUTE_WAS_SOONER
    assert computed(scheduler) == [(4, 12, sooner), (16, 18, None)]


def test_all_that_was_found_may_be_computed_with_what_is_new() -> None:
    policy = ComputeAll()
    scheduler, kv, loop = fetching(policy, step_tokens=8)
    loop.run(3)
    assert [spans(plan)[0][1:] for plan in loop.plans] == [(4, 12), (12, 18)]
    assert loop.plans[1].steps[0].new_block_ids == tuple(kv.block_table(1))[3:]
    meeting, work = policy.asked[0]
    assert meeting.unclaimed == {Tier.HOST: [1, 2], Tier.DISK: [3]}
    assert (work.num_tokens, work.step_tokens, work.other_tokens) == (18, 8, 0)
    assert where(scheduler) == (4, 0, 0, 14)
    sooner = MissReason.RECOMPUTE_WAS_SOONER
    assert computed(scheduler) == [(4, 16, sooner), (16, 18, None)]
    scheduler.release(1)
    assert scheduler.take_receipts() == [77]


def test_the_policy_is_told_how_large_steps_are_now() -> None:
    policy = Scripted([Claims(8)])
    scheduler, _, loop = fetching(policy, step_tokens=8, shared_tokens=5)
    loop.step()
    scheduler.add(make_sequence(2, [9, 9]), loop.now)
    loop.run(2)
    assert [spans(plan) for plan in loop.plans] == [[(1, 4, 8)], [(2, 0, 2)], [(2, 2, 3)]]
    assert [work.step_tokens for _, work in policy.asked] == [8, 8, 5]


@pytest.mark.parametrize("lost", [1, 2])
def test_what_did_not_arrive_is_computed_and_the_rest_joins_behind_it(lost: int) -> None:
    scheduler, _, loop = fetching()
    loop.step()
    host, disk = scheduler.take_transfers()
    answer(scheduler, disk, 0.1)
    answer(scheduler, host, 0.3, lost)
    loop.run(3)
    start = lost * 4
    assert [spans(plan)[0][1:] for plan in loop.plans] == [(start, start + 4), (16, 18)]
    assert where(scheduler) == (4, 4, 4, 6)
    assert computed(scheduler) == [(start, start + 4, MissReason.CORRUPT), (16, 18, None)]


def test_the_runner_never_knows_a_block_before_its_kv_is_there() -> None:
    """Computing one block, loading the next, by turns."""
    policy = Scripted([Claims(8, {Tier.HOST: 1}), Claims(16)])
    scheduler, kv, loop = fetching(policy)
    loop.step()
    assert loop.plans[0].starts[0].block_ids == tuple(kv.block_table(1))[:2]
    (host,) = scheduler.take_transfers()
    assert [move.src for move in host.moves] == [2]
    answer(scheduler, host, 0.1)
    loop.run(3)
    assert [spans(plan)[0][1:] for plan in loop.plans] == [(4, 8), (12, 16), (16, 18)]
    starts = [[s.num_cached_tokens for s in plan.starts] for plan in loop.plans]
    assert starts == [[4], [12], []]
    assert len(loop.plans[1].starts[0].block_ids) == 4
    assert loop.plans[2].steps[0].new_block_ids == tuple(kv.block_table(1))[4:]
    assert where(scheduler) == (4, 4, 0, 10)


def test_computing_stops_before_what_was_claimed_whatever_the_policy_says() -> None:
    _, _, loop = fetching(Scripted([Claims(None, {Tier.HOST: 1})]))
    loop.step()
    assert spans(loop.plans[0]) == [(1, 4, 8)]


def test_a_policy_sees_how_long_loads_take_and_who_else_wants_to_compute() -> None:
    policy = Scripted([Claims(4, {Tier.HOST: 1}), Claims(4)])
    scheduler, _, loop = fetching(policy)
    loop.step()
    scheduler.add(make_sequence(2, range(50, 57), max_tokens=1), 0.02)
    scheduler.schedule(0.52)
    work = policy.asked[-1][1]
    assert work.lanes[Tier.HOST] == Lane(1, 1, pytest.approx(0.5))
    assert work.lanes[Tier.DISK] == Lane()
    assert work.other_tokens == 7


def test_a_preempted_meeting_gives_everything_back_and_starts_over() -> None:
    policy = Scripted([Claims(8, {Tier.DISK: 1}), Claims(8)])
    scheduler, kv, loop = fetching(policy)
    loop.step()
    (disk,) = scheduler.take_transfers()
    scheduler._life.preempt_last()
    assert kv.tables == {}
    sequence = scheduler.get(1)
    assert (sequence.state, sequence.computed_before) == (SequenceState.WAITING, 8)
    scheduler.on_transfer(TransferResult(disk.transfer_id, (MoveOutcome.OK,), 0.1), 0.1)
    assert scheduler.take_receipts() == []  # still of use
    policy.answers = [Claims(None)]
    kv.matches[0] = Match(8, 4, 4)
    loop.run(2)
    assert [spans(plan)[0][1:] for plan in loop.plans] == [(4, 8), (8, 18)]
    assert where(scheduler) == (4, 0, 0, 14)
    assert scheduler.get(1).report().recomputed_tokens == 0
    assert scheduler.take_receipts() == [77]


def test_a_lookup_that_takes_too_long_is_done_without() -> None:
    kv = FakeKV(20)
    kv.queries[0] = DiskQuery((), BlockHash(b"p"), (), 0)
    scheduler = make_scheduler(kv, min_lookup_wait_ms=50)
    scheduler.add(make_sequence(1, range(4), max_tokens=1), 1.0)
    assert scheduler.next_wake() == pytest.approx(1.05)
    assert scheduler.schedule(1.04) is None
    plan = scheduler.schedule(1.05)
    assert plan is not None
    assert scheduler.next_wake() is None
    scheduler.on_receipt(1, DiskReceipt(5, (), None))
    assert scheduler.take_receipts() == [5]


def test_a_lookup_is_waited_for_as_long_as_it_is_worth() -> None:
    kv = FakeKV(40)
    kv.queries |= {first: DiskQuery((), BlockHash(b"p"), (), 0) for first in (0, 50)}
    policy = Scripted([Claims(None)], token_patience_s=0.02)
    scheduler = make_scheduler(kv, policy=policy, min_lookup_wait_ms=50)
    scheduler.add(make_sequence(1, range(10), max_tokens=1), 1.0)  # 0.2 s
    scheduler.add(make_sequence(2, [50, 51], max_tokens=1), 1.01)  # the least, 0.05 s
    assert scheduler.next_wake() == pytest.approx(1.06)
    plan = scheduler.schedule(1.1)
    assert plan is not None
    assert [step.seq_id for step in plan.steps] == [2]
    assert scheduler.get(2).disk_was_late
    assert scheduler.next_wake() == pytest.approx(1.2)
    scheduler.on_receipt(1, DiskReceipt(5, (), None))
    assert scheduler.next_wake() is None
    assert not scheduler.get(1).disk_was_late


def test_what_memory_lacks_is_worth_a_wait_and_a_late_disk_none_again() -> None:
    kv = FakeKV(40)
    kv.queries[0] = DiskQuery((), BlockHash(b"p"), (), 8)  # the first 8 tokens are in memory
    kv.matches[0] = Match(8, 0, 0)
    policy = Scripted([Claims(None)], token_patience_s=0.1)
    scheduler = make_scheduler(kv, policy=policy, min_lookup_wait_ms=50)
    scheduler.add(make_sequence(1, range(10), max_tokens=1), 1.0)
    assert scheduler.next_wake() == pytest.approx(1.2)
    free, kv.free = kv.free, []
    assert scheduler.schedule(1.2) is None  # no room
    kv.free = free
    kv.matches[0] = Match(4, 0, 0)  # memory has lost some meanwhile
    assert scheduler.schedule(1.3) is None
    assert scheduler.next_wake() == pytest.approx(1.35)


def test_an_answer_that_comes_late_but_before_admission_is_of_use() -> None:
    kv = FakeKV(20)
    kv.queries[0] = DiskQuery((), BlockHash(b"p"), (), 0)
    scheduler = make_scheduler(kv, min_lookup_wait_ms=50)
    scheduler.add(make_sequence(1, range(4), max_tokens=1), 1.0)
    free, kv.free = kv.free, []
    assert scheduler.schedule(1.05) is None
    assert scheduler.get(1).disk_was_late
    scheduler.on_receipt(1, DiskReceipt(5, (), None))
    assert not scheduler.get(1).disk_was_late
    assert scheduler.take_receipts() == []
    kv.free = free
    assert scheduler.schedule(1.1) is not None
    assert scheduler.take_receipts() == [5]


def test_a_lookup_without_a_find_goes_on_at_once() -> None:
    kv = FakeKV(20)
    kv.queries[0] = DiskQuery((), BlockHash(b"p"), (), 0)
    scheduler = make_scheduler(kv)
    scheduler.add(make_sequence(1, range(4)), 0.0)
    scheduler.on_receipt(1, DiskReceipt(5, (), None))
    assert scheduler.schedule(0.0) is not None
    assert scheduler.take_receipts() == [5]
    scheduler.add(make_sequence(2, range(4)), 0.0)
    scheduler.on_receipt(2, None)
    assert scheduler.take_receipts() == []


def test_the_cache_can_be_left_out() -> None:
    kv = FakeKV(20)
    kv.matches[0] = Match(4, 0, 0)
    scheduler = make_scheduler(kv)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(7), max_tokens=2, use_cache=False), 0.0)
    loop.run(3)
    assert spans(loop.plans[0]) == [(1, 0, 7)]
    assert {call[0] for call in kv.calls} == {"admit", "unstage"}


# ---- waiting for others --------------------------------------------------------------------


def test_it_waits_for_the_filler_of_its_next_block_as_long_as_that_goes_on() -> None:
    kv = FakeKV(40)
    scheduler = make_scheduler(kv, step_tokens=4)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(16), max_tokens=1), 0.0)
    loop.step()
    kv.matches[50] = Match(0, 0, 0, waits_for=1)
    scheduler.add(make_sequence(2, [50, 51], max_tokens=1), 0.0)
    loop.run(3)
    assert loop.order() == [1]
    loop.run(1)
    assert loop.order() == [1, 2]


def test_it_computes_itself_when_the_filler_makes_no_progress() -> None:
    kv = FakeKV(40)
    scheduler = make_scheduler(kv, step_tokens=8)
    loop = Loop(scheduler)
    scheduler.add(make_sequence(1, range(4), max_tokens=40), 0.0)
    loop.step()
    kv.queries[0] = None
    kv.matches[50] = Match(0, 0, 0, waits_for=2)
    kv.matches[60] = Match(0, 4, 0)
    scheduler.add(make_sequence(2, [60, *range(7)], max_tokens=1), loop.now)  # fetches for ever
    loop.step()
    scheduler.add(make_sequence(3, [50, 51], max_tokens=1), loop.now)
    loop.run(16)
    assert loop.order() == [1]
    loop.run(2)
    assert loop.order() == [1, 3]


def test_it_waits_for_a_transfer_that_brings_its_next_block() -> None:
    kv = FakeKV(40)
    scheduler = make_scheduler(kv)
    kv.matches[60] = Match(0, 4, 0)
    scheduler.add(make_sequence(1, [60, *range(7)], max_tokens=1), 0.0)
    assert scheduler.schedule(0.0) is None
    kv.matches[50] = Match(0, 0, 0, waits_for_transfer=100)
    scheduler.add(make_sequence(2, [50, 51], max_tokens=1), 0.0)
    assert scheduler.schedule(0.0) is None
    assert "waiting for others: {2: 'transfer 100'}" in scheduler.idle_reason()
    scheduler.on_transfer(ended(100), 0.1)
    plan = scheduler.schedule(0.1)
    assert plan is not None
    assert [s.seq_id for s in plan.steps] == [1, 2]
