"""Sessions for clients that keep none: a committed exchange is one, named by its conversation.

The name is ``~http:chat:`` and the digest of the conversation up to and with the answer. A request
is matched by looking for the longest part of its conversation that ends with an answer and whose
digest names a session; a copy of that session, which costs nothing, is continued with the whole
conversation under history ``follow``, and afterwards has the new conversation's name. So matching
is by content, works across restarts, and rests on no key that a client may forget or share.

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
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
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
from sessionkv.gateway.transcript import Message, Transcript

_log = logging.getLogger(__name__)

NAMES = "~http:chat:"
RUNNING = "~http:turn:"
"""Names of sessions while their turn runs."""
MAX_KNOWN = 20_000
"""Names of which it is remembered that they are there: what is not is tried all the same."""
MAX_TRIES = 4
"""Sessions that are asked for, one after the other, before a conversation counts as new."""
MAX_LABELS = 1_000
"""Conversations of which it is remembered how they went, to tell what changed in them."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What becomes of an exchange.

    Attributes:
        is_helper: Nothing is kept: it only serves another conversation (a title, a summary).
        tier: Where its cache is wanted, None for no wish.
        ttl_s: How long.
        label: The client's own name of the conversation; None is how it begins.
    """

    is_helper: bool = False
    tier: str | None = None
    ttl_s: float | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class _Latest:
    """The last exchange under a label, to tell what a client has changed since."""

    name: str
    tools: str
    digests: tuple[str, ...]

    def parted_from(self, digests: Sequence[str]) -> bool:
        """Whether the two differ before either ends."""
        return any(one != other for one, other in zip(self.digests, digests, strict=False))


class Conversations:
    """What exchanges there are, as far as is known here, and the making of new ones."""

    def __init__(self, client: AsyncClient) -> None:
        """Know of nothing; the client stays the caller's."""
        self.client = client
        self._known: OrderedDict[str, None] = OrderedDict()
        self._latest: OrderedDict[str, _Latest] = OrderedDict()  # by label
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, transcript: Transcript, keeping: Keeping) -> Exchange:
        """An exchange that continues what is known of its conversation."""
        names = [NAMES + digest for digest in reversed(transcript.digests())]
        known = [name for name in names if name in self._known]
        # The longest may be of an earlier run of the gateway, and so may all where none is known.
        tried = dict.fromkeys([*names[:1], *known, *names[1:MAX_TRIES]])
        parted = self._parted(transcript, keeping, names, known)
        return Exchange(
            self, transcript, keeping, [*([parted] if parted else []), *tried][: MAX_TRIES + 1]
        )

    def _parted(
        self, transcript: Transcript, keeping: Keeping, names: list[str], known: list[str]
    ) -> str | None:
        """The exchange that a client has changed: following it, the engine can say where.

        Only one that goes on from what is known, so that nothing is found less for it.
        """
        latest = self._latest.get(keeping.label or transcript.opening)
        if latest is None or latest.name not in self._known or not (names or keeping.label):
            return None
        digests = transcript.all_digests()
        goes_on = not known or known[0].removeprefix(NAMES) in latest.digests
        is_same = latest.tools == transcript.tools_digest
        return latest.name if is_same and goes_on and latest.parted_from(digests) else None

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

    def used(self, name: str) -> None:
        """The session was continued, or is new."""
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def answered(self, name: str, transcript: Transcript, keeping: Keeping) -> None:
        """The exchange of that name is the last one under its label."""
        label = keeping.label or transcript.opening
        digests = (*transcript.all_digests(), name.removeprefix(NAMES))
        self._latest[label] = _Latest(name, transcript.tools_digest, digests)
        self._latest.move_to_end(label)
        if len(self._latest) > MAX_LABELS:
            self._latest.popitem(last=False)

    async def name(
        self, running: str, name: str, keeping: Keeping, *, after: str | None = None
    ) -> None:
        """Give a session whose turn is committed its name; one transaction of the journal.

        What else is to be done is begun and not waited for: the old name goes, and where the
        session is pinned, the one that it continues, ``after``, is not any more: a conversation
        has one pin, however many turns.

        Raises:
            ConnectionLost: The engine is gone, perhaps without having named it.
        """
        naming = asyncio.ensure_future(self._fork(running, name))
        await asyncio.sleep(0)  # its request goes out first: the turn is never without a name
        self.later(self._delete(running))
        if await naming:
            self.later(self._pin(name, keeping, after))

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

    async def _fork(self, running: str, name: str) -> bool:
        """Whether there is a session of that name now; ConnectionLost where nobody can say."""
        try:
            await self.client.session(running).fork(name)
        except SessionExists:  # the same was asked and answered before
            pass
        except ConnectionLost:
            self.forget(name)
            raise
        except SessionKVError as error:
            self.forget(name)
            _log.warning("a conversation could not be kept: %s", error.message)
            return False
        return True

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
        continues: Name of the session that it continues, None for a new conversation.
        ends_at: Asked behind each event: after how many characters of the reply the answer is over
            for its client, where the turn ends; None as long as it is not.
    """

    def __init__(
        self,
        conversations: Conversations,
        transcript: Transcript,
        keeping: Keeping,
        candidates: list[str],
    ) -> None:
        """Made by :meth:`Conversations.begin`; ``candidates`` are sessions, the best one first."""
        self._all = conversations
        self._transcript = transcript
        self._keeping = keeping
        self._candidates = candidates
        self._running: str | None = None
        self._naming: asyncio.Task[None] | None = None
        self.continues: str | None = None
        self.ends_at: Callable[[], int | None] = _never

    async def stream(self, **options: Unpack[TurnOptions]) -> AsyncGenerator[StreamEvent, None]:
        """Run the turn; closing the generator cancels it.

        Raises:
            SessionKVError: It failed.
        """
        if self._keeping.is_helper:
            async with aclosing(self._generation(options)) as events:
                async for event in events:
                    yield event
            return
        for name in (*self._candidates, None):
            try:
                async with aclosing(self._turn(name, options)) as events:
                    async for event in events:
                        yield event
                return
            except _Stale:
                continue

    async def count(self) -> int:
        """How many prompt tokens its turn would have, were it run now.

        Raises:
            SessionKVError: They cannot be counted.
        """
        client, messages = self._all.client, list(self._transcript.messages)
        for name in () if self._keeping.is_helper else self._candidates:
            try:
                return await client.session(name).count(messages=messages)
            except (SessionNotFound, SessionDamaged):
                self._all.forget(name)
        return await client.count(messages=messages, tools=self._transcript.tools)

    def keep(self, reply: Message) -> None:
        """Begin to name the session by its conversation, whatever becomes of the client.

        Args:
            reply: The answer as the client was given it.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        name = NAMES + self._transcript.answered(reply)
        self._all.used(name)
        self._all.answered(name, self._transcript, self._keeping)
        naming = self._all.name(running, name, self._keeping, after=self.continues)
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

    def _generation(self, options: TurnOptions) -> AsyncGenerator[StreamEvent, None]:
        rest: Any = {k: v for k, v in options.items() if k != "when_busy"}
        messages, tools = list(self._transcript.messages), self._transcript.tools
        running = self._all.client.stream_generate(messages=messages, tools=tools, **rest)
        return until(running, self.ends_at)

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
        running = self._running = RUNNING + secrets.token_hex(12)
        self.continues = name
        made = asyncio.ensure_future(self._make(name, running))
        await asyncio.sleep(0)  # it sends its request
        session = client.session(running)
        messages = list(self._transcript.messages)
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


def _never() -> None:
    return None


class _Stale(Exception):
    """There is no session of a name, or none that can be read."""


def _heard(made: asyncio.Future[None]) -> None:
    """A failure that somebody else was told of needs no warning."""
    if not made.cancelled():
        made.exception()
