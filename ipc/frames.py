"""Frames over a connected stream socket, for two processes of one engine.

Each frame arrives whole, once and in order. What is sent and not yet read is bounded by the
kernel's buffer. Whoever sends more either waits (:meth:`FrameSocket.send`), or keeps the rest here
and hands it over as the other side reads (:meth:`FrameSocket.post`). Knows nothing of what frames
say. ::

    | length, 4 bytes little-endian | the frame | length | ...
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from contextlib import suppress

from sessionkv.errors import ConnectionLost

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024
BUFFER_BYTES = 256 * 1024
"""Asked of the kernel for each direction: some 64 steps of 256 sequences, as it counts them."""


class FrameSocket:
    """One end. Any thread may send, one at a time may receive.

    Attributes:
        fd: Readable when there is something to receive, an end included.
    """

    def __init__(self, end: socket.socket) -> None:
        """Owns the socket from here on."""
        end.setblocking(True)
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.fd = end.fileno()
        self._socket = end
        self._sending = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent_bytes = 0
        # One buffer for all reads: a fresh one of this size costs more than reading a small frame.
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._pending = bytearray()
        self._readable = select.poll()
        self._readable.register(self.fd, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[FrameSocket, socket.socket]:
        """One end, and the other to be given away."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    # Sending

    @property
    def is_behind(self) -> bool:
        """Whether something posted waits for the other side to read."""
        return bool(self._unsent)

    @property
    def num_unsent_bytes(self) -> int:
        """How much of what was posted waits here, beside what the kernel holds."""
        return self._num_unsent_bytes

    def send(self, frame: bytes) -> None:
        """Hand a frame over; waits while the other side is behind.

        Raises:
            ConnectionLost: The other side is gone.
        """
        with self._sending:
            self._post(frame)
            while self._unsent:
                wait_for(self.fd, select.POLLOUT)
                self._flush()

    def post(self, frame: bytes) -> None:
        """Hand over what fits now; the rest waits here for :meth:`flush`. Never waits.

        Raises:
            ConnectionLost: The other side is gone.
        """
        with self._sending:
            self._post(frame)

    def flush(self) -> None:
        """Hand over of what was posted as much as fits now.

        Raises:
            ConnectionLost: The other side is gone.
        """
        with self._sending:
            self._flush()

    def send_if_free(self, frame: bytes) -> bool:
        """Hand a small frame over unless others wait; whether it was.

        Raises:
            ConnectionLost: The other side is gone.
        """
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if self._unsent:
                return False
            data = _with_length(frame)
            sent = self._write(data)
            if sent:
                self._keep(data, sent)  # of one that was begun the rest must follow
            return bool(sent)
        finally:
            self._sending.release()

    def _post(self, frame: bytes) -> None:
        data = _with_length(frame)
        self._keep(data, 0 if self._unsent else self._write(data))

    def _keep(self, data: bytes, sent: int) -> None:
        """Whatever the kernel has not taken."""
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
            self._num_unsent_bytes += len(data) - sent

    def _flush(self) -> None:
        while self._unsent:
            sent = self._write(self._unsent[0])
            self._num_unsent_bytes -= sent
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
                return
            self._unsent.popleft()

    def _write(self, data: bytes | memoryview) -> int:
        """How much of it the kernel took."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._unsent.clear()
            self._num_unsent_bytes = 0
            raise ConnectionLost(f"the other process is gone ({error})") from None

    # Receiving

    def receive(self) -> list[bytes]:
        """Frames that have come whole with one read, maybe none; waits where nothing is there.

        Raises:
            ConnectionLost: The other side is gone and nothing is left to be read.
        """
        try:
            count = self._socket.recv_into(self._buffer)
        except OSError as error:
            raise ConnectionLost(f"the other process is gone ({error})") from None
        if not count:
            raise ConnectionLost("the other process is gone")
        pending = self._pending
        pending += self._buffer[:count]
        frames: list[bytes] = []
        start = 0
        while len(pending) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(pending, start)[0]
            if end > len(pending):
                break
            frames.append(bytes(memoryview(pending)[start + _LENGTH.size : end]))
            start = end
        del pending[:start]
        return frames

    def receive_now(self) -> list[bytes]:
        """As :meth:`receive`, and none where nothing is there.

        Raises:
            ConnectionLost: The other side is gone and nothing is left to be read.
        """
        # Asked first: the exception of a socket that has nothing costs a multiple of the question.
        return self.receive() if self._readable.poll(0) else []

    def close(self) -> None:
        """Free the socket; a second call does nothing. Nobody may be in :meth:`receive`."""
        self._socket.close()

    def __enter__(self) -> FrameSocket:
        """The end itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _with_length(frame: bytes) -> bytes:
    return _LENGTH.pack(len(frame)) + frame


def wait_for(fd: int, events: int) -> int:
    """Wait for some of poll's events of a socket; what there was, its end always included."""
    poller = select.poll()
    poller.register(fd, events)
    ((_, found),) = poller.poll()
    return found


def wait_for_end(fd: int) -> None:
    """Return when the other side of a socket is gone, whatever is left to be read."""
    wait_for(fd, 0)
