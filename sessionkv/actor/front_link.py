"""The way between core and a front in a process of its own: its words and its two ends.

Messages of the engine go as they are, and a few words more about the processes themselves. One
frame holds what one side had to say at one time; an empty one is core's sign of life.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, get_args

from sessionkv.actor.front_setup import FrontSetup
from sessionkv.engine.messages import CoreMessage, CoreStopped, FrontMessage
from sessionkv.errors import ConnectionLost, Overloaded, SessionKVError
from sessionkv.ipc.frames import FrameSocket, wait_for
from sessionkv.ipc.records import RecordCodec

FRAMES_AT_ONCE = 64
"""Of core's frames that are worked off between two looks at the clients."""
MAX_UNSENT_BYTES = 64 * 1024**2
"""Kept for a core that does not read; while there is more, clients' requests are refused. Four of
the largest frames: a core that is only in a long step never comes near it."""


@dataclass(frozen=True, slots=True)
class StartFront:
    """Core to front, first: serve the endpoint for this engine."""

    endpoint: str
    setup: FrontSetup


@dataclass(frozen=True, slots=True)
class FrontStarted:
    """Front to core, first: clients are served, or why they cannot be."""

    error: SessionKVError | None = None


@dataclass(frozen=True, slots=True)
class FrontEnded:
    """Front to core, last: it has heard that core stopped, and has told its clients."""


def link_codec() -> RecordCodec:
    """For either end."""
    kinds = (*get_args(FrontMessage), *get_args(CoreMessage))
    return RecordCodec((StartFront, FrontStarted, FrontEnded, *kinds))


class CoreEnd:
    """Core's end: a ``FrontSink`` and a ``Source``; the core thread only.

    ::

        put:   write --full--> read what has come, keep it --> wait until one of both is possible
        take:  what was kept, then what has come

    Core waits while the front is behind by more than the link holds, but reads meanwhile: so each
    side gets rid of what it has to say, whatever the other has not read.

    Attributes:
        stopped: Core's last message, set before it is handed over. Whoever sees the core thread
            ended first and None here after it knows that no word will come.
        waiting_since: When core began to wait for the front, by the monotonic clock; None while it
            does not. After :attr:`stopped` it waits for the front's end. Other threads may look.
        has_left: Set when core's last word is handed over, or there is nobody to take it: core
            reads no more.
    """

    def __init__(self, frames: FrameSocket, codec: RecordCodec) -> None:
        """Over a socket that stays the caller's."""
        self.fd = frames.fd
        self.stopped: CoreStopped | None = None
        self.waiting_since: float | None = None
        self.has_left = threading.Event()
        self._frames = frames
        self._codec = codec
        self._kept: list[bytes] = []

    def keep(self, frames: list[bytes]) -> None:
        """For :meth:`take`, before all others; before core begins."""
        self._kept = frames + self._kept

    def take(self) -> list[Any]:
        """What the front said, of what one read gives; never waits.

        Raises:
            ConnectionLost: The front is gone.
        """
        if self._kept:
            frames, self._kept = self._kept, []
        else:
            frames = self._frames.receive_now()
        taken: list[Any] = []
        for frame in frames:
            taken += self._codec.decode(frame)
        return taken

    def put(self, messages: list[CoreMessage]) -> None:
        """Hand a batch to the front; waits while it is far behind. One that is gone takes none."""
        frame = self._codec.encode(messages)
        if isinstance(messages[-1], CoreStopped):
            self.waiting_since = time.monotonic()
            self.stopped = messages[-1]
        try:
            self._frames.post(frame)
            if self._frames.is_behind:
                self._wait_for_room()
        except ConnectionLost:
            return  # whoever watches the front sees it too, and has core end
        finally:
            if self.stopped is not None:
                self.has_left.set()

    def _wait_for_room(self) -> None:
        if self.waiting_since is None:
            self.waiting_since = time.monotonic()
        while self._frames.is_behind:
            if wait_for(self.fd, select.POLLIN | select.POLLOUT) & select.POLLIN:
                self._kept += self._frames.receive_now()
            self._frames.flush()
        if self.stopped is None:
            self.waiting_since = None


class FrontEnd:
    """The front's end. A ``CoreLink``; the front's thread only."""

    def __init__(
        self,
        frames: FrameSocket,
        codec: RecordCodec,
        *,
        silence_s: float,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        """Over a socket that stays the caller's.

        Args:
            frames: Leads to core's process.
            codec: From :func:`link_codec`.
            silence_s: Without a word for so long core's process stands still.
            max_unsent_bytes: Kept here before :meth:`require_room` refuses.
        """
        self._max_unsent_bytes = max_unsent_bytes
        self._frames = frames
        self._codec = codec
        self._silence_s = silence_s
        self._heard_s = time.monotonic()
        self._read: deque[bytes] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is here that was not taken; more may lie in the socket."""
        return not self._read

    @property
    def is_behind(self) -> bool:
        """Whether something sent waits for core to read, and goes with a later :meth:`take`."""
        return self._frames.is_behind

    @property
    def is_silent(self) -> bool:
        """Whether core's process stands still."""
        return time.monotonic() - self._heard_s > self._silence_s

    def take(self) -> list[Any]:
        """What core said, of at most :data:`FRAMES_AT_ONCE` frames. Never waits.

        Raises:
            ConnectionLost: Core's process is gone.
        """
        if self._frames.is_behind:
            self._frames.flush()
        if len(self._read) < FRAMES_AT_ONCE:
            new = self._frames.receive_now()
            if new:
                self._read += new
                self._heard_s = time.monotonic()
        taken: list[Any] = []
        for _ in range(min(len(self._read), FRAMES_AT_ONCE)):
            taken += self._codec.decode(self._read.popleft())
        return taken

    def require_room(self) -> None:
        """To be called before a request is taken in.

        Raises:
            Overloaded: Core has left too much unread.
        """
        if self._frames.num_unsent_bytes > self._max_unsent_bytes:
            raise Overloaded(
                f"the engine is in a step and more than {self._max_unsent_bytes} bytes of requests "
                "wait for its end",
                allowed_bytes=self._max_unsent_bytes,
            )

    def send(self, messages: list[FrontMessage]) -> None:
        """Hand messages to core, or keep them until it reads. Never waits.

        Core may be in a step for long, and clients are answered meanwhile. What is kept is bounded
        if no request is taken in without :meth:`require_room`: what the front says of itself, or
        to end a turn, is little for each request that was.

        Raises:
            ConnectionLost: Core's process is gone.
        """
        self._frames.post(self._codec.encode(messages))
