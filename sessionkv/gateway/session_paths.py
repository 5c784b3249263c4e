"""The turns that sessions stand on, asked for once: what a turn follows never changes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from sessionkv.client import AsyncClient, SessionInfo
from sessionkv.errors import SessionDamaged, SessionNotFound

MAX_TURNS = 200_000
"""Turns of all paths that are remembered."""
AT_ONCE = 8
"""Questions under way: each may have the engine read a session."""


class SessionPaths:
    """Paths by the turn that they end with; for one event loop.

    Numbers of turns are never used again while an engine runs, and who asks was told of the turn
    by the engine, so what one caller asked serves another.
    """

    def __init__(self, *, most: int = MAX_TURNS) -> None:
        """Know nothing yet."""
        self._most = most
        self._paths: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._num_turns = 0
        self._asking = asyncio.Semaphore(AT_ONCE)

    async def of(self, client: AsyncClient, info: SessionInfo) -> tuple[str, ...]:
        """Turns of a session from its root; none where it was deleted or cannot be read."""
        path = self._paths.get(info.node)
        if path is not None:
            self._paths.move_to_end(info.node)
            return path
        try:
            async with self._asking:
                path = await client.session(info.name).path()
        except (SessionNotFound, SessionDamaged):
            return ()
        if path[-1] not in self._paths:
            self._paths[path[-1]] = path
            self._num_turns += len(path)
        while self._num_turns > self._most and len(self._paths) > 1:
            self._num_turns -= len(self._paths.popitem(last=False)[1])
        return path
