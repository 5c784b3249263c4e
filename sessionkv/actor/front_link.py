"""The way between core and a front in a process of its own: its words, and the front's end.

Messages of the engine go as they are, and a few words more about the processes themselves. One
frame holds what one side had to say at one time; an empty one is core's sign of life.
"""

from __future__ import annotations

import select
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, get_args

from sessionkv.actor.front_setup import FrontSetup
from sessionkv.engine.messages import CoreMessage, FrontMessage
from sessionkv.errors import SessionKVError
from sessionkv.ipc.frames import FrameSocket
from sessionkv.ipc.records import RecordCodec

FRAMES_AT_ONCE = 64
"""Of core's frames that are worked off between two looks at the clients."""


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


class FrontEnd:
    """The front's end. A ``CoreLink``; the front's thread only."""

    def __init__(self, frames: FrameSocket, codec: RecordCodec, *, silence_s: float) -> None:
        """Over a socket that stays the caller's.

        Args:
            frames: Leads to core's process.
            codec: From :func:`link_codec`.
            silence_s: Without a word for so long core's process stands still.
        """
        self._frames = frames
        self._codec = codec
        self._silence_s = silence_s
        self._heard_s = time.monotonic()
        self._read: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(frames.fd, select.POLLIN)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is here that was not taken; more may lie in the socket."""
        return not self._read

    @property
    def is_silent(self) -> bool:
        """Whether core's process stands still."""
        return time.monotonic() - self._heard_s > self._silence_s

    def take(self) -> list[Any]:
        """What core said, of at most :data:`FRAMES_AT_ONCE` frames.

        Raises:
            ConnectionLost: Core's process is gone.
        """
        while len(self._read) < FRAMES_AT_ONCE and self._poll.poll(0):
            self._read += self._frames.receive()
            self._heard_s = time.monotonic()
        taken: list[Any] = []
        for _ in range(min(len(self._read), FRAMES_AT_ONCE)):
            taken += self._codec.decode(self._read.popleft())
        return taken

    def send(self, messages: list[FrontMessage]) -> None:
        """Hand messages to core; its process reads whatever core does.

        Raises:
            ConnectionLost: Core's process is gone.
        """
        self._frames.send(self._codec.encode(messages))
