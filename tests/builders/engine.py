"""Whole engines over the checksum runner: real front, core, store and movers, exact answers.

``open_engine(...)`` embeds one; ``socket_engine(...)`` serves one on a thread of this process, for
tests of the wire that need gates. Both capture what they were built of, so that a test can read the
books (``assert_ledger``) and hold the runner or the movers at a gate.
"""

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sessionkv import (
    CacheConfig,
    Client,
    Engine,
    EngineConfig,
    LimitsConfig,
    SamplingParams,
    SchedulerConfig,
)
from sessionkv.actor.front_setup import build_front
from sessionkv.actor.host import CoreHost
from sessionkv.actor.socket_loop import SocketLoop
from sessionkv.engine.build import BuiltEngine, build_engine
from sessionkv.engine.checksum_runner import ChecksumRunner, checksum_geometry
from sessionkv.engine.messages import CoreMessage, FrontMessage
from sessionkv.ipc.server import RouterServer
from sessionkv.store.gates import OPEN_GATES, Gates
from sessionkv.text.builtin import BYTE_VOCAB_SIZE
from sessionkv.types import StepPlan
from sessionkv.types.access import Access
from tests.builders.checksum import cold_oracle

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def greedy(max_tokens: int | None, **fields: Any) -> SamplingParams:
    """Greedy sampling that runs to ``max_tokens``."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True} | fields)


def engine_config(
    store: Path | None = None,
    *,
    blocks: int = 64,
    host_blocks: int = 0,
    disk_bytes: int = 0,
    block_size: int = BLOCK_SIZE,
    max_model_len: int | None = None,
    limits: LimitsConfig | None = None,
    step_tokens: int | None = None,
    **cache: Any,
) -> EngineConfig:
    """A small engine's configuration; tiers are off unless given, and the disk is waited for."""
    block_bytes = checksum_geometry(block_size).block_bytes
    return EngineConfig(
        model="checksum",
        store=store,
        max_model_len=max_model_len,
        limits=limits or LimitsConfig(),
        scheduler=SchedulerConfig(step_tokens=step_tokens, min_lookup_wait_ms=30_000),
        cache=CacheConfig(
            block_size=block_size,
            device_blocks=blocks,
            host_bytes=host_blocks * block_bytes,
            disk_bytes=disk_bytes,
            **cache,
        ),
    )


@dataclass
class StepGate:
    """Holds the runner at the start of chosen steps until the test lets it go on.

    A test waits in ``reached()`` until the step loop stands at the gate, does what it wants to
    happen in that very moment, and calls ``open()``.
    """

    when: Callable[[StepPlan], bool] = field(default=lambda plan: True)
    _reached: threading.Event = field(default_factory=threading.Event)
    _opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, plan: StepPlan) -> None:
        if self._opened.is_set() or not self.when(plan):
            return
        self._reached.set()
        if not self._opened.wait(30):
            raise TimeoutError("the test never opened the gate")

    def reached(self) -> None:
        assert self._reached.wait(30), "the step loop never came to the gate"

    def open(self) -> None:
        self._opened.set()


class Building:
    """Builds with a checking runner and remembers what was built.

    Unless ``planner_learns``, everything that is found in a lower tier is fetched: checksums are
    computed faster than any disk reads them, and how fast is up to the machine. With ``text_dir``
    the engine speaks through another text folder than the built-in one of bytes.
    """

    def __init__(
        self,
        *,
        gates: Gates = OPEN_GATES,
        planner_learns: bool = False,
        text_dir: Path | None = None,
        **runner: Any,
    ) -> None:
        self._gates = gates
        self._planner_learns = planner_learns
        self._text_dir = text_dir
        self._runner = runner
        self.built: BuiltEngine | None = None

    def __call__(self, config: EngineConfig, **arguments: Any) -> BuiltEngine:
        facts = None
        if self._text_dir is not None:
            facts = json.loads((self._text_dir / "text.json").read_text())

        def checking(small: Any) -> ChecksumRunner:
            options = {"full_read": True, "runner_type": ChecksumRunner} | self._runner
            runner_type = options.pop("runner_type")
            return runner_type(
                small.num_blocks,
                small.geometry.block_size,
                vocab_size=facts["vocab_size"] if facts else BYTE_VOCAB_SIZE,
                max_model_len=small.max_model_len,
                **options,
            )

        self.built = build_engine(config, wrap_runner=checking, gates=self._gates, **arguments)
        if facts:
            self.built = replace(
                self.built,
                text=self._text_dir,
                parts=replace(
                    self.built.parts,
                    tokenizer_digest=facts["tokenizer_digest"],
                    template_digest=facts["template_digest"],
                ),
            )
        if not self._planner_learns:
            self.built.parts.planner.rates.observe_prefill = _not_observed
        return self.built


def _not_observed(*args: Any, **fields: Any) -> None:
    """Without a measured prefill the planner loads."""
    del args, fields


class CheckedEngine(Engine):
    """An embedded engine whose books a test may read while it is idle."""

    def __init__(self, config: EngineConfig, building: Building) -> None:
        self.building = building
        super().__init__(config, build=building)

    @property
    def parts(self) -> Any:
        assert self.building.built is not None
        return self.building.built.parts

    def await_messages(self, count: int) -> None:
        """Wait until the core, which stands at a gate, has so many messages to take in."""
        assert self.building.built is not None
        inbox = self.building.built.inbox
        for _ in range(30_000):
            if len(inbox._items) >= count:
                return
            threading.Event().wait(0.001)
        raise AssertionError(f"{len(inbox._items)} messages came, not {count}")

    def assert_ledger(self) -> None:
        """Idle: the books balance, nothing is leased or under way, disk bytes are as found."""
        self.flush()
        quiet = 0
        for _ in range(10_000):  # each question is a round through the core
            # One transfer's answer may be what lets the next one begin.
            quiet = 0 if self.stats()["ledger"]["transfers_in_flight"] else quiet + 1
            if quiet == 3:
                break
        self.parts.kv.check()
        ledger = self.parts.kv.ledger()
        assert ledger.idle, ledger
        stats = self.stats()
        assert stats["book_errors"] == 0
        if blocks := stats["store"]["blocks"]:
            assert self.building.built is not None
            assert blocks["used_bytes"] == allocated(self.building.built.store_path / "blocks")


def allocated(folder: Path) -> int:
    """Bytes of disk under a folder, as the file system counts them."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@contextmanager
def open_engine(
    config: EngineConfig | None = None,
    *,
    gates: Gates = OPEN_GATES,
    gate: Callable[[StepPlan], None] | None = None,
    runner: dict[str, Any] | None = None,
) -> Iterator[CheckedEngine]:
    """An embedded engine over the checksum runner.

    Args:
        config: See :func:`engine_config`.
        gates: For the store's and movers' threads.
        gate: Called with each plan before it is executed, such as a :class:`StepGate`.
        runner: More arguments of :class:`Building`, such as faults and scripts of the runner.
    """
    building = Building(gates=gates, gate=gate, **(runner or {}))
    engine = CheckedEngine(config or engine_config(), building)
    try:
        yield engine
    finally:
        engine.close()


class ThreadLink:
    """Core and front as threads of one process: a ``FrontSink`` and a ``CoreLink``."""

    is_silent = False
    is_behind = False

    def __init__(self, server: RouterServer) -> None:
        self._server = server
        self._batches: queue.SimpleQueue[list[CoreMessage]] = queue.SimpleQueue()
        self.host: CoreHost | None = None

    def put(self, messages: list[CoreMessage]) -> None:
        self._batches.put(messages)
        self._server.wake()

    @property
    def is_empty(self) -> bool:
        return self._batches.empty()

    def take(self) -> list[CoreMessage]:
        return [] if self._batches.empty() else self._batches.get()

    def require_room(self) -> None:
        pass

    def send(self, messages: list[FrontMessage]) -> None:
        assert self.host is not None
        for message in messages:
            self.host.inbox.put(message)


@dataclass
class SocketEngine:
    """A served engine on threads of this process."""

    endpoint: str
    building: Building
    loop: SocketLoop
    host: CoreHost

    @property
    def parts(self) -> Any:
        assert self.building.built is not None
        return self.building.built.parts

    @contextmanager
    def client(self, key: str | None = None, *, tenant: str | None = None) -> Iterator[Client]:
        client = Client(self.endpoint, key=key, tenant=tenant)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def socket_engine(
    folder: Path,
    config: EngineConfig | None = None,
    *,
    gates: Gates = OPEN_GATES,
    gate: Callable[[StepPlan], None] | None = None,
    runner: dict[str, Any] | None = None,
    access: Access | None = None,
) -> Iterator[SocketEngine]:
    """An engine at ``ipc://folder/e.sock``; arguments as for :func:`open_engine`.

    With ``access`` it asks for keys, and shares what that declares public.
    """
    config = config or engine_config()
    building = Building(gates=gates, gate=gate, **(runner or {}))
    started = threading.Event()
    served: list[SocketEngine] = []
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            with RouterServer(f"ipc://{folder}/e.sock", config.limits) as server:
                link = ThreadLink(server)
                host = link.host = CoreHost(building(config), config, link, access=access)
                front = build_front(host.setup)
                link.send(front.to_core)
                front.to_core.clear()
                loop = SocketLoop(front, server, link, config.limits)
                served.append(SocketEngine(server.endpoint, building, loop, host))
                host.start()
                started.set()
                loop.run()
                host.close()
        except BaseException as failure:
            failures.append(failure)
            started.set()
            raise

    thread = threading.Thread(target=serve, name="serve")
    thread.start()
    started.wait(30)
    assert not failures, failures
    assert served, "the engine did not start"
    try:
        yield served[0]
    finally:
        served[0].host.drain()
        thread.join(30)
        assert not thread.is_alive(), "the engine did not stop"


def oracle(prompt: Sequence[int], sampling: SamplingParams = GREEDY, **fields: Any) -> list[int]:
    """What a fresh engine with the cache off answers to these ids, stop ids not counted."""
    count = sampling.max_tokens
    assert count is not None
    return cold_oracle(prompt, count, sampling, **{"vocab_size": BYTE_VOCAB_SIZE} | fields)


def without_cache(config: EngineConfig) -> EngineConfig:
    """The same engine with the prefix cache off."""
    return replace(config, cache=replace(config.cache, prefix_cache=False))
