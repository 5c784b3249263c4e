"""Several turns of one request at the same time; whatever ends the wait early ends all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_QUEUED = 64
"""Events of a request that wait for its reader; past them its turns' own queues fill."""


async def merged(
    streams: Sequence[AsyncIterator[T]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Events of all streams as they come, each with the number of its stream.

    The first failure is raised. Closing the generator stops reading; the streams are the caller's
    to close.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(_QUEUED)

    async def feed(number: int) -> None:
        end = None
        try:
            async for event in streams[number]:
                await queue.put((number, event))
        except Exception as failure:  # noqa: BLE001 - raised where the events are read
            end = failure
        await queue.put(end)

    tasks = [asyncio.ensure_future(feed(number)) for number in range(len(streams))]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
