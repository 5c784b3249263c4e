"""``/v1/models``: the one that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from sessionkv.gateway.services import ServedModel, Services


def router(services: Services) -> APIRouter:
    """Routes of the Models API."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the models: one."""
        model = _map(await services.model())
        # Some clients look under `models`.
        return {"object": "list", "data": [model], "models": [{"slug": model["id"], **model}]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Get one model by its name."""
        served = await services.model()
        served.require(name)
        return _map(served)

    return routes


def _map(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "sessionkv",
        "max_model_len": model.max_model_len,
        "context_length": model.max_model_len,
    }
