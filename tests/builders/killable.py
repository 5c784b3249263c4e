"""An engine in a process of its own that ends by SIGKILL, at a chosen instant or at any.

Processes are forked from a server that has everything imported, so one is ready within some 30 ms.
An engine says which gates its threads have passed (``GateNames``), so that instants which are added
to the store are killed at without being named here.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sessionkv import EngineConfig
from sessionkv.actor import serve
from sessionkv.actor.serve import run_serve
from sessionkv.config import LimitsConfig
from sessionkv.store import journal_thread
from sessionkv.store.journal import Journal
from tests.builders.engine import Building, engine_config

READY_S = 60.0
"""How long a start may take on a slow machine."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


@dataclass(frozen=True, slots=True)
class Life:
    """What an engine process is to do.

    Attributes:
        folder: Holds ``store``, ``engine.log`` and ``gates``.
        endpoint: Where it listens.
        gate: The gate at which it kills itself, ``""`` for none.
        passes: At which passing of it.
        compacts: The journal is compacted all the time and not when it is worth it.
    """

    folder: Path
    endpoint: str
    config: EngineConfig
    gate: str = ""
    passes: int = 1
    compacts: bool = False


class KillAt:
    """Gates that end the process the n-th time somebody passes one of them."""

    def __init__(self, life: Life) -> None:
        self._gate = life.gate
        self._left = life.passes
        self._known: set[str] = set()
        self._names = life.folder / "gates"

    def pass_through(self, name: str) -> None:
        if name not in self._known:
            self._known.add(name)
            with self._names.open("a") as file:
                file.write(f"{name}\n")
        if name == self._gate:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)


def gate_names(folder: Path) -> list[str]:
    """Gates that engines over this folder have passed so far."""
    path = folder / "gates"
    return sorted(set(path.read_text().split())) if path.exists() else []


def small_config(store: Path, **cache: Any) -> EngineConfig:
    """Tiers so small that blocks move all the time, and few keys, so that they are forgotten."""
    config = engine_config(
        store,
        blocks=96,
        host_blocks=48,
        disk_bytes=4 * 2**20,
        limits=LimitsConfig(
            heartbeat_s=0.1, missed_heartbeats=10_000, idempotency_keys=200, drain_s=20
        ),
    )
    return replace(config, cache=replace(config.cache, **cache))


def _live(life: Life, line: Connection) -> None:
    """The process, from fork to its end."""
    log = os.open(life.folder / "engine.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = str(life.folder)  # temporary files that a killed engine left would be seen
    logging.basicConfig(level=logging.WARNING, force=True)
    threading.Thread(target=_die_with, args=(line,), daemon=True).start()
    if life.compacts:
        journal_thread._LOOK_EVERY = 4
        Journal.wasted_bytes = lambda self: 2**40  # type: ignore[method-assign]
    serve.build_engine = Building(gates=KillAt(life))  # type: ignore[assignment]
    status = run_serve(life.config, life.endpoint, on_ready=lambda report: line.send(True))
    os._exit(status)


def _die_with(line: Connection) -> None:
    """Whoever started this process has died: so does it."""
    try:
        line.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGKILL)


class KillableEngine:
    """One engine process. To be ended by :meth:`kill` or by itself, and then :meth:`reap`-ed.

    Attributes:
        endpoint: Where it listens once :meth:`wait_ready` has said so.
    """

    def __init__(self, life: Life) -> None:
        """Start it."""
        self.endpoint = life.endpoint
        self._line, theirs = _context.Pipe()
        self._process = _context.Process(target=_live, args=(life, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def wait_ready(self) -> bool:
        """Whether it came so far; False when it died before."""
        if not self._line.poll(READY_S):
            raise AssertionError("the engine neither started nor died")
        try:
            return bool(self._line.recv())
        except (EOFError, ConnectionResetError):
            return False

    def ended(self, within_s: float) -> bool:
        """Whether it has ended by itself after at most so long."""
        self._process.join(within_s)
        return self._process.exitcode is not None

    def kill(self) -> None:
        """SIGKILL; harmless when it has ended."""
        self._process.kill()

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def reap(self) -> int:
        """Wait for its end; its exit code, negative for a signal."""
        self._process.join(READY_S)
        code = self._process.exitcode
        if code is None:
            self.kill()
            raise AssertionError("the engine did not end")
        self._line.close()
        self._process.close()
        return code


StartEngine = Callable[[Life], KillableEngine]
