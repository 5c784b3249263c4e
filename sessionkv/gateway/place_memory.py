"""Where things were put in conversations: remembered, or read from the turn that has them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sessionkv.client import AsyncClient
from sessionkv.errors import SessionDamaged, SessionNotFound
from sessionkv.gateway.rewriting_places import Place, places_of

MAX_SESSIONS = 1_000
"""Sessions whose places are remembered; those of others are asked for."""


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

    def put(self, name: str, places: Sequence[Place]) -> None:
        """Remember those of a session that is new or was gone on from."""
        self._places[name] = places
        self._places.move_to_end(name)
        if len(self._places) > MAX_SESSIONS:
            self._places.popitem(last=False)
