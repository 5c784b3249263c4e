"""A mailbox between threads: many may put, one takes everything at once."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Unordered senders, one reader; items of one sender stay in order.

    The reader sleeps on an event that a sender sets, so that an idle engine costs nothing and wakes
    at once.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ready = threading.Event()

    def put(self, item: T) -> None:
        """Add an item. Any thread."""
        self._items.append(item)
        if not self._ready.is_set():
            self._ready.set()

    def drain(self, timeout_s: float = 0.0) -> list[T]:
        """Take everything there is, waiting up to ``timeout_s`` for the first. The reader only."""
        if not self._items and timeout_s > 0:
            self._ready.wait(timeout_s)
        # Cleared before taking: an item put after this line sets it again, so none is slept over.
        self._ready.clear()
        taken: list[T] = []
        while self._items:
            taken.append(self._items.popleft())
        return taken
