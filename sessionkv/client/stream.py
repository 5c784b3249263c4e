"""A turn's events for a blocking program."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from sessionkv.client.assemble import StreamAssembler
from sessionkv.client.core import ClientCore
from sessionkv.client.pending import Pending
from sessionkv.client.results import StreamEvent, TurnResult
from sessionkv.errors import SessionKVError

Leave = Callable[[Pending], None]
"""What to do with a request that is left before its end."""


class Stream(Iterator[StreamEvent]):
    """Events of one turn. Leaving early (``break``, ``close``, an exception) cancels the turn."""

    def __init__(self, owner: object, core: ClientCore, pending: Pending, leave: Leave) -> None:
        """Made by the ``stream`` methods; ``owner`` is the client, which must stay open."""
        self._owner = owner
        self._core = core
        self._pending = pending
        self._leave = leave
        self._assembler = StreamAssembler()
        self._cancelled = False
        self._reading = threading.Lock()

    @property
    def result(self) -> TurnResult | None:
        """The whole turn once the last event was taken, else None."""
        return self._assembler.result

    def __next__(self) -> StreamEvent:
        """Wait for the next event.

        Raises:
            StopIteration: After the last one, or after :meth:`cancel` or :meth:`close`.
            SessionKVError: The turn failed.
        """
        try:
            with self._reading:
                return self._next()
        except KeyboardInterrupt:
            self.close()
            raise

    def _next(self) -> StreamEvent:
        while not self._assembler.over and not self._pending.discarded:
            self._core.check_process()
            taken = self._pending.get()
            if taken is None:
                break
            item, num_deltas = taken
            self._core.taken(num_deltas)
            try:
                event = self._assembler.feed(item)
            except SessionKVError:
                if self._cancelled:
                    break
                raise
            if event is not None:
                return event
        raise StopIteration

    def cancel(self, *, keep: bool = False, chars: int | None = None) -> TurnResult | None:
        """End the turn and wait for that; the iteration is over then.

        May be called from another thread than the iterating one.

        Args:
            keep: Commit what was generated so far instead of dropping it.
            chars: Of that, only so many characters of the reply's text; what has ended by itself
                stays whole.

        Returns:
            The turn as committed: with ``keep``, or when it had ended by itself; else None.
        """
        self._cancelled = True
        self._core.cancel(self._pending, keep=keep, chars=chars)
        with self._reading, contextlib.suppress(StopIteration):
            while True:
                self._next()
        return self.result

    def close(self) -> None:
        """Leave: cancel the turn if it still runs, without waiting."""
        if not self._pending.ended and not self._pending.discarded:
            self._leave(self._pending)

    def __enter__(self) -> Stream:
        """The stream itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self.close()

    def __del__(self) -> None:
        """Leave; how a ``break`` out of a ``for`` cancels."""
        with contextlib.suppress(SessionKVError):
            self.close()
