"""The page at ``/``: files of this package, served as they are and to everybody.

They hold nothing of the engine: all that the page shows it asks for under ``/sessionkv/v1/``, with
the key that its user gives. The policy below keeps the browser from loading or running anything
that is not one of these files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from sessionkv.gateway.services import Services

FOLDER = Path(__file__).parent / "page"
_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for each time, and answered in a line when it is the same
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        headers = {**HEADERS, "ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def router(services: Services) -> APIRouter:
    """``/`` and ``/page/NAME``. The files are read once, here, and no other is ever looked for."""
    del services
    files = {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in _TYPES}
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return files["index.html"].response(request)

    @routes.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file")
        return files[name].response(request)

    return routes


def _read(path: Path) -> _File:
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()
    return _File(body, _TYPES[path.suffix], f'"{digest[:32]}"')
