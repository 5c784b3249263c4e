"""Connections to the engine: one for each key that callers show, made when it is first used."""

from __future__ import annotations

import asyncio
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
        self._greeting = asyncio.Lock()  # one at a time: keys are tried no faster

    async def get(self, key: str | None) -> AsyncClient:
        """The connection of a key; None is the one without.

        Raises:
            ConnectionLost: No engine is there.
            Unauthorized: It does not know the key.
        """
        client = self._known(key)
        if client is not None:
            return client
        async with self._greeting:
            if (client := self._known(key)) is not None:
                return client
            client = AsyncClient(self._endpoint, key=key)
            try:
                await client.welcome()
            except BaseException:  # a key that is not known takes nobody's place
                await client.close()
                raise
            self._clients[key] = client
            if len(self._clients) > self._most:
                _, oldest = self._clients.popitem(last=False)
                await oldest.close()
        return client

    def _known(self, key: str | None) -> AsyncClient | None:
        """The connection there is, unless the engine has ended it for good."""
        client = self._clients.get(key)
        if client is None or client.has_ended:
            return None
        self._clients.move_to_end(key)
        return client

    async def close(self) -> None:
        """Close all of them."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()
