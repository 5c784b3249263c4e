"""Which responses are on their way into conversations, so that a crash keeps none out.

A response is there when its turn is, and only then can its conversation have it. So before the turn
is asked for, a session ``~http:entering:CONVERSATION.RESPONSE`` says that it is to be in both; it
goes when the response is in its conversation, or will never be there. One that a crash left is
settled by whoever uses the conversation next: if the response is there, its conversation is given
it. What is left of a deleted conversation runs out by itself, as responses do.
"""

from __future__ import annotations

import contextlib

from sessionkv.client import AsyncClient
from sessionkv.errors import SessionNotFound
from sessionkv.gateway.openai.response_ids import is_conversation_id

_PREFIX = "~http:entering:"


class ConversationEntries:
    """Those of one caller. One event loop."""

    def __init__(self, client: AsyncClient) -> None:
        """Over a caller's connection."""
        self._client = client

    async def of(self, conversation_id: str) -> list[str]:
        """Ids of the responses on their way into a conversation. One question."""
        if not is_conversation_id(conversation_id):
            return []
        found = await self._client.sessions(f"{_PREFIX}{conversation_id}.")
        return [info.name.rpartition(".")[2] for info in found]

    async def begin(self, conversation_id: str, response_id: str) -> None:
        """A response is going to be made.

        Raises:
            Overloaded: There is no room for the note.
        """
        await self._client.open(_name(conversation_id, response_id))

    async def end(self, conversation_id: str, response_id: str) -> None:
        """It is in its conversation, or never will be there; also where no note is."""
        with contextlib.suppress(SessionNotFound):
            await self._client.delete(_name(conversation_id, response_id))


def _name(conversation_id: str, response_id: str) -> str:
    return f"{_PREFIX}{conversation_id}.{response_id}"
