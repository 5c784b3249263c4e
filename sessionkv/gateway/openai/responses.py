"""``/v1/responses``: answers that stay, and that others go on from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from sessionkv.gateway.errors import Problem, refused
from sessionkv.gateway.helpers import says_helper
from sessionkv.gateway.openai import conversations
from sessionkv.gateway.openai.compaction import CompactRequest, compacted
from sessionkv.gateway.openai.input_tokens import CountRequest, input_tokens
from sessionkv.gateway.openai.pages import page_of
from sessionkv.gateway.openai.response_events import ResponseEvent
from sessionkv.gateway.openai.response_run import ResponseRun
from sessionkv.gateway.openai.response_schema import ResponseRequest
from sessionkv.gateway.openai.stores import Stores
from sessionkv.gateway.services import Services
from sessionkv.gateway.sse import STREAMED, EventStream, named, openai_error, unless_gone

Asked = TypeVar("Asked", bound=ResponseRequest)


def router(services: Services) -> APIRouter:
    """Routes of Responses and Conversations."""
    stores = Stores(services)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        await stores.backgrounds.close()  # before the engine is left

    routes = APIRouter(tags=["responses"], lifespan=lifespan)
    routes.include_router(conversations.router(stores))

    @routes.post("/v1/responses", response_model=None, responses=STREAMED)
    async def create(body: ResponseRequest, request: Request) -> Response:
        """Answer, at once or as a stream, or in the background."""
        served = await services.model()
        served.require(body.model)
        body = _kept(body, request)
        body.check()
        run = ResponseRun(
            body,
            await stores.responses(request),
            await stores.conversations(request),
            model=served.id,
        )
        if body.background:
            begun = await stores.backgrounds.start((await services.caller(request)).tenant, run)
            return streamed(begun.follow(), run.failed) if body.stream else JSONResponse(begun.body)
        if body.stream:
            return streamed(_framed(run.events()), run.failed)
        return JSONResponse(await unless_gone(request, _last(run.events())))

    def streamed(
        events: AsyncGenerator[bytes, None], error: Callable[[Problem], bytes]
    ) -> EventStream:
        return EventStream(events, ping_s=services.settings.ping_s, error=error)

    @routes.post("/v1/responses/input_tokens", response_model=None)
    async def count(body: CountRequest, request: Request) -> dict[str, Any]:
        """Count the input tokens of a request for a response, exactly."""
        served = await services.model()
        served.require(body.model or served.id)
        body = _kept(body, request)
        body.check()
        tokens = await input_tokens(
            body,
            await stores.responses(request),
            await stores.conversations(request),
            served,
        )
        return {"object": "response.input_tokens", "input_tokens": tokens}

    @routes.post("/v1/responses/compact", response_model=None)
    async def compact(body: CompactRequest, request: Request) -> Response:
        """Make a conversation shorter: what users said, and a summary of the rest."""
        served = await services.model()
        served.require(body.model)
        work = compacted(body, await stores.responses(request), served)
        return JSONResponse(await unless_gone(request, work))

    @routes.get("/v1/responses/{response_id}", response_model=None, responses=STREAMED)
    async def retrieve(
        response_id: str,
        request: Request,
        stream: bool | None = None,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """Give a stored response again, or one that is being made as it is now."""
        store = await stores.responses(request)
        known = stores.backgrounds.find((await services.caller(request)).tenant, response_id)
        if stream and known is not None and known.is_followed:
            after = -1 if starting_after is None else starting_after
            return streamed(known.follow(after), openai_error)
        if known is not None and not known.is_settled and not stream:
            return JSONResponse(known.body)
        body = store.body(await store.found(response_id))
        if stream:
            why = (
                "of one that was asked for in the background as a stream, until long after its end"
            )
            raise refused("stream", True, why)
        return JSONResponse(body)

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
        known = stores.backgrounds.find((await services.caller(request)).tenant, response_id)
        if known is not None and not known.is_settled:
            items = known.input_items()
        else:
            items = store.input_items(await store.found(response_id))
        return page_of(items, limit=limit, order=order, after=after)

    @routes.delete("/v1/responses/{response_id}", response_model=None)
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Forget a response, also one that is being made; those that went on from it stay."""
        store = await stores.responses(request)
        await stores.backgrounds.forget((await services.caller(request)).tenant, response_id)
        await store.found(response_id)
        await store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str, request: Request) -> dict[str, Any]:
        """End a response that is made in the background; one that has ended stays as it is."""
        store = await stores.responses(request)
        known = stores.backgrounds.find((await services.caller(request)).tenant, response_id)
        if known is not None and not known.is_settled:
            await known.cancel()
            return known.body
        body = store.body(await store.found(response_id))
        if not body["background"]:
            raise refused("cancel", response_id, "it was not made in the background")
        return body

    return routes


def _kept(body: Asked, request: Request) -> Asked:
    """A request as it is where it says that nothing is to be kept of it."""
    return body.for_helper() if says_helper(request.headers, body.metadata) else body


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
