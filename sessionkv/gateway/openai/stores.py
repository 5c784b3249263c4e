"""What Responses and Conversations share between requests: who calls, and locks."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from starlette.requests import Request

from sessionkv.gateway.openai.conversation_store import ConversationStore
from sessionkv.gateway.openai.response_store import ResponseStore
from sessionkv.gateway.services import Services


class Stores:
    """Makes the stores of a request's caller. One event loop.

    Attributes:
        services: The gateway's.
    """

    def __init__(self, services: Services) -> None:
        """Nothing is under way."""
        self.services = services
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def responses(self, request: Request) -> ResponseStore:
        """Responses of whoever sends a request.

        Raises:
            ConnectionLost: No engine is there.
        """
        served = await self.services.model()
        caller = await self.services.caller(request)
        return ResponseStore(caller.client, served.reply_style, caller.conversations.later)

    async def conversations(self, request: Request) -> ConversationStore:
        """Conversations of whoever sends a request.

        Raises:
            ConnectionLost: No engine is there.
        """
        responses = await self.responses(request)
        return ConversationStore(await self.services.client(request), responses, self._locks)
