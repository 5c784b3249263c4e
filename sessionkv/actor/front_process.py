"""The front in a process of its own, as core's process sees it.

::

    core thread  <==link==>  front: clients, text
    main thread  ---beats->

Core's thread reads and writes the link itself, so that nobody has to be woken in between. The main
thread gives signs of life, hears signals, and sees whether core or front is gone; it reads the link
only for the front's last word, when core has left. Either process notices at the link that the
other is gone.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from sessionkv.actor.front_link import CoreEnd, FrontEnded, FrontStarted, StartFront, link_codec
from sessionkv.actor.own_process import start_module
from sessionkv.engine.messages import CoreStopped
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


def _nothing() -> None:
    """There is nothing to reload."""


class FrontProcess:
    """Starts, watches and ends the front's process. The main thread's, but for :attr:`link`.

    Attributes:
        link: The core thread's: what it says and hears.
        is_lost: The front ended before core did.
    """

    def __init__(self, listener: socket.socket) -> None:
        """Start the process; it waits for :meth:`begin`.

        Args:
            listener: Where clients come; the process's own from here on.

        Raises:
            EngineStartFailed: There can be no other process.
        """
        self.is_lost = False
        self._codec = link_codec()
        self._beat = self._codec.encode([])
        self._waker = Waker()
        self._stop_asked = False
        self._stop_asked_s = 0.0
        self._hurry_asked = False
        self._reload_asked = False
        self._ended = False
        self._frames, theirs = FrameSocket.pair()
        self.link = CoreEnd(self._frames, self._codec)
        with listener, theirs:
            fds = (theirs.fileno(), listener.fileno())
            try:
                self._process = start_module(
                    "sessionkv.actor.front_main", fds, name="the engine's front"
                )
            except EngineStartFailed:
                self._frames.close()
                self._waker.close()
                raise

    @property
    def stopped(self) -> CoreStopped | None:
        """Core's last message; None before."""
        return self.link.stopped

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
        first, *early = frames
        started: FrontStarted
        started, *words = self._codec.decode(first)
        if started.error is not None:
            raise started.error
        self.link.keep([self._codec.encode(words), *early])

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

    def beat(self) -> None:
        """Give one sign of life: :meth:`run` gives them from when it is called."""
        with suppress(ConnectionLost):  # told by its end, and with what it sent before
            self._frames.send_if_free(self._beat)

    def reload(self) -> None:
        """Have :meth:`run` read the keys anew. Signal handlers too."""
        self._reload_asked = True
        self._waker.wake()

    def run(
        self,
        host: CoreHost,
        on_stopping: Callable[[int], None] | None = None,
        *,
        reload: Callable[[], None] = _nothing,
    ) -> None:
        """Watch both until core has stopped and clients know, or one is lost.

        Args:
            host: Of the core.
            on_stopping: Called once in a drain that takes a while, with the turns there were: at
                once where turns run, else after :data:`_QUIET_S`.
            reload: Called after each time that :meth:`reload` was.
        """
        beat_s = min(host.setup.limits.heartbeat_s / 2, _LOOK_S)
        next_beat, draining, hurried = 0.0, False, False
        poller = select.poll()
        poller.register(self._frames.fd, 0)  # its end alone: what it says is core's to read
        poller.register(self._waker.fd, select.POLLIN)
        try:
            while not self._ended:
                if not host.is_running and self.stopped is None:
                    _log.error("the engine's core ended without a word; the engine ends")
                    return
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + beat_s
                    self.beat()
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
                if self._reload_asked:
                    self._reload_asked = False
                    reload()
                if self._hurry_asked and not hurried:
                    hurried = True
                    host.hurry()
                if self.link.has_left.is_set():
                    poller.modify(self._frames.fd, select.POLLIN)
                if self._frames.fd in ready:
                    self._hear_the_end()
        except ConnectionLost:
            self.is_lost = True
            _log.error("the engine's front died; the engine ends")

    def _hear_the_end(self) -> None:
        """The front is gone, or says its last word.

        Raises:
            ConnectionLost: It is gone without one.
        """
        if self.stopped is None:
            raise ConnectionLost("the front ended before core did")
        # It may have ended by itself, just after core's last word and before core knew that the
        # word was handed over.
        self.link.has_left.wait()
        for frame in self._frames.receive():
            for message in self._codec.decode(frame):
                self._ended |= isinstance(message, FrontEnded)

    def _give_up_if_stuck(self, now: float) -> None:
        """An engine that is to end does not wait for a front that does nothing any more."""
        since = self.link.waiting_since
        ending = self._stop_asked or self.stopped is not None
        if ending and since is not None and now - since > _PATIENCE_S:
            self._process.kill()

    def leave(self) -> None:
        """Kill the front unless it has ended: nobody reads it, and core must not wait for it."""
        if not self._ended:
            self._process.kill()

    def close(self) -> None:
        """Wait for the process's end, or see to it. Core has ended."""
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
