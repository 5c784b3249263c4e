"""Steps planned while the step before them is computed."""

import pytest

from sessionkv.engine.scheduler.policy import Claims, LoadPolicy
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.sequence import SequenceEvent, SequenceState
from sessionkv.types import (
    PENDING,
    DiskReceipt,
    FinishReason,
    Match,
    MoveOutcome,
    SampledToken,
    SequenceStep,
    StepOutput,
    StepPlan,
    Tier,
    Transfer,
    TransferResult,
)
from tests.builders.fake_kv import FakeKV
from tests.builders.schedules import Scripted, make_scheduler, make_sequence, spans

EOS = 7


def in_flight(
    *seq_ids: int,
    kv: FakeKV | None = None,
    max_tokens: int = 9,
    policy: LoadPolicy | None = None,
    **config: object,
) -> tuple[Scheduler, StepPlan]:
    """Sequences of three tokens, prefilled by the step in flight."""
    scheduler = make_scheduler(kv or FakeKV(20), policy=policy, **config)
    for seq_id in seq_ids:
        sequence = make_sequence(
            seq_id, range(3), max_tokens=max_tokens, stop_token_ids=frozenset({EOS})
        )
        scheduler.add(sequence, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return scheduler, plan


def collect(
    scheduler: Scheduler, plan: StepPlan, failed: dict[int, str] | None = None, **tokens: int
) -> list[SequenceEvent]:
    """Commit; sequence 1 sampled ``s1`` and so on, others 100 and the number of the step."""
    sampled = {
        s.seq_id: SampledToken(tokens.get(f"s{s.seq_id}", 100 + plan.step_id))
        for s in plan.steps
        if s.sample and s.seq_id not in (failed or {})
    }
    return scheduler.commit(plan, StepOutput(plan.step_id, sampled, failed or {}), 0.0)


def ahead(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule_ahead(0.0)
    assert plan is not None
    return plan


# ---- what is planned -----------------------------------------------------------------------


def test_a_plan_made_ahead_computes_what_is_being_sampled() -> None:
    kv = FakeKV(20)
    scheduler, first = in_flight(1, 2, kv=kv)
    second = ahead(scheduler)
    assert second.is_ahead
    assert not first.is_ahead
    assert second.steps == tuple(SequenceStep(i, 3, (PENDING,), (), sample=True) for i in (1, 2))
    collect(scheduler, first)
    third = ahead(scheduler)
    # The fifth position is in a new block.
    assert [(s.start, len(s.new_block_ids)) for s in third.steps] == [(4, 1), (4, 1)]
    assert [e.num_output_tokens for e in collect(scheduler, second)] == [2, 2]
    assert [e.num_output_tokens for e in collect(scheduler, third)] == [3, 3]
    assert scheduler.get(1).token_ids == [0, 1, 2, 101, 102, 103]
    assert ("commit", 1, 5) in kv.calls
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(1, 5, 6), (2, 5, 6)]


def test_at_most_one_plan_is_made_ahead_and_they_are_collected_in_order() -> None:
    scheduler, first = in_flight(1)
    second = ahead(scheduler)
    with pytest.raises(RuntimeError, match="2 plans"):
        scheduler.schedule_ahead(0.0)
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="not the oldest"):
        collect(scheduler, second)
    collect(scheduler, first)
    collect(scheduler, second)
    with pytest.raises(RuntimeError, match="0 plans"):
        scheduler.schedule_ahead(0.0)


def test_a_sequence_that_ends_by_its_limit_is_left_out() -> None:
    scheduler, first = in_flight(1, max_tokens=1)
    scheduler.add(make_sequence(2, range(3), max_tokens=9), 0.0)
    assert scheduler.schedule_ahead(0.0) is None  # it waits to be admitted
    assert collect(scheduler, first)[0].finish is FinishReason.LENGTH
    second = scheduler.schedule(0.0)
    assert second is not None
    scheduler.add(make_sequence(3, range(3), max_tokens=2), 0.0)
    collect(scheduler, second)
    mixed = scheduler.schedule(0.0)
    assert mixed is not None
    third = ahead(scheduler)
    assert [s.seq_id for s in third.steps] == [2, 3]
    collect(scheduler, mixed)
    fourth = ahead(scheduler)
    assert [s.seq_id for s in fourth.steps] == [2]
    assert [e.finish for e in collect(scheduler, third)] == [None, FinishReason.LENGTH]
    fifth = ahead(scheduler)
    assert fifth.ends == (3,)


def test_nothing_is_planned_ahead_where_all_end() -> None:
    scheduler, _ = in_flight(1, max_tokens=1)
    assert scheduler.schedule_ahead(0.0) is None


def test_a_prompt_that_goes_on_is_planned_in_turn() -> None:
    scheduler, plan = in_flight(1, step_tokens=2)
    assert spans(plan) == [(1, 0, 2)]
    assert scheduler.schedule_ahead(0.0) is None
    collect(scheduler, plan)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(1, 2, 3)]
    assert spans(ahead(scheduler)) == [(1, 3, 4)]


def test_a_sequence_that_fetches_is_planned_in_turn() -> None:
    kv = FakeKV(20)
    kv.matches = {50: Match(0, 8, 0)}
    some = Scripted([Claims(0, {Tier.HOST: 1})])  # the policy is to be asked again
    scheduler, plan = in_flight(1, kv=kv, policy=some)
    collect(scheduler, plan)
    scheduler.add(make_sequence(2, range(50, 60)), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(1, 3, 4)]
    assert scheduler.get(2).state is SequenceState.FETCHING
    assert scheduler.schedule_ahead(0.0) is None


def test_without_room_the_next_step_is_planned_in_turn() -> None:
    kv = FakeKV(3)
    scheduler, first = in_flight(1, 2, kv=kv)
    second = ahead(scheduler)
    collect(scheduler, first)
    assert scheduler.schedule_ahead(0.0) is None  # both need a block and one is free
    collect(scheduler, second)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(1, 4, 5)]
    assert len(plan.steps[0].new_block_ids) == 1
    assert scheduler.get(2).state is SequenceState.RUNNING


def test_steps_are_planned_ahead_beside_those_who_cannot_be_admitted() -> None:
    scheduler, first = in_flight(1, 2, max_running=2, max_tokens=3)
    scheduler.add(make_sequence(3, range(3)), 0.0)
    second = ahead(scheduler)
    collect(scheduler, first)
    third = ahead(scheduler)
    collect(scheduler, second)
    # Now places become free, and are given away as soon as they are.
    assert scheduler.schedule_ahead(0.0) is None
    collect(scheduler, third)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(3, 0, 3)]


def test_a_place_is_given_away_in_turn_though_others_go_on() -> None:
    scheduler, first = in_flight(1, max_running=2)
    collect(scheduler, first)
    scheduler.add(make_sequence(2, range(3), max_tokens=1), 0.0)
    assert scheduler.schedule(0.0) is not None
    scheduler.add(make_sequence(3, range(3)), 0.0)
    assert scheduler.schedule_ahead(0.0) is None


def beside_a_fetch(**config: object) -> tuple[Scheduler, StepPlan]:
    """Sequence 1 decodes, its step in flight; sequence 2 fetches: 2 blocks on host, 1 on disk."""
    kv = FakeKV(20)
    scheduler, first = in_flight(1, kv=kv, **config)
    collect(scheduler, first)
    kv.matches[0] = Match(0, 8, 4)
    scheduler.add(make_sequence(2, range(14)), 0.0)
    scheduler.on_receipt(2, DiskReceipt(77, (), None))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(1, 3, 4)]
    assert scheduler.get(2).state is SequenceState.FETCHING
    return scheduler, plan


def answer(scheduler: Scheduler, transfer: Transfer, outcome: MoveOutcome = MoveOutcome.OK) -> None:
    outcomes = (outcome,) * len(transfer.moves)
    scheduler.on_transfer(TransferResult(transfer.transfer_id, outcomes, 0.1), 0.0)


def test_steps_are_planned_ahead_beside_those_who_wait_for_loads() -> None:
    scheduler, plan = beside_a_fetch()
    host, disk = scheduler.take_transfers()
    second = ahead(scheduler)
    assert spans(second) == [(1, 4, 5)]
    collect(scheduler, plan)
    answer(scheduler, disk)  # the front still waits for what lies before
    third = ahead(scheduler)
    assert spans(third) == [(1, 5, 6)]
    collect(scheduler, second)
    answer(scheduler, host)
    assert scheduler.schedule_ahead(0.0) is None
    collect(scheduler, third)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(1, 6, 7), (2, 12, 14)]


def test_beside_a_load_that_fails_the_next_step_is_planned_in_turn() -> None:
    scheduler, plan = beside_a_fetch()
    host, disk = scheduler.take_transfers()
    answer(scheduler, disk, MoveOutcome.CORRUPT)
    assert scheduler.schedule_ahead(0.0) is None
    collect(scheduler, plan)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(1, 4, 5)]
    answer(scheduler, host)
    collect(scheduler, plan)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(1, 5, 6), (2, 8, 14)]


def test_those_who_wait_for_loads_or_for_a_place_hold_nobody_up() -> None:
    scheduler, _ = beside_a_fetch(max_running=2)
    scheduler.add(make_sequence(3, range(3)), 0.0)
    assert spans(ahead(scheduler)) == [(1, 4, 5)]


def test_those_without_room_are_tried_again_now_and_then() -> None:
    scheduler, plan = in_flight(1, kv=FakeKV(11), max_tokens=40)
    scheduler.add(make_sequence(2, range(41)), 0.0)
    in_turn = []
    for _ in range(36):
        following = scheduler.schedule_ahead(0.0)
        collect(scheduler, plan)
        if following is None:
            following = scheduler.schedule(0.0)
            assert following is not None
            in_turn.append(following.step_id)
        plan = following
    # The first time it finds no room; then after every 16 steps.
    assert in_turn == [2, 17, 33]


# ---- ends ----------------------------------------------------------------------------------


def test_what_is_computed_past_a_stop_id_is_dropped_and_its_blocks_are_held_meanwhile() -> None:
    kv = FakeKV(20)
    scheduler, first = in_flight(1, 2, kv=kv)
    second = ahead(scheduler)
    events = collect(scheduler, first, s1=EOS)
    assert [(e.seq_id, e.finish) for e in events] == [(1, FinishReason.STOP), (2, None)]
    scheduler.release(1, 4)
    with pytest.raises(KeyError):
        scheduler.release(1, 4)
    assert 1 in kv.tables
    third = ahead(scheduler)
    assert third.ends == (1,)
    assert [s.seq_id for s in third.steps] == [2]
    assert [e.seq_id for e in collect(scheduler, second)] == [2]
    assert 1 not in kv.tables
    assert ("finish", 1, 4) in kv.calls
    assert ("commit", 1, 4) not in kv.calls


def test_one_that_is_released_later_gives_its_blocks_back_then() -> None:
    kv = FakeKV(20)
    scheduler, first = in_flight(1, kv=kv)
    second = ahead(scheduler)
    collect(scheduler, first, s1=EOS)
    assert collect(scheduler, second) == []
    assert 1 in kv.tables
    scheduler.release(1)
    assert (len(kv.free), kv.tables) == (20, {})


@pytest.mark.parametrize("collected", [0, 1, 2])
def test_cancel_waits_for_every_step_in_flight(collected: int) -> None:
    kv = FakeKV(20)
    scheduler, first = in_flight(1, kv=kv)
    second = ahead(scheduler)
    plans = [first, second]
    for plan in plans[:collected]:
        collect(scheduler, plan)
    assert scheduler.cancel(1)
    for plan in plans[collected:]:
        assert 1 in kv.tables
        assert collect(scheduler, plan) == []
    assert (len(kv.free), kv.tables) == (20, {})


def test_a_finished_sequence_that_is_cancelled_still_waits_for_the_step_in_flight() -> None:
    kv = FakeKV(20)
    scheduler, first = in_flight(1, kv=kv)
    second = ahead(scheduler)
    collect(scheduler, first, s1=EOS)
    assert scheduler.cancel(1)
    assert 1 in kv.tables
    assert collect(scheduler, second) == []
    assert kv.tables == {}


def test_cancel_at_known_tokens_ends_at_once_beside_a_step_made_ahead() -> None:
    kv = FakeKV(20)
    scheduler, first = in_flight(1, kv=kv)
    second = ahead(scheduler)
    assert scheduler.cancel_at(1, 0) is None  # the first step is not made ahead
    event = collect(scheduler, first)[0]
    assert (event.token, event.num_output_tokens, event.finish) == (None, 0, FinishReason.STOP)
    assert collect(scheduler, second) == []

    scheduler, first = in_flight(1, kv=kv)
    second = ahead(scheduler)
    collect(scheduler, first)
    ended = scheduler.cancel_at(1, 1, FinishReason.CANCELLED)
    assert ended is not None
    assert (ended.num_output_tokens, ended.finish) == (1, FinishReason.CANCELLED)
    scheduler.release(1, 4)
    assert collect(scheduler, second) == []
    assert kv.tables.keys() == set()


# ---- failures ------------------------------------------------------------------------------


def test_a_failed_sequence_and_its_readers_leave_when_the_step_in_flight_has_ended() -> None:
    kv = FakeKV(20)
    kv.depends = {1: (2,)}
    scheduler, first = in_flight(1, 2, 3, kv=kv)
    second = ahead(scheduler)
    events = collect(scheduler, first, failed={1: "NaN in the logits"})
    assert [(e.seq_id, e.error is not None) for e in events] == [(1, True), (3, False)]
    assert kv.tables.keys() == {1, 2, 3}
    assert scheduler.schedule_ahead(0.0) is None  # sequence 2 waits to be admitted
    events = collect(scheduler, second, failed={1: "NaN in the logits"})
    assert [e.seq_id for e in events] == [3]
    assert kv.tables.keys() == {3}
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(3, 4, 5), (2, 0, 3)]
    assert sorted(plan.ends) == [1, 2]


def test_one_that_went_back_to_the_queue_can_be_cancelled_there() -> None:
    kv = FakeKV(20)
    kv.depends = {1: (2,)}
    scheduler, first = in_flight(1, 2, kv=kv)
    second = ahead(scheduler)
    collect(scheduler, first, failed={1: "NaN in the logits"})
    assert scheduler.cancel(2)
    assert collect(scheduler, second) == []
    assert (len(kv.free), kv.tables) == (20, {})
    assert scheduler.schedule(0.0) is None


def test_a_step_that_raises_takes_the_next_one_with_it() -> None:
    kv = FakeKV(20)
    scheduler, first = in_flight(1, 2, kv=kv)
    second = ahead(scheduler)
    events = scheduler.fail_step(first, RuntimeError())
    assert {e.seq_id for e in events if e.error} == {1, 2}
    assert kv.tables.keys() == {1, 2}
    assert scheduler.fail_step(second, RuntimeError()) == []
    assert kv.tables == {}


def test_a_step_made_ahead_that_raises_fails_only_who_goes_on() -> None:
    kv = FakeKV(20)
    scheduler, first = in_flight(1, 2, kv=kv)
    second = ahead(scheduler)
    collect(scheduler, first, s1=EOS)
    events = scheduler.fail_step(second, RuntimeError())
    assert [e.seq_id for e in events] == [2]
    scheduler.release(1)
    assert kv.tables == {}


def fetching_alone() -> tuple[Scheduler, Transfer]:
    """Sequence 1 waits for two blocks of the host, and nobody else is there."""
    kv = FakeKV(20)
    kv.matches[0] = Match(0, 8, 0)
    scheduler = make_scheduler(kv)
    scheduler.add(make_sequence(1, range(10)), 0.0)
    assert scheduler.schedule(0.0) is None
    (transfer,) = scheduler.take_transfers()
    return scheduler, transfer


def test_what_is_promised_is_used_and_stays_under_way_until_it_is_answered() -> None:
    scheduler, transfer = fetching_alone()
    assert scheduler.awaited_alone == {transfer.transfer_id}
    scheduler.on_promise(TransferResult(transfer.transfer_id, (MoveOutcome.OK,) * 2, 0.0))
    assert scheduler.awaited_alone == set()
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan) == [(1, 8, 10)]
    assert scheduler.idle_reason().endswith("transfers under way: 1")
    answer(scheduler, transfer)
    assert scheduler.idle_reason().endswith("transfers under way: 0")
    collect(scheduler, plan)
    assert scheduler.get(1).num_arrived == 2


def test_with_others_there_nobody_waits_alone() -> None:
    scheduler, transfer = fetching_alone()
    scheduler.add(make_sequence(2, range(1, 4)), 0.0)
    assert scheduler.awaited_alone == set()
    scheduler.cancel(2)
    assert scheduler.awaited_alone == {transfer.transfer_id}
    scheduler.cancel(1)
    assert scheduler.awaited_alone == set()
