"""Connections as they come: bounded in number, and each step of each of them in time.

================  ================================================================================
headers           of a request are there within ``header_s`` of its first byte, the first one's of
                  the connection's beginning, and are not too large; else 408 or 431, and the end
bodies            :mod:`sessionkv.gateway.bodies`
answers           that nobody reads end with their connection after ``unread_s`` without progress
idle              between two requests for ``idle_s`` at most: uvicorn's own bound
number            past ``connections`` the one that has waited longest without a whole request goes;
                  where all are at work the new one is answered 503
================  ================================================================================

An answer that is read may take any time. Must not know what requests are.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from sessionkv.gateway.errors import Problem

_OTHER_FILES = 128
"""Descriptors that are no connections: libraries, the engine's sockets, pipes."""
_MOST_HEADER_BYTES = 64 * 1024
_LATE = Problem(408, "header_timeout", "the request's headers did not come in time")
_TOO_LARGE = Problem(431, "headers_too_large", "a request's headers have at most 64 KiB")
_FULL = Problem(
    503,
    "too_many_connections",
    "all connections that this server may have are at work",
    retry_after_s=1.0,
)


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """See :class:`~sessionkv.gateway.settings.GatewaySettings`."""

    connections: int
    header_s: float
    unread_s: float


class _Part(Enum):
    """Of a request: what comes next belongs to it."""

    NOTHING = 0
    HEADERS = 1
    BODY = 2


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration, for :class:`BoundedConnection`."""

    def __init__(self, app: Any, bounds: ConnectionBounds, **options: Any) -> None:
        """Options are uvicorn's."""
        super().__init__(app, http=BoundedConnection, **options)
        self.bounds = bounds


class BoundedConnection(HttpToolsProtocol):
    """One connection; everything happens in its event loop."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """As uvicorn makes one, of a :class:`BoundedConfig`."""
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = cast(BoundedConfig, config).bounds
        self._since = self.loop.time()
        self._part = _Part.NOTHING
        self._header_bytes = 0
        self._due: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether a request's headers are here and it is not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The bound on headers begins."""
        super().connection_made(transport)
        self._await_more()
        if len(self.connections) > self._bounds.connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """No bound is left."""
        self._nothing_is_due()
        self._it_reads()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """What comes while nothing is at work is of the next request, or left of the last one."""
        goes_on = self._part is _Part.HEADERS
        super().data_received(data)
        if self.transport.is_closing():
            return
        if goes_on and self._part is _Part.HEADERS:
            self._header_bytes += len(data)
            if self._header_bytes > _MOST_HEADER_BYTES:
                self._end(_TOO_LARGE)
        if self._due is None and not self.is_at_work:
            # uvicorn's own bound ended with the first byte, whatever that was.
            self._await_more()

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._part, self._header_bytes = _Part.HEADERS, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request goes to work, or waits behind another of its connection."""
        self._part = _Part.BODY
        self._nothing_is_due()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of a request is here."""
        self._part = _Part.NOTHING
        self._nothing_is_due()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The connection is idle, or serves what came meanwhile."""
        self._since = self.loop.time()
        super().on_response_complete()
        if self.transport.is_closing():  # once the client has read the answer
            self._await_reading()

    def timeout_keep_alive_handler(self) -> None:
        """Idle for long: what is left of an answer may still be read."""
        self.transport.close()
        self._await_reading()

    def pause_writing(self) -> None:
        """A client has more to read than is kept for it."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """It has read."""
        self._it_reads()
        super().resume_writing()

    def _await_more(self) -> None:
        bounds = self._bounds
        wait_s = bounds.unread_s if self._part is _Part.BODY else bounds.header_s
        self._due = self.loop.call_later(wait_s, self._end, _LATE)

    def _nothing_is_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _await_reading(self) -> None:
        if self._unread is None:
            left = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(self._bounds.unread_s, self._look_again, left)

    def _look_again(self, before: int) -> None:
        """Who has read something meanwhile, however little, may go on."""
        self._unread = None
        if self.transport.get_write_buffer_size() < before:
            self._await_reading()
        else:
            self.transport.abort()

    def _it_reads(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _end(self, problem: Problem) -> None:
        """Who has not begun a request, or waits for an answer to another, is told nothing."""
        if self._part is _Part.HEADERS and not self.is_at_work:
            self.transport.write(_as_bytes(problem.response("/")))
        self.transport.close()
        self._await_reading()

    def _make_room(self) -> None:
        """O(connections), and only when there are too many."""
        every = cast("set[BoundedConnection]", self.connections)
        waiting = [other for other in every if not other.is_at_work]
        oldest = min(waiting, key=lambda other: other._since, default=self)
        if oldest is self:  # it is told, if it asks before others take its place
            self.app = _refuse
        else:
            oldest.transport.abort()
            self.connections.discard(oldest)


def most_connections(wanted: int) -> int:
    """As many of ``wanted`` as this process has descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _OTHER_FILES))


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    response = _FULL.response(scope["path"])
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


def _as_bytes(response: Response) -> bytes:
    """An answer to what is no request yet."""
    phrase = HTTPStatus(response.status_code).phrase
    lines = [f"HTTP/1.1 {response.status_code} {phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)])
