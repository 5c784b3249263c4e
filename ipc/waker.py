"""One thread ends another's wait for a socket.

A pipe beside the socket in the poll, rather than a second socket: any thread may write to it, a
signal handler too.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Waker:
    """A readable file descriptor while somebody called :meth:`wake` since the last :meth:`clear`.

    The waiting thread clears first and looks at its queues after. A call that comes between the two
    is seen in the queues already, and one that comes later makes the descriptor readable again.
    """

    def __init__(self) -> None:
        """Make the pipe."""
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._closed = False
        # No write may meet a closed descriptor: its number may be another file's by then.
        # Re-entrant, so that a signal handler may interrupt a wake with a wake.
        self._guard = threading.RLock()

    def wake(self) -> None:
        """End the wait. Any thread; never blocks; does nothing once closed."""
        with self._guard:
            if not self._closed:
                with suppress(BlockingIOError):  # full: readable already
                    os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Forget the calls so far. The waiting thread only."""
        with suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Free the pipe; the waiting thread only, when it will not wait again."""
        with self._guard:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
                os.close(self._write_fd)
