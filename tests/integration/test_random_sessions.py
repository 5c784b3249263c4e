"""Random conversations over whole engines: whatever is evicted, fetched or lost, warm is cold."""

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessionkv.engine.checksum_runner import ChecksumRunner
from sessionkv.engine.device_memory import Copy, Copying
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.types import StepOutput, StepPlan, TransferResult
from tests.builders.deferred_device import DeferredDevice
from tests.builders.engine import CheckedEngine, engine_config, greedy, open_engine, oracle
from tests.builders.random_sessions import Mix, Tally, run_sessions
from tests.builders.store import memory_store

MIB = 2**20


@pytest.fixture
def store() -> Iterator[Path]:
    with memory_store() as folder:
        yield folder


def assert_disk_figures(engine: CheckedEngine, store: Path) -> None:
    """What the disk tier reports is what is there, and within its cap."""
    for _ in range(2_000):  # the figures are renewed whenever the store's thread has nothing to do
        blocks = engine.stats()["store"]["blocks"]
        found = sum(p.stat().st_blocks * 512 for p in (store / "blocks").rglob("*") if p.is_file())
        if blocks["used_bytes"] == found:
            break
    assert blocks["used_bytes"] == found
    assert found <= blocks["cap_bytes"]
    assert blocks["leased_slots"] == 0


def assert_logs(engine: CheckedEngine, logs: dict[str, list[int]]) -> None:
    """One more turn on each session: the engine has exactly the log that the test kept."""
    for name, log in logs.items():
        result = engine.session(name).turn(tokens=[99], sampling=greedy(2))
        assert result.cache.prompt_tokens == len(log) + 1
        assert list(result.tokens) == oracle([*log, 99], greedy(2))


def assert_sums(engine: CheckedEngine, tally: Tally) -> None:
    """The engine's own figures are the sums of the reports that its clients got."""
    stats = engine.stats()
    cache = stats["prefix_cache"]
    assert stats["prompt_tokens"] == tally.prompt_tokens
    assert stats["recomputed_tokens"] == tally.recomputed_tokens
    assert cache["device_tokens"] == tally.device_tokens
    assert cache["host_tokens"] == tally.host_tokens
    assert cache["disk_tokens"] == tally.disk_tokens
    assert stats["miss_turns"] == dict(tally.reasons)


SEEDS = [1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seed", SEEDS)
def test_two_hundred_sessions_on_a_device_for_five_in_a_hundred(store: Path, seed: int) -> None:
    config = engine_config(store, blocks=280, host_blocks=140, disk_bytes=64 * MIB)
    with open_engine(config) as engine:
        tally, logs = run_sessions(engine, seed=seed, sessions=200, turns=10)
        assert min(tally.device_tokens, tally.host_tokens, tally.disk_tokens) > 1000
        engine.assert_ledger()
        assert_sums(engine, tally)
        assert_disk_figures(engine, store)
    with open_engine(config) as engine:  # and all of it is there after a restart
        assert_logs(engine, logs)
        engine.assert_ledger()


TIERS = {
    "device only": {},
    "host": {"host_blocks": 100},
    "disk": {"disk_bytes": 32 * MIB},
    "disk on eviction": {"disk_bytes": 32 * MIB, "durability": "evict"},
    "disk that forgets": {"host_blocks": 40, "disk_bytes": 1 * MIB},
    "no prefix cache": {"host_blocks": 40, "disk_bytes": 32 * MIB, "prefix_cache": False},
    "large blocks": {"block_size": 16, "blocks": 40, "host_blocks": 40, "disk_bytes": 32 * MIB},
}


@pytest.mark.parametrize("tiers", TIERS)
def test_any_tiers(store: Path, tiers: str) -> None:
    config = engine_config(store, **{"blocks": 100} | TIERS[tiers])
    with open_engine(config) as engine:
        _, logs = run_sessions(engine, seed=5, sessions=48, turns=6)
        engine.assert_ledger()
        if config.cache.disk_bytes and config.cache.prefix_cache:
            assert_disk_figures(engine, store)
        assert_logs(engine, logs)


PRESSED = Mix(max_tokens=40, max_delta=20, max_log=100, cancel=0.15, keep=0.15, flush=0.0)


GROWING = Mix(
    max_tokens=100, max_delta=6, max_log=60, rewind=0.2, cancel=0.05, keep=0.05, flush=0.0
)
"""Turns that begin small and grow large, so that those that run together outgrow the pool."""


@pytest.mark.parametrize("plans_ahead", [False, True], ids=["in_turn", "ahead"])
def test_preempted_turns_go_on(store: Path, plans_ahead: bool) -> None:
    config = engine_config(store, blocks=48, host_blocks=30, disk_bytes=32 * MIB)
    with open_engine(config, runner={"plans_ahead": plans_ahead}) as engine:
        _, logs = run_sessions(engine, seed=6, sessions=16, turns=12, workers=16, mix=GROWING)
        assert engine.stats()["preemptions"] > 10
        engine.assert_ledger()
        assert_logs(engine, logs)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(42, 70),
    host_blocks=st.sampled_from([0, 1, 7, 40]),
    disk=st.sampled_from([0, 600_000, 8 * MIB]),
    durability=st.sampled_from(["turn", "idle", "evict", "off"]),
    step_tokens=st.sampled_from([6, 16, 64]),
    workers=st.integers(2, 8),
)
def test_any_tiny_engine(
    seed: int,
    blocks: int,
    host_blocks: int,
    disk: int,
    durability: str,
    step_tokens: int,
    workers: int,
) -> None:
    with memory_store() as store:
        config = engine_config(
            store, blocks=blocks, host_blocks=host_blocks, disk_bytes=disk,
            durability=durability, step_tokens=step_tokens,
        )  # fmt: skip
        with open_engine(config) as engine:
            run_sessions(
                engine, seed=seed, sessions=2 * workers, turns=4, workers=workers, mix=PRESSED
            )
            engine.assert_ledger()


class FlakyGates:
    """Reads and writes of the disk fail now and then."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.num_failures = 0

    def pass_through(self, name: str) -> None:
        if name == "before_read" and self._rng.random() < 0.2:
            self.num_failures += 1
            raise OSError("told to fail")


class FlakyViews(ChecksumRunner):
    """Device blocks that the movers cannot get at now and then."""

    _rng = random.Random(7)

    def block_view(self, block_id: int) -> memoryview:
        if threading.current_thread().name == "movers" and self._rng.random() < 0.2:
            raise OSError("told to fail")
        return super().block_view(block_id)


class FlakyDevice(DeferredDevice):
    """Copies that fail now and then: one block of them, or all."""

    _rng = random.Random(7)

    def copy_in(self, copies: Sequence[Copy], after: object) -> Copying:
        self.bad_blocks = {block for block, _ in copies if self._rng.random() < 0.05}
        if self._rng.random() < 0.05:
            raise RuntimeError("told to fail")
        return super().copy_in(copies, after)


class BehindCopies(ChecksumRunner):
    """Device blocks that only copies reach."""

    _device: FlakyDevice | None = None

    @property
    def memory(self) -> Any:
        if self._device is None:
            size = self.geometry.block_bytes
            self._device = FlakyDevice(self.num_blocks, size, memory=self._memory)
        return self._device


class PromisedCopies(BehindCopies):
    """Steps may be held behind copies that are under way, and run with them made."""

    @property
    def memory(self) -> Any:
        device = super().memory
        device.promises = True
        return device

    def execute(self, plan: StepPlan) -> StepOutput:
        self.memory.run_steps()
        return super().execute(plan)


def test_a_pool_that_only_copies_reach(store: Path) -> None:
    config = engine_config(store, blocks=100, host_blocks=40, disk_bytes=32 * MIB)
    with open_engine(config, runner={"runner_type": BehindCopies}) as engine:
        _, logs = run_sessions(engine, seed=11, sessions=32, turns=6)
        engine.assert_ledger()
        assert_disk_figures(engine, store)
        assert_logs(engine, logs)
        moves = engine.stats()["transfers"]
        for way in ("device_to_host", "host_to_device", "device_to_disk", "disk_to_device"):
            assert moves[way]["blocks"] > 0, way
        assert moves["host_to_device"]["failed_blocks"] > 0
        assert moves["disk_to_device"]["failed_blocks"] > 0


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Transfers that steps were held behind, so far."""
    made: list[int] = []
    on_promise = Scheduler.on_promise

    def counted(scheduler: Scheduler, result: TransferResult) -> None:
        made.append(result.transfer_id)
        on_promise(scheduler, result)

    monkeypatch.setattr(Scheduler, "on_promise", counted)
    return made


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_behind_copies_that_have_not_ended(
    store: Path, promised: list[int], workers: int
) -> None:
    config = engine_config(store, blocks=60, host_blocks=200, disk_bytes=32 * MIB)
    with open_engine(config, runner={"runner_type": PromisedCopies}) as engine:
        _, logs = run_sessions(engine, seed=12, sessions=16, turns=6, workers=workers)
        engine.assert_ledger()
        assert_disk_figures(engine, store)
        assert_logs(engine, logs)
        assert engine.stats()["transfers"]["host_to_device"]["failed_blocks"] > 0
        assert engine.parts.runner.memory.overlaps == []
    if workers == 1:  # each turn is alone: then no load waits for anything but its own copies
        assert len(promised) > 30


@pytest.mark.filterwarnings("ignore")
def test_transfers_that_fail_are_misses(store: Path) -> None:
    config = engine_config(store, blocks=100, host_blocks=60, disk_bytes=32 * MIB)
    gates = FlakyGates(7)
    with open_engine(config, gates=gates, runner={"runner_type": FlakyViews}) as engine:
        _, logs = run_sessions(engine, seed=7, sessions=48, turns=8)
        assert gates.num_failures > 10
        engine.assert_ledger()
        assert_disk_figures(engine, store)
        assert_logs(engine, logs)


class Faults:
    """Steps that raise, and sequences whose result is unusable."""

    def __init__(self, seed: int, *, steps: float, sequences: float) -> None:
        self._rng = random.Random(seed)
        self._steps = steps
        self._sequences = sequences
        self.on = True

    def as_runner(self) -> dict[str, object]:
        return {
            "fail_step": lambda plan: self.on and self._rng.random() < self._steps,
            "fail_sequence": lambda seq_id, ids: self.on and self._rng.random() < self._sequences,
        }


FAILING = Mix(faults=True, max_tokens=24, rewind=0.16, flush=0.0)
"""Turns of many steps, each of which may fail."""


@pytest.mark.parametrize("plans_ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize(
    ("steps", "sequences"),
    [(0.03, 0.0), (0.0, 0.03), (0.02, 0.02)],
    ids=["steps", "sequences", "both"],
)
def test_steps_that_fail_leave_every_session_as_it_was(
    store: Path, steps: float, sequences: float, plans_ahead: bool
) -> None:
    faults = Faults(8, steps=steps, sequences=sequences)
    config = engine_config(store, blocks=100, host_blocks=60, disk_bytes=32 * MIB)
    with open_engine(config, runner=faults.as_runner() | {"plans_ahead": plans_ahead}) as engine:
        tally, logs = run_sessions(engine, seed=8, sessions=48, turns=6, mix=FAILING)
        assert tally.failed > 20
        engine.assert_ledger()
        assert_disk_figures(engine, store)
        faults.on = False
        assert_logs(engine, logs)
