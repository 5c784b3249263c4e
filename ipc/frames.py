"""Frames over a connected stream socket, for two processes of one engine.

Each frame arrives whole, once and in order. What is sent and not yet read is bounded by the
kernel's buffer: whoever sends more waits until the other side has read. Knows nothing of what
frames say. ::

    | length, 4 bytes little-endian | the frame | length | ...
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from contextlib import suppress

from sessionkv.errors import ConnectionLost

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024
BUFFER_BYTES = 256 * 1024
"""Asked of the kernel for each direction: some 64 steps of 256 sequences, as it counts them."""


class FrameSocket:
    """One end. :meth:`send` may be called by any thread, :meth:`receive` by one.

    Attributes:
        fd: Readable when :meth:`receive` has something, an end included.
    """

    def __init__(self, end: socket.socket) -> None:
        """Owns the socket from here on."""
        end.setblocking(True)
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.fd = end.fileno()
        self._socket = end
        self._sending = threading.Lock()
        self._pending = bytearray()

    @classmethod
    def pair(cls) -> tuple[FrameSocket, socket.socket]:
        """One end, and the other to be given away."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def send(self, frame: bytes) -> None:
        """Hand a frame over; waits while the other side is behind.

        Raises:
            ConnectionLost: The other side is gone.
        """
        with self._sending:
            self._send(frame)

    def send_if_free(self, frame: bytes) -> bool:
        """Hand a small frame over unless that could mean waiting; whether it was."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if not select.select([], [self._socket], [], 0)[1]:
                return False
            self._send(frame)
            return True
        finally:
            self._sending.release()

    def _send(self, frame: bytes) -> None:
        header = _LENGTH.pack(len(frame))
        try:
            sent = self._socket.sendmsg((header, frame))
            if sent < len(header) + len(frame):  # a signal came; rare, so the copy costs nothing
                self._socket.sendall(memoryview(header + frame)[sent:])
        except OSError as error:
            raise ConnectionLost(f"the other process is gone ({error})") from None

    def receive(self) -> list[bytes]:
        """Frames that have come whole with one read, maybe none; waits where nothing is there.

        Raises:
            ConnectionLost: The other side is gone and nothing is left to be read.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise ConnectionLost(f"the other process is gone ({error})") from None
        if not data:
            raise ConnectionLost("the other process is gone")
        pending = self._pending
        pending += data
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

    def close(self) -> None:
        """Free the socket; a second call does nothing. Nobody may be in :meth:`receive`."""
        self._socket.close()

    def __enter__(self) -> FrameSocket:
        """The end itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def wait_for_end(fd: int) -> None:
    """Return when the other side of a socket is gone, whatever is left to be read."""
    poller = select.poll()
    poller.register(fd, 0)  # errors and the end are always told
    poller.poll()
