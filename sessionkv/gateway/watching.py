"""What a page that watches a session is told of it, and no more often than it costs little.

Looking all blocks of a session up costs core O(history). So it is asked for when a turn has ended,
and else only when the engine's books have changed since, and for a small share of the time however
long it takes. Not while a turn runs: its blocks count from its end on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from sessionkv.client import AsyncClient, Places, SessionInfo
from sessionkv.errors import Overloaded, SessionDamaged, SessionNotFound
from sessionkv.gateway.session_maps import places_map, session_map

PAUSES = 20
"""After blocks were looked up, so many times as long passes before they are again."""
LONGEST_S = 2.0
"""A disk that hangs may not answer: the figures are to go on."""


class SessionWatch:
    """One watcher's view of one session."""

    def __init__(
        self, client: AsyncClient, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Know nothing yet."""
        self._client = client
        self._name = name
        self._clock = clock
        self._places: Places | None = None
        self._node: str | None = None
        self._books: object = None
        self._again_s = 0.0
        self._told: object = None

    async def look(self, stats: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is to be told, None when nothing has changed.

        Args:
            stats: The engine's figures now.

        Raises:
            SessionKVError: The engine cannot answer.
        """
        info = await self._info()
        try:
            if info is not None:
                await self._look_up(info, stats)
        except SessionNotFound:
            info = None
        value: dict[str, Any] = {"name": self._name, "session": None, "places": None}
        if info is not None:
            places = self._places
            value["session"] = session_map(info)
            value["places"] = None if places is None else places_map(places)
        if value == self._told:
            return None
        self._told = value
        return value

    async def _info(self) -> SessionInfo | None:
        """The session as a list has it, which costs the same however long it is."""
        page = await self._client.session_page(self._name, limit=1)
        found = page.sessions[0] if page.sessions else None
        return found if found is not None and found.name == self._name else None

    async def _look_up(self, info: SessionInfo, stats: Mapping[str, Any]) -> None:
        books = stats.get("kv")
        if info.node == self._node:
            # A tenant is not told of the engine's books: to it something may always have changed.
            is_same = books is not None and books == self._books
            if info.running or is_same or self._clock() < self._again_s:
                return
        began = self._clock()
        try:
            async with asyncio.timeout(LONGEST_S):
                self._places = await self._client.session(self._name).places()
            self._node, self._books = info.node, books
        except SessionDamaged:
            self._places = None
        except (Overloaded, TimeoutError):
            pass  # what was seen last stays until it is asked for again
        self._again_s = self._clock() + PAUSES * (self._clock() - began)
