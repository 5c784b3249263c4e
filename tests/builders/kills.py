"""Engines under random load, killed at any instant and at chosen ones, again and again.

After each kill the next engine on the same store must have every acknowledged change, replay every
keyed turn exactly, go on as an uninterrupted run would, balance its books, and take no more disk
than the ones before it.
"""

from __future__ import annotations

import random
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sessionkv.store.directory import disk_bytes
from tests.builders.kill_load import Account, Line, Worker
from tests.builders.killable import KillableEngine, Life, gate_names, small_config

INSTANTS = {"load": 0.35, "gate": 0.35, "start": 0.1, "drain": 0.1, "rest": 0.1}
"""How often an engine is killed when: at any time under load, at a gate, while it starts, while it
drains, at rest."""
_GATE_PATIENCE_S = 1.0
"""A gate that nobody has passed by then is not waited for."""


@dataclass
class Tally:
    """What happened.

    Attributes:
        instants: Kills by instant, gates by name.
        not_reached: Lives that were to end at a gate and ended at any time after waiting for it.
        sizes: After each life, bytes of the journal, of the blocks, and number of files.
    """

    kills: int = 0
    drained: int = 0
    instants: Counter[str] = field(default_factory=Counter)
    not_reached: Counter[str] = field(default_factory=Counter)
    sizes: list[tuple[int, int, int]] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)

    def total(self, name: str) -> int:
        return sum(getattr(account, name) for account in self.accounts)


class Killing:
    """One store and the engines that die over it."""

    def __init__(
        self, folder: Path, seed: int, *, workers: int, load_s: float, **cache: Any
    ) -> None:
        self.tally = Tally()
        self._load_s = load_s
        self.folder = folder
        self.store = folder / "store"
        self.config = small_config(self.store, **cache)
        self._rng = random.Random(f"{seed}/{cache}")
        self._workers = [Worker(number, seed) for number in range(workers)]
        self.tally.accounts = [worker.account for worker in self._workers]
        self._sockets = Path(tempfile.mkdtemp(prefix="skv-", dir="/tmp"))
        self._lives = 0
        self._start_s = 0.05

    def close(self) -> None:
        shutil.rmtree(self._sockets, ignore_errors=True)

    def life(self, instant: str) -> None:
        """One engine, from its start to its death."""
        self._lives += 1
        gate, passes = "", 1
        if instant == "gate" and (known := gate_names(self.folder)):
            gate, passes = self._rng.choice(known), int(self._rng.expovariate(1 / 6)) + 1
        endpoint = f"ipc://{self._sockets}/{self._lives}"
        began = time.monotonic()
        compacts = self._rng.random() < 0.5
        engine = KillableEngine(Life(self.folder, endpoint, self.config, gate, passes, compacts))
        try:
            if instant == "start":
                if not engine.ended(self._rng.random() * 1.2 * self._start_s):
                    engine.kill()
            elif engine.wait_ready():
                self._start_s = 0.8 * self._start_s + 0.2 * (time.monotonic() - began)
                self._under_load(engine, instant, gate)
        finally:
            engine.kill()
            code = engine.reap()
        self._ended(code, f"gate {gate}" if gate else instant)

    def _under_load(self, engine: KillableEngine, instant: str, gate: str) -> None:
        rng = self._rng
        dead, stop = threading.Event(), threading.Event()
        failures: list[BaseException] = []

        def work(worker: Worker) -> None:
            try:
                worker.run(engine.endpoint, dead, stop)
            except BaseException as failure:  # noqa: BLE001 - raised again below
                failures.append(failure)

        crew = [threading.Thread(target=work, args=(worker,)) for worker in self._workers]
        for thread in crew:
            thread.start()
        if gate:
            if not engine.ended(_GATE_PATIENCE_S):
                self.tally.not_reached[gate] += 1
        else:
            engine.ended(rng.random() * self._load_s)
        if instant == "rest":
            stop.set()
            for thread in crew:
                thread.join()
            engine.ended(rng.choice((0.0, 0.01, 0.05, 0.2)))
        if instant == "drain":
            engine.terminate()
            engine.ended(rng.random() * 0.05)
        engine.kill()
        at_s = time.monotonic()
        engine.ended(60)
        dead.set()
        for thread in crew:
            thread.join()
        for worker in self._workers:
            worker.died(at_s)
        if failures:
            failures[0].add_note(f"the engines' log:\n{self.log()}")
            raise failures[0]

    def _ended(self, code: int, instant: str) -> None:
        tally = self.tally
        assert code in (0, -9), f"the engine ended with {code}, not by our hand:\n{self.log()}"
        if code == 0:
            tally.drained += 1
        else:
            tally.kills += 1
            tally.instants[instant] += 1
        if self.store.exists():
            self._look_at_files()

    def _look_at_files(self) -> None:
        left = {path.name for path in self.folder.iterdir()}
        assert left <= {"store", "engine.log", "gates"}, left  # no temporary files, in particular
        files = 0
        for path in self.store.rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))
            assert "damaged" not in path.name, path
            files += 1
        blocks = disk_bytes(self.store / "blocks")
        self.tally.sizes.append((disk_bytes(self.store / "journal"), blocks, files))
        cap = self.config.cache.disk_bytes or 0
        assert blocks <= cap + 2**20, (blocks, cap)

    def last(self) -> dict[str, Any]:
        """An engine that is let live: its figures once it is idle; checks books and log."""
        self._lives += 1
        endpoint = f"ipc://{self._sockets}/{self._lives}"
        engine = KillableEngine(Life(self.folder, endpoint, self.config))
        never, stop = threading.Event(), threading.Event()
        stop.set()
        try:
            assert engine.wait_ready(), self.log()
            for worker in self._workers:
                worker.run(engine.endpoint, never, stop)
            with Line(engine.endpoint, never) as line:
                line.call("hello", {})
                stats = self._idle_stats(line)
            engine.terminate()
            code = engine.reap()
        except BaseException:
            engine.kill()
            raise
        assert code == 0, self.log()
        log = self.log()
        assert "Traceback" not in log, log
        assert stats["book_errors"] == 0
        blocks = stats["store"]["blocks"]
        assert (blocks["corrupt_blocks"], blocks["io_errors"]) == (0, 0)
        assert blocks["enabled"]
        return stats

    def _idle_stats(self, line: Line) -> dict[str, Any]:
        """After a flush: nothing is held, and what is reported is what is found."""
        deadline = time.monotonic() + 30
        while True:
            line.call("flush", {})
            stats: dict[str, Any] = line.call("stats", {})["value"]
            found = disk_bytes(self.store / "blocks")
            if _is_idle(stats) and stats["store"]["blocks"]["used_bytes"] == found:
                return stats
            assert time.monotonic() < deadline, (stats, found)

    def log(self) -> str:
        """What all engines wrote."""
        path = self.folder / "engine.log"
        return path.read_text() if path.exists() else ""


def _is_idle(stats: dict[str, Any]) -> bool:
    ledger = stats["ledger"]
    for tier in (ledger["device"], ledger["host"]):
        states = ("free", "filling", "leased", "cached")
        assert sum(tier[state] for state in states) == tier["total"], ledger
    held = (ledger[tier][state] for tier in ("device", "host") for state in ("filling", "leased"))
    return not (any(held) or ledger["sequences"] or ledger["transfers_in_flight"])


def kill_engines(
    folder: Path,
    kills: int,
    *,
    seed: int,
    workers: int = 3,
    load_s: float = 0.25,
    **cache: Any,
) -> Tally:
    """Kill so many engines over one store, one after another, and check each time.

    Args:
        folder: Empty; holds the store and the engines' log.
        kills: How many have to die; those that drain in time do not count.
        seed: Of all that is chosen; the instants themselves are up to the machine.
        workers: Clients.
        load_s: Longest that an engine is under load, unless it waits for a gate.
        cache: Changes to the engines' ``CacheConfig``.

    Raises:
        AssertionError: Something was lost, wrong, or grew without bound.
    """
    killing = Killing(folder, seed, workers=workers, load_s=load_s, **cache)
    rng = random.Random(seed)
    try:
        killing.life("load")
        while killing.tally.kills < kills:
            killing.life(rng.choices(list(INSTANTS), list(INSTANTS.values()))[0])
        killing.last()
    finally:
        killing.close()
    _assert_bounded(killing.tally.sizes)
    return killing.tally


def _assert_bounded(sizes: Sequence[tuple[int, int, int]]) -> None:
    """Once the load has settled, the journal takes no more room, nor are there more files.

    Blocks have their cap.
    """
    half = len(sizes) // 2
    for column, slack in ((0, 2**20), (2, 8)):
        earlier = max(row[column] for row in sizes[:half])
        later = max(row[column] for row in sizes[half:])
        assert later <= 1.5 * earlier + slack, (column, earlier, later)
