"""``/v1/models``: the one that is served, in the words of OpenAI's clients and of Anthropic's."""

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
        listed = {"object": "list", "data": [model], "models": [{"slug": model["id"], **model}]}
        return {**listed, "has_more": False, "first_id": model["id"], "last_id": model["id"]}

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
        "type": "model",
        "display_name": model.id,
        "created_at": "1970-01-01T00:00:00Z",
        "created": 0,
        "owned_by": "sessionkv",
        "max_model_len": model.max_model_len,
        "context_length": model.max_model_len,
    }
