"""Sequences that may sample only some tokens, which those before decide."""

from dataclasses import dataclass, field

from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.sequence import SequenceEvent
from sessionkv.types import FinishReason, SampledToken, SamplingParams, StepOutput, StepPlan
from tests.builders.fake_kv import FakeKV
from tests.builders.schedules import make_scheduler, make_sequence

EOS = 7


@dataclass
class Told:
    """Masks that name what was sampled; ends with a reason after ``most`` tokens."""

    most: int = 99
    seen: list[int] = field(default_factory=list)

    @property
    def mask(self) -> bytes:
        return bytes(self.seen)

    def advance(self, token_id: int) -> str | None:
        self.seen.append(token_id)
        return None if len(self.seen) < self.most else "its grammar: dead end"


def scheduler_of(*told: Told | None, kv: FakeKV | None = None, **fields: object) -> Scheduler:
    scheduler = make_scheduler(kv or FakeKV(20))
    for number, constraint in enumerate(told):
        sequence = make_sequence(
            number, range(3), constraint=constraint, **{"max_tokens": 9, **fields}
        )
        scheduler.add(sequence, 0.0)
    return scheduler


def step(scheduler: Scheduler, *tokens: int) -> tuple[StepPlan, list[SequenceEvent]]:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    sampled = {s.seq_id: SampledToken(tokens[s.seq_id]) for s in plan.steps if s.sample}
    return plan, scheduler.commit(plan, StepOutput(plan.step_id, sampled), 0.0)


def test_a_plan_has_the_masks_of_those_that_sample() -> None:
    told = Told()
    scheduler = scheduler_of(told, None)
    assert step(scheduler, 11, 12)[0].masks == {0: b""}
    assert step(scheduler, 21, 22)[0].masks == {0: b"\x0b"}
    assert told.seen == [11, 21]


def test_a_chunk_that_samples_nothing_has_none() -> None:
    scheduler = make_scheduler(FakeKV(20), step_tokens=4)
    scheduler.add(make_sequence(0, range(10), constraint=Told()), 0.0)
    assert [step(scheduler, 9)[0].masks for _ in range(3)] == [{}, {}, {0: b""}]


def test_where_nobody_has_one_plans_have_no_masks() -> None:
    scheduler = scheduler_of(None, Told())
    step(scheduler, 1, 2)
    scheduler.cancel(1)
    assert step(scheduler, 1)[0].masks == {}


def test_nothing_is_planned_ahead_while_one_of_them_is_in_flight() -> None:
    scheduler = scheduler_of(None, Told())
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.schedule_ahead(0.0) is None
    sampled = {0: SampledToken(1), 1: SampledToken(2)}
    scheduler.commit(plan, StepOutput(plan.step_id, sampled), 0.0)
    scheduler.cancel(1)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.schedule_ahead(0.0) is not None


def test_a_dead_end_fails_its_sequence_alone() -> None:
    told = Told(most=2)
    scheduler = scheduler_of(told, None)
    step(scheduler, 1, 2)
    failed, going_on = step(scheduler, 1, 2)[1]
    assert "its grammar: dead end" in str(failed.error)
    assert going_on.error is None
    assert [s.seq_id for s in step(scheduler, 1, 2)[0].steps] == [1]


def test_the_token_that_ends_it_is_not_asked_about() -> None:
    told = Told(most=1)
    scheduler = scheduler_of(told, max_tokens=1)
    assert step(scheduler, 5)[1][0].finish is FinishReason.LENGTH
    assert told.seen == []


def test_an_end_token_ends_it_also_before_min_tokens() -> None:
    """Its mask lets one come only where nothing else may."""
    sampling = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=5)
    scheduler = scheduler_of(Told(), sampling=sampling, stop_token_ids=frozenset({EOS}))
    assert step(scheduler, 5)[1][0].finish is None
    assert step(scheduler, EOS)[1][0].finish is FinishReason.STOP


def test_preempted_it_goes_on_where_it_was() -> None:
    told = [Told(), Told()]
    scheduler = scheduler_of(*told, kv=FakeKV(3))
    outputs: dict[int, int] = {0: 0, 1: 0}
    for number in range(10, 30):
        plan, events = step(scheduler, number, number)
        for seq_id, mask in plan.masks.items():
            assert len(mask) == outputs[seq_id]
        for event in events:
            outputs[event.seq_id] = event.num_output_tokens
            if event.finish is not None:
                scheduler.release(event.seq_id)
        if list(outputs.values()) == [9, 9]:
            break
    assert scheduler.num_preemptions
    assert list(outputs.values()) == [9, 9]
    assert [len(constraint.seen) for constraint in told] == [8, 8]
