"""Waiting in an event loop: one request's queue, and a turn's events for an asyncio program."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from sessionkv.client.assemble import StreamAssembler
from sessionkv.client.core import ClientCore
from sessionkv.client.pending import Item
from sessionkv.client.results import StreamEvent, TurnResult
from sessionkv.errors import SessionKVError
from sessionkv.ipc.messages import Request


class Awaited:
    """A pending request whose consumer is a task of the running loop.

    Attributes:
        pending: The request.
    """

    def __init__(self, core: ClientCore, kind: type[Request], fields: dict[str, Any]) -> None:
        """Send it; arguments and errors as for ``ClientCore.submit``."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.pending = core.submit(kind, fields, wake=self._wake)

    def _wake(self) -> None:
        """From the transport's thread, once for each time the queue stops being empty."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def get(self) -> Item:
        """Next event. Being cancelled takes nothing off the queue.

        A push between the look and the clear sets the event later, in this loop, so it is seen.
        """
        while (item := self.pending.pop()) is None:
            self._event.clear()
            await self._event.wait()
        return item


Leave = Callable[[Awaited], None]
"""What to do with a request that is left before its end."""


class AsyncStream(AsyncIterator[StreamEvent]):
    """Events of one turn. Leaving early (``break``, ``aclose``, an exception) cancels the turn."""

    def __init__(
        self,
        owner: object,
        core: ClientCore,
        start: Callable[[], Coroutine[Any, Any, Awaited]],
        leave: Leave,
    ) -> None:
        """Made by the ``stream`` methods; ``owner`` is the client, which must stay open."""
        self._owner = owner
        self._core = core
        self._start = start
        self._leave = leave
        self._awaited: Awaited | None = None
        self._assembler = StreamAssembler()
        self._cancelled = False
        self._left = False
        self._reading = asyncio.Lock()  # one task takes events, others wait for it to be done

    @property
    def result(self) -> TurnResult | None:
        """The whole turn once the last event was taken, else None."""
        return self._assembler.result

    async def __anext__(self) -> StreamEvent:
        """Wait for the next event.

        Raises:
            StopAsyncIteration: After the last one, or after :meth:`cancel` or :meth:`aclose`.
            SessionKVError: The turn failed.
        """
        event = None
        if not self._left:
            try:
                async with self._reading:
                    event = await self._next()
            except asyncio.CancelledError:
                self._close()
                raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def _next(self) -> StreamEvent | None:
        """Next event, None when there is none to come."""
        if self._awaited is None:
            self._awaited = await self._start()
        while not self._assembler.over:
            item, num_deltas = await self._awaited.get()
            self._core.taken(num_deltas)
            try:
                event = self._assembler.feed(item)
            except SessionKVError:
                if self._cancelled:
                    break
                raise
            if event is not None:
                return event
        return None

    async def cancel(self, *, keep: bool = False, chars: int | None = None) -> TurnResult | None:
        """End the turn and wait for that; the iteration is over then.

        May be called from another task than the iterating one.

        Args:
            keep: Commit what was generated so far instead of dropping it.
            chars: Of that, only so many characters of the reply's text; what has ended by itself
                stays whole.

        Returns:
            The turn as committed: with ``keep``, or when it had ended by itself; else None.
        """
        if self._awaited is not None and not self._left:
            self._cancelled = True
            self._core.cancel(self._awaited.pending, keep=keep, chars=chars)
            async with self._reading:
                while await self._next() is not None:
                    pass
        self._left = True
        return self.result

    async def aclose(self) -> None:
        """Leave: cancel the turn if it still runs, without waiting."""
        self._close()

    def _close(self) -> None:
        if not self._left:
            self._left = True
            if self._awaited is not None and not self._awaited.pending.ended:
                self._leave(self._awaited)

    async def __aenter__(self) -> AsyncStream:
        """The stream itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave."""
        self._close()

    def __del__(self) -> None:
        """Leave; how a ``break`` out of an ``async for`` cancels."""
        with contextlib.suppress(SessionKVError):
            self._close()
