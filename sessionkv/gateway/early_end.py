"""Ends a turn where what it says is over for its client, before the model ends it.

What is committed ends there too, to the character: the client sends it back as it was told it, and
is found. A turn that ended by itself before it could be ended stays whole: then more is billed and
kept than was told.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from sessionkv.client import AsyncStream, StreamEvent
from sessionkv.errors import TurnFailed


async def until(
    running: AsyncStream, ends_at: Callable[[], int | None]
) -> AsyncGenerator[StreamEvent, None]:
    """A turn's events until it ends, or may end; what was said up to there is committed then.

    Args:
        running: The turn; ended with the generator.
        ends_at: Asked behind each event: after how many characters of the reply it is over; None
            as long as it is not.

    Raises:
        SessionKVError: The turn failed.
    """
    async with running as events:
        async for event in events:
            yield event
            if event.result is None and (chars := ends_at()) is not None:
                kept = await events.cancel(keep=True, chars=chars)
                if kept is None:
                    raise TurnFailed("the turn could not be ended where it was over")
                yield StreamEvent(result=kept)
                return
