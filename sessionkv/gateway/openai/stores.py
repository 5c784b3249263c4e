"""What Responses and Conversations share between requests."""

from __future__ import annotations

import asyncio
import secrets
from weakref import WeakSet, WeakValueDictionary

from starlette.requests import Request

from sessionkv.gateway.clients import Caller
from sessionkv.gateway.openai.background import Backgrounds
from sessionkv.gateway.openai.conversation_store import ConversationStore
from sessionkv.gateway.openai.response_passing import PassingResponses
from sessionkv.gateway.openai.response_store import ResponseStore
from sessionkv.gateway.services import Services


class Stores:
    """Makes the stores of a request's caller. One event loop.

    Attributes:
        services: The gateway's.
        backgrounds: Responses that are made in the background, of all callers.
    """

    def __init__(self, services: Services) -> None:
        """Name this run; nothing is under way."""
        self.services = services
        self.backgrounds = Backgrounds()
        self._run = secrets.token_hex(4)
        self._swept: WeakSet[Caller] = WeakSet()
        self._answering: set[str] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def responses(self, request: Request) -> ResponseStore:
        """Responses of whoever sends a request.

        Raises:
            ConnectionLost: No engine is there.
        """
        served = await self.services.model()
        caller = await self.services.caller(request)
        later = caller.conversations.later
        store = ResponseStore(
            caller.client,
            served.reply_style,
            later,
            pieces=caller.pieces,
            run=self._run,
            passing=PassingResponses(caller.conversations, request.headers),
        )
        if caller not in self._swept:
            self._swept.add(caller)
            store.sweep()
        return store

    async def conversations(self, request: Request) -> ConversationStore:
        """Conversations of whoever sends a request.

        Raises:
            ConnectionLost: No engine is there.
        """
        responses = await self.responses(request)
        client = await self.services.client(request)
        return ConversationStore(client, responses, self._answering, self._locks)
