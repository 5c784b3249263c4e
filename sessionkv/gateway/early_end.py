"""Ends a turn where what it says is over for its client, before the model ends it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from sessionkv.client import AsyncStream, StreamEvent
from sessionkv.errors import TurnFailed


async def until(
    running: AsyncStream, is_over: Callable[[], bool]
) -> AsyncGenerator[StreamEvent, None]:
    """A turn's events until it ends, or may end; what was generated is committed then.

    Args:
        running: The turn; ended with the generator.
        is_over: Asked behind each event.

    Raises:
        SessionKVError: The turn failed.
    """
    async with running as events:
        async for event in events:
            yield event
            if event.result is None and is_over():
                kept = await events.cancel(keep=True)
                if kept is None:
                    raise TurnFailed("the turn could not be ended where it was over")
                yield StreamEvent(result=kept)
                return
