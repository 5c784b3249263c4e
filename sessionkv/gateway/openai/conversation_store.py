"""Conversations by name: what happened in each, one session for each thing that did.

::

    http:conv:<id>.00000000.m   it began: its metadata
    http:conv:<id>.00000001.i   items were added by hand
    http:conv:<id>.00000002.r   a response: another name of that response's turn
    http:conv:<id>.00000003.d   an item was deleted

Nothing of it ever changes, so there is nothing that a crash could leave half changed; what a
conversation is now follows from reading it in order. Its sessions stay until it is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from sessionkv.client import AsyncClient
from sessionkv.client.results import NodeInfo
from sessionkv.errors import InvalidRequest, SessionNotFound
from sessionkv.gateway.openai.response_body import Kept
from sessionkv.gateway.openai.response_errors import ConversationNotFound, ItemNotFound
from sessionkv.gateway.openai.response_ids import (
    is_conversation_id,
    item_ids,
    new_conversation_id,
    new_response_id,
    session_of,
)
from sessionkv.gateway.openai.response_items import from_messages, to_messages
from sessionkv.gateway.openai.response_store import Found, ResponseStore, Standing

Item = dict[str, Any]
_PREFIX = "http:conv:"
_DOCUMENT = "conversation"
_TOO_LONG = "less than 64 KiB at a time"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a conversation.

    Attributes:
        number: Counted from 0.
        kind: ``m``, ``i``, ``r`` or ``d``.
        session: What holds it.
    """

    number: int
    kind: str
    session: str


class ConversationStore:
    """Conversations of one caller. One event loop."""

    def __init__(
        self,
        client: AsyncClient,
        responses: ResponseStore,
        locks: WeakValueDictionary[str, asyncio.Lock],
    ) -> None:
        """Over a caller's connection.

        Args:
            client: The connection.
            responses: The caller's.
            locks: One for each conversation in which something is being done.
        """
        self._client = client
        self._responses = responses
        self._locks = locks

    def lock(self, conversation_id: str) -> asyncio.Lock:
        """To be held while something is added that follows from what there is."""
        return self._locks.setdefault(conversation_id, asyncio.Lock())

    # Reading ---------------------------------------------------------------------------------

    async def events(self, conversation_id: str) -> list[Event]:
        """What happened, in order. One question.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        found = []
        if is_conversation_id(conversation_id):
            for info in await self._client.sessions(f"{_PREFIX}{conversation_id}."):
                _, number, kind = info.name.rsplit(".", 2)
                found.append(Event(int(number), kind, info.name))
        if not found:
            raise ConversationNotFound.of(conversation_id)
        return found

    async def body(self, conversation_id: str) -> dict[str, Any]:
        """The object ``conversation``.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        events = await self.events(conversation_id)
        latest = next(event for event in reversed(events) if event.kind == "m")
        document = _document(await self._node(latest))
        return {"id": conversation_id, "object": "conversation", **document}

    async def items(self, events: Sequence[Event]) -> list[Item]:
        """All items that are in a conversation now. One question for each event."""
        items: list[Item] = []
        deleted: set[str] = set()
        for event in events:
            node = await self._node(event)
            if event.kind == "i":
                items += _document(node)["items"]
            elif event.kind == "d":
                deleted.add(_document(node)["item"])
            elif event.kind == "r" and (found := _found(node)) is not None:
                items += [*self._responses.input_items(found), *self._responses.output(found)]
        return [item for item in items if item["id"] not in deleted]

    async def item(self, conversation_id: str, item_id: str) -> Item:
        """One item.

        Raises:
            ConversationNotFound, ItemNotFound: It is not there.
        """
        for item in await self.items(await self.events(conversation_id)):
            if item["id"] == item_id:
                return item
        raise ItemNotFound.of(item_id)

    async def standing(self, conversation_id: str) -> Standing:
        """Where a conversation is, for a response to go on from.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        events = await self.events(conversation_id)
        places = [place for place, event in enumerate(events) if event.kind == "r"]
        if not places:
            return Standing(None, None, (), await self.items(events))
        last, since = events[places[-1]], events[places[-1] + 1 :]
        extra = await self.items(since)
        gone = {_document(await self._node(e))["item"] for e in since if e.kind == "d"}
        added = {
            item["id"]
            for event in since
            if event.kind == "i"
            for item in _document(await self._node(event))["items"]
        }
        found = _found(await self._node(last)) if gone <= added else None
        items = () if found is not None else await self.items(events)
        return Standing(last.session, found, extra, items)

    async def _node(self, event: Event) -> NodeInfo:
        return await self._client.session(event.session).node()

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
        await self._add(conversation_id, 0, "m", document)
        if named:
            await self._add(conversation_id, 1, "i", {"items": named})
        return {"id": conversation_id, "object": "conversation", **document}

    async def update(
        self, conversation_id: str, metadata: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """Give it other metadata.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        async with self.lock(conversation_id):
            body = await self.body(conversation_id)
            body["metadata"] = dict(metadata or {})
            document = {name: body[name] for name in ("created_at", "metadata")}
            await self._append(conversation_id, "m", document)
        return body

    async def add_items(self, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        """Add items by hand; they come back with ids.

        Raises:
            ConversationNotFound: There is no such conversation.
            InvalidRequest: An item cannot be read, or they are too long.
        """
        named = _named(items)
        async with self.lock(conversation_id):
            await self._append(conversation_id, "i", {"items": named})
        return named

    async def delete_item(self, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Take an item out; what comes after it stays.

        Raises:
            ConversationNotFound, ItemNotFound: It is not there.
        """
        async with self.lock(conversation_id):
            await self.item(conversation_id, item_id)
            await self._append(conversation_id, "d", {"item": item_id})
            return await self.body(conversation_id)

    async def add_response(self, conversation_id: str, response_id: str) -> None:
        """A response is there that goes on from it; :meth:`lock` is held.

        Raises:
            ConversationNotFound: It was deleted meanwhile.
        """
        number = (await self.events(conversation_id))[-1].number + 1
        name = _name(conversation_id, number, "r")
        await self._client.session(session_of(response_id)).fork(name)

    async def delete(self, conversation_id: str) -> None:
        """Forget all of it; its responses stay.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        # Its beginning goes last: what a crash leaves is still a conversation, to be deleted again.
        for event in reversed(await self.events(conversation_id)):
            with contextlib.suppress(SessionNotFound):
                await self._client.delete(event.session)

    async def _append(self, conversation_id: str, kind: str, document: Mapping[str, Any]) -> None:
        number = (await self.events(conversation_id))[-1].number + 1
        await self._add(conversation_id, number, kind, document)

    async def _add(
        self, conversation_id: str, number: int, kind: str, document: Mapping[str, Any]
    ) -> None:
        name = _name(conversation_id, number, kind)
        try:
            await self._client.open(name, metadata={_DOCUMENT: dict(document)})
        except InvalidRequest as error:
            if error.details.get("field") != "metadata":
                raise
            raise InvalidRequest("items", error.details["value"], _TOO_LONG) from None


def _name(conversation_id: str, number: int, kind: str) -> str:
    return f"{_PREFIX}{conversation_id}.{number:08}.{kind}"


def _document(node: NodeInfo) -> dict[str, Any]:
    return dict(node.metadata[_DOCUMENT])


def _found(node: NodeInfo) -> Found | None:
    kept = Kept.of(node)
    return None if kept is None else Found(node, kept)


def _named(items: Sequence[Item]) -> list[Item]:
    """The same as they are listed, with ids that nothing else has."""
    return from_messages(to_messages(items, field="items"), item_ids(new_response_id(), "i"))
