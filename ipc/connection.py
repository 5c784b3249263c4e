"""The client's end of the wire: one DEALER socket, owned by one thread.

Any thread sends, through a queue; replies go to a sink from the socket's own thread. Greets,
pings, notices a lost engine and greets its successor on a new socket: nothing that waited on the
old one can reach the new engine. Knows nothing of sessions or streams.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

import zmq

from sessionkv.config import LimitsConfig
from sessionkv.errors import (
    ConnectionLost,
    EngineClosed,
    Overloaded,
    ProtocolViolation,
    SessionKVError,
)
from sessionkv.ipc.codec import decode_reply, encode_request
from sessionkv.ipc.endpoint import default_endpoint, is_listening, socket_path
from sessionkv.ipc.limits import TRANSPORT_FACTOR
from sessionkv.ipc.link import Due, Link, Phase
from sessionkv.ipc.messages import Bye, Failure, Hello, Ping, Reply, Request, Welcome
from sessionkv.ipc.starting import STARTING, not_answering
from sessionkv.ipc.transport import ReplySink
from sessionkv.ipc.waker import Waker

OWN_IDS = 2**62
"""Ids from here on are the connection's own (hello, heartbeats); those below are the sink's."""
MAX_WAITING = 4096
"""Frames that may wait to be sent."""
LINGER_MS = 100
"""How long a goodbye may take."""
_READ_AT_ONCE = 1000
_JOIN_S = 2.0
_COMES_BACK = frozenset({"connection_lost", "engine_closed", "overloaded"})


class SocketTransport:
    """A :class:`~sessionkv.ipc.transport.Transport` to an engine process.

    Attributes:
        endpoint: Where the engine listens.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        client: str = "python",
        key: str | None = None,
        tenant: str | None = None,
        reconnect_s: float = 30.0,
    ) -> None:
        """Prepare; :meth:`start` connects.

        Args:
            endpoint: None is the user's own engine.
            client: A name for logs.
            key: Key that says whose sessions these are.
            tenant: Whom to act for; with an operator's key, or where the engine has no keys.
            reconnect_s: How long keyed requests wait for a lost engine to come back.

        Raises:
            ConfigError: The endpoint is not one.
        """
        self.endpoint = endpoint or default_endpoint()
        socket_path(self.endpoint)
        self._welcome: Welcome | None = None
        self._hello = Hello(OWN_IDS, client=client, key=key, tenant=tenant)
        self._limits = LimitsConfig()
        self._link = Link(reconnect_s=reconnect_s)
        self._waiting: deque[bytes] = deque()
        self._pid = os.getpid()
        self._next_own_id = OWN_IDS + 1
        self._next_due_s = 0.0
        self._closing = False
        self._dead: SessionKVError | None = None
        self._sink: ReplySink
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._socket: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes]
        self._poller: zmq.Poller
        self._waker: Waker
        self._thread: threading.Thread | None = None

    # -- any thread -------------------------------------------------------------------------

    @property
    def welcome(self) -> Welcome | None:
        """The engine's last welcome, None before the first."""
        return self._welcome

    def start(self, sink: ReplySink) -> None:
        """Connect and greet; the welcome is not waited for.

        Raises:
            ConnectionLost: Nobody listens at the endpoint.
        """
        if not is_listening(self.endpoint):
            raise ConnectionLost(
                f"no engine listens at {self.endpoint} (start one with `sessionkv serve`)",
                endpoint=self.endpoint,
            )
        self._sink = sink
        self._waker = Waker()
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="sessionkv-client", daemon=True)
        self._thread.start()

    def send(self, request: Request) -> None:
        """Encode here, send there; see :class:`~sessionkv.ipc.transport.Transport`."""
        self._check_usable()
        frame = encode_request(request, self._limits)
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests of this client wait to be sent")
        self._waiting.append(frame)
        self._waker.wake()

    def close(self) -> None:
        """Say goodbye and end the thread; open requests end with ``EngineClosed``."""
        thread = self._thread
        if thread is None or os.getpid() != self._pid:
            return
        self._closing = True
        self._waker.wake()
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosed("this client was made before a fork; make a new one in the child")
        if self._closing or self._thread is None:
            raise EngineClosed("the client is closed")
        if self._dead is not None:
            raise self._dead.copy()

    # -- the socket's thread ----------------------------------------------------------------

    def _run(self) -> None:
        end: SessionKVError = ConnectionLost("the client's connection ended unexpectedly")
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._socket = self._connect()
        self._next_due_s = time.monotonic()
        try:
            while not self._closing and self._dead is None:
                self._step()
            end = self._dead or EngineClosed("the client is closed")
        finally:
            self._dead = end
            self._sink.lost(end, final=True)
            if self._link.phase is Phase.READY:
                self._flush()
                with suppress(zmq.Again):
                    self._socket.send(encode_request(Bye(OWN_IDS), self._limits), zmq.NOBLOCK)
            self._disconnect(LINGER_MS)
            self._context.term()
            self._waker.close()

    def _step(self) -> None:
        """Wait for something to do and do it.

        What arrived is read before silence is judged. Silence is judged as of the poll and counts
        only while this process ran: after a stall the engine's answers lie in the socket, or
        nothing was asked.
        """
        wait_ms = math.ceil((self._next_due_s - time.monotonic()) * 1000)
        ready = dict(self._poller.poll(max(0, wait_ms)))
        polled_s = time.monotonic()
        self._link.overslept(max(0.0, polled_s - self._next_due_s))
        if self._waker.fd in ready:
            self._waker.clear()
        if ready.get(self._socket, 0) & zmq.POLLIN:
            self._receive()
        elif self._monitor in ready and not self._readable():  # its last words are read
            self._lose(self._loss("the engine ended the connection"))
        self._beat(polled_s)
        if self._waiting and self._link.phase is Phase.READY:
            self._flush()
        now_s = time.monotonic()
        self._next_due_s = now_s + self._link.wait_s(now_s)

    def _connect(self) -> zmq.Socket[bytes]:
        """A new socket, so a new identity, with a hello on its way."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = LINGER_MS  # before connect: an absent engine must not hold up the exit
        dealer.setsockopt(zmq.MAXMSGSIZE, self._limits.frame_bytes * TRANSPORT_FACTOR)
        self._monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(self.endpoint)
        dealer.send(encode_request(self._hello, self._limits))
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._link.greeted(time.monotonic())
        return dealer

    def _disconnect(self, linger_ms: int) -> None:
        if self._socket.closed:  # after a loss there may be no other one yet
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def _receive(self) -> None:
        """Read what is there; asking first is cheaper than the exception of an empty socket."""
        for _ in range(_READ_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._link.heard(time.monotonic())
            try:
                reply = decode_reply(frames)
            except ProtocolViolation as error:
                reason = f"the engine sent something that cannot be read: {error.message}"
                self._lose(self._loss(reason))
                return
            if not self._handle(reply) or not self._readable():
                return

    def _readable(self) -> bool:
        events: Any = self._socket.getsockopt(zmq.EVENTS)
        return bool(events & zmq.POLLIN)

    def _handle(self, reply: Reply) -> bool:
        """Take the connection's own replies, pass on the others; False ends this connection."""
        if isinstance(reply, Welcome):
            self._welcomed(reply)
        elif isinstance(reply, Failure) and reply.id == OWN_IDS:
            if reply.code not in _COMES_BACK:
                self._dead = reply.to_error()
            else:
                self._lose(self._loss(reply.message))
            return False
        elif isinstance(reply, Failure) and (
            reply.id > OWN_IDS or reply.code == ConnectionLost.code
        ):
            self._lose(self._loss("the engine does not know this connection any more"))
            return False
        elif reply.id < OWN_IDS:
            self._sink.deliver(reply)
        return True

    def _welcomed(self, welcome: Welcome) -> None:
        limits = welcome.limits
        self._limits = replace(
            self._limits, frame_bytes=limits.get("frame_bytes", self._limits.frame_bytes)
        )
        self._link.welcomed(
            time.monotonic(),
            heartbeat_s=limits.get("heartbeat_s", self._limits.heartbeat_s),
            missed=limits.get("missed_heartbeats", self._limits.missed_heartbeats),
        )
        self._welcome = welcome

    def _beat(self, now_s: float) -> None:
        due = self._link.due(now_s)
        if due is Due.PING:
            ping = Ping(self._next_own_id, consumed=self._sink.consumed)
            self._next_own_id += 1
            self._link.pinged(now_s)
            with suppress(zmq.Again):  # full: the engine does not read, and silence will tell
                self._socket.send(encode_request(ping, self._limits), zmq.NOBLOCK)
        elif due is Due.LOSE:
            self._lose(self._silence())
        elif due is Due.GIVE_UP:
            self._link.gave_up()
            self._sink.lost(self._loss("the engine did not come back"), final=True)
        elif due is Due.PROBE:
            if is_listening(self.endpoint):
                self._sink.restored()  # what it sends now waits here for the welcome
                self._socket = self._connect()
            else:
                self._link.probed(now_s)

    def _lose(self, error: ConnectionLost) -> None:
        """First the sink, then the queue: what was queued before belongs to ended requests."""
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._disconnect(0)
        self._link.lose(time.monotonic())
        self._sink.lost(error, final=self._link.has_given_up)
        self._waiting.clear()

    def _silence(self) -> ConnectionLost:
        """What silence means: one that has not greeted us yet may be starting still."""
        starting = not_answering(self.endpoint) if self._link.phase is Phase.GREETING else None
        known = None if self._welcome is None else self._welcome.pid
        if starting is not None and starting.details[STARTING] != known:
            return starting
        return self._loss(f"the engine was silent for {self._link.patience_s:g} s")

    def _loss(self, reason: str) -> ConnectionLost:
        return ConnectionLost(f"{reason} ({self.endpoint})", endpoint=self.endpoint)

    def _flush(self) -> None:
        """Send what waits; where the transport is full the rest goes when it has room."""
        events = zmq.POLLIN
        while self._waiting:
            try:
                self._socket.send(self._waiting[0], zmq.NOBLOCK)
            except zmq.Again:
                events |= zmq.POLLOUT
                break
            self._waiting.popleft()
        self._poller.modify(self._socket, events)
