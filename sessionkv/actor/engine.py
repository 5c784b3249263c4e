"""The engine inside the caller's process: the same front, no socket."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from sessionkv.actor.front import Front
from sessionkv.actor.front_setup import build_front
from sessionkv.actor.host import CoreHost
from sessionkv.client.client import Client
from sessionkv.config import EngineConfig, LimitsConfig
from sessionkv.engine.build import BuiltEngine, ProgressSink, build_engine
from sessionkv.engine.draining import log_undone
from sessionkv.engine.messages import CoreMessage, CoreStopped
from sessionkv.errors import ConnectionLost, EngineClosed, SessionKVError, TurnFailed
from sessionkv.ipc import messages as wire
from sessionkv.ipc.codec import decode_request, encode_request
from sessionkv.ipc.outbox import Outbox
from sessionkv.ipc.transport import ReplySink

_log = logging.getLogger(__name__)

_TICK_S = 0.5
_CONNECTION = b"embedded"


class _FrontThread:
    """Runs the front for one in-process client: a ``Transport`` and a ``FrontSink``."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._mail: queue.SimpleQueue[wire.Request | list[CoreMessage]] = queue.SimpleQueue()
        self._limits = limits
        self._outbox = Outbox(limits.unread_events, timeout_s=limits.unread_timeout_s)
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self._host: CoreHost | None = None
        self._front: Front | None = None
        self._sink: ReplySink | None = None
        self._welcome: wire.Welcome | None = None
        self._closed = False
        self._left_undecided = False

    # Transport: the client's side

    @property
    def welcome(self) -> wire.Welcome | None:
        """How the front greeted; None before it did."""
        return self._welcome

    def start(self, sink: ReplySink) -> None:
        """Begin to deliver to the client."""
        self._sink = sink
        self._mail.put(wire.Hello(0))
        self._thread.start()

    def send(self, request: wire.Request) -> None:
        """Pass a request on.

        Raises:
            EngineClosed: After :meth:`close`.
        """
        if self._closed:
            raise EngineClosed("the engine is closed")
        # Through the codec and back: the same checks and the same values as over a socket.
        frame = encode_request(request, self._limits)
        self._mail.put(decode_request((frame,), self._limits))

    def close(self) -> None:
        """Say goodbye for the client, drain the engine and close all of it."""
        if self._closed:
            return
        self._closed = True
        self._mail.put(wire.Bye(0))
        if self._host is not None:
            self._host.drain()
            self._thread.join()
            self._host.close()

    # FrontSink: the core's side

    def put(self, messages: list[CoreMessage]) -> None:
        """Any thread."""
        self._mail.put(messages)

    # The thread

    def attach(self, host: CoreHost) -> None:
        """Make the front of an engine; before :meth:`start`.

        Raises:
            ModelError: The model's text cannot be used.
        """
        self._host, self._front = host, build_front(host.setup)

    def _run(self) -> None:
        host, front, sink = self._host, self._front, self._sink
        if host is None or front is None or sink is None:
            raise EngineClosed("the front has no engine")
        end: SessionKVError = EngineClosed("the engine is closed")
        try:
            self._serve(host, front, sink)
        except Exception as failure:  # noqa: BLE001 - whoever waits for an answer has to get one
            _log.exception("the engine's front failed")
            end = TurnFailed(f"the engine failed ({type(failure).__name__})")
            host.drain()
        finally:
            sink.lost(end, final=True)

    def _serve(self, host: CoreHost, front: Front, sink: ReplySink) -> None:
        """Until core has stopped."""
        stopped = False
        next_tick = time.monotonic() + _TICK_S
        while not stopped:
            stopped = self._take_in(front, max(0.0, next_tick - time.monotonic()))
            now = time.monotonic()
            self._outbox.consumed(sink.consumed, now)
            if now >= next_tick:
                next_tick = now + _TICK_S
                for request_id in self._outbox.overdue(now):
                    front.give_up_reader(_CONNECTION, request_id)
            for message in front.to_core:
                host.inbox.put(message)
            front.to_core.clear()
            for _, reply in front.replies:
                if isinstance(reply, wire.Welcome):
                    self._welcome = reply
                self._outbox.push(reply, now)
            front.replies.clear()
            for reply in self._outbox.take_ready():
                sink.deliver(reply)
            if self._left_undecided:
                what = "the engine ended while its journal did not answer; it may have stored this"
                sink.lost(ConnectionLost(what), final=True)

    def _take_in(self, front: Front, timeout_s: float) -> bool:
        """Everything that has come; whether core has stopped."""
        stopped = False
        try:
            item = self._mail.get(timeout=timeout_s) if timeout_s else self._mail.get_nowait()
            while True:
                if isinstance(item, list):
                    for message in item:
                        front.on_core(message)
                        if isinstance(message, CoreStopped):
                            stopped = True
                            self._left_undecided = bool(message.undecided)
                            if message.drained is not None:
                                log_undone(message.drained)
                elif isinstance(item, wire.Bye):
                    front.on_disconnect(_CONNECTION)
                else:
                    front.on_request(_CONNECTION, item)
                item = self._mail.get_nowait()
        except queue.Empty:
            return stopped


class Engine(Client):
    """An engine in this process, with the methods and results of :class:`Client`.

    Use it as a context manager, or call :meth:`close`. Thread-safe. Loads the model into this
    process and runs the step loop on a thread of its own; opens no socket. Without ``store`` the
    conversations go with the engine.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        on_progress: ProgressSink | None = None,
        build: Callable[..., BuiltEngine] = build_engine,
    ) -> None:
        """Open the store and load the model; returns when turns may come.

        Args:
            config: Everything there is to say; the default model when None.
            on_progress: Called with ``{"stage", "done", "total", "unit"}`` meanwhile.
            build: Called as ``build(config, progress=...)``; for engines with other parts.

        Raises:
            SessionKVError: What kept the engine from starting.
        """
        config = config or EngineConfig()
        front = _FrontThread(config.limits)
        with ExitStack() as undo:
            host = CoreHost(build(config, progress=on_progress), config, front)
            undo.callback(host.close)
            front.attach(host)
            host.start()
            undo.pop_all()
        super().__init__(transport=front)
