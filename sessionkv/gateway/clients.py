"""Who calls: for each key that is shown a connection to the engine, made when it is first used."""

from __future__ import annotations

from collections import OrderedDict

from sessionkv.client import AsyncClient
from sessionkv.gateway.conversations import Conversations
from sessionkv.gateway.pieces import Pieces


class Caller:
    """One key's connection and what is known over it.

    Attributes:
        client: The connection.
        conversations: Those of clients that keep no session.
        pieces: What tokens stand for.
    """

    def __init__(self, client: AsyncClient) -> None:
        """Own the connection."""
        self.client = client
        self.conversations = Conversations(client)
        self.pieces = Pieces()

    async def close(self) -> None:
        """Do what is left to be done, then close the connection."""
        await self.conversations.settle()
        await self.client.close()


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
        self._callers: OrderedDict[str | None, Caller] = OrderedDict()

    async def get(self, key: str | None) -> Caller:
        """The caller of a key; None is the one without.

        Raises:
            ConnectionLost: No engine is there.
        """
        caller = self._callers.get(key)
        if caller is None:
            caller = self._callers[key] = Caller(AsyncClient(self._endpoint))
            if len(self._callers) > self._most:
                _, oldest = self._callers.popitem(last=False)
                await oldest.close()
        self._callers.move_to_end(key)
        return caller

    async def close(self) -> None:
        """Close all of them."""
        while self._callers:
            _, caller = self._callers.popitem()
            await caller.close()
