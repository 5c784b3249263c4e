"""What Responses and Conversations share between requests."""

from __future__ import annotations

import secrets
from weakref import WeakSet

from starlette.requests import Request

from sessionkv.gateway.clients import Caller
from sessionkv.gateway.openai.conversation_store import ConversationStore
from sessionkv.gateway.openai.response_passing import PassingResponses
from sessionkv.gateway.openai.response_store import ResponseStore
from sessionkv.gateway.services import Services


class Stores:
    """Makes the stores of a request's caller. One event loop.

    Attributes:
        services: The gateway's.
    """

    def __init__(self, services: Services) -> None:
        """Name this run; nothing is under way."""
        self.services = services
        self._run = secrets.token_hex(4)
        self._swept: WeakSet[Caller] = WeakSet()
        self._answering: set[str] = set()

    async def responses(self, request: Request) -> ResponseStore:
        """Responses of whoever sends a request.

        Raises:
            ConnectionLost: No engine is there.
        """
        served = await self.services.model()
        caller = await self.services.caller(request)
        later = caller.conversations.later
        passing = PassingResponses(caller.conversations, request.headers)
        store = ResponseStore(
            caller.client, served.reply_style, later, run=self._run, passing=passing
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
        return ConversationStore(await self.services.client(request), responses, self._answering)
