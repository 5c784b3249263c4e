"""Builds schedulers and sequences, and runs steps with made-up tokens instead of a runner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sessionkv.config import SchedulerConfig
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.sequence import Sequence as EngineSequence
from sessionkv.engine.scheduler.sequence import SequenceEvent
from sessionkv.types import Match, SampledToken, SamplingParams, StepOutput, StepPlan
from tests.builders.fake_kv import FakeChain, FakeKV


@dataclass(frozen=True)
class Decision:
    """A load decision."""

    use_host: bool = True
    use_disk: bool = True
    reason: object = None


class FixedPolicy:
    """Always decides the same and remembers what it was asked."""

    def __init__(self, decision: Decision | None = None) -> None:
        self.decision = decision or Decision()
        self.asked: list[tuple[Match, int, int]] = []

    def decide(self, match: Match, num_prompt_tokens: int, queued_tokens: int) -> Decision:
        self.asked.append((match, num_prompt_tokens, queued_tokens))
        return self.decision


def make_scheduler(
    kv: object,
    *,
    step_tokens: int = 32,
    max_model_len: int = 64,
    policy: FixedPolicy | None = None,
    **config: object,
) -> Scheduler:
    """A scheduler with small limits."""
    return Scheduler(
        kv,
        policy or FixedPolicy(),
        config=SchedulerConfig(**config),
        step_tokens=step_tokens,
        max_model_len=max_model_len,
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


__all__ = ["Decision", "FakeKV", "FixedPolicy", "Loop", "make_scheduler", "make_sequence", "spans"]
