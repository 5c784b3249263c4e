"""``/sessionkv/v1/``: sessions, their tree, their blocks and the engine's figures, for the page.

Each route is one or a few requests of the socket; nothing is kept here. Names of sessions may hold
anything, so they travel in bodies and queries and never in paths. What another site's page sends is
refused: without keys whoever can reach the gateway may use it, and a browser can.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from sessionkv.client import AsyncClient, AsyncSession, SessionInfo
from sessionkv.errors import SessionDamaged, SessionNotFound
from sessionkv.gateway.errors import Problem
from sessionkv.gateway.reports import cache_map
from sessionkv.gateway.services import ServedModel, Services
from sessionkv.gateway.session_maps import history_map, places_map, session_map, tree_nodes
from sessionkv.gateway.sse import EventStream, named
from sessionkv.types import SamplingParams

PREFIX = "/sessionkv/v1"
EVERY_S = 1.0
"""How often a watching page is told of the engine's figures."""
MAX_PAGE = 1000
MAX_TREE = 200

SessionName = Annotated[str, Query(description="Name of a session.")]
After = Annotated[str | None, Query(description="`next` of the page before.")]


class Named(BaseModel):
    """A session."""

    session: str


class OpenBody(Named):
    """Create a session, or resume one."""

    system: str | None = None
    history: Literal["keep", "follow"] | None = None
    budget_bytes: int | None = None


class Sampling(BaseModel):
    """How tokens are chosen; what is absent has the engine's default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None

    def params(self) -> SamplingParams:
        """For the engine.

        Raises:
            InvalidRequest: A value is not allowed.
        """
        return SamplingParams(**self.model_dump(exclude_none=True))


class TurnBody(Named):
    """One user message."""

    text: str
    sampling: Sampling = Field(default_factory=Sampling)
    when_busy: Literal["error", "queue"] = "error"


class ForkBody(Named):
    """A new session that goes on from here, or from one of its turns."""

    name: str
    node: str | None = None


class RewindBody(Named):
    """Take turns back."""

    turns: int = 1


class PinBody(Named):
    """Keep it in a tier longer than others."""

    tier: Literal["device", "host", "disk"] = "host"
    ttl_s: float | None = None
    priority: int = 50


class CloseBody(Named):
    """End what runs of it; without ``keep`` the session is deleted."""

    keep: bool = True


async def same_origin(request: Request) -> None:
    """Refuse what a browser sends for another site's page."""
    site = request.headers.get("sec-fetch-site", "none")
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    foreign = origin is not None and origin.partition("://")[2] != host
    if site not in ("none", "same-origin") or foreign:
        raise HTTPException(403, "requests of other sites' pages are refused")


def router(services: Services, *, every_s: float = EVERY_S) -> APIRouter:
    """The routes.

    Args:
        services: The gateway's.
        every_s: How often watchers are told.
    """
    routes = APIRouter(prefix=PREFIX, tags=["sessionkv"])
    _add_questions(routes, services, every_s)
    _add_changes(routes, services)
    return routes


def _add_questions(routes: APIRouter, services: Services, every_s: float) -> None:
    async def handle(request: Request, session: str) -> AsyncSession:
        return (await services.client(request)).session(session)

    @routes.get("/sessions")
    async def sessions(
        request: Request,
        prefix: str = "",
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    ) -> dict[str, Any]:
        """A page of sessions, by name."""
        client = await services.client(request)
        page = await client.session_page(prefix, after=after, limit=limit)
        return {"sessions": [session_map(info) for info in page.sessions], "next": page.next}

    @routes.get("/session")
    async def session(request: Request, session: SessionName) -> dict[str, Any]:
        """One session, with its bytes in each tier."""
        return session_map(await (await handle(request, session)).info())

    @routes.get("/history")
    async def history(request: Request, session: SessionName) -> dict[str, Any]:
        """One session with its messages."""
        return history_map(await (await handle(request, session)).info(history=True))

    @routes.get("/places")
    async def places(request: Request, session: SessionName) -> dict[str, Any]:
        """Where its blocks are."""
        return places_map(await (await handle(request, session)).places())

    @routes.get("/tree")
    async def tree(
        request: Request,
        session: Annotated[str | None, Query(description="This one alone.")] = None,
        prefix: str = "",
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=MAX_TREE)] = 100,
    ) -> dict[str, Any]:
        """Turns that sessions stand on, and which session stands where."""
        client = await services.client(request)
        if session is not None:
            path = await client.session(session).path()
            info = await client.session(session).info()
            return {
                "sessions": [session_map(info)],
                "nodes": tree_nodes([(session, path)]),
                "next": None,
            }
        page = await client.session_page(prefix, after=after, limit=limit)
        paths = await asyncio.gather(*(_path(client, info) for info in page.sessions))
        return {
            "sessions": [session_map(info) for info in page.sessions],
            "nodes": tree_nodes(paths),
            "next": page.next,
        }

    @routes.get("/stats")
    async def stats(request: Request) -> dict[str, Any]:
        """All of the engine's figures."""
        return await (await services.client(request)).stats()

    @routes.get("/events", response_model=None)
    async def events(request: Request, session: str | None = None) -> Response:
        """Figures, and what is known of a session, as they change: a stream for a page."""
        client, model = await services.client(request), await services.model()
        told = _watch(client, model, session, every_s)
        return EventStream(told, ping_s=services.settings.ping_s, error=_error_event)


def _add_changes(routes: APIRouter, services: Services) -> None:
    only_here = [Depends(same_origin)]

    async def handle(request: Request, body: Named) -> AsyncSession:
        return (await services.client(request)).session(body.session)

    @routes.post("/open", dependencies=only_here)
    async def open_session(request: Request, body: OpenBody) -> dict[str, Any]:
        """Create a session, or resume the one of that name."""
        client = await services.client(request)
        opened = await client.open(
            body.session,
            system=body.system,
            history=body.history,
            budget_bytes=body.budget_bytes,
        )
        return session_map(await opened.info())

    @routes.post("/turn", dependencies=only_here, response_model=None)
    async def turn(request: Request, body: TurnBody) -> Response:
        """Say something and stream the reply; who goes away cancels it."""
        told = _turn(await handle(request, body), body, body.sampling.params())
        return EventStream(told, ping_s=services.settings.ping_s, error=_error_event)

    @routes.post("/fork", dependencies=only_here)
    async def fork(request: Request, body: ForkBody) -> dict[str, Any]:
        """A new session on the last turn, or on an earlier one; costs no KV."""
        forked = await (await handle(request, body)).fork(body.name, node=body.node)
        return session_map(await forked.info())

    @routes.post("/rewind", dependencies=only_here)
    async def rewind(request: Request, body: RewindBody) -> dict[str, Any]:
        """Take turns back, each with its reply."""
        return session_map(await (await handle(request, body)).rewind(body.turns))

    @routes.post("/pin", dependencies=only_here)
    async def pin(request: Request, body: PinBody) -> dict[str, Any]:
        """Let its blocks leave a tier after all that is pinned less."""
        session = await handle(request, body)
        pinned = await session.pin(tier=body.tier, ttl_s=body.ttl_s, priority=body.priority)
        return session_map(pinned)

    @routes.post("/unpin", dependencies=only_here)
    async def unpin(request: Request, body: Named) -> dict[str, Any]:
        """Take the pin off."""
        return session_map(await (await handle(request, body)).unpin())

    @routes.post("/close", dependencies=only_here)
    async def close(request: Request, body: CloseBody) -> dict[str, bool]:
        """End its turns and keep it, or delete it."""
        await (await handle(request, body)).close(keep=body.keep)
        return {"closed": True}


async def _path(client: AsyncClient, info: SessionInfo) -> tuple[str, tuple[str, ...]]:
    """Name and turns of a session; none of one that was deleted meanwhile or cannot be read."""
    try:
        return info.name, await client.session(info.name).path()
    except (SessionNotFound, SessionDamaged):
        return info.name, ()


async def _turn(
    session: AsyncSession, body: TurnBody, sampling: SamplingParams
) -> AsyncGenerator[bytes, None]:
    stream = session.stream(body.text, sampling=sampling, when_busy=body.when_busy)
    try:
        async for event in stream:
            if event.restarted:
                yield named("restarted", {})
            if event.text or event.tokens:
                yield named("delta", {"text": event.text, "tokens": len(event.tokens)})
            if (result := event.result) is not None:
                done = {
                    "text": result.text,
                    "node": result.node,
                    "finish_reason": result.finish_reason.value,
                    "stop": result.stop,
                    "completion_tokens": result.usage.completion_tokens,
                    "cache": cache_map(result.cache),
                }
                yield named("done", done)
    finally:
        await stream.aclose()


async def _watch(
    client: AsyncClient, model: ServedModel, session: str | None, every_s: float
) -> AsyncGenerator[bytes, None]:
    """The model, then figures each time, and the session whenever it or its blocks changed."""
    yield named("engine", {"model": model.id, "max_model_len": model.max_model_len})
    told: object = None
    while True:
        yield named("stats", await client.stats())
        if session is not None:
            found = await _session_event(client.session(session))
            if found != told:
                told = found
                yield named("session", found)
        await asyncio.sleep(every_s)


async def _session_event(session: AsyncSession) -> dict[str, Any]:
    try:
        info, places = await session.info(), await session.places()
    except SessionNotFound:
        return {"name": session.name, "session": None, "places": None}
    return {"name": session.name, "session": session_map(info), "places": places_map(places)}


def _error_event(problem: Problem) -> bytes:
    return named("error", problem.openai())
