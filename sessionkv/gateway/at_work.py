"""Requests at work at once: shared by tenants, so that no one's connections take all places.

Behind the guard, which knows whose a request is, and in front of everything that takes long. What
is open to all takes no place and needs none: who watches the server hears of it under load too.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from sessionkv.gateway.errors import Problem
from sessionkv.gateway.guard import NOBODY, TENANT, is_open
from sessionkv.types.holdings import Holdings


class RequestShares:
    """ASGI middleware; lets a request through while its tenant may have one more."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        """In front of an application.

        Args:
            app: The application.
            most: Requests at once, shared as :class:`~sessionkv.types.holdings.Holdings` says.
        """
        self._app = app
        self._most = most
        self._held = Holdings()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        tenant = scope.get(TENANT, NOBODY)
        if not self._held.has_room(tenant, self._most):
            at_work = self._held.of(tenant)
            problem = Problem(
                429,
                "too_many_requests",
                f"{at_work} requests of yours are at work here: your share; wait for some to end",
                details={"requests": at_work},
                retry_after_s=1.0,
            )
            await problem.response(scope["path"])(scope, receive, send)
            return
        self._held.add(tenant, 1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._held.add(tenant, -1)
