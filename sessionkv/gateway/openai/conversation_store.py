"""Conversations by name: what they are now, and what may be done with them.

What a conversation is now follows from reading what happened in it, in order; nothing else is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sessionkv.client import AsyncClient
from sessionkv.client.results import NodeInfo
from sessionkv.errors import (
    ItemNotFound,
    SessionBusy,
    SessionKVError,
)
from sessionkv.gateway.openai.conversation_log import (
    ConversationEvent,
    ConversationLog,
    document_of,
)
from sessionkv.gateway.openai.response_body import KeptResponse
from sessionkv.gateway.openai.response_ids import (
    item_ids,
    new_conversation_id,
    new_response_id,
    session_of,
)
from sessionkv.gateway.openai.response_items import from_messages, to_messages
from sessionkv.gateway.openai.response_store import Found, ResponseStore, Standing

Item = dict[str, Any]


class ConversationStore:
    """Conversations of one caller. One event loop."""

    def __init__(
        self,
        client: AsyncClient,
        responses: ResponseStore,
        answering: set[str],
    ) -> None:
        """Over a caller's connection.

        Args:
            client: The connection.
            responses: The caller's.
            answering: Conversations in which a response is being made, of all callers.
        """
        self._client = client
        self._log = ConversationLog(client)
        self._responses = responses
        self._answering = answering

    @contextmanager
    def answering(self, conversation_id: str) -> Iterator[None]:
        """While a response is made that goes on from what there is.

        Raises:
            SessionBusy: Another one is being made, or asks for the same.
        """
        self._require_rest(conversation_id)
        self._answering.add(conversation_id)
        try:
            yield
        finally:
            self._answering.discard(conversation_id)

    def _require_rest(self, conversation_id: str) -> None:
        if conversation_id in self._answering:
            raise SessionBusy("a response is being made in this conversation", param="conversation")

    # Reading ---------------------------------------------------------------------------------

    async def require(self, conversation_id: str) -> None:
        """See that there is such a conversation.

        Raises:
            ConversationNotFound: There is not.
        """
        await self._log.events(conversation_id)

    async def body(self, conversation_id: str) -> dict[str, Any]:
        """The object ``conversation``.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        events = await self._log.events(conversation_id)
        latest = next(event for event in reversed(events) if event.kind == "m")
        document = document_of(await self._log.node(latest))
        return {"id": conversation_id, "object": "conversation", **document}

    async def all_items(self, conversation_id: str) -> list[Item]:
        """All items that are in a conversation now.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        return await self._items(await self._log.events(conversation_id))

    async def _items(self, events: Sequence[ConversationEvent]) -> list[Item]:
        nodes = await self._log.nodes(events)
        items: list[Item] = []
        deleted: set[str] = set()
        for event in events:
            node = nodes[event.node]
            if event.kind == "i":
                items += document_of(node)["items"]
            elif event.kind == "d":
                deleted.add(document_of(node)["item"])
            elif event.kind == "r" and (found := _found(node)) is not None:
                items += [*self._responses.input_items(found), *self._responses.output(found)]
        return [item for item in items if item["id"] not in deleted]

    async def item(self, conversation_id: str, item_id: str) -> Item:
        """One item.

        Raises:
            ConversationNotFound, ItemNotFound: It is not there.
        """
        for item in await self.all_items(conversation_id):
            if item["id"] == item_id:
                return item
        raise ItemNotFound(item_id)

    async def standing(self, conversation_id: str) -> Standing:
        """Where a conversation is, for a response to go on from.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        events = await self._log.events(conversation_id)
        places = [place for place, event in enumerate(events) if event.kind == "r"]
        if not places:
            return Standing(None, None, (), await self._items(events))
        last, since = events[places[-1]], events[places[-1] + 1 :]
        extra, nodes = await self._items(since), await self._log.nodes(since)
        gone = {document_of(nodes[e.node])["item"] for e in since if e.kind == "d"}
        added = {
            item["id"]
            for event in since
            if event.kind == "i"
            for item in document_of(nodes[event.node])["items"]
        }
        found = _found(await self._log.node(last)) if gone <= added else None
        items = () if found is not None else await self._items(events)
        return Standing(last.session, found, extra, items)

    # Writing ---------------------------------------------------------------------------------

    async def create(
        self, metadata: Mapping[str, str] | None, items: Sequence[Item]
    ) -> dict[str, Any]:
        """Begin one.

        Raises:
            InvalidRequest: An item cannot be read.
        """
        named = _named(items)
        conversation_id = new_conversation_id()
        document = {"created_at": int(time.time()), "metadata": dict(metadata or {})}
        await self._log.begin(conversation_id, document)
        try:
            if named:
                await self._log.append(conversation_id, "i", {"items": named})
        except SessionKVError:
            await self._log.delete(conversation_id)  # nobody knows of it
            raise
        return {"id": conversation_id, "object": "conversation", **document}

    async def update(
        self, conversation_id: str, metadata: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """Give it other metadata.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        body = await self.body(conversation_id)
        body["metadata"] = dict(metadata or {})
        document = {name: body[name] for name in ("created_at", "metadata")}
        await self._log.append(conversation_id, "m", document)
        return body

    async def add_items(self, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        """Add items by hand; they come back with ids.

        Raises:
            ConversationNotFound: There is no such conversation.
            InvalidRequest: An item cannot be read, or they are too long.
            SessionBusy: A response is being made in it.
        """
        named = _named(items)
        await self._log.events(conversation_id)
        self._require_rest(conversation_id)
        await self._log.append(conversation_id, "i", {"items": named})
        return named

    async def delete_item(self, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Take an item out; what comes after it stays.

        Raises:
            ConversationNotFound, ItemNotFound: It is not there.
            SessionBusy: A response is being made in the conversation.
        """
        await self.item(conversation_id, item_id)
        self._require_rest(conversation_id)
        await self._log.append(conversation_id, "d", {"item": item_id})
        return await self.body(conversation_id)

    async def add_response(self, conversation_id: str, response_id: str) -> None:
        """A response is there that goes on from it, within :meth:`answering`.

        Raises:
            ConversationNotFound: It was deleted meanwhile.
        """
        session = self._client.session(session_of(response_id))
        await self._log.next(conversation_id, "r", session.fork)

    async def delete(self, conversation_id: str) -> None:
        """Forget all of it; its responses stay.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        await self._log.delete(conversation_id)


def _found(node: NodeInfo) -> Found | None:
    kept = KeptResponse.of(node)
    return None if kept is None else Found(node, kept)


def _named(items: Sequence[Item]) -> list[Item]:
    """The same as they are listed, with ids that nothing else has."""
    return from_messages(to_messages(items, field="items"), item_ids(new_response_id(), "i"))
