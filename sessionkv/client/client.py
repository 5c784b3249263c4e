"""The blocking client: sessions, turns and streams over one connection to an engine.

Thread-safe: any thread may use a client and its sessions; a stream belongs to the thread that
iterates it. Works where only msgpack and pyzmq are installed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

from sessionkv.client.assemble import answer, failure
from sessionkv.client.core import ClientCore, socket_transport
from sessionkv.client.options import GenerateOptions, TurnOptions, given, given_turn
from sessionkv.client.pending import Pending
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
from sessionkv.client.stream import Leave, Stream
from sessionkv.errors import ConnectionLost, EngineClosed, SessionKVError
from sessionkv.ipc import messages as wire
from sessionkv.ipc.transport import Transport


class Client:
    """A connection to an engine. Use as a context manager, or call :meth:`close`."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout_s: float = 30.0,
        key: str | None = None,
        tenant: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        """Connect.

        Args:
            endpoint: ``ipc://PATH`` of an engine; None is the user's own (``sessionkv serve``).
            timeout_s: How long to wait for answers to everything that is not a turn or a flush, and
                for a lost engine to come back where a turn may be repeated. Turns have no timeout
                but their ``deadline_s``: a dead engine is noticed after 3 s of silence.
            key: Key that the engine asks for; it says whose sessions these are.
            tenant: Whom to act for; with an operator's key, or where the engine has no keys.
            transport: Another way to an engine than a socket.

        Raises:
            ConnectionLost: No engine listens there.
            ConfigError: The endpoint is not one.
        """
        self._timeout_s = timeout_s
        self._core = ClientCore(
            transport or socket_transport(endpoint, timeout_s, key=key, tenant=tenant)
        )
        self._finalizer = weakref.finalize(self, self._core.close)

    def open(
        self,
        name: str,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        history: str | None = None,
        budget_bytes: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Session:
        """Create a session, or resume the one of that name.

        Args:
            name: 1 to 4,096 bytes of UTF-8 without NUL.
            system: System prompt; None takes over an existing session's.
            tools: Tools for the chat template; None takes over an existing session's.
            history: ``"keep"`` or ``"follow"``: how messages that repeat the history are read.
            budget_bytes: Most KV that is retained of the session, from its start on; what goes past
                it is the first to leave every tier. Forks inherit it.
            metadata: Plain values, up to 64 KiB as JSON, kept with the root of a new session (see
                :meth:`Session.node`); an existing session keeps what it has.

        Raises:
            SessionDiffers: It exists with other values.
        """
        fields = given(
            session=name,
            system=system,
            tools=tools,
            history=history,
            budget_bytes=budget_bytes,
            metadata=metadata,
        )
        self._call(wire.Open, fields)
        return Session(self, name)

    def session(self, name: str) -> Session:
        """Handle of a session that exists; nothing is asked of the engine."""
        return Session(self, name)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> TurnResult:
        """Generate without a session; what was seen before is found in the cache all the same.

        Args:
            prompt: Text without template.
            messages: A whole conversation, through the model's template.
            tokens: Ids as they are.
            **options: See :class:`~sessionkv.client.options.GenerateOptions`.
        """
        fields = given_turn(options, prompt=prompt, messages=messages, tokens=tokens)
        return self._finish(self._core.submit(wire.Generate, fields), self._core.abandon)

    def stream_generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """As :meth:`generate`, piece by piece."""
        fields = given_turn(options, prompt=prompt, messages=messages, tokens=tokens, stream=True)
        pending = self._core.submit(wire.Generate, fields)
        return Stream(self, self._core, pending, self._core.abandon)

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Bytes that each token id stands for, control tokens spelled out.

        The text of a whole sequence is its pieces joined, as UTF-8, but for a space that some
        tokenizers put before it.
        """
        value = self._call(wire.Pieces, {"tokens": tokens})
        return list(value["pieces"])

    def count(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Exactly how many prompt tokens :meth:`generate` of the same would have now.

        What does not fit the model's window is counted too.

        Args:
            prompt: Text without template.
            messages: A whole conversation, through the model's template.
            tools: For the template.
        """
        fields = given(prompt=prompt, messages=messages, tools=tools)
        value: dict[str, int] = self._call(wire.Count, fields)
        return value["tokens"]

    def served(self) -> Served:
        """What the engine serves; it is asked where it has not answered anything yet."""
        if self._core.welcome is None:  # it comes before the first answer
            self._call(wire.Ping, {"consumed": self._core.consumed})
        if self._core.welcome is None:
            raise ConnectionLost("the engine did not greet this connection")
        return served(self._core.welcome)

    def sessions(self, prefix: str = "") -> list[SessionInfo]:
        """All sessions whose name begins with ``prefix``, by name."""
        found: list[SessionInfo] = []
        after: str | None = None
        while True:
            page = self._call(wire.List, given(prefix=prefix, after=after))
            found += [session_info(value) for value in page["sessions"]]
            after = page.get("next")
            if after is None:
                return found

    def session_page(
        self, prefix: str = "", *, after: str | None = None, limit: int = 1000
    ) -> SessionPage:
        """Up to ``limit`` (at most 10,000) of these sessions, those behind the name ``after``."""
        fields = given(prefix=prefix, after=after, limit=limit)
        return page_of_sessions(self._call(wire.List, fields))

    def delete(self, name: str) -> None:
        """Delete a session: its name, and every turn and block that no other session reaches.

        Raises:
            SessionNotFound: There is none of that name.
        """
        self._call(wire.Close, {"session": name, "keep": False})

    def flush(self) -> dict[str, Any]:
        """Write the KV of all idle sessions to disk; returns counts when that is done."""
        value: dict[str, Any] = self._call(wire.Flush, {}, has_timeout=False)
        return value

    def stats(self, *, brief: bool = False) -> dict[str, Any]:
        """All metrics of the engine, as a nested map; of a tenant, unless the key is an operator's.

        Args:
            brief: Only whether the engine drains and how many turns run and wait; cheap.
        """
        value: dict[str, Any] = self._call(wire.Stats, given(brief=brief or None))
        return value

    def close(self) -> None:
        """End the connection: open turns are cancelled, unless they have an idempotency key."""
        self._finalizer()

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _call(
        self, kind: type[wire.Request], fields: dict[str, Any], *, has_timeout: bool = True
    ) -> Any:
        """Value of a request that is not a turn."""
        timeout_s = self._timeout_s if has_timeout else None
        pending = self._core.submit(kind, fields)
        try:
            item = pending.get(timeout_s)
        finally:
            self._core.forget(pending)
        if item is None:
            raise ConnectionLost(f"no answer to {kind.TYPE!r} within {timeout_s:g} s")
        return answer(item[0])

    def _finish(self, pending: Pending, leave: Leave) -> TurnResult:
        """Wait for a turn without stream; whatever ends the wait early cancels it."""
        try:
            while (taken := pending.get()) is not None:
                if isinstance(taken[0], wire.Done):
                    return turn_result(taken[0])
                if not isinstance(taken[0], wire.PROVISIONAL):
                    break
        finally:
            if not pending.ended:
                leave(pending)
        raise failure(taken[0] if taken else EngineClosed("the client is closed"))


class Session:
    """Handle of one session. As a context manager it closes at the end and keeps the session.

    Attributes:
        name: Of the session.
    """

    def __init__(self, client: Client, name: str) -> None:
        """Made by :meth:`Client.open` and :meth:`Client.session`."""
        self.name = name
        self._client = client
        self._core = client._core
        self._left: list[Pending] = []
        self._settling = threading.Lock()
        self._closed = False

    def turn(
        self,
        text: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[TurnOptions],
    ) -> TurnResult:
        """Run one turn and wait for its end; an interrupt cancels it.

        Args:
            text: One user message.
            messages: New messages (or, under ``follow``, the whole conversation).
            tokens: Ids, appended as they are: no template.
            **options: See :class:`~sessionkv.client.options.TurnOptions`.

        Raises:
            RequestError: The request is at fault; nothing changed.
            TurnError: The turn ended without being committed; the session is as before.
            ConnectionLost: The engine is gone; without an idempotency key it is not known whether
                the turn was committed.
        """
        pending = self._submit(text, messages, tokens, options)
        return self._client._finish(pending, self._leave)

    def stream(
        self,
        text: str | None = None,
        *,
        messages: Sequence[wire.ChatMessage] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Unpack[TurnOptions],
    ) -> Stream:
        """As :meth:`turn`, piece by piece.

        Leaving the iteration early cancels the turn, and the session is as before it.
        """
        pending = self._submit(text, messages, tokens, options, stream=True)
        return Stream(self._client, self._core, pending, self._leave)

    def count(
        self, text: str | None = None, *, messages: Sequence[wire.ChatMessage] | None = None
    ) -> int:
        """Exactly how many prompt tokens :meth:`turn` of the same would have now."""
        if text is not None and messages is None:
            messages = [{"role": "user", "content": text}]
        value: dict[str, int] = self._call(wire.Count, messages=messages)
        return value["tokens"]

    def fork(self, name: str, *, node: str | None = None) -> Session:
        """A new session that continues from the last completed turn; costs no KV.

        Args:
            name: Of the new session.
            node: An earlier turn of this session to continue from.

        Raises:
            SessionExists: The name is taken.
            NodeNotFound: The turn is not one of this session's.
        """
        self._call(wire.Fork, name=name, node=node)
        return Session(self._client, name)

    def rename(self, name: str) -> SessionInfo:
        """Give the session another name: this handle's from then on; its pin stays.

        Raises:
            SessionExists: The name is taken.
            SessionBusy: A turn is running.
        """
        info = session_info(self._call(wire.Rename, name=name))
        self.name = name
        return info

    def rewind(self, turns: int = 1) -> SessionInfo:
        """Take back so many turns, each with its reply.

        Raises:
            RewindBeyondRoot: There are not so many; nothing changed.
            SessionBusy: A turn is running.
        """
        return session_info(self._call(wire.Rewind, turns=turns))

    def pin(
        self, *, tier: str = "host", ttl_s: float | None = None, priority: int = 50
    ) -> SessionInfo:
        """Let the session's KV leave ``tier`` only after everything that is pinned less.

        Raises:
            PinRefused: The tier cannot promise that many bytes.
        """
        return session_info(self._call(wire.Pin, tier=tier, ttl_s=ttl_s, priority=priority))

    def unpin(self) -> SessionInfo:
        """Take the pin off."""
        return session_info(self._call(wire.Unpin))

    def info(self, *, history: bool = False) -> SessionInfo:
        """What the engine knows of the session; with its messages where ``history``."""
        return session_info(self._call(wire.Info, history=history))

    def places(self) -> Places:
        """Where the session's blocks are now: on the device, in host memory, on disk, nowhere."""
        return session_places(self._call(wire.Places))

    def path(self) -> tuple[str, ...]:
        """Ids of the session's turns, its root first. O(turns)."""
        value = self._call(wire.Export)
        return tuple(f"n-{number}" for number in value["path"])

    def node(self, node: str | None = None) -> NodeInfo:
        """What is kept of one turn of the session: the last one, or the one of that id.

        Raises:
            NodeNotFound: The turn is not one of this session's.
        """
        return node_info(self._call(wire.Node, node=node))

    def nodes(self, node: str | None = None) -> list[NodeInfo]:
        """The turns from the root, which comes first, to the last one or that of an id."""
        return path_of(self._call(wire.Node, node=node, path=True))

    def close(self, *, keep: bool = True) -> None:
        """End this handle; a second call does nothing.

        Args:
            keep: False deletes the session, as :meth:`Client.delete`.
        """
        if not self._closed:
            self._call(wire.Close, keep=keep)
            self._closed = True

    def __enter__(self) -> Session:
        """The session itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close and keep; when leaving by an error, that error is the one to be seen."""
        hidden = (SessionKVError,) if kind is not None else ()
        with contextlib.suppress(*hidden):
            self.close()

    def _submit(
        self,
        text: str | None,
        messages: Sequence[wire.ChatMessage] | None,
        tokens: Sequence[int] | None,
        options: TurnOptions,
        *,
        stream: bool = False,
    ) -> Pending:
        self._settle()
        fields = given_turn(
            options,
            session=self.name,
            text=text,
            messages=messages,
            tokens=tokens,
            stream=stream,
        )
        return self._core.submit(wire.Turn, fields)

    def _call(self, kind: type[wire.Request], **fields: Any) -> Any:
        self._settle()
        return self._client._call(kind, given(session=self.name, **fields))

    def _leave(self, pending: Pending) -> None:
        self._left.append(pending)
        self._core.abandon(pending)

    def _settle(self) -> None:
        """Let turns that were left early end, so that they are not in the way of what follows."""
        if self._closed:
            raise EngineClosed(f"this handle of session {self.name!r} is closed")
        with self._settling:  # each of them has one terminal event, for one thread to take
            while self._left:
                self._left[0].get(self._client._timeout_s)
                del self._left[0]
