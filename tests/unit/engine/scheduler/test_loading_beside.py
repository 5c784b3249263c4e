"""Sequences that load are admitted, and go on loading, beside the step in flight."""

import pytest

from sessionkv.engine.scheduler.policy import Claims
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.sequence import SequenceState
from sessionkv.types import (
    BlockHash,
    BlockMove,
    BlockRecord,
    Match,
    MoveOutcome,
    SampledToken,
    StepOutput,
    StepPlan,
    Tier,
    Transfer,
    TransferResult,
)
from tests.builders.fake_kv import FakeKV
from tests.builders.schedules import Scripted, make_scheduler, make_sequence, spans


def decoding(kv: FakeKV, **scheduler: object) -> tuple[Scheduler, StepPlan]:
    """Sequence 9 decodes: its second token is being computed."""
    made = make_scheduler(kv, **scheduler)
    made.add(make_sequence(9, [9, 9, 9], max_tokens=20), 0.0)
    plan = made.schedule(0.0)
    assert plan is not None
    return made, following(made, plan)


def following(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    """The step planned ahead, once the one in flight is collected."""
    ahead = scheduler.schedule_ahead(0.0)
    assert ahead is not None
    collect(scheduler, plan)
    return ahead


def collect(scheduler: Scheduler, plan: StepPlan) -> None:
    sampled = {step.seq_id: SampledToken(5) for step in plan.steps if step.sample}
    scheduler.commit(plan, StepOutput(plan.step_id, sampled, {}), 0.0)


def answer(scheduler: Scheduler, transfer: Transfer, outcome: MoveOutcome = MoveOutcome.OK) -> None:
    outcomes = (outcome,) * len(transfer.moves)
    scheduler.on_transfer(TransferResult(transfer.transfer_id, outcomes, 0.1), 0.0)


def loading(num_blocks: int, **scheduler: object) -> tuple[Scheduler, StepPlan, FakeKV]:
    """Sequence 9 decodes, and sequence 1, which has come, finds blocks of four on the host."""
    kv = FakeKV(50)
    kv.matches[1] = Match(0, 4 * num_blocks, 0)
    made, plan = decoding(kv, **scheduler)
    made.add(make_sequence(1, [1] * (4 * num_blocks + 2)), 0.0)
    return made, plan, kv


def spill(transfer_id: int) -> Transfer:
    record = BlockRecord(BlockHash(b"k"), BlockHash(b"p"), (1,))
    return Transfer(transfer_id, Tier.DEVICE, Tier.HOST, (BlockMove(record, 0, 0),))


def test_a_step_in_flight_goes_on_while_another_sequence_is_admitted_and_loads() -> None:
    scheduler, plan, _ = loading(3)
    scheduler.load_beside(0.0)
    assert scheduler.take_ready() == []  # its admission is a part by itself
    assert scheduler.has_more
    scheduler.load_beside(0.0)
    (transfer,) = scheduler.take_ready()
    assert not scheduler.has_more
    assert [move.src for move in transfer.moves] == [0, 1, 2]
    assert scheduler.get(1).state is SequenceState.FETCHING
    for _ in range(3):
        plan = following(scheduler, plan)
        assert spans(plan)[0][0] == 9
        assert len(plan.steps) == 1
        scheduler.load_beside(0.0)
        assert scheduler.take_ready() == []
    answer(scheduler, transfer)
    scheduler.load_beside(0.0)  # all is there: it joins
    assert scheduler.get(1).state is SequenceState.RUNNING
    assert scheduler.schedule_ahead(0.0) is None
    collect(scheduler, plan)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan)[1] == (1, 12, 14)


def test_who_has_nothing_to_load_waits_for_the_next_step() -> None:
    kv = FakeKV(50)
    scheduler, plan = decoding(kv)
    scheduler.add(make_sequence(1, [1] * 6), 0.0)
    scheduler.load_beside(0.0)
    assert scheduler.get(1).state is SequenceState.WAITING
    assert scheduler.schedule_ahead(0.0) is None
    collect(scheduler, plan)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan)[1] == (1, 0, 6)


def test_loads_are_begun_a_part_at_a_time_from_the_back() -> None:
    scheduler, plan, _ = loading(5, most_blocks=2)
    begun = []
    for has_more in (True, True, True, False):
        scheduler.load_beside(0.0)
        begun += scheduler.take_ready()
        assert scheduler.has_more is has_more
        plan = following(scheduler, plan)
    assert [[move.src for move in transfer.moves] for transfer in begun] == [[3, 4], [1, 2], [0]]
    for transfer in begun:
        assert scheduler.get(1).state is SequenceState.FETCHING
        answer(scheduler, transfer)
        scheduler.load_beside(0.0)
    assert scheduler.get(1).state is SequenceState.RUNNING


def test_what_is_to_be_loaded_in_parts_is_decided_once() -> None:
    """The few blocks that a bound leaves would be computed as soon, beside those under way."""
    policy = Scripted([Claims(0, {Tier.HOST: 3}), Claims(8)])
    kv = FakeKV(50)
    kv.matches[1] = Match(0, 12, 0)
    scheduler = make_scheduler(kv, policy=policy, most_blocks=2)
    scheduler.add(make_sequence(1, [1] * 14), 0.0)
    begun = []
    for _ in range(2):
        assert scheduler.schedule(0.0) is None
        begun += scheduler.take_transfers()
    assert [[move.src for move in transfer.moves] for transfer in begun] == [[1, 2], [0]]
    assert not scheduler.has_more


def test_a_part_that_is_lost_is_decided_anew() -> None:
    policy = Scripted([Claims(0, {Tier.HOST: 3}), Claims(8)])
    kv = FakeKV(50)
    kv.matches[1] = Match(0, 12, 0)
    scheduler = make_scheduler(kv, policy=policy, most_blocks=2)
    scheduler.add(make_sequence(1, [1] * 14), 0.0)
    assert scheduler.schedule(0.0) is None
    (transfer,) = scheduler.take_transfers()
    answer(scheduler, transfer, MoveOutcome.CORRUPT)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan)[0][:2] == (1, 0)


def test_who_finds_no_room_is_tried_again_beside_a_step_and_not_between_two() -> None:
    scheduler, plan, kv = loading(3)
    kv.free, spare = kv.free[:2], kv.free[2:]
    for _ in range(17):
        if not kv.free:
            kv.free.append(spare.pop())  # for the one that decodes
        scheduler.load_beside(0.0)
        assert scheduler.get(1).state is SequenceState.WAITING
        plan = following(scheduler, plan)


def test_room_is_made_a_part_at_a_time_and_nobody_takes_it_meanwhile() -> None:
    scheduler, plan, kv = loading(3)
    kv.pieces[1] = 2
    kv.matches[2] = Match(0, 4, 0)
    scheduler.add(make_sequence(2, [2] * 6), 0.0)
    for _ in range(2):
        scheduler.load_beside(0.0)
        assert scheduler.has_more
        assert [scheduler.get(i).state for i in (1, 2)] == [SequenceState.WAITING] * 2
        plan = following(scheduler, plan)
    scheduler.load_beside(0.0)
    assert [scheduler.get(i).state for i in (1, 2)] == [SequenceState.FETCHING] * 2
    scheduler.load_beside(0.0)
    assert not scheduler.has_more
    assert len(scheduler.take_ready()) == 2
    assert following(scheduler, plan).steps[0].seq_id == 9


def test_without_room_it_is_tried_again_when_all_copies_that_make_some_have_ended() -> None:
    scheduler, plan, kv = loading(3)
    kv.spills = [spill(901), spill(902)]
    kv._held_back = {901: kv.free[2:20], 902: kv.free[20:]}
    kv.free = kv.free[:2]
    scheduler.load_beside(0.0)
    assert scheduler.get(1).blocked_since == 0.0
    first, second = scheduler.take_transfers()
    answer(scheduler, first)  # there would be room, but more is to come
    scheduler.load_beside(0.0)
    assert scheduler.get(1).state is SequenceState.WAITING
    plan = following(scheduler, plan)  # which nobody holds up
    answer(scheduler, second)
    scheduler.load_beside(0.0)
    assert scheduler.get(1).state is SequenceState.FETCHING
    assert following(scheduler, plan).steps[0].seq_id == 9


def test_without_a_step_to_plan_ahead_room_is_made_between_two() -> None:
    scheduler, plan, kv = loading(3)
    kv.pieces[1] = 1
    collect(scheduler, plan)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert len(plan.steps) == 1
    assert scheduler.has_more
    collect(scheduler, plan)
    assert scheduler.schedule(0.0) is not None
    assert scheduler.get(1).state is SequenceState.FETCHING


def test_where_nobody_runs_room_is_made_at_once() -> None:
    kv = FakeKV(50)
    kv.matches[1] = Match(0, 12, 0)
    kv.pieces[1] = 5
    scheduler = make_scheduler(kv)
    scheduler.add(make_sequence(1, [1] * 14), 0.0)
    assert scheduler.schedule(0.0) is None
    assert len(scheduler.take_transfers()) == 1


def test_what_is_lost_is_computed_in_the_next_step() -> None:
    scheduler, plan, _ = loading(3)
    scheduler.load_beside(0.0)
    scheduler.load_beside(0.0)
    (transfer,) = scheduler.take_ready()
    answer(scheduler, transfer, MoveOutcome.CORRUPT)
    scheduler.load_beside(0.0)
    assert scheduler.schedule_ahead(0.0) is None
    collect(scheduler, plan)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert spans(plan)[1][:2] == (1, 0)


def test_nothing_is_brought_on_without_a_step() -> None:
    scheduler, plan, _ = loading(3)
    collect(scheduler, plan)
    with pytest.raises(RuntimeError, match="no plan is in flight"):
        scheduler.load_beside(0.0)
