"""What every route needs: the engine, whose connection a request uses, and what is served."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from sessionkv.client import AsyncClient
from sessionkv.errors import ModelNotFound, Unauthorized
from sessionkv.gateway.clients import Caller, ClientPool
from sessionkv.gateway.errors import NO_KEY
from sessionkv.gateway.guard import key_of
from sessionkv.gateway.replies import ReplyStyle
from sessionkv.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The engine's model, as it greeted with.

    Attributes:
        name: As the engine was told; its last part alone names it too.
        max_model_len: Its window, in tokens.
        limits: All bounds that the engine told of.
        reply_style: How it writes tool calls and reasoning.
        started_s: Wall-clock seconds at which it was first served here.
    """

    name: str
    max_model_len: int
    limits: Mapping[str, Any]
    reply_style: ReplyStyle
    started_s: float

    @property
    def id(self) -> str:
        """Name for clients: of a path, the last part."""
        return self.name.rstrip("/").rpartition("/")[2] if self.name.startswith("/") else self.name

    def require(self, name: str) -> None:
        """See that a request means this model.

        Raises:
            ModelNotFound: It names another one.
        """
        if name not in (self.id, self.name):
            raise ModelNotFound(
                f"the model {name!r} is not served here; served: {self.id}",
                param="model",
                served=self.id,
            )


class Services:
    """Shared by all routes; for one event loop. :meth:`start` before the first request.

    Attributes:
        settings: The gateway's.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        """Connect to nobody yet."""
        self.settings = settings
        self._clients = ClientPool(
            settings.endpoint, most=settings.clients, is_steady=settings.steady_prompts
        )
        self._model: ServedModel | None = None

    async def start(self) -> None:
        """Greet the engine.

        Raises:
            ConnectionLost: No engine is there.
        """
        await self.model()

    async def close(self) -> None:
        """Leave the engine; what is open ends."""
        await self._clients.close()

    async def caller(self, request: Request) -> Caller:
        """Who sends a request.

        Raises:
            ConnectionLost: No engine is there.
            Unauthorized: It shows no key that the engine knows.
        """
        key = key_of(request.headers) if self.asks_for_keys else None
        if key is None and self.asks_for_keys:
            raise Unauthorized(NO_KEY.message)
        return await self._clients.get(key)

    @property
    def asks_for_keys(self) -> bool:
        """Whether callers have to show a key."""
        return self.settings.key is not None

    @property
    def body_bytes(self) -> int:
        """Largest body of a request: no larger than a frame, in which the engine gets it."""
        frame_bytes = None if self._model is None else self._model.limits.get("frame_bytes")
        most = self.settings.body_bytes
        return most if frame_bytes is None else min(most, frame_bytes)

    async def admit(self, key: str) -> str:
        """See that the engine knows a key; whose it is.

        Raises:
            ConnectionLost: No engine is there.
            Unauthorized: It does not.
        """
        return (await self._clients.get(key)).tenant

    async def own_client(self) -> AsyncClient:
        """The gateway's own connection, which sees nobody's sessions.

        Raises:
            ConnectionLost: No engine is there.
        """
        return (await self._clients.get(self.settings.key)).client

    async def client(self, request: Request) -> AsyncClient:
        """The connection to the engine that a request uses.

        Raises:
            ConnectionLost: No engine is there.
        """
        return (await self.caller(request)).client

    async def model(self) -> ServedModel:
        """What is served. Asked of the engine once.

        Raises:
            ConnectionLost: No engine is there.
        """
        if self._model is None:
            served = await (await self.own_client()).served()
            style = self.settings.reply_style or served.reply_style
            self._model = ServedModel(
                served.model, served.max_model_len, served.limits, style, time.time()
            )
        return self._model
