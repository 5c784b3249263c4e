"""The load planner against pure loading and pure computing, with real parts on a virtual clock.

Scheduler, cache and planner are the engine's; steps and loads cost virtual time by a model of a
machine, so a figure is exact and the same everywhere. The history of each turn is on a disk whose
speed is set so that loading all of it takes ``ratio`` times as long as computing it. Beside what
was planned stands the ideal: the best point at which the two cursors could meet, known from the
start. Even that gains nothing where a step's fixed cost is most of what computing all takes, as a
meeting takes one step more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.report import Row
from sessionkv.cache.chain import TokenChain
from sessionkv.cache.identity import KVIdentity
from sessionkv.cache.manager import KVCacheManager
from sessionkv.config import SchedulerConfig
from sessionkv.engine.planner import LoadPlanner
from sessionkv.engine.rates import MeasuredRates
from sessionkv.engine.scheduler.batch import StepBudget
from sessionkv.engine.scheduler.policy import Claims, LoadPolicy, Workload
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.sequence import Sequence
from sessionkv.types import (
    DiskBlock,
    DiskReceipt,
    KVGeometry,
    Meeting,
    MoveOutcome,
    SampledToken,
    SamplingParams,
    StepOutput,
    StepPlan,
    Tier,
    Transfer,
    TransferResult,
)

ABOUT = "load, compute, or both at once: planned against the better of the two, virtual clock"
BLOCK_SIZE = 16
NEW_TOKENS = 32
HISTORIES = (256, 1024, 4096, 16_384, 65_536, 131_072)
RATIOS = (0.05, 0.2, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 5.0, 20.0)
BALANCED = (0.7, 1.4)
OVER_IDEAL = 1.2
"""Most that the planned way takes of the ideal: it does without a meeting that is foreseen to gain
an eighth or less (``planner.MEETING_GAIN``), which is 1.14, and learns the rates as it goes."""
_GEOMETRY = KVGeometry(1, 1, 1, BLOCK_SIZE, "float32", 4)
_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Machine:
    """What steps and loads cost, in seconds.

    Attributes:
        fixed_s: Of any step.
        token_s: Of each token in it.
        attended_s: Of each pair of a token and a position that it attends to.
        step_tokens: Budget of a step.
        transfer_s: Of any load, besides its blocks.
    """

    name: str
    fixed_s: float
    token_s: float
    attended_s: float
    step_tokens: int
    transfer_s: float

    def step_s(self, spans: Iterable[tuple[int, int]]) -> float:
        """Of a step that computes these ``(start, end)``."""
        pairs = [(end - start, (start + end) / 2) for start, end in spans]
        return self.fixed_s + sum(n * (self.token_s + self.attended_s * at) for n, at in pairs)

    def compute_s(self, num_tokens: int) -> float:
        """Of a prompt, in whole steps."""
        starts = range(0, num_tokens, self.step_tokens)
        return sum(self.step_s([(at, min(at + self.step_tokens, num_tokens))]) for at in starts)


MACHINES = (
    Machine("small model, 2 cores", 0.030, 2.4e-3, 6e-7, 256, 1e-3),
    Machine("8B, one large GPU", 0.011, 2.4e-5, 8.6e-10, 2048, 3e-4),
)


class LoadAll:
    """Pure loading."""

    def patience_s(self, start: int, end: int, *, step_tokens: int) -> float:
        return 0.0

    def meet(self, meeting: Meeting, work: Workload) -> Claims:
        """Claim everything."""
        loads = {tier: len(places) for tier, places in meeting.unclaimed.items() if places}
        return Claims(meeting.front_tokens, loads)


class ComputeAll:
    """Pure computing."""

    def patience_s(self, start: int, end: int, *, step_tokens: int) -> float:
        return 0.0

    def meet(self, meeting: Meeting, work: Workload) -> Claims:
        """Claim nothing."""
        return Claims(None)


@dataclass
class VirtualEngine:
    """Step loop, runner, movers and disk, of which only the clock moves.

    Attributes:
        block_s: Seconds the disk takes for a block; may be changed at any time.
        now: The clock.
        on_disk: Tokens of a prompt that the disk has.
    """

    machine: Machine
    policy: LoadPolicy
    num_blocks: int
    block_s: float = 0.0
    rates: MeasuredRates | None = None
    now: float = 0.0
    on_disk: int = 0
    _answers: list[tuple[float, int, TransferResult, Transfer]] = field(default_factory=list)
    _disk_free_at: float = 0.0
    _next_id: int = 0

    def __post_init__(self) -> None:
        self._root = KVIdentity("virtual", _GEOMETRY, "none", "1").root_hash()
        self._kv = KVCacheManager(
            self._root,
            block_size=BLOCK_SIZE,
            num_device_blocks=self.num_blocks,
            num_host_blocks=0,
            disk=True,
        )
        self._scheduler = Scheduler(
            self._kv,
            self.policy,
            config=SchedulerConfig(),
            budget=StepBudget(self.machine.step_tokens, self.machine.step_tokens),
            max_model_len=self.num_blocks * BLOCK_SIZE,
        )

    def turn(self, num_history: int, *, on_disk: bool = True, num_outputs: int = 1) -> Sequence:
        """Run one turn over a history of its own to its end; the sequence, for its figures."""
        self._next_id += 1
        self.on_disk = num_history if on_disk else 0
        prompt = [(self._next_id * 7919 + i * 31) % 50_000 for i in range(num_history + NEW_TOKENS)]
        prompt[0] = self._next_id
        chain = TokenChain(self._root, BLOCK_SIZE, tenant="local", token_ids=prompt)
        sampling = SamplingParams(temperature=0.0, max_tokens=num_outputs)
        sequence = Sequence(self._next_id, chain, sampling)
        self._scheduler.add(sequence, self.now)
        while not self._round(chain):
            pass
        self._scheduler.release(sequence.seq_id)
        self._give_back()
        return sequence

    def _round(self, chain: TokenChain) -> bool:
        """One round of the step loop; whether the turn has ended."""
        while self._answers and self._answers[0][0] <= self.now:
            self._take_answer(*heapq.heappop(self._answers)[2:])
        plan = self._plan(chain)
        if plan is None:
            next_answer = self._answers[0][0] if self._answers else self.now + _TICK_S
            # Who measures looks again now and then, as the engine does.
            tick = next_answer if self.rates is None else self.now + _TICK_S
            self.now = min(max(next_answer, self.now), tick)
            return False
        steps = [(step.start, step.start + len(step.token_ids)) for step in plan.steps]
        seconds = self.machine.step_s(steps)
        self.now += seconds
        if self.rates is not None:
            self.rates.observe_step(plan, seconds)
        sampled = {step.seq_id: SampledToken(1) for step in plan.steps if step.sample}
        events = self._scheduler.commit(plan, StepOutput(plan.step_id, sampled), self.now)
        return any(event.finish is not None for event in events)

    def _plan(self, chain: TokenChain) -> StepPlan | None:
        for seq_id, query in self._scheduler.take_lookups():
            first = query.first_token // BLOCK_SIZE
            blocks = [
                DiskBlock(chain.block_record(block), block)
                for block in range(first, self.on_disk // BLOCK_SIZE)
            ]
            self._scheduler.on_receipt(seq_id, DiskReceipt(seq_id, tuple(blocks), None))
        plan = self._scheduler.schedule(self.now)
        for transfer in self._scheduler.take_transfers():
            self._submit(transfer)
        self._give_back()
        return plan

    def _give_back(self) -> None:
        self._scheduler.take_receipts()
        self._kv.take_stale()

    def _submit(self, transfer: Transfer) -> None:
        """Loads are carried out one after the other; writing costs nothing here."""
        seconds = 0.0
        if transfer.src is Tier.DISK:
            seconds = self.machine.transfer_s + len(transfer.moves) * self.block_s
            self._disk_free_at = max(self._disk_free_at, self.now) + seconds
        outcomes = (MoveOutcome.OK,) * len(transfer.moves)
        result = TransferResult(transfer.transfer_id, outcomes, seconds)
        at = self._disk_free_at if transfer.src is Tier.DISK else self.now
        heapq.heappush(self._answers, (at, transfer.transfer_id, result, transfer))

    def _take_answer(self, result: TransferResult, transfer: Transfer) -> None:
        self._scheduler.on_transfer(result, self.now)
        if self.rates is not None and transfer.src is Tier.DISK:
            blocks = len(transfer.moves)
            self.rates.observe_load(Tier.DISK, blocks, blocks, result.elapsed_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds to the first token of one turn, each way, and how the planned one came about."""

    num_history: int
    ratio: float
    load_s: float
    compute_s: float
    planned_s: float
    loaded_tokens: int
    ideal_s: float

    @property
    def better_s(self) -> float:
        """The better of the two."""
        return min(self.load_s, self.compute_s)

    @property
    def over_best(self) -> float:
        """Planned against the better of the two."""
        return self.planned_s / self.better_s


def run(machine: Machine, num_history: int, ratio: float, *, surprise: float = 1.0) -> Outcome:
    """One turn with measured rates, against the same loaded and the same computed.

    Args:
        machine: What things cost.
        num_history: Tokens of the history, all of it on disk.
        ratio: Seconds to load it, in seconds to compute it.
        surprise: How much slower than measured the disk has become when the turn comes.
    """
    block_s = ratio * machine.compute_s(num_history) / (num_history // BLOCK_SIZE)
    planner = warm_planner(machine, block_s)
    seconds: list[float] = []
    loaded = 0
    ways: tuple[tuple[LoadPolicy, MeasuredRates | None], ...] = (
        (LoadAll(), None),
        (ComputeAll(), None),
        (planner, planner.rates),
    )
    for policy, rates in ways:
        engine = VirtualEngine(
            machine,
            policy,
            num_blocks=num_history // BLOCK_SIZE + 8,
            block_s=block_s * surprise,
            rates=rates,
        )
        report = engine.turn(num_history).report()
        seconds.append(report.ttft_ms / 1000.0)
        loaded = report.disk_tokens
    load_s, compute_s, planned_s = seconds
    ideal = ideal_s(machine, num_history, block_s * surprise)
    return Outcome(num_history, ratio, load_s, compute_s, planned_s, loaded, ideal)


def ideal_s(machine: Machine, num_history: int, block_s: float) -> float:
    """Seconds to the first token with the best meeting there is, or with all of it computed.

    What lies before the meeting is computed in whole steps while one load brings what lies behind;
    the new tokens are a step of their own then.
    """
    num_blocks = num_history // BLOCK_SIZE
    last_s = machine.step_s([(num_history, num_history + NEW_TOKENS)])
    fetched_s = min(
        max(
            machine.compute_s(point * BLOCK_SIZE),
            machine.transfer_s + (num_blocks - point) * block_s,
        )
        for point in range(num_blocks)
    )
    return min(fetched_s + last_s, machine.compute_s(num_history + NEW_TOKENS))


def warm_planner(machine: Machine, block_s: float) -> LoadPlanner:
    """A planner that has seen prompts computed and loaded, and tokens decoded."""
    planner = LoadPlanner(block_size=BLOCK_SIZE)
    engine = VirtualEngine(machine, planner, num_blocks=1024, block_s=block_s, rates=planner.rates)
    engine.turn(4096, on_disk=False, num_outputs=3)
    engine.policy = LoadAll()
    engine.turn(2048, num_outputs=3)
    return planner


def measure(options: object = None) -> list[Row]:
    """For each machine and length: the worst of all ratios, and the least gain at even ones."""
    del options
    rows: list[Row] = []
    for machine in MACHINES:
        for num_history in HISTORIES:
            outcomes = [run(machine, num_history, ratio) for ratio in RATIOS]
            label = f"{machine.name}, {num_history:,}"
            worst = max(outcome.over_best for outcome in outcomes)
            name = f"{label}: worst of {len(outcomes)} ratios, planned / better"
            rows.append(Row(name, worst, "x", bound=("<=", 1.05)))
            even = [o for o in outcomes if BALANCED[0] <= o.ratio <= BALANCED[1]]
            pays = has_room(machine, num_history)
            name = f"{label}: worst of ratios {BALANCED[0]:g} to {BALANCED[1]:g}"
            rows.append(
                Row(name, max(o.over_best for o in even), "x", bound=("<=", 0.8) if pays else None)
            )
            least = max(o.ideal_s / o.better_s for o in even)
            rows.append(Row(f"{label}: the same, the ideal meeting", least, "x"))
            over = max(outcome.planned_s / outcome.ideal_s for outcome in outcomes)
            name = f"{label}: worst of {len(outcomes)} ratios, planned / ideal"
            rows.append(Row(name, over, "x", bound=("<=", OVER_IDEAL)))
    return rows


def has_room(machine: Machine, num_history: int) -> bool:
    """Whether a step more costs little beside computing the history."""
    return machine.fixed_s <= machine.compute_s(num_history) / 10
