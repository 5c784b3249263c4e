"""``/v1/responses``: answers that stay, and that others go on from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from sessionkv.gateway.errors import refused
from sessionkv.gateway.helpers import says_helper
from sessionkv.gateway.openai import conversations
from sessionkv.gateway.openai.pages import page_of
from sessionkv.gateway.openai.response_events import ResponseEvent
from sessionkv.gateway.openai.response_run import ResponseRun
from sessionkv.gateway.openai.response_schema import ResponseRequest
from sessionkv.gateway.openai.stores import Stores
from sessionkv.gateway.services import Services
from sessionkv.gateway.sse import STREAMED, EventStream, named, unless_gone


def router(services: Services) -> APIRouter:
    """Routes of Responses and Conversations."""
    routes = APIRouter(tags=["responses"])
    stores = Stores(services)
    routes.include_router(conversations.router(stores))

    @routes.post("/v1/responses", response_model=None, responses=STREAMED)
    async def create(body: ResponseRequest, request: Request) -> Response:
        """Answer, at once or as a stream."""
        served = await services.model()
        served.require(body.model)
        if says_helper(request.headers, body.metadata):
            body = body.model_copy(update={"store": False})
        body.check()
        run = ResponseRun(
            body,
            await stores.responses(request),
            await stores.conversations(request),
            model=served.id,
        )
        if body.stream:
            events = _framed(run.events())
            ping_s = services.settings.ping_s
            return EventStream(events, ping_s=ping_s, error=run.failed)
        return JSONResponse(await unless_gone(request, _last(run.events())))

    @routes.get("/v1/responses/{response_id}", response_model=None)
    async def retrieve(
        response_id: str, request: Request, stream: bool | None = None
    ) -> dict[str, Any]:
        """Give a stored response again."""
        if stream:
            raise refused("stream", True, "a response is streamed once, as it is made")
        store = await stores.responses(request)
        return store.body(await store.find(response_id))

    @routes.get("/v1/responses/{response_id}/input_items", response_model=None)
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List what came in with a response."""
        store = await stores.responses(request)
        items = store.input_items(await store.find(response_id))
        return page_of(items, limit=limit, order=order, after=after)

    @routes.delete("/v1/responses/{response_id}", response_model=None)
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Forget a response; those that went on from it stay."""
        store = await stores.responses(request)
        await store.find(response_id)
        await store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str, request: Request) -> None:
        """Refused: only responses in the background are cancelled, and there are none."""
        await (await stores.responses(request)).find(response_id)
        raise refused("cancel", response_id, "no response is made in the background")

    @routes.post("/v1/responses/compact", response_model=None)
    async def compact() -> None:
        """Refused: nothing here makes a conversation shorter."""
        raise refused("compact", None, "ask for a summary and begin a conversation with it")

    return routes


async def _framed(events: AsyncGenerator[ResponseEvent, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield named(event["type"], event)


async def _last(events: AsyncGenerator[ResponseEvent, None]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    async with aclosing(events):
        async for event in events:
            body = event.get("response", body)
    return body
