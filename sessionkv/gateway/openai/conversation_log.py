"""What happened in conversations: a log of sessions, one for each thing that did.

::

    http:conv:<id>.00000000.m   it began: its metadata
    http:conv:<id>.00000001.i   items were added by hand
    http:conv:<id>.00000002.r   a response: another name of that response's turn
    http:conv:<id>.00000003.d   an item was deleted

Nothing of it ever changes, so there is nothing that a crash could leave half changed. Its sessions
stay until the conversation is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sessionkv.client import AsyncClient
from sessionkv.client.results import NodeInfo
from sessionkv.errors import (
    ConversationNotFound,
    InvalidRequest,
    SessionBusy,
    SessionExists,
    SessionNotFound,
)
from sessionkv.gateway.openai.response_ids import is_conversation_id

_PREFIX = "http:conv:"
_DOCUMENT = "conversation"
_AT_ONCE = 32
_TRIES = 8
_TOO_LONG = "less than 64 KiB at a time"


@dataclass(frozen=True, slots=True)
class ConversationEvent:
    """Something that happened in a conversation.

    Attributes:
        number: Counted from 0.
        kind: ``m``, ``i``, ``r`` or ``d``.
        session: What holds it.
        node: The turn or root that it is.
    """

    number: int
    kind: str
    session: str
    node: str


class ConversationLog:
    """The conversations of one caller. One event loop."""

    def __init__(self, client: AsyncClient) -> None:
        """Over a caller's connection."""
        self._client = client

    async def events(self, conversation_id: str) -> list[ConversationEvent]:
        """What happened, in order. One question.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        found = []
        if is_conversation_id(conversation_id):
            for info in await self._client.sessions(f"{_PREFIX}{conversation_id}."):
                _, number, kind = info.name.rsplit(".", 2)
                found.append(ConversationEvent(int(number), kind, info.name, info.node))
        if not found:
            raise ConversationNotFound(conversation_id)
        return found

    async def nodes(self, events: Sequence[ConversationEvent]) -> dict[str, NodeInfo]:
        """What each event is, by its node.

        Responses are asked for with all that they go on from, the last one first: one question for
        a conversation whose instructions never changed. The others are asked for side by side.
        """
        nodes: dict[str, NodeInfo] = {}
        for event in reversed(events):
            if event.kind == "r" and event.node not in nodes:
                nodes |= {
                    node.node: node for node in (await self._client.session(event.session).nodes())
                }
        others = [event for event in events if event.kind != "r"]
        for start in range(0, len(others), _AT_ONCE):
            some = others[start : start + _AT_ONCE]
            found = await asyncio.gather(*map(self.node, some))
            nodes |= {event.node: node for event, node in zip(some, found, strict=True)}
        return nodes

    async def node(self, event: ConversationEvent) -> NodeInfo:
        """What one event is."""
        return await self._client.session(event.session).node()

    async def begin(self, conversation_id: str, document: Mapping[str, Any]) -> None:
        """The first event of a new conversation."""
        await self._open(_name(conversation_id, 0, "m"), document)

    async def append(self, conversation_id: str, kind: str, document: Mapping[str, Any]) -> None:
        """Note that something happened.

        Raises:
            ConversationNotFound: There is no such conversation.
            InvalidRequest: There is more than can be kept at a time.
            SessionBusy: Others were faster, again and again.
        """
        await self.next(conversation_id, kind, lambda name: self._open(name, document))

    async def next(
        self, conversation_id: str, kind: str, make: Callable[[str], Awaitable[object]]
    ) -> None:
        """Make the session of what happened next; where somebody was faster, of what did then."""
        for _ in range(_TRIES):
            number = (await self.events(conversation_id))[-1].number + 1
            with contextlib.suppress(SessionExists):
                await make(_name(conversation_id, number, kind))
                return
        raise SessionBusy("much happens in this conversation at once", param="conversation")

    async def _open(self, name: str, document: Mapping[str, Any]) -> None:
        """A new session that is nothing but its metadata.

        Raises:
            SessionExists: The name is taken.
            InvalidRequest: There is more than can be kept at a time.
        """
        marked = {_DOCUMENT: dict(document), "mark": secrets.token_hex(8)}
        try:
            session = await self._client.open(name, metadata=marked)
        except InvalidRequest as error:
            if error.details.get("field") != "metadata":
                raise
            raise InvalidRequest("items", error.details["value"], _TOO_LONG) from None
        # To open a session that is there already is no error, and leaves it as it is.
        if (await session.node()).metadata.get("mark") != marked["mark"]:
            raise SessionExists(f"there is a session named {name!r}")

    async def delete(self, conversation_id: str) -> None:
        """Forget all of it.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        # Its beginning goes last: what a crash leaves is still a conversation, to be deleted again.
        for event in reversed(await self.events(conversation_id)):
            with contextlib.suppress(SessionNotFound):
                await self._client.delete(event.session)


def _name(conversation_id: str, number: int, kind: str) -> str:
    return f"{_PREFIX}{conversation_id}.{number:08}.{kind}"


def document_of(node: NodeInfo) -> dict[str, Any]:
    """What was noted with an event; of a response there is none."""
    return dict(node.metadata[_DOCUMENT])
