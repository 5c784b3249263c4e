"""The application: every API's routes over the same services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from sessionkv.errors import SessionKVError
from sessionkv.gateway import admin, health, metrics, page_files
from sessionkv.gateway.anthropic import messages
from sessionkv.gateway.at_work import RequestShares
from sessionkv.gateway.bodies import BodyLimits
from sessionkv.gateway.errors import DOCUMENTED, Problem, invalid_body, problem_response
from sessionkv.gateway.guard import Guard
from sessionkv.gateway.openai import chat, completions, models, responses
from sessionkv.gateway.services import Services
from sessionkv.gateway.settings import GatewaySettings
from sessionkv.gateway.sse import ClientGone

_ROUTERS = (
    health.router,
    metrics.router,
    models.router,
    chat.router,
    completions.router,
    responses.router,
    messages.router,
    admin.router,
    page_files.router,
)


def create_app(settings: GatewaySettings) -> FastAPI:
    """The whole gateway; it greets the engine when it starts and leaves it when it ends."""
    services = Services(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        await services.start()
        try:
            yield
        finally:
            await services.close()

    app = FastAPI(
        title="sessionkv",
        version=version("sessionkv"),
        lifespan=lifespan,
        responses={400: DOCUMENTED, "4XX": DOCUMENTED},  # with the latter none is 422
        strict_content_type=False,
        docs_url=None,  # those pages load scripts from elsewhere; /openapi.json is what they show
        redoc_url=None,
    )
    app.add_middleware(
        BodyLimits,
        bounds=services,
        pause_s=settings.body_pause_s,
        bytes_per_s=settings.body_bytes_per_s,
    )
    app.add_middleware(RequestShares, most=max(1, settings.connections // 4))
    app.add_middleware(
        Guard, admission=services, hosts=settings.hosts, origins=settings.cors_origins
    )
    if settings.cors_origins:  # outermost: a browser asks for leave without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _failed)
    app.add_exception_handler(SessionKVError, _failed)
    for router in _ROUTERS:
        app.include_router(router(services))
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        return problem_response(request, error)
    problems = error.errors()
    is_unread = [tuple(problem["loc"]) for problem in problems] == [("body",)]
    if is_unread and not _says_json(request):  # it was handed on as bytes, which are no object
        why = "the body is JSON: send it with Content-Type: application/json"
        return Problem(415, "unsupported_media_type", why).response(request.url.path)
    return invalid_body(problems).response(request.url.path)


def _says_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.endswith(("/json", "+json"))


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return problem_response(request, error)
    code = _CODES.get(error.status_code, "invalid_request")
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = Problem(error.status_code, code, message).response(request.url.path)
    response.headers.update(error.headers or {})
    return response


_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "request_too_large",
    503: "engine_closed",
}


async def _gone(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    return problem_response(request, error)
