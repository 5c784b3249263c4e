"""Conversations by name: what they are now, and what may be done with them.

What a conversation is now follows from reading what happened in it, in order; nothing else is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sessionkv.client import AsyncClient
from sessionkv.client.results import NodeInfo
from sessionkv.errors import (
    ConversationNotFound,
    ItemNotFound,
    ResponseNotFound,
    SessionBusy,
    SessionKVError,
    SessionNotFound,
)
from sessionkv.gateway.openai.conversation_entries import ConversationEntries
from sessionkv.gateway.openai.conversation_log import FOLD_AT, ConversationLog, document_of
from sessionkv.gateway.openai.conversation_sums import ConversationEvent
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
T = TypeVar("T")
_TRIES = 3
_OWN = ("created_at", "metadata")
"""Of a conversation, beside its items."""


class ConversationStore:
    """Conversations of one caller. One event loop."""

    def __init__(
        self,
        client: AsyncClient,
        responses: ResponseStore,
        answering: set[str],
        locks: MutableMapping[str, asyncio.Lock],
    ) -> None:
        """Over a caller's connection.

        Args:
            client: The connection.
            responses: The caller's.
            answering: Conversations in which a response is being made, of all callers.
            locks: Of conversations that are being summed up or deleted, of all callers; one that
                nobody holds or waits for need not stay.
        """
        self._client = client
        self._log = ConversationLog(client)
        self._entries = ConversationEntries(client)
        self._responses = responses
        self._answering = answering
        self._locks = locks

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

    async def catch_up(self, conversation_id: str) -> None:
        """Take in responses that are there, and that a crash kept out; within :meth:`answering`.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        for response_id in await self._entries.of(conversation_id):
            with contextlib.suppress(ResponseNotFound):
                turn = (await self._responses.find(response_id)).node.node
                if all(e.node != turn for e in await self._log.events(conversation_id)):
                    await self._take_in(conversation_id, response_id)
            await self._entries.end(conversation_id, response_id)

    async def _caught_up(self, conversation_id: str) -> None:
        """The same for who makes no response; while one is made, its maker has seen to it."""
        left = conversation_id not in self._answering and await self._entries.of(conversation_id)
        if left and conversation_id not in self._answering:
            with self.answering(conversation_id):
                await self.catch_up(conversation_id)

    # Reading ---------------------------------------------------------------------------------

    async def require(self, conversation_id: str) -> None:
        """See that there is such a conversation.

        Raises:
            ConversationNotFound: There is not.
        """
        await self._log.events(conversation_id)
        await self._caught_up(conversation_id)

    async def body(self, conversation_id: str) -> dict[str, Any]:
        """The object ``conversation``.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        document = await self._read(conversation_id, self._document)
        return {"id": conversation_id, "object": "conversation", **document}

    async def _read(
        self, conversation_id: str, of: Callable[[list[ConversationEvent]], Awaitable[T]]
    ) -> T:
        """What is read of the events; once more where a sum took the place of some meanwhile."""
        for _ in range(_TRIES):
            with contextlib.suppress(SessionNotFound):
                return await of(await self._log.events(conversation_id))
        return await of(await self._log.events(conversation_id))

    async def _document(self, events: Sequence[ConversationEvent]) -> dict[str, Any]:
        """When it began, and its metadata now."""
        latest = next((event for event in reversed(events) if event.kind == "m"), None)
        if latest is not None:
            return document_of(await self._log.node(latest))
        document = await self._log.sum_of(events) or {}
        return {name: document[name] for name in _OWN}

    async def all_items(self, conversation_id: str) -> list[Item]:
        """All items that are in a conversation now.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        await self._caught_up(conversation_id)
        return await self._read(conversation_id, self._items)

    async def _items(self, events: Sequence[ConversationEvent]) -> list[Item]:
        before = await self._log.sum_of(events)
        since = [event for event in events if event.piece is None]
        nodes = await self._log.nodes(since)
        items: list[Item] = [] if before is None else before["items"]
        deleted: set[str] = set()
        for event in since:
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
        await self._caught_up(conversation_id)
        return await self._read(conversation_id, self._standing)

    async def _standing(self, events: Sequence[ConversationEvent]) -> Standing:
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
        document = {name: body[name] for name in _OWN}
        self._fold_if_long(conversation_id, await self._log.append(conversation_id, "m", document))
        return body

    async def add_items(self, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        """Add items by hand; they come back with ids.

        Raises:
            ConversationNotFound: There is no such conversation.
            InvalidRequest: An item cannot be read, or they are too long.
            SessionBusy: A response is being made in it.
        """
        named = _named(items)
        await self.require(conversation_id)
        self._require_rest(conversation_id)
        document = {"items": named}
        self._fold_if_long(conversation_id, await self._log.append(conversation_id, "i", document))
        return named

    async def delete_item(self, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Take an item out; what comes after it stays.

        Raises:
            ConversationNotFound, ItemNotFound: It is not there.
            SessionBusy: A response is being made in the conversation.
        """
        await self.item(conversation_id, item_id)
        self._require_rest(conversation_id)
        document = {"item": item_id}
        self._fold_if_long(conversation_id, await self._log.append(conversation_id, "d", document))
        return await self.body(conversation_id)

    async def expect(self, conversation_id: str, response_id: str) -> None:
        """A response is going to be made that is to be in it, within :meth:`answering`.

        From here on the response is in the conversation if it is there, whatever ends when;
        :meth:`add_response` or :meth:`expect_no_more` comes behind.

        Raises:
            Overloaded: There is no room for the note.
        """
        await self._entries.begin(conversation_id, response_id)

    async def expect_no_more(self, conversation_id: str, response_id: str) -> None:
        """The response is not there, and will not be."""
        await self._entries.end(conversation_id, response_id)

    async def add_response(self, conversation_id: str, response_id: str) -> None:
        """The response is there, within :meth:`answering`.

        Raises:
            ConversationNotFound: The conversation was deleted meanwhile.
        """
        await self._take_in(conversation_id, response_id)
        await self._entries.end(conversation_id, response_id)

    async def _take_in(self, conversation_id: str, response_id: str) -> None:
        session = self._client.session(session_of(response_id))
        count = await self._log.next(conversation_id, "r", session.fork)
        self._fold_if_long(conversation_id, count)

    def _fold_if_long(self, conversation_id: str, count: int) -> None:
        if count >= FOLD_AT:
            self._responses.later(self._fold(conversation_id))

    async def _fold(self, conversation_id: str) -> None:
        """Sum up what happened before the last response, which is gone on from.

        Where that is little, since much was added by hand behind it, all but the last event is
        summed up: the next response then writes the conversation anew. Nothing is done where
        another fold left few events, or the conversation was deleted.
        """
        async with self._lock(conversation_id):
            try:
                events = await self._log.events(conversation_id)
            except ConversationNotFound:
                return
            since = [event for event in events if event.piece is None]
            if len(since) < FOLD_AT:
                return
            end = max((place for place, event in enumerate(since) if event.kind == "r"), default=0)
            if end < FOLD_AT // 2:
                end = len(since) - 1
            before = events[: len(events) - len(since) + end]  # the pieces of a sum are first
            document = await self._document(before)
            items = await self._items(before)
            await self._log.fold(conversation_id, since[end], {**document, "items": items})

    def _lock(self, conversation_id: str) -> asyncio.Lock:
        """Held by who sums a conversation up, or deletes it."""
        return self._locks.setdefault(conversation_id, asyncio.Lock())

    async def delete(self, conversation_id: str) -> None:
        """Forget all of it, after a fold that is under way; its responses stay.

        Raises:
            ConversationNotFound: There is no such conversation.
        """
        async with self._lock(conversation_id):
            await self._log.delete(conversation_id)


def _found(node: NodeInfo) -> Found | None:
    kept = KeptResponse.of(node)
    return None if kept is None else Found(node, kept)


def _named(items: Sequence[Item]) -> list[Item]:
    """The same as they are listed, with ids that nothing else has."""
    return from_messages(to_messages(items, field="items"), item_ids(new_response_id(), "i"))
