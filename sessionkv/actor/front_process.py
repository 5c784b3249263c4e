"""The front in a process of its own, as core's process sees it.

::

    core thread  --put-->  frames  ==link==>  front: clients, text
    main thread  <-------  frames  <==link==  front
         `-----> inbox of core

The main thread reads whatever core is doing, so the front never waits for core; core waits in
:meth:`FrontProcess.put` while the front is behind by more than the link holds. Either process
notices at the link that the other is gone.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from sessionkv.actor.front_link import FrontEnded, FrontStarted, StartFront, link_codec
from sessionkv.engine.messages import CoreMessage, CoreStopped
from sessionkv.errors import ConnectionLost, EngineStartFailed
from sessionkv.ipc.frames import FrameSocket
from sessionkv.ipc.limits import LINGER_MS
from sessionkv.ipc.waker import Waker

if TYPE_CHECKING:
    from sessionkv.actor.host import CoreHost

_log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""How long an engine that is to end waits for a front that takes nothing."""
_LOOK_S = 0.5
"""At least so often the main thread looks whether core and front go on."""
_ONE_SIGNAL_S = 0.3
"""Signals this close are one: a terminal's and the same passed on by a parent, for example."""
_QUIET_S = 0.5
"""A drain without turns that is over by then is not worth a word."""
_EXIT_S = LINGER_MS / 1000 + 2.0
"""How long the front's process may take to exit, its last replies included."""


class FrontProcess:
    """Starts, feeds and ends the front's process. A ``FrontSink``.

    Attributes:
        stopped: Core's last message. Set by the core thread before that thread ends, so whoever
            sees the thread ended first and None here after it knows that no word will come.
        is_lost: The front ended before core did; the main thread's.
    """

    def __init__(self, listener: socket.socket) -> None:
        """Start the process; it waits for :meth:`begin`.

        Args:
            listener: Where clients come; the process's own from here on.

        Raises:
            EngineStartFailed: There can be no other process.
        """
        self.stopped: CoreStopped | None = None
        self.is_lost = False
        self._codec = link_codec()
        self._beat = self._codec.encode([])
        self._waker = Waker()
        self._stop_asked = False
        self._stop_asked_s = 0.0
        self._hurry_asked = False
        self._ended = False
        # The core thread writes it, the main thread reads it; late is harmless.
        self._waiting_since: float | None = None
        self._early: list[bytes] = []
        self._frames, theirs = FrameSocket.pair()
        with listener, theirs:
            fds = (theirs.fileno(), listener.fileno())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "sessionkv.actor.front_main", *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # a terminal's Ctrl-C is this process's to handle
                )
            except OSError as error:
                self._frames.close()
                self._waker.close()
                message = f"the engine's front could not be started ({error})"
                raise EngineStartFailed(message) from None

    @property
    def pid(self) -> int:
        """Process id of the front."""
        return self._process.pid

    def begin(self, start: StartFront) -> None:
        """Have clients served; waits until they are.

        Raises:
            ModelError: The front cannot use the model's text.
            EngineStartFailed: The front's process died.
        """
        try:
            self._frames.send(self._codec.encode([start]))
            while not (frames := self._frames.receive()):
                pass
        except ConnectionLost:
            raise EngineStartFailed("the engine's front died while it was started") from None
        # A client that came early may have asked already: its request lies right behind.
        first, *self._early = frames
        started: FrontStarted
        (started,) = self._codec.decode(first)
        if started.error is not None:
            raise started.error

    # FrontSink: the core's side

    def put(self, messages: list[CoreMessage]) -> None:
        """The core thread; waits while the front is far behind."""
        if isinstance(messages[-1], CoreStopped):
            self.stopped = messages[-1]
        frame = self._codec.encode(messages)
        self._waiting_since = time.monotonic()
        try:
            self._frames.send(frame)
        except ConnectionLost:
            return  # the main thread sees it too, and has core end
        if self.stopped is None:
            self._waiting_since = None

    # The main thread

    def stop(self) -> None:
        """Begin to drain, or hurry the second time; :meth:`run` returns when it is done.

        Signal handlers too.
        """
        now = time.monotonic()
        if not self._stop_asked:
            self._stop_asked, self._stop_asked_s = True, now
        elif now - self._stop_asked_s > _ONE_SIGNAL_S:
            self._hurry_asked = True
        self._waker.wake()

    def run(self, host: CoreHost, on_stopping: Callable[[int], None] | None = None) -> None:
        """Pass on what the front says until core has stopped and clients know, or one is lost.

        Args:
            host: Of the core.
            on_stopping: Called once in a drain that takes a while, with the turns there were: at
                once where turns run, else after :data:`_QUIET_S`.
        """
        beat_s = min(host.setup.limits.heartbeat_s / 2, _LOOK_S)
        next_beat, draining, hurried = 0.0, False, False
        poller = select.poll()
        poller.register(self._frames.fd, select.POLLIN)
        poller.register(self._waker.fd, select.POLLIN)
        try:
            self._take_in(host, self._early)
            while not self._ended:
                if not host.is_running and self.stopped is None:
                    _log.error("the engine's core ended without a word; the engine ends")
                    return
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + beat_s
                    with suppress(ConnectionLost):  # told by receive, after all that was sent
                        self._frames.send_if_free(self._beat)
                    self._give_up_if_stuck(now)
                ready = dict(poller.poll(math.ceil(max(0.0, next_beat - now) * 1000)))
                if self._waker.fd in ready:
                    self._waker.clear()
                if self._stop_asked and not draining:
                    draining, num_turns = True, host.num_turns
                    host.drain()
                    if on_stopping is not None and num_turns:
                        on_stopping(num_turns)
                        on_stopping = None
                elif draining and on_stopping is not None and now >= self._stop_asked_s + _QUIET_S:
                    on_stopping(0)
                    on_stopping = None
                if self._hurry_asked and not hurried:
                    hurried = True
                    host.hurry()
                if self._frames.fd in ready:
                    self._take_in(host, self._frames.receive())
        except ConnectionLost:
            self.is_lost = True
            _log.error("the engine's front died; the engine ends")

    def _take_in(self, host: CoreHost, frames: list[bytes]) -> None:
        for frame in frames:
            for message in self._codec.decode(frame):
                if isinstance(message, FrontEnded):
                    self._ended = True
                else:
                    host.inbox.put(message)

    def _give_up_if_stuck(self, now: float) -> None:
        """An engine that is to end does not wait for a front that does nothing any more."""
        since = self._waiting_since
        ending = self._stop_asked or self.stopped is not None
        if ending and since is not None and now - since > _PATIENCE_S:
            self._process.kill()

    def leave(self) -> None:
        """Kill the front unless it has ended: nobody reads it, and core must not wait for it."""
        if not self._ended:
            self._process.kill()

    def close(self) -> None:
        """Wait for the process's end, or see to it. Nobody may call :meth:`put` any more."""
        if not self._ended:
            self._process.kill()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._frames.close()
        self._waker.close()

    def __enter__(self) -> FrontProcess:
        """The front itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
