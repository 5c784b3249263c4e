"""``/v1/responses``: answers that stay, and that others go on from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from sessionkv.client import TurnResult
from sessionkv.client.options import TurnOptions
from sessionkv.gateway.errors import Problem, refused
from sessionkv.gateway.openai.pages import page_of
from sessionkv.gateway.openai.response_body import body_of, echo_of, status_of, usage_of
from sessionkv.gateway.openai.response_events import ResponseWriter
from sessionkv.gateway.openai.response_ids import new_response_id
from sessionkv.gateway.openai.response_plan import plan_of
from sessionkv.gateway.openai.response_schema import ResponseRequest
from sessionkv.gateway.openai.response_store import Plan, ResponseStore
from sessionkv.gateway.openai.sampling import priority_of, sampling_of, tier_of
from sessionkv.gateway.reports import extension
from sessionkv.gateway.services import Services
from sessionkv.gateway.sse import EventStream, named, unless_gone
from sessionkv.types import FinishReason

DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """One response under way."""

    store: ResponseStore
    plan: Plan
    options: TurnOptions
    writer: ResponseWriter
    on_disk_s: float | None

    @property
    def id(self) -> str:
        return str(self.plan.kept.echo["id"])

    def body(self, status: str, **outcome: Any) -> dict[str, Any]:
        return body_of(self.plan.kept, self.plan.tools, status=status, **outcome)

    async def events(self, *, stream: bool) -> AsyncGenerator[dict[str, Any], None]:
        """All events; the last one has the whole response."""
        calls = bool(self.plan.tools) and self.plan.kept.calls_tools
        parser, writer = self.store.parser(self.id, calls=calls), self.writer
        running = self.store.run(
            self.plan,
            self.options,
            # Where the reply ends with its first call somebody has to see it come.
            stream=stream or (calls and self.plan.kept.calls_once),
            is_over=lambda: writer.is_over,
        )
        has_begun = False
        try:
            async for event in running:
                if not has_begun:
                    has_begun = True
                    for first in writer.begin(self.body("in_progress")):
                        yield first
                if event.text:
                    for said in writer.feed(parser.feed(event.text)):
                        yield said
                if event.result is not None:
                    is_cut = event.result.finish_reason is FinishReason.LENGTH
                    for said in [*writer.feed(parser.end()), *writer.end(is_cut=is_cut)]:
                        yield said
                    if self.on_disk_s is not None:
                        self.store.keep_on_disk(self.id, self.on_disk_s)
                    yield writer.finish(self._whole(event.result))
        finally:
            await running.aclose()

    def _whole(self, result: TurnResult) -> dict[str, Any]:
        output = self.writer.output
        counts = {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "cached_tokens": result.cache.cached_tokens,
        }
        usage = usage_of(counts, output)
        body = self.body(status_of(result.finish_reason), output=output, usage=usage)
        report = extension([result])
        if not self.plan.is_stored:
            report.pop("node", None)
        return body | {"sessionkv": report}

    def failed(self, problem: Problem) -> bytes:
        """The last event of a stream that failed."""
        own = problem.openai()["error"]
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        error = {**own, "code": code}
        body = self.body("failed", output=self.writer.output, error=error)
        event = self.writer.finish(body)
        return named(event["type"], event)


def router(services: Services) -> APIRouter:
    """Routes of Responses."""
    routes = APIRouter(tags=["responses"])
    tasks: set[asyncio.Task[None]] = set()

    async def store_of(request: Request) -> ResponseStore:
        served = await services.model()
        return ResponseStore(await services.client(request), served.reply_style, tasks)

    @routes.post("/v1/responses", response_model=None)
    async def create(body: ResponseRequest, request: Request) -> Response:
        """Answer, at once or as a stream."""
        served = await services.model()
        served.require(body.model)
        body.check()
        store = await store_of(request)
        echo = echo_of(body, new_response_id(), model=served.id, tier=tier_of(body))
        plan = await plan_of(store, body, echo)
        answer = _answer(store, body, plan)
        if not plan.messages:
            return _nothing(answer, stream=bool(body.stream))
        if body.stream:
            events = _framed(answer.events(stream=True))
            ping_s = services.settings.ping_s
            return EventStream(events, ping_s=ping_s, error=answer.failed)
        return JSONResponse(await unless_gone(request, _last(answer.events(stream=False))))

    @routes.get("/v1/responses/{response_id}", response_model=None)
    async def retrieve(
        response_id: str, request: Request, stream: bool | None = None
    ) -> dict[str, Any]:
        """Give a stored response again."""
        if stream:
            raise refused("stream", True, "a response is streamed once, as it is made")
        store = await store_of(request)
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
        store = await store_of(request)
        items = store.input_items(await store.find(response_id))
        return page_of(items, limit=limit, order=order, after=after)

    @routes.delete("/v1/responses/{response_id}", response_model=None)
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Forget a response; those that went on from it stay."""
        store = await store_of(request)
        await store.delete(await store.find(response_id))
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str, request: Request) -> None:
        """Refused: only responses in the background are cancelled, and there are none."""
        await (await store_of(request)).find(response_id)
        raise refused("cancel", response_id, "no response is made in the background")

    @routes.post("/v1/responses/compact", response_model=None)
    async def compact() -> None:
        """Refused: nothing here makes a conversation shorter."""
        raise refused("compact", None, "ask for a summary and begin a conversation with it")

    return routes


def _answer(store: ResponseStore, body: ResponseRequest, plan: Plan) -> _Answer:
    (sampling,) = sampling_of(body, max_tokens=body.max_output_tokens, logprobs=None)
    options: TurnOptions = {"sampling": sampling, "priority": priority_of(body)}
    writer = ResponseWriter(
        str(plan.kept.echo["id"]),
        seals=body.seals_reasoning,
        calls_once=body.parallel_tool_calls is False,
    )
    keeps = plan.is_stored and body.prompt_cache_retention == "24h"
    return _Answer(store, plan, options, writer, DAY_S if keeps else None)


def _nothing(answer: _Answer, *, stream: bool) -> Response:
    """A request that says nothing, as clients send to see who is there: answered with nothing."""
    body = answer.body("completed", usage=usage_of({}, ()))
    if not stream:
        return JSONResponse(body)
    events = [*answer.writer.begin(answer.body("in_progress")), answer.writer.finish(body)]
    framed = b"".join(named(event["type"], event) for event in events)
    return Response(framed, media_type="text/event-stream")


async def _framed(events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    try:
        async for event in events:
            yield named(event["type"], event)
    finally:
        await events.aclose()


async def _last(events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    try:
        async for event in events:
            body = event.get("response", body)
    finally:
        await events.aclose()
    return body
