"""Whether the engine lives, whether it takes work, and which one it is.

``/health`` is open to everybody and says one word; the others are for those who have a key.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from sessionkv.errors import ConnectionLost, EngineClosed, Overloaded
from sessionkv.gateway.services import Services

_CORE_S = 1.0
"""How long core may take to say whether it drains."""


def router(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["health"])

    @routes.get("/health", summary="Whether the engine answers: ok, loading or draining")
    async def health() -> JSONResponse:
        status = await _status(services)
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @routes.get("/ready", summary="Whether turns are taken: 200 or 503, with the model")
    async def ready() -> JSONResponse:
        status = await _status(services)
        model = await services.model() if status == "ok" else None
        values: dict[str, Any] = {"ready": status == "ok", "status": status}
        if model is not None:
            values |= {"model": model.id, "max_model_len": model.max_model_len}
        return JSONResponse(values, 200 if status == "ok" else 503)

    @routes.get("/version", summary="Version of the package, of the wire, and the engine's id")
    async def about() -> JSONResponse:
        welcome = await (await services.own_client()).welcome()
        return JSONResponse(
            {
                "version": version("sessionkv"),
                "protocol": welcome.version,
                "engine": welcome.engine,
                "model": (await services.model()).id,
            }
        )

    return routes


async def _status(services: Services) -> str:
    """``draining`` where the engine ends, ``loading`` where there is none yet or again."""
    try:
        client = await services.own_client()
        await client.welcome()  # answered beside a long step too
        async with asyncio.timeout(_CORE_S):
            if (await client.stats(brief=True))["draining"]:
                return "draining"
    except EngineClosed:
        return "draining"
    except ConnectionLost:
        return "loading"
    except (TimeoutError, Overloaded):  # core is in a long step, or has more to do than it can
        return "ok"
    return "ok"
