"""An engine that serves a socket, until a signal or a failure.

This process is core's: it holds the store, the device and the endpoint, handles signals and has the
exit code. The front, which serves the socket, is a child of it, so that text and clients take
nothing of core's interpreter. Neither outlives the other.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from sessionkv.actor.access_file import new_key, read_access
from sessionkv.actor.front_link import StartFront
from sessionkv.actor.front_process import FrontProcess
from sessionkv.actor.gateway_process import GatewayProcess
from sessionkv.config import EngineConfig, HttpConfig
from sessionkv.engine.messages import DrainReport
from sessionkv.errors import ConfigError
from sessionkv.ipc.endpoint import default_endpoint
from sessionkv.ipc.listener import Listener

if TYPE_CHECKING:
    from sessionkv.actor.host import CoreHost
    from sessionkv.engine.build import BuiltEngine, ProgressSink

_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002
"""Core and what wakes it share an interpreter: none may wait the default 5 ms for the other. Two
threads that never wait lose a few hundredths to switching so often."""
COLLECT_AFTER = (700, 2, 35)
"""Of the collector, which keeps the interpreter for each of its passes: the one over objects that
have outlived one pass comes after 3 others instead of 11, and so looks at a quarter as many
(0.15 ms instead of 0.6); all objects are looked at as seldom as by default."""
WAIT_POLICY = "passive"
"""How threads of torch wait in an engine that is served, unless the environment says otherwise."""


def build_engine(config: EngineConfig, *, progress: ProgressSink | None = None) -> BuiltEngine:
    """As the function of that name in ``engine.build``, whose libraries are loaded only now."""
    from sessionkv.engine import build

    return build.build_engine(config, progress=progress)


def run_serve(
    config: EngineConfig,
    endpoint: str | None = None,
    on_ready: Callable[[Mapping[str, Any]], None] | None = None,
    on_progress: ProgressSink | None = None,
    on_stopping: Callable[[int], None] | None = None,
    on_drained: Callable[[DrainReport], None] | None = None,
    http: HttpConfig | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; one that comes before ready ends the start.

    A second one drops the turns that still run, and ends the drain soon.

    The main thread only.

    Args:
        config: The engine's; without ``store`` its conversations end with it.
        endpoint: Where to listen; None is the user's own endpoint.
        on_ready: Called once with socket path, model and memory split when clients may come.
        on_progress: Called while the model is fetched, converted and loaded.
        on_stopping: Called when a drain takes a while, with the turns that are waited for.
        on_drained: Called at the end of a drain with what it left undone; else that is logged.
        http: Where to serve the HTTP APIs; None is nowhere.

    Returns:
        0 after a drain, 1 where core, front or gateway failed or the journal did not answer, and
        where a signal ended the start 128 and its number, as in a shell.

    Raises:
        EngineRunning: Somebody serves the endpoint already.
        SessionKVError: What kept the engine from starting.
    """
    access = read_access(config.keys)
    service_key = None
    if http is not None:
        http.check(has_keys=config.keys is not None)
        service_key = new_key() if config.keys is not None else None
    if service_key is not None:
        access = access.with_service(service_key)
    share_interpreter()
    _set_thread_environment(config)
    starting = _Starting()
    handlers = _on_signals(starting.interrupt)
    try:
        with (
            Listener(endpoint or default_endpoint()) as listener,
            _gateway(http) as gateway,
            FrontProcess(listener.take()) as front,
        ):
            if config.keys is not None:
                handlers |= _on_signals(lambda number: front.reload(), signal.SIGHUP)
            from sessionkv.actor.host import CoreHost  # while the front's libraries are loaded too

            built = build_engine(config, progress=on_progress)
            host = CoreHost(built, config, front.link, source=front.link, access=access)
            try:
                front.begin(StartFront(listener.endpoint, host.setup))
                _on_signals(lambda number: front.stop())
                if starting.signal is not None:
                    raise _Interrupted
                _settle_memory()
                host.start()
                report = {"endpoint": listener.endpoint, **host.report}
                if gateway is not None:
                    told = _told(listener.endpoint, service_key, http)
                    gateway.start(told, front.stop, meanwhile=front.beat)
                    report["http"] = gateway.url
                if on_ready is not None:
                    on_ready(report)
                front.run(host, on_stopping, reload=lambda: _reload(config, host, service_key))
            finally:
                front.leave()
                host.drain(abandoned=True)
                host.close()
            code = _result(front, on_drained)
            return 1 if gateway is not None and gateway.is_lost else code
    except _Interrupted:
        return 128 + (starting.signal or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def share_interpreter() -> None:
    """Have no thread of this process keep the interpreter for long from the one that decodes."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*COLLECT_AFTER)


def _gateway(http: HttpConfig | None) -> AbstractContextManager[GatewayProcess | None]:
    return nullcontext() if http is None else GatewayProcess(http)


def _result(front: FrontProcess, on_drained: Callable[[DrainReport], None] | None) -> int:
    """The exit code, once all has ended."""
    stopped = front.stopped
    if stopped is not None and stopped.drained is not None:
        from sessionkv.engine.draining import log_undone

        (on_drained or log_undone)(stopped.drained)
    if front.is_lost or stopped is None or stopped.error is not None:
        return 1
    return 1 if stopped.drained is not None and stopped.drained.unanswered_commits else 0


def _set_thread_environment(config: EngineConfig) -> None:
    """Before the libraries that compute are loaded, which look at it once.

    Threads of torch that wait asleep leave the cores to those of other libraries. OpenBLAS's spin
    for 2**26 cycles after each product by default, tens of milliseconds in which they take a core
    from torch; 2**18, about 0.1 ms, reach over the gaps between the products of a step.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", WAIT_POLICY)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "18")
    if config.threads is not None:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(config.threads))


class _Interrupted(BaseException):
    """A signal came while the engine was being started, which may take minutes."""


class _Starting:
    """What a signal does while the engine is being started: end that, wherever it is."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def interrupt(self, number: int) -> None:
        """Raise out of whatever runs; noted too, since a finaliser would swallow it."""
        self.signal = self.signal or number
        raise _Interrupted


def _settle_memory() -> None:
    """What was made at start lives as long as the engine: the collector need not look at it."""
    gc.collect()
    gc.freeze()


def _told(endpoint: str, service_key: str | None, http: HttpConfig | None) -> dict[str, Any]:
    """The gateway's settings."""
    found: dict[str, Any] = {"endpoint": endpoint, "key": service_key}
    if http is not None:
        found |= {
            "hosts": [http.host],
            "cors_origins": http.cors_origins,
            "steady_prompts": http.steady_prompts,
        }
    return found


def _reload(config: EngineConfig, host: CoreHost, service_key: str | None) -> None:
    """SIGHUP came: the keys as the file has them now, or, where that is not sound, as they were."""
    try:
        access = read_access(config.keys)
    except ConfigError as error:
        _log.error("the keys stay as they were: %s", error)
        return
    host.renew_access(access if service_key is None else access.with_service(service_key))
    _log.info("%d keys of %d tenants", len(access.keys), len(access.tenants))


def _on_signals(action: Callable[[int], None], *numbers: signal.Signals) -> dict[int, Any]:
    """Have ``action`` called with these, or SIGTERM and SIGINT; returns what they did before."""
    return {
        number: signal.signal(number, lambda number, frame: action(number))
        for number in numbers or (signal.SIGTERM, signal.SIGINT)
    }
