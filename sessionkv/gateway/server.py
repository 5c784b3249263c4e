"""Serves the application on a socket that is bound already; no signals of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Generator
from dataclasses import replace

import uvicorn

from sessionkv.gateway.app import create_app
from sessionkv.gateway.connections import BoundedConfig, ConnectionBounds, most_connections
from sessionkv.gateway.settings import GatewaySettings

GRACE_S = 2
"""How long answers may take to be read once the gateway is to end."""


class GatewayServer(uvicorn.Server):
    """One gateway. ``should_exit`` ends it, from any thread."""

    def __init__(self, settings: GatewaySettings, on_ready: Callable[[], None]) -> None:
        """Prepare; :meth:`serve` with the socket serves.

        Args:
            settings: The gateway's.
            on_ready: Called once, in the event loop, when requests may come.
        """
        # Of one number come both bounds: on connections, and on requests at work.
        settings = replace(settings, connections=most_connections(settings.connections))
        bounds = ConnectionBounds(settings.connections, settings.header_s, settings.unread_s)
        config = BoundedConfig(
            create_app(settings),
            bounds,
            lifespan="on",
            ws="none",  # else an upgrade is answered before the guard has seen the request
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.idle_s,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to whoever runs the process."""
        yield
