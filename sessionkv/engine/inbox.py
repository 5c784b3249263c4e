"""A mailbox with one reader: threads of this process put, and one source may be read beside them.

The reader sleeps on descriptors, its own waker's and the source's, so that what comes from another
process wakes it without a thread in between, and an idle engine costs nothing.
"""

from __future__ import annotations

import select
from collections import deque
from typing import Generic, Protocol, TypeVar

from sessionkv.errors import ConnectionLost
from sessionkv.ipc.waker import Waker

T = TypeVar("T")


class Source(Protocol[T]):
    """What the reader reads by itself, such as a socket."""

    @property
    def fd(self) -> int:
        """A descriptor that can be read when something has come."""
        ...

    def take(self) -> list[T]:
        """What has come, oldest first; never waits. The reader only.

        Raises:
            ConnectionLost: Nothing comes any more.
        """
        ...


class Inbox(Generic[T]):
    """Unordered senders, one reader; items of one sender stay in order."""

    def __init__(self) -> None:
        """Without a source."""
        self._items: deque[T] = deque()
        self._source: Source[T] | None = None
        self._waker = Waker()
        self._asleep = False
        self._poll = select.poll()
        self._poll.register(self._waker.fd, select.POLLIN)

    def read_from(self, source: Source[T]) -> None:
        """Read this too, until it ends; before the reader begins."""
        self._source = source
        self._poll.register(source.fd, select.POLLIN)

    def put(self, item: T) -> None:
        """Add an item. Any thread."""
        self._items.append(item)
        if self._asleep:
            self._waker.wake()

    def drain(self, timeout_s: float = 0.0) -> list[T]:
        """Take everything there is, waiting up to ``timeout_s`` for the first. The reader only."""
        self._read()  # a source may have kept something, which its descriptor does not tell
        if timeout_s > 0 and not self._items and self._sleep(timeout_s):
            self._read()
        taken: list[T] = []
        while self._items:
            taken.append(self._items.popleft())
        return taken

    def _sleep(self, timeout_s: float) -> bool:
        """Until something comes; whether it is the source's."""
        self._asleep = True
        # Looked at again only now: an item put before the line above woke nobody, a later one does.
        ready = [] if self._items else self._poll.poll(timeout_s * 1000)
        self._asleep = False
        found = {fd for fd, _ in ready}
        if self._waker.fd in found:
            found.discard(self._waker.fd)
            self._waker.clear()
        return bool(found)

    def _read(self) -> None:
        if self._source is None:
            return
        try:
            self._items += self._source.take()
        except ConnectionLost:
            self._poll.unregister(self._source.fd)
            self._source = None

    def close(self) -> None:
        """Free the waker; the reader has ended. Later items are kept and wake nobody."""
        self._waker.close()
