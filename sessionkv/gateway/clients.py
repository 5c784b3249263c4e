"""Connections to the engine: one for each key that callers show, made when it is first used."""

from __future__ import annotations

from collections import OrderedDict

from sessionkv.client import AsyncClient


class ClientPool:
    """Bounded; for one event loop."""

    def __init__(self, endpoint: str, *, most: int) -> None:
        """Connect to nobody yet.

        Args:
            endpoint: The engine's.
            most: Connections at once; past it the one used longest ago is closed, and what is
                open on it ends.
        """
        self._endpoint = endpoint
        self._most = most
        self._clients: OrderedDict[str | None, AsyncClient] = OrderedDict()

    async def get(self, key: str | None) -> AsyncClient:
        """The connection of a key; None is the one without.

        Raises:
            ConnectionLost: No engine is there.
        """
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = AsyncClient(self._endpoint)
            if len(self._clients) > self._most:
                _, oldest = self._clients.popitem(last=False)
                await oldest.close()
        self._clients.move_to_end(key)
        return client

    async def close(self) -> None:
        """Close all of them."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()
