"""Who calls: for each key that is shown a connection to the engine, made when it is first used."""

from __future__ import annotations

import asyncio
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
        self._greeting = asyncio.Lock()  # one at a time: keys are tried no faster

    async def get(self, key: str | None) -> Caller:
        """The caller of a key; None is the one without.

        Raises:
            ConnectionLost: No engine is there.
            Unauthorized: It does not know the key.
        """
        caller = self._known(key)
        if caller is not None:
            return caller
        async with self._greeting:
            if (caller := self._known(key)) is not None:
                return caller
            caller = Caller(AsyncClient(self._endpoint, key=key))
            try:
                await caller.client.welcome()
            except BaseException:  # a key that is not known takes nobody's place
                await caller.close()
                raise
            ended, self._callers[key] = self._callers.pop(key, None), caller
            if ended is not None:
                await ended.close()
            if len(self._callers) > self._most:
                _, oldest = self._callers.popitem(last=False)
                await oldest.close()
        return caller

    def _known(self, key: str | None) -> Caller | None:
        """The caller there is, unless the engine has ended its connection for good."""
        caller = self._callers.get(key)
        if caller is None or caller.client.has_ended:
            return None
        self._callers.move_to_end(key)
        return caller

    async def close(self) -> None:
        """Close all of them."""
        while self._callers:
            _, caller = self._callers.popitem()
            await caller.close()
