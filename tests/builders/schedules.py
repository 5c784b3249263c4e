"""Builds schedulers and sequences, and runs steps with made-up tokens instead of a runner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sessionkv.config import SchedulerConfig
from sessionkv.engine.scheduler.admission import MOST_BLOCKS
from sessionkv.engine.scheduler.batch import StepBudget
from sessionkv.engine.scheduler.policy import Claims, LoadPolicy, Workload
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.sequence import Sequence as EngineSequence
from sessionkv.engine.scheduler.sequence import SequenceEvent
from sessionkv.types import Meeting, SampledToken, SamplingParams, StepOutput, StepPlan, Tier
from tests.builders.fake_kv import FakeChain, FakeKV


class LoadAll:
    """Loads everything at once, and computes only what could not be loaded."""

    def patience_s(self, start: int, end: int, *, step_tokens: int) -> float:
        return 0.0

    def meet(self, meeting: Meeting, work: Workload) -> Claims:
        loads = unclaimed(meeting)
        if loads:
            return Claims(meeting.front_tokens, loads)
        return Claims(None)


class ComputeAll:
    """Loads nothing; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Meeting, Workload]] = []

    def patience_s(self, start: int, end: int, *, step_tokens: int) -> float:
        return 0.0

    def meet(self, meeting: Meeting, work: Workload) -> Claims:
        self.asked.append((meeting, work))
        return Claims(None)


@dataclass
class Scripted:
    """What each meeting is answered, in order; the last answer stays."""

    answers: list[Claims]
    asked: list[tuple[Meeting, Workload]] = field(default_factory=list)
    token_patience_s: float = 0.0

    def patience_s(self, start: int, end: int, *, step_tokens: int) -> float:
        return (end - start) * self.token_patience_s

    def meet(self, meeting: Meeting, work: Workload) -> Claims:
        self.asked.append((meeting, work))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def unclaimed(meeting: Meeting) -> dict[Tier, int]:
    """How many blocks (of 4 tokens) of each tier may be claimed."""
    front = -(-meeting.front_tokens // 4)
    counts = {t: sum(at >= front for at in places) for t, places in meeting.unclaimed.items()}
    return {tier: count for tier, count in counts.items() if count}


def make_scheduler(
    kv: object,
    *,
    step_tokens: int = 32,
    shared_tokens: int | None = None,
    small_tokens: int = 0,
    max_model_len: int = 64,
    policy: LoadPolicy | None = None,
    most_blocks: int = MOST_BLOCKS,
    **config: object,
) -> Scheduler:
    """A scheduler with small limits; ``shared_tokens`` where somebody decodes, else the same."""
    return Scheduler(
        kv,
        policy or LoadAll(),
        config=SchedulerConfig(**config),
        budget=StepBudget(step_tokens, shared_tokens or step_tokens, small_tokens),
        max_model_len=max_model_len,
        most_blocks=most_blocks,
    )


def make_sequence(
    seq_id: int, prompt: Sequence[int], *, max_tokens: int | None = 4, **rest: object
) -> EngineSequence:
    """A greedy sequence over a chain without hashes."""
    sampling = rest.pop("sampling", None) or SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return EngineSequence(seq_id, FakeChain(prompt), sampling, **rest)


class Loop:
    """Schedules and commits; every sampled token is ``1000 + step`` unless ``token`` says so."""

    def __init__(
        self, scheduler: Scheduler, token: Callable[[int, int], int] | None = None
    ) -> None:
        self.scheduler = scheduler
        self.token = token or (lambda seq_id, step: 1000 + step)
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.events: list[SequenceEvent] = []

    def step(self, seconds: float = 0.01, failed: dict[int, str] | None = None) -> StepPlan | None:
        """One step; what it planned."""
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.plans.append(plan)
            sampled = {
                s.seq_id: SampledToken(self.token(s.seq_id, plan.step_id))
                for s in plan.steps
                if s.sample and s.seq_id not in (failed or {})
            }
            output = StepOutput(plan.step_id, sampled, failed or {})
            self.events += self.scheduler.commit(plan, output, self.now)
        self.now += seconds
        return plan

    def run(self, steps: int) -> None:
        """So many steps, or fewer where nothing is left to do."""
        for _ in range(steps):
            if self.step() is None:
                return

    def order(self) -> list[int]:
        """seq_ids in the order in which they first ran."""
        seen: list[int] = []
        for plan in self.plans:
            seen += [s.seq_id for s in plan.steps if s.seq_id not in seen]
        return seen

    def release_finished(self) -> None:
        """Release every sequence that finished and was not released."""
        for event in self.events:
            if event.finish is not None:
                try:
                    self.scheduler.release(event.seq_id)
                except KeyError:
                    continue


def spans(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(seq_id, start, end) of each step."""
    return [(s.seq_id, s.start, s.start + len(s.token_ids)) for s in plan.steps]


__all__ = [
    "Claims",
    "ComputeAll",
    "FakeKV",
    "LoadAll",
    "Loop",
    "Scripted",
    "make_scheduler",
    "make_sequence",
    "spans",
]
