"""What happened in conversations: a log of sessions, one for each thing that did.

::

    http:conv:<id>.00000000.m           it began: its metadata
    http:conv:<id>.00000001.i           items were added by hand
    http:conv:<id>.00000002.r           a response: another name of that response's turn
    http:conv:<id>.00000003.d           an item was deleted
    http:conv:<id>.00000002.s0000-0001  the sum of what happened before 2, and its only piece

An event never changes, so there is nothing that a crash could leave half changed. When there are
:data:`FOLD_AT` of them, a sum takes the place of those before the last response. The first event
that is not in a sum is its witness: only a deletion, or a later sum, takes it away, and then the
sum is not to be there either. So a conversation holds at most so many sessions and one for each
48 KiB of its text, packed; they stay until it is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sessionkv.client import AsyncClient
from sessionkv.client.results import NodeInfo
from sessionkv.errors import (
    ConversationNotFound,
    InvalidRequest,
    SessionBusy,
    SessionExists,
    SessionNotFound,
)
from sessionkv.gateway.openai.conversation_sums import (
    ConversationEvent,
    in_force,
    kinds_of,
    packed,
    unpacked,
)
from sessionkv.gateway.openai.response_ids import is_conversation_id

S = TypeVar("S")
T = TypeVar("T")
_PREFIX = "http:conv:"
_DOCUMENT = "conversation"
_PIECE = "piece"
_AT_ONCE = 32
FOLD_AT = 32
_TRIES = 8
_TOO_LONG = "less than 64 KiB at a time"


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
        events = in_force(await self._listed(conversation_id))
        if not events:
            raise ConversationNotFound(conversation_id)
        return events

    async def _listed(self, conversation_id: str) -> list[ConversationEvent]:
        if not is_conversation_id(conversation_id):
            return []
        found = []
        for info in await self._client.sessions(f"{_PREFIX}{conversation_id}."):
            _, number, kind = info.name.rsplit(".", 2)
            found.append(ConversationEvent(int(number), kind, info.name, info.node))
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

    async def append(self, conversation_id: str, kind: str, document: Mapping[str, Any]) -> int:
        """Note that something happened; how many events there are then, a sum left out.

        Raises:
            ConversationNotFound: There is no such conversation.
            InvalidRequest: There is more than can be kept at a time.
            SessionBusy: Others were faster, again and again.
        """
        return await self.next(conversation_id, kind, lambda name: self._open(name, document))

    async def next(
        self, conversation_id: str, kind: str, make: Callable[[str], Awaitable[object]]
    ) -> int:
        """Make the session of what happened next; where somebody was faster, of what did then."""
        for _ in range(_TRIES):
            events = await self.events(conversation_id)
            with contextlib.suppress(SessionExists):
                await make(_name(conversation_id, events[-1].number + 1, kind))
                return sum(event.piece is None for event in events) + 1
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
        listed = await self._listed(conversation_id)
        if not listed:
            raise ConversationNotFound(conversation_id)
        while listed:  # again, for what another gateway's fold has written meanwhile
            # Its beginning goes last: what a crash leaves is a conversation, to be deleted again.
            last = in_force(listed)
            for event in [*(event for event in listed if event not in last), *reversed(last)]:
                await self._drop(event)
            listed = await self._listed(conversation_id)

    async def fold(
        self, conversation_id: str, witness: ConversationEvent, document: Mapping[str, Any]
    ) -> None:
        """Let a sum take the place of all events before one; of a deleted conversation none stays.

        Args:
            conversation_id: The conversation.
            witness: The first event that is not in the sum.
            document: The sum. It is packed in a thread, since it may be long.
        """
        number, pieces = witness.number, await _aside(packed, document)
        for kind, piece in zip(kinds_of(pieces), pieces, strict=True):
            with contextlib.suppress(SessionExists):  # a fold that a crash cut off had made it
                await self._open(_name(conversation_id, number, kind), {_PIECE: piece})
        listed = await self._listed(conversation_id)
        is_there = any(event.session == witness.session for event in listed)
        last = {event.session for event in in_force(listed)} if is_there else set()
        for event in listed:
            is_own = event.number == number and event.piece is not None
            if event.session not in last and (is_own or (is_there and event.number <= number)):
                await self._drop(event)

    async def sum_of(self, events: Sequence[ConversationEvent]) -> dict[str, Any] | None:
        """The document of the sum that events begin with; None where there is none."""
        pieces = [event for event in events if event.piece is not None]
        if not pieces:
            return None
        nodes = await self.nodes(pieces)
        texts = [document_of(nodes[event.node])[_PIECE] for event in pieces]
        return await _aside(unpacked, texts)

    async def _drop(self, event: ConversationEvent) -> None:
        with contextlib.suppress(SessionNotFound):
            await self._client.delete(event.session)


async def _aside(work: Callable[[S], T], value: S) -> T:
    """What work makes of a value that may be long, in a thread that ends with it."""
    threads = ThreadPoolExecutor(1, "conversation")
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, work, value)
    finally:
        threads.shutdown(wait=False)


def _name(conversation_id: str, number: int, kind: str) -> str:
    return f"{_PREFIX}{conversation_id}.{number:08}.{kind}"


def document_of(node: NodeInfo) -> dict[str, Any]:
    """What was noted with an event; of a response there is none."""
    return dict(node.metadata[_DOCUMENT])
