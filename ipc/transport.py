"""The seam between a client and the way to its engine.

``SocketTransport`` (``connection``) speaks to an engine process; an embedded engine plugs in one
that passes the message objects themselves. Everything above is the same for both.
"""

from __future__ import annotations

from typing import Protocol

from sessionkv.errors import SessionKVError
from sessionkv.ipc.messages import Reply, Request, Welcome


class ReplySink(Protocol):
    """Where a transport delivers: the client. Called from the transport's thread, never blocks."""

    @property
    def consumed(self) -> int:
        """Deltas that the application has taken so far."""
        ...

    def deliver(self, reply: Reply) -> None:
        """Hand over one reply, in the order in which the engine sent them."""
        ...

    def lost(self, error: SessionKVError, *, final: bool) -> None:
        """The way to the engine is broken.

        Args:
            error: What open requests end with.
            final: No way back is tried: keyed requests end as well.
        """
        ...

    def restored(self) -> None:
        """A new connection is on its way: send what may be sent again; it goes when it is up."""
        ...


class Transport(Protocol):
    """A way to one engine. A connection of its own: request ids are unique within it."""

    @property
    def welcome(self) -> Welcome | None:
        """How the engine greeted; None before it did. It does so before it answers anything."""
        ...

    def start(self, sink: ReplySink) -> None:
        """Begin, once, before anything is sent.

        Raises:
            ConnectionLost: There is no engine.
        """
        ...

    def send(self, request: Request) -> None:
        """Pass a request on. Any thread; does not wait for the engine.

        Raises:
            InvalidRequest: A value cannot be sent (lone surrogates, not plain data, too large).
            Overloaded: Too much waits to be sent.
            EngineClosed: After :meth:`close`, or in a forked child.
        """
        ...

    def close(self) -> None:
        """End the connection and what is open on it. Any thread; a second call does nothing."""
        ...
