"""An engine that serves a socket in this process, until a signal or a failure of its core."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sessionkv.actor.host import EngineHost
from sessionkv.actor.socket_loop import CoreMail, SocketLoop
from sessionkv.config import EngineConfig
from sessionkv.engine.build import ProgressSink, build_engine
from sessionkv.engine.messages import DrainReport
from sessionkv.ipc.endpoint import default_endpoint
from sessionkv.ipc.server import RouterServer

SWITCH_INTERVAL_S = 0.0005
"""Front and core share an interpreter: neither may wait the default 5 ms for the other."""


def run_serve(
    config: EngineConfig,
    endpoint: str | None = None,
    on_ready: Callable[[Mapping[str, Any]], None] | None = None,
    on_progress: ProgressSink | None = None,
    on_drained: Callable[[DrainReport], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; one that comes before ready ends the start.

    The main thread only.

    Args:
        config: The engine's; without ``store`` its conversations end with it.
        endpoint: Where to listen; None is the user's own endpoint.
        on_ready: Called once with socket path, model and memory split when clients may come.
        on_progress: Called while the model is fetched, converted and loaded.
        on_drained: Called at the end of a drain with what it left undone.

    Returns:
        0 after a drain or an interrupted start, 1 where the core failed.

    Raises:
        EngineRunning: Somebody serves the endpoint already.
        SessionKVError: What kept the engine from starting.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _set_thread_environment(config)
    starting = _Starting()
    handlers = _on_signals(starting.interrupt)
    try:
        with RouterServer(endpoint or default_endpoint(), config.limits) as server:
            built = build_engine(config, progress=on_progress)
            mail = CoreMail(server)
            host = EngineHost(built, config, mail)
            loop = SocketLoop(host, server, mail, config.limits)
            try:
                _on_signals(loop.stop)
                if starting.interrupted:
                    raise _Interrupted
                _settle_memory()
                host.start()
                if on_ready is not None:
                    on_ready({"endpoint": server.endpoint, **host.report})
                loop.run()
            finally:
                loop.stop()
                host.close()
            if on_drained is not None and loop.drained is not None:
                on_drained(loop.drained)
            return 1 if loop.failed else 0
    except _Interrupted:
        return 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _set_thread_environment(config: EngineConfig) -> None:
    """Before the libraries that compute are loaded, which look at it once.

    Threads of torch that wait asleep leave the cores to those of other libraries. OpenBLAS's spin
    for 2**26 cycles after each product by default, tens of milliseconds in which they take a core
    from torch; 2**18, about 0.1 ms, reach over the gaps between the products of a step.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "18")
    if config.threads is not None:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(config.threads))


class _Interrupted(BaseException):
    """A signal came while the engine was being started, which may take minutes."""


class _Starting:
    """What a signal does while the engine is being started: end that, wherever it is."""

    def __init__(self) -> None:
        self.interrupted = False

    def interrupt(self) -> None:
        """Raise out of whatever runs; noted too, since a finaliser would swallow it."""
        self.interrupted = True
        raise _Interrupted


def _settle_memory() -> None:
    """What was made at start lives as long as the engine: the collector need not look at it."""
    gc.collect()
    gc.freeze()


def _on_signals(action: Callable[[], None]) -> dict[int, Any]:
    """Make SIGTERM and SIGINT do ``action``; returns what they did before."""
    return {
        number: signal.signal(number, lambda *_: action())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
