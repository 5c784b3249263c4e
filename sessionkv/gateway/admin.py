"""``/sessionkv/v1/``: sessions, their tree, their blocks and the engine's figures, for the page.

Each route is one or a few requests of the socket; nothing is kept here. Names of sessions may hold
anything, so they travel in bodies and queries and never in paths.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from sessionkv.client import AsyncClient, AsyncStream, TurnResult
from sessionkv.client import AsyncSession as Session
from sessionkv.errors import TurnCancelled
from sessionkv.gateway.admin_bodies import (
    CloseBody,
    ForkBody,
    Named,
    OpenBody,
    PinBody,
    RewindBody,
    StopBody,
    TurnBody,
)
from sessionkv.gateway.errors import Problem
from sessionkv.gateway.reports import cache_map
from sessionkv.gateway.services import ServedModel, Services
from sessionkv.gateway.session_maps import history_map, places_map, session_map, tree_nodes
from sessionkv.gateway.session_paths import SessionPaths
from sessionkv.gateway.sse import EventStream, named
from sessionkv.gateway.watching import SessionWatch

PREFIX = "/sessionkv/v1"
EVERY_S = 1.0
"""How often a watching page is told of the engine's figures."""
MAX_PAGE = 1000
MAX_TREE = 200

SessionName = Annotated[str, Query(description="Name of a session.")]
After = Annotated[str | None, Query(description="`next` of the page before.")]


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
    paths = SessionPaths()

    async def handle(request: Request, session: str) -> Session:
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
        found = await asyncio.gather(*(paths.of(client, info) for info in page.sessions))
        names = [info.name for info in page.sessions]
        return {
            "sessions": [session_map(info) for info in page.sessions],
            "nodes": tree_nodes(zip(names, found, strict=True)),
            "next": page.next,
        }

    @routes.get("/stats")
    async def stats(request: Request) -> dict[str, Any]:
        """All of the engine's figures."""
        return await (await services.client(request)).stats()

    @routes.get("/events", response_class=EventStream, status_code=200)
    async def events(request: Request, session: str | None = None) -> Response:
        """Figures, and what is known of a session, as they change: a stream for a page."""
        client, model = await services.client(request), await services.model()
        told = _watch(client, model, session, every_s)
        return EventStream(told, ping_s=services.settings.ping_s, error=_error_event)


def _add_changes(routes: APIRouter, services: Services) -> None:
    running: dict[tuple[AsyncClient, str], AsyncStream] = {}

    async def handle(request: Request, body: Named) -> Session:
        return (await services.client(request)).session(body.session)

    @routes.post("/open")
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

    @routes.post("/turn", response_class=EventStream, status_code=200)
    async def turn(request: Request, body: TurnBody) -> Response:
        """Say something and stream the reply; who goes away cancels it."""
        session = await handle(request, body)
        stream = session.stream(
            body.text, sampling=body.sampling.params(), when_busy=body.when_busy
        )
        told = _turn(stream)
        if body.turn is not None:
            told = _named(told, running, (await services.client(request), body.turn), stream)
        return EventStream(told, ping_s=services.settings.ping_s, error=_error_event)

    @routes.post("/stop")
    async def stop(request: Request, body: StopBody) -> dict[str, bool]:
        """End a running turn; what was said so far is kept, or nothing of it."""
        stream = running.get((await services.client(request), body.turn))
        if stream is not None:
            await stream.cancel(keep=body.keep)
        return {"found": stream is not None}

    @routes.post("/fork")
    async def fork(request: Request, body: ForkBody) -> dict[str, Any]:
        """A new session on the last turn, or on an earlier one; costs no KV."""
        forked = await (await handle(request, body)).fork(body.name, node=body.node)
        return session_map(await forked.info())

    @routes.post("/rewind")
    async def rewind(request: Request, body: RewindBody) -> dict[str, Any]:
        """Take turns back, each with its reply."""
        return session_map(await (await handle(request, body)).rewind(body.turns))

    @routes.post("/pin")
    async def pin(request: Request, body: PinBody) -> dict[str, Any]:
        """Let its blocks leave a tier after all that is pinned less."""
        session = await handle(request, body)
        pinned = await session.pin(tier=body.tier, ttl_s=body.ttl_s, priority=body.priority)
        return session_map(pinned)

    @routes.post("/unpin")
    async def unpin(request: Request, body: Named) -> dict[str, Any]:
        """Take the pin off."""
        return session_map(await (await handle(request, body)).unpin())

    @routes.post("/close")
    async def close(request: Request, body: CloseBody) -> dict[str, bool]:
        """End its turns and keep it, or delete it."""
        await (await handle(request, body)).close(keep=body.keep)
        return {"closed": True}


async def _turn(stream: AsyncStream) -> AsyncGenerator[bytes, None]:
    told = False
    try:
        async for event in stream:
            if event.restarted:
                yield named("restarted", {})
            if event.text or event.tokens:
                yield named("delta", {"text": event.text, "tokens": len(event.tokens)})
            if event.result is not None:
                told = True
                yield named("done", _done(event.result))
        # Who stopped it may have taken its last events.
        if not told and stream.result is not None:
            yield named("done", _done(stream.result))
        elif not told:
            raise TurnCancelled("the turn was stopped, and nothing of it was kept")
    finally:
        await stream.aclose()


def _done(result: TurnResult) -> dict[str, Any]:
    return {
        "text": result.text,
        "node": result.node,
        "finish_reason": result.finish_reason.value,
        "stop": result.stop,
        "completion_tokens": result.usage.completion_tokens,
        "cache": cache_map(result.cache),
    }


async def _named(
    events: AsyncGenerator[bytes, None],
    running: dict[tuple[AsyncClient, str], AsyncStream],
    name: tuple[AsyncClient, str],
    stream: AsyncStream,
) -> AsyncGenerator[bytes, None]:
    """The events; while they last the turn can be stopped by its name, the latest of that name."""
    running[name] = stream
    try:
        async for event in events:
            yield event
    finally:
        if running.get(name) is stream:
            del running[name]
        await events.aclose()


async def _watch(
    client: AsyncClient, model: ServedModel, session: str | None, every_s: float
) -> AsyncGenerator[bytes, None]:
    """The model, then figures each time, and the session whenever it or its blocks changed."""
    yield named("engine", {"model": model.id, "max_model_len": model.max_model_len})
    watch = None if session is None else SessionWatch(client, session)
    while True:
        stats = await client.stats()
        yield named("stats", stats)
        if watch is not None and (told := await watch.look(stats)) is not None:
            yield named("session", told)
        await asyncio.sleep(every_s)


def _error_event(problem: Problem) -> bytes:
    return named("error", problem.openai())
