"""Who calls: for each key that is shown a connection to the engine, made when it is first used."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from sessionkv.client import AsyncClient
from sessionkv.gateway.conversations import Conversations
from sessionkv.gateway.pieces import Pieces

IDLE_S = 60.0
"""Nobody has asked anything of a caller for so long: it may be closed."""


class Caller:
    """One key's connection and what is known over it.

    Attributes:
        client: The connection.
        tenant: Whose the key is; known once the engine has greeted.
        conversations: Those of clients that keep no session.
        pieces: What tokens stand for; the same for all callers.
    """

    def __init__(self, client: AsyncClient, pieces: Pieces, *, is_steady: bool = False) -> None:
        """Own the connection; ``is_steady`` as for :class:`Keeping` by default."""
        self.client = client
        self.tenant = ""
        self.conversations = Conversations(client, is_steady=is_steady)
        self.pieces = pieces
        self.used_s = 0.0
        self._seen = 0

    def is_idle(self, now: float) -> bool:
        """Whether nothing is open and nobody has asked for a while, as of two looks at it."""
        asked = self.client.num_asked
        if asked != self._seen:  # by who holds the client for long, such as a page's stream
            self._seen, self.used_s = asked, now
        return self.client.num_open == 0 and now - self.used_s > IDLE_S

    async def close(self) -> None:
        """Do what is left to be done, then close the connection."""
        await self.conversations.settle()
        await self.client.close()


class ClientPool:
    """For one event loop. The engine's keys bound it; those that are not known take no place."""

    def __init__(
        self,
        endpoint: str,
        *,
        most: int,
        is_steady: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to nobody yet.

        Args:
            endpoint: The engine's.
            most: Connections past which idle ones are closed, the one used longest ago first.
            is_steady: Whether what moves in prompts is put where it costs no cache.
            clock: Seconds.
        """
        self._endpoint = endpoint
        self._most = most
        self._is_steady = is_steady
        self._clock = clock
        self._callers: OrderedDict[str | None, Caller] = OrderedDict()
        self._pieces = Pieces()
        self._greeting = asyncio.Lock()  # one at a time: keys are tried no faster
        self._closing: set[asyncio.Task[None]] = set()

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
            client = AsyncClient(self._endpoint, key=key)
            caller = Caller(client, self._pieces, is_steady=self._is_steady)
            try:
                caller.tenant = (await caller.client.welcome()).tenant
            except BaseException:  # a key that is not known takes nobody's place
                await caller.close()
                raise
        ended = self._callers.pop(key, None)
        if ended is not None:
            self._close(ended)
        self._callers[key] = caller
        caller.used_s = self._clock()
        self._close_idle()
        return caller

    def _known(self, key: str | None) -> Caller | None:
        """The caller there is, unless the engine has ended its connection for good."""
        caller = self._callers.get(key)
        if caller is None or caller.client.has_ended:
            return None
        self._callers.move_to_end(key)
        caller.used_s = self._clock()
        return caller

    def _close_idle(self) -> None:
        """Too many: those that nobody uses go. A stream that runs keeps its connection."""
        now = self._clock()
        for key in [key for key, caller in self._callers.items() if caller.is_idle(now)]:
            if len(self._callers) <= self._most:
                return
            self._close(self._callers.pop(key))

    def _close(self, caller: Caller) -> None:
        """Beside requests, which do not wait for it."""
        task = asyncio.create_task(caller.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all of them."""
        while self._callers:
            _, caller = self._callers.popitem()
            await caller.close()
        await asyncio.gather(*self._closing)
