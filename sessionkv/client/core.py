"""What both clients share: ids, matching of replies, queues of events, credit, retries.

No sockets and no threads of its own: it is called by the application's threads and, as a
:class:`~sessionkv.ipc.transport.ReplySink`, by the transport's. Invariants:

* every submitted request ends in exactly one terminal reply or error on its queue;
* a request without idempotency key is sent at most once; with one it is sent again on a new
  connection under its key, so that the engine runs the turn once;
* a queue never holds more than about ``MAX_QUEUED`` events: past that, deltas grow the last one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sessionkv.client.pending import Pending
from sessionkv.errors import EngineClosed, SessionKVError
from sessionkv.ipc.messages import PROVISIONAL, Cancel, Delta, Ping, Reply, Request, Welcome
from sessionkv.ipc.transport import Transport

REPORT_EVERY = 256
"""Consumed deltas after which the engine is told without waiting for the heartbeat."""


class ClientCore:
    """The client's side of one connection; all methods are thread-safe."""

    def __init__(self, transport: Transport) -> None:
        """Take over a transport and start it.

        Raises:
            ConnectionLost: There is no engine.
        """
        self._transport = transport
        self._open: dict[int, Pending] = {}
        self._lock = threading.RLock()  # a stream's finalizer may run anywhere, in here too
        self._next_id = 1
        self._lost: SessionKVError | None = None
        self._given_up = False
        self._consumed = 0
        self._reported = 0
        self._pid = os.getpid()
        transport.start(self)

    @property
    def has_ended(self) -> bool:
        """Whether there will be no connection any more."""
        return self._given_up

    @property
    def num_asked(self) -> int:
        """Requests so far."""
        return self._next_id - 1

    @property
    def num_open(self) -> int:
        """Requests without their terminal reply."""
        return len(self._open)

    # -- for the application ----------------------------------------------------------------

    def submit(
        self,
        kind: type[Request],
        fields: dict[str, Any],
        *,
        wake: Callable[[], None] | None = None,
    ) -> Pending:
        """Send a request.

        Args:
            kind: Its class.
            fields: Its fields but ``id``.
            wake: See :class:`~sessionkv.client.pending.Pending`.

        Raises:
            InvalidRequest: It cannot be sent.
            ConnectionLost: There is no connection now, and the request has no idempotency key.
            EngineClosed: The client is closed, or this is a forked child.
        """
        self.check_process()
        with self._lock:
            pending = Pending(kind(id=self._take_id(), **fields), wake)
            if self._lost is not None and (self._given_up or not pending.keyed):
                raise self._lost.copy()
            self._open[pending.request.id] = pending
            if self._lost is None:  # otherwise it goes with the rest when there is a connection
                try:
                    self._transport.send(pending.request)
                except BaseException as error:
                    del self._open[pending.request.id]
                    pending.ended = True
                    if not isinstance(error, SessionKVError):  # an interrupt: it may be on its way
                        self._tell(Cancel, request=pending.request.id)
                    raise
        return pending

    def cancel(self, pending: Pending, *, keep: bool = False, chars: int | None = None) -> None:
        """Ask the engine to end a turn; its terminal reply still comes."""
        if not pending.ended:
            self._tell(Cancel, request=pending.request.id, keep=keep, chars=chars)

    def abandon(self, pending: Pending) -> None:
        """Cancel a turn that nobody will read on: its deltas are dropped, their credit returned."""
        self.taken(pending.discard())
        self.cancel(pending)

    def forget(self, pending: Pending) -> None:
        """Stop waiting for a request; a late reply is dropped."""
        with self._lock:
            self._open.pop(pending.request.id, None)

    def taken(self, num_deltas: int) -> None:
        """The application took deltas: give their credit back, in time for a fast stream."""
        if not num_deltas:
            return
        with self._lock:
            self._consumed += num_deltas
            due = self._consumed - self._reported >= REPORT_EVERY
            if due:
                self._reported = self._consumed
        if due:
            self._tell(Ping, consumed=self._consumed)

    def check_process(self) -> None:
        """Refuse to work in a forked child, where the connection's thread does not exist.

        Raises:
            EngineClosed: This is a forked child.
        """
        if os.getpid() != self._pid:
            raise EngineClosed("this client was made before a fork; make a new one in the child")

    @property
    def welcome(self) -> Welcome | None:
        """The engine's last greeting; None before it."""
        return self._transport.welcome

    def close(self) -> None:
        """End the connection; what is open on it ends with ``EngineClosed``.

        In a forked child it does nothing: the connection is the parent's.
        """
        if os.getpid() == self._pid:
            self._transport.close()

    # -- for the transport ------------------------------------------------------------------

    @property
    def consumed(self) -> int:
        """Deltas taken by the application on this connection."""
        return self._consumed

    def deliver(self, reply: Reply) -> None:
        """Queue a reply for its request; one that nobody waits for is dropped."""
        if isinstance(reply, PROVISIONAL):
            pending = self._open.get(reply.id)
        else:
            pending = self._open.pop(reply.id, None)
        queued = pending is not None and pending.push(reply)
        if not queued and isinstance(reply, Delta):
            self.taken(1)

    def lost(self, error: SessionKVError, *, final: bool) -> None:
        """End what cannot be sent again."""
        with self._lock:
            self._lost = error
            self._given_up = self._given_up or final
            ended = [p for p in self._open.values() if final or p.discarded or not p.keyed]
            for pending in ended:
                del self._open[pending.request.id]
        for pending in ended:
            pending.push(error.copy())

    def restored(self) -> None:
        """A new connection: its counts start anew, and keyed requests are sent again."""
        with self._lock:
            self._lost = None
            self._given_up = False
            self._consumed = 0
            self._reported = 0
            for pending in list(self._open.values()):
                request: Any = pending.request
                try:
                    self._transport.send(replace(request, attempt=pending.attempt))
                except SessionKVError as error:
                    del self._open[request.id]
                    pending.push(error)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _tell(self, kind: type[Request], **fields: Any) -> None:
        """Send something whose answer nobody waits for; without a connection it is moot."""
        self.check_process()
        with self._lock:
            if self._lost is None:
                with suppress(SessionKVError):
                    self._transport.send(kind(id=self._take_id(), **fields))


def socket_transport(
    endpoint: str | None, reconnect_s: float, *, key: str | None, tenant: str | None
) -> Transport:
    """The usual transport; zmq is loaded here, when the first client is made."""
    from sessionkv.ipc.connection import SocketTransport

    return SocketTransport(endpoint, key=key, tenant=tenant, reconnect_s=reconnect_s)
