"""The engine's end of the wire: one ROUTER socket, owned by one thread.

Moves frames and knows connections by opaque ids; what the frames say, who is alive and who reads
too slowly is the front's to judge. Apart from :meth:`RouterServer.wake` everything is called from
the thread that made the server.
"""

from __future__ import annotations

import math
import socket
from typing import Any

import zmq

from sessionkv.config import LimitsConfig
from sessionkv.errors import ConnectionLost
from sessionkv.ipc.limits import LINGER_MS, TRANSPORT_FACTOR
from sessionkv.ipc.listener import Listener
from sessionkv.ipc.waker import Waker


class RouterServer:
    """Serves one endpoint.

    Attributes:
        endpoint: Where it listens.
    """

    def __init__(
        self,
        endpoint: str,
        limits: LimitsConfig,
        *,
        listener: socket.socket | None = None,
        send_hwm: int = 4096,
        receive_hwm: int = 128,
    ) -> None:
        """Lock the endpoint and listen, unless somebody else has.

        Args:
            endpoint: ``ipc://`` and an absolute path.
            limits: Of these ``frame_bytes``; bigger frames come through to be answered, much bigger
                ones cut their connection.
            listener: Listens there already and is this server's from here on, the path is not;
                None where the server has a :class:`Listener` of its own.
            send_hwm: Frames that may wait for one connection before :meth:`send` returns False.
            receive_hwm: Frames of one connection that may wait here; more wait with the client.

        Raises:
            EngineRunning: Another engine serves the endpoint; with its pid.
            ConfigError: The endpoint cannot be used.
        """
        self.endpoint = endpoint
        self._own: Listener | None = None
        if listener is None:
            self._own = Listener(endpoint)
            listener = self._own.take()
        self._waker = Waker()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = LINGER_MS  # before bind: nothing may ever wait for ever
        self._socket.sndhwm = send_hwm
        self._socket.rcvhwm = receive_hwm
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.frame_bytes * TRANSPORT_FACTOR)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.USE_FD, listener.detach())  # the socket closes it
        self._socket.bind(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._watched: int | None = None
        self._for_room = False

    def watch(self, fd: int) -> None:
        """Make :meth:`poll` return while this descriptor, one at most, can be read."""
        self._watched = fd
        self._poller.register(fd, zmq.POLLIN)

    def poll(
        self, timeout_s: float, *, max_messages: int = 256, for_room: bool = False
    ) -> list[tuple[bytes, list[bytes]]]:
        """Wait for messages, a :meth:`wake` or the timeout, whichever is first.

        Args:
            timeout_s: How long.
            max_messages: Most that are returned.
            for_room: Return too when the watched descriptor can be written.

        Returns:
            Connection id and frames of each message, in order of arrival per connection; empty
            after a timeout or a wake. At most ``max_messages``, so that senders get their turn.
        """
        if for_room != self._for_room and self._watched is not None:
            self._for_room = for_room
            self._poller.modify(self._watched, zmq.POLLIN | (zmq.POLLOUT if for_room else 0))
        ready = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        if self._waker.fd in ready:
            self._waker.clear()
        messages: list[tuple[bytes, list[bytes]]] = []
        more = self._socket in ready
        while more and len(messages) < max_messages:
            try:
                conn_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            messages.append((conn_id, frames))
            events: Any = self._socket.getsockopt(zmq.EVENTS)
            more = bool(events & zmq.POLLIN)
        return messages

    def send(self, conn_id: bytes, frame: bytes) -> bool:
        """Hand one frame to the transport; never blocks.

        Returns:
            False when the connection's queue is full: the caller keeps the frame.

        Raises:
            ConnectionLost: The peer is gone.
        """
        try:
            self._socket.send_multipart((conn_id, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise ConnectionLost("the client is gone") from None
        return True

    def wake(self) -> None:
        """Make :meth:`poll` return soon. Any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Stop listening, send what waits for at most ``LINGER_MS``, free the endpoint.

        A second call does nothing.
        """
        if self._socket.closed:
            return
        if self._own is not None:
            self._own.unlink()
        self._socket.close()
        self._context.term()
        self._waker.close()
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> RouterServer:
        """The server itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
