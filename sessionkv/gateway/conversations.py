"""Sessions for clients that keep none: a committed exchange is one, named by its conversation.

The name is ``~http:chat:``, the digest of the conversation up to and with the answer, and that of
its system prompt and tools. A request is matched by looking for the longest part of its
conversation that ends with an answer and whose digests name a session; a copy of that session,
which costs nothing, is continued with the whole conversation under history ``follow``, and
afterwards has the new conversation's name. So matching is by content, works across restarts, and
rests on no key that a client may forget or share. Where nothing is found, a session of the same
messages under another system prompt or other tools is what the prompt is compared with.

An answer ends for its client when its session has the name: whoever has seen the end finds the
exchange, though the engine be killed the instant after.

It is never trusted: under ``follow`` the model sees what its template makes of what was sent,
whatever session was found. A wrong, missing or damaged one costs cache, not truth.

Sessions whose names begin with ``~`` run out in the engine by themselves, those of turns that a
crash cut off too, and take nobody's place. One event loop; one object for each connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Unpack

from sessionkv.client import AsyncClient, StreamEvent
from sessionkv.client.options import TurnOptions
from sessionkv.errors import (
    ConnectionLost,
    PinRefused,
    SessionDamaged,
    SessionExists,
    SessionKVError,
    SessionNotFound,
)
from sessionkv.gateway.early_end import until
from sessionkv.gateway.keeping import Keeping
from sessionkv.gateway.place_memory import PlaceMemory, dated
from sessionkv.gateway.recent import Recent
from sessionkv.gateway.rewriting import Steady, steady
from sessionkv.gateway.rewriting_places import Place, is_told, put_back
from sessionkv.gateway.transcript import Message, Transcript

_log = logging.getLogger(__name__)

NAMES = "~http:chat:"
RUNNING = "~http:turn:"
"""Names of sessions while their turn runs."""
_ROOT_CHARS = 32
MAX_KNOWN = 20_000
"""Names of which it is remembered that they are there: what is not is tried all the same."""
MAX_TRIES = 4
"""Sessions that are asked for, one after the other, before a conversation counts as new."""


class Conversations:
    """What exchanges there are, as far as is known here, and the making of new ones."""

    def __init__(self, client: AsyncClient, *, is_steady: bool = False) -> None:
        """Know of nothing; the client stays the caller's."""
        self.client = client
        self._is_steady = is_steady
        self.places = PlaceMemory(client)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._recent = Recent()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, transcript: Transcript, keeping: Keeping) -> Exchange:
        """An exchange that continues what is known of its conversation."""
        is_steady = self._is_steady if keeping.is_steady is None else keeping.is_steady
        found = Steady(transcript, ())
        if is_steady and not keeping.is_helper:
            found = steady(transcript)
        exchange = Exchange(self, found, keeping, is_steady=is_steady)
        self._match(exchange, found.transcript, keeping)
        return exchange

    def _match(self, exchange: Exchange, transcript: Transcript, keeping: Keeping) -> None:
        """Say which sessions an exchange may go on from, or else is to be compared with."""
        names = [_name(transcript, digest) for digest in reversed(transcript.digests())]
        known = [name for name in names if name in self._known]
        # The longest may be of an earlier run of the gateway, and so may all where none is known.
        tried = dict.fromkeys([*names[:1], *known, *names[1:MAX_TRIES]])
        changed = self._recent.changed(transcript, keeping.label)
        exchange.candidates = [*tried]
        if changed is None or changed.name not in self._known:
            return
        if changed.root != transcript.root:
            exchange.changed_from = changed.name
            return
        # Following it, the engine can say where it was changed. Only where it goes on from what is
        # known, so that nothing is found less for it.
        goes_on = not known or _digest(known[0]) in changed.digests
        first = [changed.name] if goes_on else []
        exchange.candidates = [*first, *tried][: MAX_TRIES + 1]

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have something done whoever goes on waiting for it; :meth:`settle` does."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settle(self) -> None:
        """Wait until nothing is left to be done."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # For exchanges ---------------------------------------------------------------------------

    def forget(self, name: str) -> None:
        """There is no session of that name any more."""
        self._known.pop(name, None)
        self.places.forget(name)

    def used(self, name: str) -> None:
        """The session was continued, or is new."""
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def answered(self, transcript: Transcript, reply: Message, keeping: Keeping) -> str:
        """An exchange is the last one of its conversation; the name of its session."""
        name = _name(transcript, transcript.with_answer(reply)[1])
        self.used(name)
        self._recent.put(name, transcript, reply, keeping.label)
        return name

    async def same_messages(self, transcript: Transcript) -> str | None:
        """A session with the same messages under another system prompt or other tools."""
        digests = transcript.digests()
        if not digests:
            return None
        page = await self.client.session_page(f"{NAMES}{digests[-1]}.", limit=1)
        return page.sessions[0].name if page.sessions else None

    async def name(
        self, running: str, name: str, exchange: Exchange, *, after: str | None = None
    ) -> None:
        """Give a session whose turn is committed its name; one transaction of the journal.

        What else is to be done is begun and not waited for: where the session is pinned, the one
        that it continues, ``after``, is not any more: a conversation has one pin, however many
        turns.

        Raises:
            ConnectionLost: The engine is gone, perhaps without having named it.
        """
        named = await self._rename(running, name, exchange)
        if named is not None:
            self.later(self._pin(named, exchange.keeping, after))

    async def _pin(self, name: str, keeping: Keeping, after: str | None) -> None:
        if keeping.tier is None:
            return
        try:
            await self.client.session(name).pin(tier=keeping.tier, ttl_s=keeping.ttl_s)
            if after is not None and after != name:
                await self.client.session(after).unpin()
        except SessionNotFound:  # deleted meanwhile, and its pin with it
            pass
        except PinRefused as error:
            _log.info("a conversation's cache cannot be promised: %s", error.message)
        except SessionKVError as error:
            _log.warning("a conversation's cache could not be pinned: %s", error.message)

    async def _rename(self, running: str, name: str, exchange: Exchange) -> str | None:
        """The name that there is a session of now; ConnectionLost where nobody can say."""
        try:
            await self.client.session(running).rename(name)
            if exchange.is_steady:
                self.places.put(name, exchange.places)
        except SessionExists:  # the same was asked and answered before
            places = await self.places.of(name) if exchange.is_steady else ()
            if places and not is_told(exchange.found, places):
                return await self._rename(running, dated(name, exchange.found), exchange)
            self.later(self._delete(running))
        except ConnectionLost:
            self.forget(name)
            raise
        except SessionKVError as error:
            self.forget(name)
            _log.warning("a conversation could not be kept: %s", error.message)
            self.later(self._delete(running))
            return None
        return name

    async def _delete(self, name: str) -> None:
        try:
            await self.client.delete(name)
        except SessionNotFound:
            pass
        except SessionKVError as error:
            _log.warning("a session could not be removed: %s", error.message)


class Exchange:
    """One request's turn. :meth:`stream` it once, :meth:`keep` it, and :meth:`close` it always.

    Attributes:
        candidates: Sessions to go on from, the best one first.
        changed_from: Where there is none of them, the session to compare with.
        found: What was asked, without what moves.
        keeping: What is to become of its session.
        is_steady: What moves is put where it costs no cache.
        continues: Name of the session that it continues, None for a new conversation.
        ends_at: Asked behind each event: after how many characters of the reply the answer is over
            for its client, where the turn ends; None as long as it is not.
    """

    def __init__(
        self,
        conversations: Conversations,
        found: Steady,
        keeping: Keeping,
        *,
        is_steady: bool,
    ) -> None:
        """Made by :meth:`Conversations.begin`."""
        self._all = conversations
        self.found = found
        self._transcript = found.transcript
        self._placed = put_back(found, ())
        self.is_steady = is_steady
        self.keeping = keeping
        self.candidates: list[str] = []
        self.changed_from: str | None = None
        self._running: str | None = None
        self._naming: asyncio.Task[None] | None = None
        self.continues: str | None = None
        self.ends_at: Callable[[], int | None] = _never

    @property
    def places(self) -> Sequence[Place]:
        """Where what was taken out is in what the model saw."""
        return self._placed.places

    @property
    def rewrites(self) -> Sequence[Mapping[str, str]]:
        """What the model saw elsewhere than the client has it, once the turn has begun."""
        return self._placed.rewrites

    async def stream(self, **options: Unpack[TurnOptions]) -> AsyncGenerator[StreamEvent, None]:
        """Run the turn; closing the generator cancels it.

        Raises:
            SessionKVError: It failed.
        """
        if self.keeping.is_helper:
            async with aclosing(self._generation(options)) as events:
                async for event in events:
                    yield event
            return
        for name in (*self.candidates, None):
            if name is None:
                other = self.changed_from or await self._all.same_messages(self._transcript)
                options["changed_from"] = other
            try:
                async with aclosing(self._turn(name, options)) as events:
                    async for event in events:
                        yield self._located(event)
                return
            except _Stale:
                continue

    async def count(self) -> int:
        """How many prompt tokens its turn would have, were it run now.

        Raises:
            SessionKVError: They cannot be counted.
        """
        client = self._all.client
        for name in () if self.keeping.is_helper else self.candidates:
            try:
                name = await self._session(name)
                placed = await self._put_back(name)
                return await client.session(name).count(messages=list(placed.messages))
            except (SessionNotFound, SessionDamaged):
                self._all.forget(name)
        whole = await self._put_back(None)
        return await client.count(messages=list(whole.messages), tools=whole.tools)

    def keep(self, reply: Message) -> None:
        """Begin to name the session by its conversation, whatever becomes of the client.

        Args:
            reply: The answer as the client was given it.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        name = self._all.answered(self._transcript, reply, self.keeping)
        naming = self._all.name(running, name, self, after=self.continues)
        self._naming = self._all.later(naming)
        self._naming.add_done_callback(_heard)

    async def kept(self) -> None:
        """Wait until the session has its name: before the client is told that the answer is over.

        One that could not be named is told in the log and costs cache, not the answer.

        Raises:
            ConnectionLost: The engine is gone, perhaps without having named it.
        """
        if self._naming is not None:
            await asyncio.shield(self._naming)

    async def close(self) -> None:
        """Leave nothing behind, unless it was kept."""
        if self._running is not None:
            running, self._running = self._running, None
            self._all.later(self._all._delete(running))

    def _located(self, event: StreamEvent) -> StreamEvent:
        """With a miss told in the request's own terms."""
        if event.result is None:
            return event
        cache = event.result.cache
        cache = replace(cache, miss=self._placed.transcript.located(cache.miss))
        return replace(event, result=replace(event.result, cache=cache))

    def _generation(self, options: TurnOptions) -> AsyncGenerator[StreamEvent, None]:
        rest: Any = {k: v for k, v in options.items() if k != "when_busy"}
        messages, tools = list(self._transcript.messages), self._transcript.tools
        running = self._all.client.stream_generate(messages=messages, tools=tools, **rest)
        return until(running, self.ends_at)

    async def _session(self, name: str) -> str:
        """Of the sessions of one name, that with this conversation's dates."""
        return await self._all.places.session(name, self.found) if self.is_steady else name

    async def _put_back(self, name: str | None) -> Transcript:
        """What the model is to see where the named session, or none, is gone on from."""
        if self.is_steady:
            earlier = () if name is None else await self._all.places.of(name)
            self._placed = put_back(self.found, earlier)
        return self._placed.transcript

    async def _turn(
        self, name: str | None, options: TurnOptions
    ) -> AsyncGenerator[StreamEvent, None]:
        """A turn of a copy of the named session, or of a new one.

        The copy is asked for and the turn right behind it, so that nobody waits for the journal.

        Raises:
            _Stale: There is no session of that name, or none that can be read.
            SessionKVError: The turn failed, or the session could not be made.
        """
        client = self._all.client
        name = name and await self._session(name)
        messages = list((await self._put_back(name)).messages)
        if self.is_steady:
            options["metadata"] = self._placed.metadata
        running = self._running = RUNNING + secrets.token_hex(12)
        self.continues = name
        made = asyncio.ensure_future(self._make(name, running))
        await asyncio.sleep(0)  # it sends its request
        session = client.session(running)
        try:
            turn = session.stream(messages=messages, **options)
            async with aclosing(until(turn, self.ends_at)) as events:
                async for event in events:
                    yield event
            await made
        except SessionNotFound:
            self._running = None
            await made  # its own failure is what matters
            raise
        finally:
            if not made.done():
                made.add_done_callback(_heard)
            else:
                _heard(made)
        if name is not None:
            self._all.used(name)

    async def _make(self, name: str | None, running: str) -> None:
        client = self._all.client
        if name is None:
            system, tools = self._transcript.system, self._transcript.tools
            await client.open(running, system=system, tools=tools or None, history="follow")
            return
        try:
            await client.session(name).fork(running)
        except (SessionNotFound, SessionDamaged):
            self._all.forget(name)
            raise _Stale from None


def _name(transcript: Transcript, digest: str) -> str:
    return f"{NAMES}{digest}.{transcript.root[:_ROOT_CHARS]}"


def _digest(name: str) -> str:
    return name.removeprefix(NAMES).partition(".")[0]


def _never() -> None:
    return None


class _Stale(Exception):
    """There is no session of a name, or none that can be read."""


def _heard(made: asyncio.Future[None]) -> None:
    """A failure that somebody else was told of needs no warning."""
    if not made.cancelled():
        made.exception()
