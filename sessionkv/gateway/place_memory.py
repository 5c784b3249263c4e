"""Where things were put in conversations: remembered, or read from the turn that has them.

Two conversations may be the same but for their dates, and their sessions would have one name. The
second one's has its dates' digest behind the name, and is looked for where those of the first are
not told by the request: places are never those of another session than the engine holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sessionkv.client import AsyncClient
from sessionkv.errors import SessionDamaged, SessionNotFound
from sessionkv.gateway.rewriting import Steady
from sessionkv.gateway.rewriting_places import Place, dates_digest, is_told, places_of

MAX_SESSIONS = 1_000
"""Sessions whose places are remembered; those of others are asked for."""


def dated(name: str, found: Steady) -> str:
    """Name of a session where the other name is that of one with other dates."""
    return f"{name}.{dates_digest(found)}"


class PlaceMemory:
    """Of one caller's sessions. One event loop."""

    def __init__(self, client: AsyncClient) -> None:
        """Remember nothing; the client stays the caller's."""
        self._client = client
        self._places: OrderedDict[str, Sequence[Place]] = OrderedDict()

    async def of(self, name: str) -> Sequence[Place]:
        """Those in a session's conversation; none where there is no such session.

        Raises:
            ConnectionLost: The engine is gone.
        """
        found = self._places.get(name)
        if found is None:
            try:
                found = places_of((await self._client.session(name).node()).metadata)
            except (SessionNotFound, SessionDamaged):
                return ()
            self.put(name, found)
        return found

    async def session(self, name: str, found: Steady) -> str:
        """Which of the sessions of one name a request goes on from: that with its dates, if any.

        Raises:
            ConnectionLost: The engine is gone.
        """
        places = await self.of(name)
        if not places or is_told(found, places):
            return name
        other = dated(name, found)
        return other if is_told(found, await self.of(other)) else name

    def forget(self, name: str) -> None:
        """There is no session of that name any more."""
        self._places.pop(name, None)

    def put(self, name: str, places: Sequence[Place]) -> None:
        """Remember those of a session that is new or was gone on from."""
        self._places[name] = places
        self._places.move_to_end(name)
        if len(self._places) > MAX_SESSIONS:
            self._places.popitem(last=False)
