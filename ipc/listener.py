"""An endpoint that is this process's own, and the socket that listens there.

The socket may be handed to another process, which serves it; the path and the right to it stay.
Knows nothing of zmq.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from sessionkv.errors import ConfigError
from sessionkv.ipc.endpoint import EndpointLock, prepare_folder, socket_path

_BACKLOG = 256


class Listener:
    """Holds one endpoint, alone: a second one on the same path is refused.

    Attributes:
        endpoint: Where it listens.
    """

    def __init__(self, endpoint: str) -> None:
        """Lock the endpoint and listen.

        Args:
            endpoint: ``ipc://`` and an absolute path.

        Raises:
            EngineRunning: Another engine serves the endpoint; with its pid.
            ConfigError: The endpoint cannot be used.
        """
        self.endpoint = endpoint
        self._path = socket_path(endpoint)
        prepare_folder(self._path)
        self._lock = EndpointLock(self._path)
        self._socket: socket.socket | None = None
        try:
            self._socket = self._listen()
        except OSError as error:
            self._lock.release()
            raise ConfigError("endpoint", endpoint, f"a path to listen at ({error})") from None

    def _listen(self) -> socket.socket:
        """Bind by ourselves: the mode is set before the first client can connect.

        A socket file that is already there is nobody's, since we hold the lock.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                self._path.unlink()
            listener.bind(os.fspath(self._path))
            self._path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def take(self) -> socket.socket:
        """The socket, once; the caller's from here on.

        Raises:
            RuntimeError: It was taken before.
        """
        taken, self._socket = self._socket, None
        if taken is None:
            raise RuntimeError(f"the socket of {self.endpoint} was taken before")
        return taken

    def unlink(self) -> None:
        """Let nobody find the socket any more. Idempotent."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    def close(self) -> None:
        """Stop listening, where the socket was not taken, and free the endpoint. Idempotent."""
        if self._lock.is_held:
            self.unlink()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._lock.release()

    def __enter__(self) -> Listener:
        """The listener itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
