"""``/v1/chat/completions``."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from sessionkv.client import AsyncClient, TurnResult
from sessionkv.client.options import GenerateOptions
from sessionkv.gateway.openai.sampling import priority_of, sampling_of, tier_of
from sessionkv.gateway.openai.schema import ChatMessage, Sampling
from sessionkv.gateway.openai.usage import usage_map
from sessionkv.gateway.reports import extension
from sessionkv.gateway.services import Services
from sessionkv.gateway.side_by_side import all_of, merged
from sessionkv.gateway.sse import EventStream, data, unless_gone
from sessionkv.types import SamplingParams


class ChatRequest(Sampling):
    """Body of a request."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(None, description="Most tokens; `max_completion_tokens` wins.")
    max_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    """What all parts of one answer repeat."""

    id: str
    created: int
    model: str
    tier: str

    def map(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": self.tier,
            "choices": choices,
        }


def router(services: Services) -> APIRouter:
    """Routes of Chat Completions."""
    routes = APIRouter(tags=["chat"])

    @routes.post("/v1/chat/completions", response_model=None)
    async def create(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, at once or as a stream."""
        served = await services.model()
        served.require(body.model)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        wanted = sampling_of(body, max_tokens=most, logprobs=None)
        client = await services.client(request)
        answer = _Answer(
            f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), served.id, tier_of(body)
        )
        if body.stream:
            events = _events(client, body, wanted, answer)
            return EventStream(events, ping_s=services.settings.ping_s)
        messages = [message.to_map() for message in body.messages]
        results = await unless_gone(
            request,
            all_of(
                [
                    client.generate(messages=messages, **_options(body, sampling))
                    for sampling in wanted
                ]
            ),
        )
        return JSONResponse(_whole(answer, results))

    return routes


def _options(body: ChatRequest, sampling: SamplingParams) -> GenerateOptions:
    return {"sampling": sampling, "priority": priority_of(body)}


def _whole(answer: _Answer, results: Sequence[TurnResult]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": result.text},
            "logprobs": None,
            "finish_reason": result.finish_reason.value,
        }
        for index, result in enumerate(results)
    ]
    value = answer.map("chat.completion", choices)
    return value | {"usage": usage_map(results), "sessionkv": extension(results)}


async def _events(
    client: AsyncClient, body: ChatRequest, wanted: Sequence[SamplingParams], answer: _Answer
) -> AsyncGenerator[bytes, None]:
    messages = [message.to_map() for message in body.messages]
    streams = [
        client.stream_generate(messages=messages, **_options(body, sampling)) for sampling in wanted
    ]
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    begun: set[int] = set()
    results: list[TurnResult | None] = [None] * len(streams)

    def chunk(index: int, delta: dict[str, Any], result: TurnResult | None = None) -> bytes:
        reason = None if result is None else result.finish_reason.value
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        value = answer.map("chat.completion.chunk", [choice])
        if with_usage:
            value["usage"] = None
        if result is not None:
            value["sessionkv"] = extension([result])
        return data(value)

    try:
        async for index, event in merged(streams):
            if index not in begun:
                begun.add(index)
                yield chunk(index, {"role": "assistant", "content": ""})
            if event.text:
                yield chunk(index, {"content": event.text})
            if event.result is not None:
                results[index] = event.result
                yield chunk(index, {}, event.result)
        finished = [result for result in results if result is not None]
        if with_usage:
            value = answer.map("chat.completion.chunk", [])
            yield data(value | {"usage": usage_map(finished), "sessionkv": extension(finished)})
        yield b"data: [DONE]\n\n"
    finally:
        for stream in streams:
            await stream.aclose()
