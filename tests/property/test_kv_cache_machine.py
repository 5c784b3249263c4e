"""Random histories of the cache manager over three tiers against memory that can be read back."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sessionkv.cache.silence import SILENCE_S
from sessionkv.types import BlockHash, MoveOutcome, Tier
from tests.builders.kv_world import B, Run, T, World

FAILURES = (MoveOutcome.MISSING, MoveOutcome.CORRUPT, MoveOutcome.IO_ERROR, MoveOutcome.NO_ROOM)


class Ranks:
    """Ranks that tests change under the pool's feet."""

    def __init__(self) -> None:
        self._ranks: dict[BlockHash, int] = {}
        self._fallen: set[BlockHash] = set()

    def rank(self, key: BlockHash, tier: Tier) -> int:
        return self._ranks.get(key, 0)

    def take_fallen(self) -> set[BlockHash]:
        fallen, self._fallen = self._fallen, set()
        return fallen

    def set(self, key: BlockHash, rank: int) -> None:
        if rank < self._ranks.get(key, 0):
            self._fallen.add(key)
        self._ranks[key] = rank


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, share, grow, fail, are preempted and end, while blocks move."""

    @initialize(
        device=st.integers(4, 7),
        host=st.sampled_from([0, 1, 3, 6, 12]),
        disk=st.sampled_from([0, 1, 3, 20]),
        ahead=st.integers(0, 3),
        prefix_cache=st.sampled_from([True] * 19 + [False]),
    )
    def build(self, device: int, host: int, disk: int, ahead: int, prefix_cache: bool) -> None:
        self.ranks = Ranks()
        self.world = World(
            device_blocks=device,
            host_blocks=host,
            disk_blocks=disk,
            prefix_cache=prefix_cache,
            retention=self.ranks,
            clean_ahead=ahead * 8,
        )
        self.kv = self.world.kv
        self.now = 0.0
        self.logs: list[list[int]] = [T(1), T(11), T(9, 3), [1, 2] * 6, [2] * 9]

    # -- sequences

    def _ready(self) -> list[Run]:
        planned = {run.seq_id for run, _ in self.world.plan}
        return [
            run
            for run in self.world.runs.values()
            if run.seq_id not in planned and run.computed < len(run.chain)
        ]

    def _prompt(self, log: int, cut: int, delta: list[int]) -> list[int]:
        """A log so far, cut anywhere, and something new."""
        known = self.logs[log % len(self.logs)]
        prompt = known[: max(len(known) - cut, 0)] + delta
        return prompt[: (self.world.device_blocks - 1) * B - 1] or [1]

    @rule(
        log=st.integers(0, 30),
        cut=st.integers(0, 9),
        delta=st.lists(st.integers(1, 3), max_size=12),
        tenant=st.sampled_from(["local"] * 5 + ["other"]),
        lookup=st.booleans(),
        claim=st.sampled_from([None, None, 0, 1, 2]),
    )
    def admit(self, log, cut, delta, tenant, lookup, claim) -> None:
        if len(self.world.runs) < 4:
            prompt = self._prompt(log, cut, delta)
            self.logs.append(prompt)
            chain = self.world.chain(prompt, tenant)
            self.world.admit(chain, lookup=lookup, claim=claim)

    @precondition(lambda self: any(not run.over for run in self.world.runs.values()))
    @rule(which=st.integers(0, 9), count=st.integers(1, 3))
    def claim(self, which: int, count: int) -> None:
        """The load cursor of a running sequence goes on."""
        run = self._idle_run(which)
        if run is not None:
            self.world.claim(run, count)

    @rule(
        log=st.integers(0, 5),
        cut=st.sampled_from([0, 0, 0, 1, 2, 5]),
        delta=st.lists(st.integers(1, 2), min_size=1, max_size=9),
        kept=st.sampled_from([None, None, 0, 1, 2, 5]),
        promised=st.booleans(),
    )
    def turn(self, log, cut, delta, kept, promised) -> None:
        """A whole turn, where there is room: the quick way to a full cache.

        Its loads from the host may be ``promised`` and end later.
        """
        prompt = self._prompt(log, cut, delta)
        run = self._admit_or_make_room(prompt)
        if run is None:
            return
        for index, transfer in reversed(list(enumerate(self.world.pending))):
            if transfer.transfer_id in run.waiting_for:
                if promised and index in self._promisable():
                    self.world.promise(index)
                else:
                    self.world.complete(index)
        while run.seq_id in self.world.runs and self._stage_or_make_room(run):
            self.world.execute()
        if run.computed == len(prompt):
            self.logs.append(prompt)
        if run.seq_id in self.world.runs:
            self.world.finish(run, None if kept is None else max(len(prompt) - kept, 0))

    @rule(
        log=st.integers(0, 30),
        deltas=st.lists(
            st.lists(st.integers(1, 2), min_size=5, max_size=9), min_size=2, max_size=3
        ),
    )
    def share_a_plan(self, log, deltas) -> None:
        """Several prompts with one beginning join one plan, each reading what others fill."""
        for delta in deltas:
            run = self._admit_or_make_room(self._prompt(log, 0, [1, 2, 1, 2, *delta]))
            if run is not None and not run.fetching:
                self._stage_or_make_room(run)

    def _admit_or_make_room(self, prompt: list[int]) -> Run | None:
        if len(self.world.runs) >= 4:
            return None
        run = self.world.admit(self.world.chain(prompt))
        if run is None and not self.world.plan:
            self.world.make_room()
            run = self.world.admit(self.world.chain(prompt))
        return run

    def _stage_or_make_room(self, run: Run) -> bool:
        staged = self.world.stage(run, len(run.chain))
        if not staged and not self.world.plan:
            self.world.make_room()
            staged = self.world.stage(run, len(run.chain))
        return staged

    @precondition(lambda self: self._ready())
    @rule(which=st.integers(0, 9), tokens=st.integers(1, 9))
    def stage(self, which: int, tokens: int) -> None:
        ready = self._ready()
        run = ready[which % len(ready)]
        self.world.stage(run, min(run.computed + tokens, len(run.chain)))

    @precondition(lambda self: self.world.plan)
    @rule(failing=st.sets(st.integers(0, 4), max_size=1), sampled=st.integers(1, 3))
    def execute(self, failing: set[int], sampled: int) -> None:
        plan = list(self.world.plan)
        failing = {index for index in failing if index < len(plan)}
        self.world.execute([plan[index][0] for index in failing])
        for run, end in plan:
            room = self.world.device_blocks * B
            if run.seq_id in self.world.runs and end == len(run.chain) < room:
                run.chain.append(sampled)

    def _idle_run(self, which: int) -> Run | None:
        planned = {run.seq_id for run, _ in self.world.plan}
        idle = [run for run in self.world.runs.values() if run.seq_id not in planned]
        return idle[which % len(idle)] if idle else None

    @rule(which=st.integers(0, 9), cut=st.integers(0, 6) | st.none())
    def finish(self, which: int, cut: int | None) -> None:
        run = self._idle_run(which)
        if run is not None:
            kept = None if cut is None else max(len(run.chain) - cut, 0)
            self.logs.append(run.chain.token_ids[:kept] or [1])
            self.world.finish(run, kept)

    @rule(which=st.integers(0, 9))
    def preempt(self, which: int) -> None:
        run = self._idle_run(which)
        if run is None:
            return
        self.world.preempt(run)
        self.world.admit(run.chain, seq_id=run.seq_id)

    @rule()
    def drop_plan(self) -> None:
        """The plan is never executed: who read from it is ended."""
        lost = {i for run, _ in self.world.plan for i in self.kv.dependents(run.seq_id)}
        self.world.plan = []
        for seq_id in lost:
            self.world.finish(self.world.runs[seq_id])
        self.kv.unstage()

    # -- moves

    @rule()
    def plan_transfers(self) -> None:
        silent = self.kv.silent_tiers
        assert not any(transfer.dst in silent for transfer in self.world.plan_transfers())

    @precondition(lambda self: self.world.pending)
    @rule(seconds=st.sampled_from([0.1, SILENCE_S]))
    def time_passes(self, seconds: float) -> None:
        """Tiers that answer nothing for long are waited for no longer."""
        self.now += seconds
        before = self.kv.silent_tiers
        overdue = self.kv.overdue(self.now)
        down = {t.transfer_id: t.dst for t in self.world.pending if t.dst is not Tier.DEVICE}
        assert {down[transfer_id] for transfer_id in overdue} == self.kv.silent_tiers - before
        assert self.kv.silent_tiers <= set(down.values())

    @precondition(lambda self: self.world.pending)
    @rule(
        index=st.integers(0, 20),
        failing=st.sets(st.integers(0, 15), max_size=3),
        failure=st.sampled_from(FAILURES),
    )
    def complete(self, index: int, failing: set[int], failure: MoveOutcome) -> None:
        self.world.complete(
            index % len(self.world.pending),
            lambda _, position: failure if position in failing else MoveOutcome.OK,
        )

    def _promisable(self) -> list[int]:
        return [
            index
            for index, transfer in enumerate(self.world.pending)
            if (transfer.src, transfer.dst) == (Tier.HOST, Tier.DEVICE)
            and transfer.transfer_id not in self.world.promised
        ]

    @precondition(lambda self: self._promisable())
    @rule(which=st.integers(0, 20), failing=st.sets(st.integers(0, 15), max_size=3))
    def promise(self, which: int, failing: set[int]) -> None:
        """Steps are held behind a load: what it brings is used before it has ended."""
        loads = self._promisable()
        self.world.promise(
            loads[which % len(loads)],
            lambda _, position: MoveOutcome.IO_ERROR if position in failing else MoveOutcome.OK,
        )

    def _some_keys(self, which: int, count: int) -> list[BlockHash]:
        keys = sorted(self.kv.resident_keys())
        return keys[which % len(keys) :][:count] if keys else []

    @rule(which=st.integers(0, 50), count=st.integers(1, 5))
    def request_clean(self, which: int, count: int) -> None:
        self.kv.request_clean(self._some_keys(which, count))

    @rule(which=st.integers(0, 50), count=st.integers(1, 3))
    def forget(self, which: int, count: int) -> None:
        self.world.disk.delete(self.kv.forget(self._some_keys(which, count)))

    @rule(which=st.integers(0, 50), count=st.integers(1, 5), rank=st.integers(0, 3))
    def retain(self, which: int, count: int, rank: int) -> None:
        for key in self._some_keys(which, count):
            self.ranks.set(key, rank)

    # -- truth

    @invariant()
    def books_balance_and_contents_are_true(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.check()
        for run in self.world.runs.values():
            if not run.copies and not self.world.reads_the_plan(run):
                self.world.read(run, run.computed)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.drop_plan()
        for run in list(self.world.runs.values()):
            self.world.finish(run)
        self.world.drain()
        self.world.assert_idle()
        for log in self.logs[-3:]:
            self.world.turn(log[: (self.world.device_blocks - 1) * B])
        for _ in range(40):
            if not (self.world.make_room() or self.kv.dirty_count()):
                break
        else:
            raise AssertionError("an idle cache goes on moving blocks")
        self.world.assert_idle()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
