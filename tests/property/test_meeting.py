"""Any sharing of a prefix between loads and computing gives the cold answers and an exact ledger.

Loads fail, lag and are answered in any order; sequences share prefixes, are cancelled and preempted
meanwhile; the policy claims whatever it likes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessionkv.engine.planner import LoadPlanner
from sessionkv.engine.scheduler.policy import Claims, LoadPolicy, Workload
from sessionkv.types import BlockMove, Meeting, MoveOutcome, SamplingParams, Tier, Transfer
from tests.builders.checksum import cold_oracle
from tests.builders.mini_engine import DictDisk, MiniEngine
from tests.builders.schedules import unclaimed

SHARES = st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3))
OUTCOMES = st.sampled_from(
    (None, None, None, None, MoveOutcome.CORRUPT, MoveOutcome.MISSING, MoveOutcome.IO_ERROR)
)


@dataclass
class Whimsical:
    """Computes and claims by a list of whims; where they would stop it, it computes."""

    whims: list[tuple[int, int, int]]
    seen: int = 0
    tiers: set[Tier] = field(default_factory=set)

    def patience_s(self, start: int, end: int, *, step_tokens: int) -> float:
        return 0.0

    def meet(self, meeting: Meeting, work: Workload) -> Claims:
        blocks, host, disk = self.whims[self.seen % len(self.whims)] if self.whims else (1, 1, 1)
        self.seen += 1
        most = unclaimed(meeting)
        wanted = {Tier.HOST: host, Tier.DISK: disk}
        loads = {t: min(most[t], wanted[t]) for t in most if min(most[t], wanted[t])}
        is_loading = any(lane.num_blocks for lane in work.lanes.values())
        if not blocks and not loads and not is_loading:
            return Claims(None)
        front = meeting.front_tokens // 4
        return Claims(None if blocks == 4 else (front + blocks) * 4, loads)


@dataclass
class Life:
    """One engine with a few conversations, driven by a list of acts."""

    engine: MiniEngine
    prompts: dict[int, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)

    def act(self, name: str, value: int) -> None:
        engine, known = self.engine, list(self.prompts)
        if name == "submit":
            self.submit(value)
        elif name == "answer" and engine.in_flight:
            engine.in_flight.append(engine.in_flight.pop(value % len(engine.in_flight)))
            engine.end_transfers(1)
        elif name == "cancel" and known:
            seq_id = known[value % len(known)]
            if seq_id not in engine.ends and engine.cancel(seq_id):
                self.cancelled.add(seq_id)
        elif name == "preempt" and engine.scheduler._life.running:
            engine.scheduler._life.preempt_last()
        engine.step()
        engine.kv.check()

    def submit(self, value: int) -> None:
        """A history of one of three conversations, cut somewhere, and something new."""
        length = 4 + value % 26
        prompt = [value % 3] * 2 + [(7 * i) % 5 for i in range(length)] + [value % 7]
        sampling = SamplingParams(temperature=float(value % 2), seed=3, max_tokens=1 + value % 4)
        self.prompts[self.engine.submit(prompt, sampling=sampling)] = prompt, sampling

    def verify(self) -> None:
        engine = self.engine
        engine.hold_transfers = False
        for _ in range(600):
            engine.now += 0.05  # those without room lose patience, and the first of them gets it
            if not engine.step() and not engine.scheduler.num_running:
                break
        else:
            raise AssertionError(engine.scheduler.idle_reason())
        for seq_id, (prompt, sampling) in self.prompts.items():
            got = engine.outputs[seq_id]
            want = cold_oracle(prompt, sampling.max_tokens or 0, sampling)
            if seq_id in self.cancelled:
                assert got == want[: len(got)]
                continue
            assert got == want
            report = engine.reports[seq_id]
            assert report.cached_tokens + report.computed_tokens == len(prompt)
            assert report.computed_tokens == self.computed[seq_id]
        engine.assert_idle()

    computed: dict[int, int] = field(default_factory=dict)

    def watch(self) -> None:
        """Note what each sequence says it computed before it is forgotten."""
        finish = self.engine.finish

        def noting(event) -> None:
            parts = self.engine.scheduler.get(event.seq_id).accounting.computed
            for before, after in pairwise(parts):
                assert before.end <= after.start
            self.computed[event.seq_id] = sum(part.end - part.start for part in parts)
            finish(event)

        self.engine.finish = noting


ACTS = st.lists(
    st.tuples(
        st.sampled_from(("submit", "submit", "answer", "answer", "step", "cancel", "preempt")),
        st.integers(0, 200),
    ),
    max_size=40,
)


def live(policy: LoadPolicy, shape: dict, acts: list, outcomes: list) -> None:
    left = list(outcomes)

    def fault(transfer: Transfer, move: BlockMove) -> MoveOutcome | None:
        return left.pop() if left and transfer.dst is Tier.DEVICE else None

    engine = MiniEngine(
        shape["num_blocks"],
        host_blocks=shape["host_blocks"],
        disk=DictDisk(shape["disk"]) if shape["disk"] else None,
        step_tokens=shape["step_tokens"],
        policy=policy,
        fault=fault,
    )
    life = Life(engine)
    life.watch()
    for value in (0, 24, 49):  # fill the tiers
        life.submit(value)
        engine.run()
    engine.hold_transfers = True
    for name, value in acts:
        life.act(name, value)
    life.verify()


SHAPES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(9, 14),
        "host_blocks": st.sampled_from((0, 4, 30)),
        "disk": st.sampled_from((None, 8, 100)),
        "step_tokens": st.sampled_from((3, 8, 32)),
    }
)
quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(st.lists(SHARES, max_size=6), SHAPES, ACTS, st.lists(OUTCOMES, max_size=12))
def test_however_the_cursors_share_a_prefix_outputs_are_the_cold_ones(
    whims: list, shape: dict, acts: list, outcomes: list
) -> None:
    live(Whimsical(whims), shape, acts, outcomes)


@quick
@given(st.integers(1, 1000), SHAPES, ACTS, st.lists(OUTCOMES, max_size=12))
def test_the_planner_gives_the_cold_outputs_at_any_rates(
    rate: int, shape: dict, acts: list, outcomes: list
) -> None:
    planner = LoadPlanner(block_size=4)
    planner.rates.observe_prefill(32, 0.032, context=16)
    for tier in (Tier.HOST, Tier.DISK):
        planner.rates.observe_load(tier, 4, 256, 0.016 * rate / 100)
    live(planner, shape, acts, outcomes)
