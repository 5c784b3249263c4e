"""``/v1/models``: the one that is served, in the words of OpenAI's clients and of Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
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


def _time(wall_s: float) -> str:
    return datetime.fromtimestamp(int(wall_s), UTC).isoformat().replace("+00:00", "Z")


def _map(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "type": "model",
        "display_name": model.id,
        "created_at": _time(model.started_s),
        "created": int(model.started_s),
        "owned_by": "sessionkv",
        "max_model_len": model.max_model_len,
        "context_length": model.max_model_len,
    }
