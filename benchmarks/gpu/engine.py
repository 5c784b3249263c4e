"""Engines of the benchmarks on a device: how one is started, asked and watched.

An engine is a process of its own that is reached through its socket. Token ids go in and come out.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu.driver import Ask, Drivers, Trace, one
from benchmarks.gpu.models import SHAPES, Shape
from benchmarks.gpu.setting import Scale, Setting
from sessionkv import CacheConfig, Client, EngineConfig, EngineProcess, launch
from sessionkv.client import Session
from sessionkv.config import SchedulerConfig
from sessionkv.errors import SessionKVError

Bound = tuple[str, float]
_T = TypeVar("_T")

START_LIMIT_S = 240.0
LIMIT_S = 90.0
"""An engine that lets one wait for longer has hung; that is to cost one case, not the others."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A running engine with all that cases need.

    Attributes:
        name: Of its model's shape.
        start_s: How long it took to be ready.
    """

    setting: Setting
    name: str
    shape: Shape
    process: EngineProcess
    client: Client
    drivers: Drivers
    start_s: float

    @property
    def scale(self) -> Scale:
        """Lengths."""
        return self.setting.scale

    @property
    def is_tiny(self) -> bool:
        """Whether only the benchmark itself is tried out."""
        return self.name == "tiny"

    def bar(self, sign: str, limit: float, *, model: str = "8b") -> Bound | None:
        """A bound that holds for one model only."""
        return (sign, limit) if self.name == model else None

    def tokens(self, count: int, *seed: object) -> list[int]:
        """Ids; the same seed gives the same ones, another seed others from the first on."""
        source = random.Random(repr(seed))
        return source.choices(range(min(self.shape.vocab, 10_000)), k=count)

    @contextmanager
    def watched(self, limit_s: float = LIMIT_S) -> Iterator[None]:
        """What waits for the engine inside ends after so long, since that is killed then."""
        timer = threading.Timer(limit_s, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def ask(self, tokens: list[int], count: int = 1, **options: Any) -> Trace:
        """One request, alone."""
        with self.watched():
            return one(self.client, Ask(tokens, count, **options))

    def open(self, name: str) -> Session:
        """A new session; its name is also new where the store is not."""
        return self.client.open(f"{name}-{time.monotonic_ns()}")

    def together(self, asks: list[Ask]) -> list[Trace]:
        """Many at once."""
        with self.watched():
            return self.drivers.together(self.process.endpoint, asks)

    def repeat(self, count: int, action: Callable[[int], _T]) -> list[_T]:
        """Results of calls with 0, 1, ...; one with -1 warms up. Fewer when the time is up."""
        action(-1)
        results = [action(0)]
        while len(results) < count and not self.setting.time_is_up:
            results.append(action(len(results)))
        return results

    @property
    def works(self) -> bool:
        """Whether the engine still answers; its last words are printed where it does not."""
        try:
            with self.watched(10.0):
                self.ask(self.tokens(4, "works"))
        except SessionKVError:
            log = self.process._scratch / "engine.log"  # a failed case is to be understood
            print(log.read_text(errors="replace")[-4000:] if log.is_file() else "", flush=True)
            return False
        return True

    def moved(self) -> dict[str, tuple[int, float]]:
        """Bytes moved so far and seconds that took, by ``from_to_to``."""
        transfers = self.client.stats()["transfers"]
        return {name: (found["moved_bytes"], found["busy_s"]) for name, found in transfers.items()}


@contextmanager
def running(
    setting: Setting,
    model: str,
    *,
    text: bool = False,
    store: Path | None = None,
    max_model_len: int | None = None,
    max_running: int = 256,
    **cache: Any,
) -> Iterator[Bench]:
    """An engine for a while. Lengths of a window are cut to what the shape has.

    Args:
        setting: Of the run.
        model: Name of a shape.
        text: Whether every id has a text.
        store: Of an engine that is to be started again; None is a temporary one.
        max_model_len: As in ``EngineConfig``.
        max_running: As in ``SchedulerConfig``.
        **cache: As in ``CacheConfig``.
    """
    folder = setting.model_folder(model, text=text)
    shape = SHAPES[model]
    config = EngineConfig(
        model=str(folder),
        model_cache=setting.work / "cache",
        max_model_len=min(max_model_len or shape.max_len, shape.max_len),
        device=setting.device,
        offline=True,
        log_level="warning",
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(step_tokens=setting.step_tokens, max_running=max_running),
    )
    if model == "tiny":
        config = replace(config, threads=1)
    began = time.perf_counter()
    reached: dict[str, float] = {}

    def note(event: Mapping[str, Any]) -> None:
        reached.setdefault(event["stage"], time.perf_counter() - began)

    with launch(store=store, config=config, timeout_s=START_LIMIT_S, on_progress=note) as process:
        start_s = time.perf_counter() - began
        stages = ", ".join(f"{stage} from {at_s:.1f} s" for stage, at_s in reached.items())
        print(f"  engine {model} ready after {start_s:.1f} s ({stages})", flush=True)
        with Drivers(setting.scale.drivers) as drivers:
            client = process.client()
            yield Bench(setting, model, shape, process, client, drivers, start_s)
