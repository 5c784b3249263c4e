"""Who gets in over HTTP: before any route, and whatever the route is.

==================  =========================================================================
engine with keys    every path but ``/health`` and the page's own files asks for one:
                    ``Authorization: Bearer``, ``x-api-key``, or as the password of ``Basic``
engine without      only names of this machine in ``Host``: a web page that has its own name
                    point here (DNS rebinding) is refused
both                a page of another origin is refused unless ``cors_origins`` names it
==================  =========================================================================

A key is shown to the engine, which alone knows keys; nothing is compared here.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sessionkv.errors import SessionKVError
from sessionkv.gateway.errors import NO_KEY, Problem, problem_of

OPEN_PATHS = frozenset({"/health", "/"})
OPEN_FOLDER = "/page/"
"""Served to whoever asks, and saying nothing of anybody: the page is what asks for a key."""
TENANT = "sessionkv.tenant"
"""Of a request that was let in, in its scope."""
NOBODY = ""
_CHALLENGE = 'Bearer realm="sessionkv"'
_ASK_A_PERSON = f'{_CHALLENGE}, Basic realm="sessionkv"'
"""Has a browser ask: for what somebody opens in it, not for what a page fetches."""
_MAX_KEY_CHARS = 4096


class Admission(Protocol):
    """Shows keys to the engine."""

    @property
    def asks_for_keys(self) -> bool:
        """Whether the engine has keys."""
        ...

    async def admit(self, key: str) -> str:
        """See that the engine knows a key; whose it is.

        Raises:
            Unauthorized: It does not.
        """
        ...


def is_open(path: str) -> bool:
    """Whether a path asks for no key, and is answered whatever else is at work."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class Guard:
    """ASGI middleware; lets a request through or answers it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        admission: Admission,
        hosts: Sequence[str],
        origins: Sequence[str],
    ) -> None:
        """In front of an application.

        Args:
            app: The application.
            admission: Shows keys to the engine.
            hosts: Names beside those of this machine that may stand in ``Host``.
            origins: Of pages that may call from elsewhere.
        """
        self._app = app
        self._admission = admission
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        found = await self._admitted(scope["path"], headers)
        if isinstance(found, str):
            scope[TENANT] = found
            await self._app(scope, receive, send)
            return
        response = found.response(scope["path"])
        if found.status == 401:
            is_opened = "text/html" in headers.get("accept", "")
            response.headers["WWW-Authenticate"] = _ASK_A_PERSON if is_opened else _CHALLENGE
        await response(scope, receive, send)

    async def _admitted(self, path: str, headers: Headers) -> Problem | str:
        """Whose a request is, nobody's where no key is asked for; or why it is not let in."""
        if not self._is_own_page(headers):
            return Problem(403, "origin_refused", "pages of another origin may not call this")
        if not self._admission.asks_for_keys:
            if self._is_own_host(headers.get("host", "")):
                return NOBODY
            return Problem(403, "host_refused", "this server is not known by that name")
        if is_open(path):
            return NOBODY
        key = key_of(headers)
        if key is None:
            return NO_KEY
        try:
            return await self._admission.admit(key)
        except SessionKVError as error:
            return problem_of(error)

    def _is_own_host(self, host: str) -> bool:
        name = _hostname(host)
        return name in self._hosts or is_loopback(name)

    def _is_own_page(self, headers: Headers) -> bool:
        """Browsers say of a page where it is from; other clients say nothing."""
        origin = headers.get("origin")
        if origin is None or origin in self._origins:
            return True
        _, _, address = origin.partition("://")
        return address.lower() == headers.get("host", "").lower() != ""


_NOT_IN_HOST = frozenset("@/?#\\")
"""What would make a URL of it, in which the name is another part."""


def _hostname(host: str) -> str:
    """The name of ``name:port`` or ``[address]:port``; empty where it is neither."""
    if not _NOT_IN_HOST.isdisjoint(host):
        return ""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is that of this machine alone."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def key_of(headers: Headers) -> str | None:
    """The key that a request shows, however it does; None without any."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        key = value.strip()
    elif scheme.lower() == "basic":
        key = _password(value)
    else:
        key = headers.get("x-api-key", "").strip()
    return key if 0 < len(key) <= _MAX_KEY_CHARS and key.isascii() else None


def _password(value: str) -> str:
    try:
        pair = base64.b64decode(value.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return pair.partition(":")[2]
