"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import secrets
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.anthropic.asked import Asked
from sessionkv.gateway.anthropic.checks import check_answer, check_prompt
from sessionkv.gateway.anthropic.convert import convert
from sessionkv.gateway.anthropic.diagnostics import Fingerprints
from sessionkv.gateway.anthropic.kept import keeping_of
from sessionkv.gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from sessionkv.gateway.clients import Caller
from sessionkv.gateway.errors import Problem
from sessionkv.gateway.services import Services
from sessionkv.gateway.sse import STREAMED, EventStream, named, unless_gone

PING = named("ping", {"type": "ping"})


def router(services: Services) -> APIRouter:
    """Routes of the Messages API."""
    routes = APIRouter(tags=["messages"])
    fingerprints: WeakKeyDictionary[Caller, Fingerprints] = WeakKeyDictionary()  # own ones alone

    @routes.post("/v1/messages", response_model=None, responses=STREAMED)
    async def create(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, at once or as a stream."""
        served = await services.model()
        served.require(body.model)
        check_prompt(body)
        check_answer(body, served.reply_style)
        caller = await services.caller(request)
        own = fingerprints.setdefault(caller, Fingerprints())
        asked = Asked(body, request.headers, caller, served, own)
        response: Response
        if body.stream:
            response = EventStream(
                asked.events(), ping_s=services.settings.ping_s, error=_error, ping=PING
            )
        else:
            response = JSONResponse(await unless_gone(request, asked.whole()))
        response.headers["request-id"] = f"req_{secrets.token_hex(12)}"
        return response

    @routes.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """How many tokens its prompt has: the number that an answer's usage would have now."""
        served = await services.model()
        served.require(body.model)
        check_prompt(body)
        converted = convert(body)
        caller = await services.caller(request)
        keeping = keeping_of(body, converted.transcript, request.headers)
        exchange = caller.conversations.begin(converted.transcript, keeping)
        try:
            tokens = await exchange.count()
        except InvalidRequest as error:
            raise converted.renamed(error) from None
        return JSONResponse({"input_tokens": tokens})

    return routes


def _error(problem: Problem) -> bytes:
    """The last event of a stream that failed."""
    return named("error", problem.anthropic())
