"""The front's loop over a socket: one thread that reads, answers and watches who is still there.

Core is at the other end of a link, in another thread or another process; the loop does not know.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from sessionkv.actor.front import Front
from sessionkv.config import LimitsConfig
from sessionkv.engine.messages import CoreMessage, CoreStopped, FrontMessage, NewAccess
from sessionkv.errors import ConnectionLost, Overloaded, RequestError, SessionKVError
from sessionkv.ipc import messages as wire
from sessionkv.ipc.codec import decode_request, encode_reply
from sessionkv.ipc.outbox import Outbox
from sessionkv.ipc.server import RouterServer

_log = logging.getLogger(__name__)


_READ_AT_ONCE = 256
_HANDED_OVER_BYTES = 64 * 1024
"""After requests of so many bytes core is handed what they ask for, before others are looked at: so
what the link does not know of yet is little."""


@dataclass(slots=True)
class _Peer:
    outbox: Outbox
    heard_s: float
    blocked: bool = False


class CoreLink(Protocol):
    """The front's end of the way to core: nothing here waits, and what comes ends a poll."""

    @property
    def is_empty(self) -> bool:
        """Whether :meth:`take` has nothing."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether something sent waits for room, and goes with a later :meth:`take`."""
        ...

    @property
    def is_silent(self) -> bool:
        """Whether core's process stands still."""
        ...

    def require_room(self) -> None:
        """Before a request is taken in.

        Raises:
            Overloaded: Too much waits for room.
        """
        ...

    def take(self) -> list[CoreMessage]:
        """What has come, oldest first; as much as is to be worked off between two polls."""
        ...

    def send(self, messages: list[FrontMessage]) -> None:
        """Hand messages to core, oldest first."""
        ...


class SocketLoop:
    """Runs a front over a router until core has stopped."""

    def __init__(
        self, front: Front, server: RouterServer, link: CoreLink, limits: LimitsConfig
    ) -> None:
        self._front = front
        self._server = server
        self._link = link
        self._limits = limits
        self._peers: dict[bytes, _Peer] = {}
        self._stopped = False
        self._core_is_silent = False

    def run(self) -> None:
        """Until core has stopped and its last words are sent."""
        next_tick = time.monotonic()
        while not self._stopped:
            wait_s = max(0.0, next_tick - time.monotonic()) if self._link.is_empty else 0.0
            messages = self._server.poll(
                wait_s, max_messages=_READ_AT_ONCE, for_room=self._link.is_behind
            )
            polled = time.monotonic()
            from_core = self._link.take()
            self._core_is_silent = self._link.is_silent  # as of now, however long the rest takes
            received = 0
            for connection, frames in messages:
                self._receive(connection, frames)
                received += sum(map(len, frames))
                if received >= _HANDED_OVER_BYTES:
                    self._hand_over()
                    received = 0
            for message in from_core:
                self._front.on_core(message)
                if isinstance(message, CoreStopped):
                    self._stopped = True
                elif isinstance(message, NewAccess):
                    for connection in self._front.take_revoked():
                        self._peers.pop(connection, None)  # what it asks next is a stranger's
            # Silence is judged as of the poll, and only when it left nothing unread: what clients
            # said while this thread was busy lies in the socket.
            if polled >= next_tick and len(messages) < _READ_AT_ONCE:
                self._overslept(polled, math.inf if self._core_is_silent else polled - next_tick)
                next_tick = polled + self._limits.heartbeat_s / 2
                self._tick(polled)
            self._hand_over()
            self._send(time.monotonic())

    def _hand_over(self) -> None:
        if self._front.to_core:
            self._link.send(self._front.to_core)
            self._front.to_core.clear()

    def _receive(self, connection: bytes, frames: list[bytes]) -> None:
        now = time.monotonic()
        peer = self._peers.get(connection)
        if peer is not None:
            peer.heard_s = now
        try:
            request = decode_request(frames, self._limits)
        except RequestError as error:
            if peer is None:
                self._refuse_stranger(connection, error.request_id, error)
            else:
                self._front.on_bad_request(connection, error.request_id, error)
            return
        if peer is None:
            if not isinstance(request, wire.Hello):
                lost = ConnectionLost("this connection is not known here; say hello first")
                self._refuse_stranger(connection, request.id, lost)
                return
            try:
                self._front.greet(connection, request)
            except RequestError as error:
                self._refuse_stranger(connection, request.id, error)
                return
            self._peers[connection] = _Peer(self._new_outbox(), now)
            return
        if isinstance(request, wire.Bye):
            self._forget(connection)
            return
        if isinstance(request, wire.Ping):
            peer.outbox.consumed(request.consumed, now)
            peer.blocked = False
            if self._core_is_silent:
                return  # the answer would say that the engine is alive
        elif not isinstance(request, wire.Hello | wire.Cancel):
            try:
                self._link.require_room()
            except Overloaded as error:
                self._front.on_bad_request(connection, request.id, error)
                return
        self._front.on_request(connection, request)

    def _new_outbox(self) -> Outbox:
        return Outbox(self._limits.unread_events, timeout_s=self._limits.unread_timeout_s)

    def _refuse_stranger(self, connection: bytes, request_id: int, error: SessionKVError) -> None:
        """Nothing is kept for a stranger: an answer is sent at once or not at all."""
        with suppress(ConnectionLost):
            self._server.send(connection, encode_reply(wire.Failure.of(request_id, error)))

    def _send(self, now: float) -> None:
        """Pass replies through each connection's credit and out, as far as there is room."""
        touched = dict.fromkeys(c for c, peer in self._peers.items() if peer.blocked)
        for connection, reply in self._front.replies:
            peer = self._peers.get(connection)
            if peer is not None:
                peer.outbox.push(reply, now)
                touched[connection] = None
        self._front.replies.clear()
        for connection in touched:
            self._flush(connection, self._peers[connection])

    def _flush(self, connection: bytes, peer: _Peer) -> None:
        replies = peer.outbox.take_ready()
        peer.blocked = False
        try:
            for i, reply in enumerate(replies):
                if not self._server.send(connection, encode_reply(reply)):
                    self._keep(connection, peer, replies[i:])
                    return
        except ConnectionLost:
            self._forget(connection)

    def _keep(self, connection: bytes, peer: _Peer, replies: Sequence[wire.Reply]) -> None:
        """The transport is full: keep the rest, or give up a client that asks and never reads."""
        if len(replies) > self._limits.unread_events:
            _log.info("a client left %d replies unread and is taken for gone", len(replies))
            self._forget(connection)
            return
        peer.outbox.put_back(replies)
        peer.blocked = True

    def _overslept(self, now: float, seconds: float) -> None:
        """This process stood still, or core's, so maybe the clients' too: nobody was silent."""
        for peer in self._peers.values():
            peer.heard_s = min(now, peer.heard_s + seconds)

    def _tick(self, now: float) -> None:
        silence_s = self._limits.heartbeat_s * self._limits.missed_heartbeats
        for connection, peer in list(self._peers.items()):
            if now - peer.heard_s > silence_s:
                _log.info("a client was silent for %.1f s and is taken for gone", silence_s)
                self._forget(connection)
                continue
            for request_id in peer.outbox.overdue(now):
                self._front.give_up_reader(connection, request_id)

    def _forget(self, connection: bytes) -> None:
        if self._peers.pop(connection, None) is not None:
            self._front.on_disconnect(connection)
