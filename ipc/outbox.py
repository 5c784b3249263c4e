"""Credit for one connection: how much may be sent to a client that reads slowly.

Pure bookkeeping, no sockets and no clock. Deltas count until the client reports them consumed;
everything else passes freely, since it is bounded by the requests a client may have open. Past the
bound each request's deltas are kept as one that grows, so memory grows by tokens only, and a
request whose delta was kept too long without any reading is reported for the caller to end.

Order within a request is kept; nothing is dropped but deltas that a ``restarted`` or a failure of
the same request makes void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sessionkv.ipc.messages import Delta, Done, Failure, Reply, Restarted


class _Held:
    """Consecutive deltas of one request, waiting as one."""

    __slots__ = ("first", "logprobs", "since_s", "text", "tokens")

    def __init__(self, delta: Delta, now_s: float) -> None:
        self.first = delta
        self.since_s = now_s
        self.tokens = list(delta.tokens)
        self.text = [delta.text]
        self.logprobs = list(delta.logprobs) if delta.logprobs is not None else None

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.text.append(delta.text)
        if self.logprobs is not None and delta.logprobs is not None:
            self.logprobs += delta.logprobs

    def merged(self) -> Delta:
        return Delta(
            self.first.id,
            attempt=self.first.attempt,
            offset=self.first.offset,
            tokens=tuple(self.tokens),
            text="".join(self.text),
            logprobs=self.logprobs,
        )


class Outbox:
    """Replies of one connection on their way out. Used by one thread."""

    def __init__(self, max_unread: int, *, timeout_s: float = 30.0) -> None:
        """Start empty.

        Args:
            max_unread: Deltas that may be on their way or unread with the client.
            timeout_s: How long deltas may be kept while the client consumes nothing.
        """
        self._max_unread = max_unread
        self._timeout_s = timeout_s
        self._ready: deque[Reply] = deque()
        self._held: dict[int, _Held] = {}
        self._granted = 0
        self._consumed = 0
        self._progress_s = 0.0

    @property
    def unread(self) -> int:
        """Deltas granted and not reported consumed yet."""
        return self._granted - self._consumed

    def push(self, reply: Reply, now_s: float) -> None:
        """Add a reply. Cost: O(tokens of the reply).

        Args:
            reply: Belongs to the outbox from here on.
            now_s: The caller's monotonic clock.
        """
        if isinstance(reply, Delta):
            self._push_delta(reply, now_s)
            return
        if isinstance(reply, Done | Failure | Restarted):
            held = self._held.pop(reply.id, None)
            if held is not None and isinstance(reply, Done):
                self._grant(held.merged())  # past the bound, by at most one for each request
        self._ready.append(reply)

    def _push_delta(self, delta: Delta, now_s: float) -> None:
        held = self._held.get(delta.id)
        if held is not None:
            held.add(delta)
        elif self.unread < self._max_unread:
            self._grant(delta)
        else:
            self._held[delta.id] = _Held(delta, now_s)

    def _grant(self, delta: Delta) -> None:
        self._granted += 1
        self._ready.append(delta)

    def consumed(self, total: int, now_s: float) -> None:
        """Take in a client's report: deltas consumed on this connection so far.

        Reports lower than an earlier one, or higher than what was sent, change nothing or count as
        everything: a client that lies harms its own stream only.
        """
        total = min(total, self._granted)
        if total <= self._consumed:
            return
        self._consumed = total
        self._progress_s = now_s
        while self._held and self.unread < self._max_unread:
            oldest = next(iter(self._held))
            self._grant(self._held.pop(oldest).merged())

    def take_ready(self) -> list[Reply]:
        """Everything that may be sent now, in order; the caller sends it or puts it back."""
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def put_back(self, replies: Sequence[Reply]) -> None:
        """Return the end of what :meth:`take_ready` gave and the transport had no room for."""
        self._ready.extendleft(reversed(replies))

    def overdue(self, now_s: float) -> tuple[int, ...]:
        """Requests to end with ``slow_reader``: kept, and nothing consumed, for the whole timeout.

        Pushing their :class:`~sessionkv.ipc.messages.Failure` frees what is kept of them.
        """
        return tuple(
            request_id
            for request_id, held in self._held.items()
            if now_s - max(self._progress_s, held.since_s) >= self._timeout_s
        )
