"""One open request and its queue of events, between the transport's thread and its consumer."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from sessionkv.errors import SessionKVError
from sessionkv.ipc.messages import PROVISIONAL, Delta, Generate, Reply, Request, Turn

MAX_QUEUED = 2048
"""Events that wait for one slow consumer before deltas are merged."""

SIGNAL_SLICE_S = 0.5
"""How long a signal may go unnoticed that came just before a wait."""

Item = tuple[Reply | SessionKVError, int]
"""An event, or the error that ended the request, and how many deltas it stands for."""


class Pending:
    """One open request: its events, in order, until the terminal one. One consumer at a time.

    Attributes:
        request: As sent.
        attempt: Of the last event received, 0 before the first.
        ended: The terminal event is here, taken or not.
        discarded: Nobody reads its deltas any more.
    """

    __slots__ = (
        "_guard",
        "_queue",
        "_ready",
        "_wake",
        "attempt",
        "discarded",
        "ended",
        "request",
    )

    def __init__(self, request: Request, wake: Callable[[], None] | None = None) -> None:
        """Start with nothing received.

        Args:
            request: As sent.
            wake: Called from the transport's thread when the queue stops being empty; None is for
                a consumer that waits in :meth:`get`.
        """
        self.request = request
        self.attempt = 0
        self.ended = False
        self.discarded = False
        self._queue: deque[Item] = deque()
        self._guard = threading.RLock()  # a stream's finalizer may run anywhere, in here too
        self._ready = threading.Lock()  # held unless something was queued since the last wait
        self._ready.acquire()
        self._wake = wake if wake is not None else self._end_wait

    @property
    def keyed(self) -> bool:
        """Whether the request may be sent again: the engine runs its key once."""
        return isinstance(self.request, Turn | Generate) and bool(self.request.idempotency_key)

    def push(self, item: Reply | SessionKVError) -> bool:
        """Add an event; the transport's thread.

        Returns:
            False when it was dropped: the request has ended, or nobody reads its deltas.
        """
        with self._guard:
            if self.ended:
                return False
            if isinstance(item, PROVISIONAL):
                self.attempt = item.attempt
                if self.discarded:
                    return False
            else:
                self.ended = True
            if len(self._queue) >= MAX_QUEUED and isinstance(item, Delta) and self._merge(item):
                return True
            self._queue.append((item, 1 if isinstance(item, Delta) else 0))
            if len(self._queue) == 1:
                self._wake()
        return True

    def pop(self) -> Item | None:
        """Next event; None when there is none now."""
        with self._guard:
            return self._queue.popleft() if self._queue else None

    def get(self, timeout_s: float | None = None) -> Item | None:
        """Next event, waited for; None after the timeout.

        The wait ends early when a signal handler raises; nothing is lost then. It is cut into
        slices, since a signal that comes just before a wait begins is handled when the wait ends.
        """
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            item = self.pop()
            if item is not None:
                return item
            left_s = deadline_s - time.monotonic()
            woken = self._ready.acquire(timeout=max(0.0, min(left_s, SIGNAL_SLICE_S)))
            if not woken and left_s <= SIGNAL_SLICE_S:
                return self.pop()

    def discard(self) -> int:
        """Drop deltas, queued and to come; the terminal event stays.

        Returns:
            How many deltas were queued.
        """
        with self._guard:
            self.discarded = True
            dropped = sum(count for _, count in self._queue)
            kept = [(item, n) for item, n in self._queue if not isinstance(item, PROVISIONAL)]
            self._queue = deque(kept)
        return dropped

    def _merge(self, delta: Delta) -> bool:
        last, count = self._queue[-1]
        if not isinstance(last, Delta) or last.attempt != delta.attempt:
            return False
        logprobs = None
        if last.logprobs is not None and delta.logprobs is not None:
            logprobs = [*last.logprobs, *delta.logprobs]
        merged = replace(
            last,
            tokens=[*last.tokens, *delta.tokens],
            text=last.text + delta.text,
            logprobs=logprobs,
        )
        self._queue[-1] = (merged, count + 1)
        return True

    def _end_wait(self) -> None:
        if self._ready.locked():  # under the guard, so nobody else releases it meanwhile
            self._ready.release()
