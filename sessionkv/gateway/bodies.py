"""Bodies of requests as they come: not too large, not too slow.

In front of every route and behind the guard: who may not call at all is told so at once.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sessionkv.gateway.errors import Problem

_CLOSE = {"Connection": "close"}
"""What is left of such a body is not read, so nothing can follow it."""


class Bounds(Protocol):
    """Knows what the engine takes, once that has said so."""

    @property
    def body_bytes(self) -> int:
        """Largest body."""
        ...


class BodyLimits:
    """ASGI middleware; ends requests whose body is too large or does not come."""

    def __init__(self, app: ASGIApp, *, bounds: Bounds, pause_s: float, bytes_per_s: int) -> None:
        """In front of an application.

        Args:
            app: The application.
            bounds: Asked for each request.
            pause_s: Longest time between two pieces of a body.
            bytes_per_s: A body may take one such pause and the time that it takes at this rate.
        """
        self._app = app
        self._bounds = bounds
        self._pause_s = pause_s
        self._bytes_per_s = bytes_per_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._bounds.body_bytes
        too_large = f"a body has at most {most} bytes"
        announced = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > most:
            response = Problem(413, "request_too_large", too_large).response(scope["path"])
            response.headers.update(_CLOSE)
            await response(scope, receive, send)
            return
        received = 0
        is_whole = False
        began = asyncio.get_running_loop().time()

        async def limited() -> Message:
            nonlocal received, is_whole
            if is_whole:  # what is left to come is the client's leaving, whenever that is
                return await receive()
            message = await self._piece(receive, began + received / self._bytes_per_s)
            received += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if received > most:
                raise HTTPException(413, too_large, _CLOSE)
            return message

        await self._app(scope, limited, send)

    async def _piece(self, receive: Receive, expected: float) -> Message:
        """The next piece; by when so much was expected at the least rate, the bound is on pauses.

        Pieces that come one by one cannot draw a body out: together they have one pause.
        """
        now = asyncio.get_running_loop().time()
        until = min(now, expected) + self._pause_s
        try:
            async with asyncio.timeout_at(until):
                return await receive()
        except TimeoutError:
            why = f"nothing came of the body for {self._pause_s:g} s"
            if until < now + self._pause_s:
                why = f"the body came more slowly than {self._bytes_per_s} bytes a second"
            raise HTTPException(408, why, _CLOSE) from None
        except asyncio.CancelledError:  # only the server's end cancels a request that is still read
            raise HTTPException(503, "the server ends", _CLOSE) from None
