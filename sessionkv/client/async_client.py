"""The asyncio client: the same methods and results as :class:`~sessionkv.client.client.Client`.

The connection has its own thread, as in the blocking client; a reply wakes the event loop that
waits for it. Cancelling a task cancels its turn and loses nothing else. A client may be used from
several loops; each call belongs to the loop it is made in.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from sessionkv.client.assemble import answer, failure
from sessionkv.client.async_stream import AsyncStream, Awaited, Leave
from sessionkv.client.core import ClientCore, socket_transport
from sessionkv.client.options import GenerateOptions, TurnOptions, given, given_turn
from sessionkv.client.results import (
    NodeInfo,
    Places,
    Served,
    SessionInfo,
    SessionPage,
    TurnResult,
    node_info,
    page_of_sessions,
    path_of,
    served,
    session_info,
    session_places,
    turn_result,
)
from sessionkv.errors import ConnectionLost, EngineClosed, SessionKVError
from sessionkv.ipc import messages as wire
from sessionkv.ipc.transport import Transport


class AsyncClient:
    """A connection to an engine. Use with ``async with``, or ``await`` :meth:`close`."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout_s: float = 30.0,
        key: str | None = None,
        tenant: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        """Connect; arguments and errors as for :class:`~sessionkv.client.client.Client`."""
        self._timeout_s = timeout_s
        self._core = ClientCore(
            transport or socket_transport(endpoint, timeout_s, key=key, tenant=tenant)
        )
        self._finalizer = weakref.finalize(self, self._core.close)

    async def open(
        self,
        name: str,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        history: str | None = None,
        budget_bytes: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncSession:
        """Create a session, or resume the one of that name."""
        fields = given(
            session=name,
            system=system,
            tools=tools,
            history=history,
            budget_bytes=budget_bytes,
            metadata=metadata,
        )
        await self._call(wire.Open, fields)
        return AsyncSession(self, name)

    def session(self, name: str) -> AsyncSession:
        """Handle of a session that exists; nothing is asked of the engine."""
        return AsyncSession(self, name)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> TurnResult:
        """Generate without a session; what was seen before is found in the cache all the same."""
        fields = given_turn(options, prompt=prompt, messages=messages, tokens=tokens)
        return await self._finish(Awaited(self._core, wire.Generate, fields), self._abandon)

    def stream_generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """As :meth:`generate`, piece by piece; starts with the first event that is awaited."""
        fields = given_turn(options, prompt=prompt, messages=messages, tokens=tokens, stream=True)

        async def start() -> Awaited:
            return Awaited(self._core, wire.Generate, fields)

        return AsyncStream(self, self._core, start, self._abandon)

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Bytes that each token id stands for, control tokens spelled out."""
        value = await self._call(wire.Pieces, {"tokens": tokens})
        return list(value["pieces"])

    async def count(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Exactly how many prompt tokens :meth:`generate` of the same would have now."""
        fields = given(prompt=prompt, messages=messages, tools=tools)
        value: dict[str, int] = await self._call(wire.Count, fields)
        return value["tokens"]

    async def served(self) -> Served:
        """What the engine serves; it is asked where it has not answered anything yet."""
        return served(self._core.welcome or await self.welcome())

    async def sessions(self, prefix: str = "") -> list[SessionInfo]:
        """All sessions whose name begins with ``prefix``, by name."""
        found: list[SessionInfo] = []
        after: str | None = None
        while True:
            page = await self._call(wire.List, given(prefix=prefix, after=after))
            found += [session_info(value) for value in page["sessions"]]
            after = page.get("next")
            if after is None:
                return found

    async def session_page(
        self, prefix: str = "", *, after: str | None = None, limit: int = 1000
    ) -> SessionPage:
        """Up to ``limit`` (at most 10,000) of these sessions, those behind the name ``after``."""
        fields = given(prefix=prefix, after=after, limit=limit)
        return page_of_sessions(await self._call(wire.List, fields))

    async def delete(self, name: str) -> None:
        """Delete a session: its name, and every turn and block that no other session reaches."""
        await self._call(wire.Close, {"session": name, "keep": False})

    @property
    def num_asked(self) -> int:
        """Requests so far."""
        return self._core.num_asked

    @property
    def num_open(self) -> int:
        """Requests that wait for their answer, running streams among them."""
        return self._core.num_open

    @property
    def has_ended(self) -> bool:
        """Whether the connection is over for good: closed, refused, or given up."""
        return self._core.has_ended

    async def welcome(self) -> wire.Welcome:
        """How the engine greeted this connection: its model, its limits.

        Raises:
            ConnectionLost: It does not answer.
        """
        await self._call(wire.Ping, {"consumed": self._core.consumed})
        welcome = self._core.welcome
        if welcome is None:
            raise ConnectionLost("the engine did not greet this connection")
        return welcome

    async def flush(self) -> dict[str, Any]:
        """Write the KV of all idle sessions to disk; returns counts when that is done."""
        value: dict[str, Any] = await self._call(wire.Flush, {}, has_timeout=False)
        return value

    async def stats(self, *, brief: bool = False) -> dict[str, Any]:
        """All metrics of the engine, as a nested map; of a tenant, unless the key is an operator's.

        Args:
            brief: Only whether the engine drains and how many turns run and wait; cheap.
        """
        value: dict[str, Any] = await self._call(wire.Stats, given(brief=brief or None))
        return value

    async def close(self) -> None:
        """End the connection: open turns are cancelled, unless they have an idempotency key."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> AsyncClient:
        """The client itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def _call(
        self, kind: type[wire.Request], fields: dict[str, Any], *, has_timeout: bool = True
    ) -> Any:
        """Value of a request that is not a turn."""
        timeout_s = self._timeout_s if has_timeout else None
        awaited = Awaited(self._core, kind, fields)
        try:
            async with asyncio.timeout(timeout_s):
                item, _ = await awaited.get()
        except TimeoutError:
            raise ConnectionLost(f"no answer to {kind.TYPE!r} within {timeout_s:g} s") from None
        finally:
            self._core.forget(awaited.pending)
        return answer(item)

    async def _finish(self, awaited: Awaited, leave: Leave) -> TurnResult:
        """Wait for a turn without stream; whatever ends the wait early cancels it."""
        try:
            while True:
                item, _ = await awaited.get()
                if isinstance(item, wire.Done):
                    return turn_result(item)
                if not isinstance(item, wire.PROVISIONAL):
                    raise failure(item)
        finally:
            if not awaited.pending.ended:
                leave(awaited)

    def _abandon(self, awaited: Awaited) -> None:
        self._core.abandon(awaited.pending)


class AsyncSession:
    """Handle of one session, for one event loop; a context manager that closes and keeps it.

    Attributes:
        name: Of the session.
    """

    def __init__(self, client: AsyncClient, name: str) -> None:
        """Made by :meth:`AsyncClient.open` and :meth:`AsyncClient.session`."""
        self.name = name
        self._client = client
        self._core = client._core
        self._left: list[Awaited] = []
        self._settling = asyncio.Lock()
        self._closed = False

    async def turn(
        self,
        text: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[TurnOptions],
    ) -> TurnResult:
        """Run one turn and wait for its end; cancelling the task cancels the turn."""
        awaited = await self._submit(text, messages, tokens, options)
        return await self._client._finish(awaited, self._leave)

    def stream(
        self,
        text: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[TurnOptions],
    ) -> AsyncStream:
        """As :meth:`turn`, piece by piece.

        Leaving early cancels the turn, and the session is as before it. It starts with the first
        event that is awaited.
        """

        async def start() -> Awaited:
            return await self._submit(text, messages, tokens, options, stream=True)

        return AsyncStream(self._client, self._core, start, self._leave)

    async def count(
        self, text: str | None = None, *, messages: Sequence[wire.ChatMessage] | None = None
    ) -> int:
        """Exactly how many prompt tokens :meth:`turn` of the same would have now."""
        if text is not None and messages is None:
            messages = [{"role": "user", "content": text}]
        value: dict[str, int] = await self._call(wire.Count, messages=messages)
        return value["tokens"]

    async def fork(self, name: str, *, node: str | None = None) -> AsyncSession:
        """A new session that continues from the last completed turn, or from an earlier one."""
        await self._call(wire.Fork, name=name, node=node)
        return AsyncSession(self._client, name)

    async def rename(self, name: str) -> SessionInfo:
        """Give the session another name: this handle's from then on; its pin stays."""
        info = session_info(await self._call(wire.Rename, name=name))
        self.name = name
        return info

    async def rewind(self, turns: int = 1) -> SessionInfo:
        """Take back so many turns, each with its reply."""
        return session_info(await self._call(wire.Rewind, turns=turns))

    async def pin(
        self, *, tier: str = "host", ttl_s: float | None = None, priority: int = 50
    ) -> SessionInfo:
        """Let the session's KV leave ``tier`` only after everything that is pinned less."""
        return session_info(await self._call(wire.Pin, tier=tier, ttl_s=ttl_s, priority=priority))

    async def unpin(self) -> SessionInfo:
        """Take the pin off."""
        return session_info(await self._call(wire.Unpin))

    async def info(self, *, history: bool = False) -> SessionInfo:
        """What the engine knows of the session; with its messages where ``history``."""
        return session_info(await self._call(wire.Info, history=history))

    async def places(self) -> Places:
        """Where the session's blocks are now: on the device, in host memory, on disk, nowhere."""
        return session_places(await self._call(wire.Places))

    async def path(self) -> tuple[str, ...]:
        """Ids of the session's turns, its root first. O(turns)."""
        value = await self._call(wire.Export)
        return tuple(f"n-{number}" for number in value["path"])

    async def node(self, node: str | None = None) -> NodeInfo:
        """What is kept of one turn of the session: the last one, or the one of that id."""
        return node_info(await self._call(wire.Node, node=node))

    async def nodes(self, node: str | None = None) -> list[NodeInfo]:
        """The turns from the root, which comes first, to the last one or that of an id."""
        return path_of(await self._call(wire.Node, node=node, path=True))

    async def close(self, *, keep: bool = True) -> None:
        """End this handle; a second call does nothing; without ``keep`` the session is deleted."""
        if not self._closed:
            await self._call(wire.Close, keep=keep)
            self._closed = True

    async def __aenter__(self) -> AsyncSession:
        """The session itself."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close and keep; when leaving by an error, that error is the one to be seen."""
        hidden = (SessionKVError,) if kind is not None else ()
        with contextlib.suppress(*hidden):
            await self.close()

    async def _submit(
        self,
        text: str | None,
        messages: Sequence[wire.ChatMessage] | None,
        tokens: Sequence[int] | None,
        options: TurnOptions,
        *,
        stream: bool = False,
    ) -> Awaited:
        await self._settle()
        fields = given_turn(
            options,
            session=self.name,
            text=text,
            messages=messages,
            tokens=tokens,
            stream=stream,
        )
        return Awaited(self._core, wire.Turn, fields)

    async def _call(self, kind: type[wire.Request], **fields: Any) -> Any:
        await self._settle()
        return await self._client._call(kind, given(session=self.name, **fields))

    def _leave(self, awaited: Awaited) -> None:
        self._left.append(awaited)
        self._core.abandon(awaited.pending)

    async def _settle(self) -> None:
        """Let turns that were left early end, so that they are not in the way of what follows."""
        if self._closed:
            raise EngineClosed(f"this handle of session {self.name!r} is closed")
        async with self._settling:  # each of them has one terminal event, for one task to take
            while self._left:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._client._timeout_s):
                        await self._left[0].get()
                del self._left[0]
