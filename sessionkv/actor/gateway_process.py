"""The gateway's process as core's process sees it: the HTTP APIs, a client of the engine's socket.

The address is bound before anything is loaded, so that one that is taken is told at once; the
socket listens when the engine is ready. What goes over the link: the settings there, ``ready``
back, and its end, which ends the gateway. Core's process imports nothing of it.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from sessionkv.actor.own_process import start_module
from sessionkv.config import HttpConfig
from sessionkv.errors import EngineStartFailed

_log = logging.getLogger(__name__)

_READY_S = 60.0
_LOOK_S = 0.2
_EXIT_S = 5.0


class GatewayProcess:
    """Starts, watches and ends the gateway. The main thread's.

    Attributes:
        url: Where clients find it.
        is_lost: It ended before it was told to.
    """

    def __init__(self, config: HttpConfig) -> None:
        """Take the address; nobody is served before :meth:`start`.

        Raises:
            EngineStartFailed: The address cannot be had.
        """
        self.is_lost = False
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._ending = False
        self._link, self._theirs = socket.socketpair()
        try:
            self._listener = _bound(config)
        except OSError as error:
            self._link.close()
            self._theirs.close()
            where = f"{config.host}:{config.port}"
            message = f"HTTP cannot be served at {where} ({error.strerror or error})"
            code = errno.errorcode.get(error.errno or 0)
            raise EngineStartFailed(
                message, host=config.host, port=config.port, errno=code
            ) from None
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(
        self,
        settings: Mapping[str, Any],
        on_lost: Callable[[], None],
        *,
        meanwhile: Callable[[], None],
    ) -> None:
        """Have requests served; waits until they are. The engine answers already.

        Args:
            settings: Of the gateway, plain values.
            on_lost: Called from a thread of this object's when the gateway ends by itself.
            meanwhile: Called several times a second until then: the gateway's own questions are
                answered only while the engine shows that it lives.

        Raises:
            EngineStartFailed: The gateway's process could not be started, or died.
        """
        fds = (self._theirs.fileno(), self._listener.fileno())
        self._process = start_module("sessionkv.gateway", fds, name="the gateway")
        self._theirs.close()
        self._listener.close()
        with suppress(OSError):  # it died at once: what follows finds that
            self._link.sendall(json.dumps(dict(settings)).encode() + b"\n")
        if not self._becomes_ready(meanwhile):
            raise EngineStartFailed("the gateway (HTTP) died while it was started; see its log")
        self._watcher = threading.Thread(
            target=self._watch, args=(self._process, on_lost), name="gateway-end", daemon=True
        )
        self._watcher.start()

    def _becomes_ready(self, meanwhile: Callable[[], None]) -> bool:
        self._link.settimeout(_LOOK_S)
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s:
            meanwhile()
            try:
                return bool(self._link.recv(64))
            except TimeoutError:
                continue
            except OSError:
                return False
        return False

    def _watch(self, process: subprocess.Popen[bytes], on_lost: Callable[[], None]) -> None:
        code = process.wait()
        if not self._ending:
            self.is_lost = True
            _log.error("the gateway (HTTP) ended with code %d; the engine ends", code)
            on_lost()

    def close(self) -> None:
        """End the gateway, letting whole answers be read; a second call does nothing."""
        self._ending = True
        for end in (self._link, self._theirs, self._listener):
            end.close()
        if self._process is not None:
            try:
                self._process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._watcher is not None:
            self._watcher.join()

    def __enter__(self) -> GatewayProcess:
        """The gateway itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _bound(config: HttpConfig) -> socket.socket:
    """A socket at the address that does not listen yet.

    Raises:
        OSError: The address is no address, or taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
