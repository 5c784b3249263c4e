"""``/v1/chat/completions``."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from sessionkv.client import StreamEvent, TurnResult
from sessionkv.client.options import TurnOptions
from sessionkv.client.results import Logprobs
from sessionkv.gateway.clients import Caller
from sessionkv.gateway.conversations import Exchange
from sessionkv.gateway.errors import refused
from sessionkv.gateway.keeping import keeping_of
from sessionkv.gateway.openai.chat_choice import Choice
from sessionkv.gateway.openai.chat_request import ChatRequest
from sessionkv.gateway.openai.logprobs import StreamedLogprobs, chat_logprobs
from sessionkv.gateway.openai.sampling import priority_of, sampling_of, tier_of
from sessionkv.gateway.openai.usage import usage_map
from sessionkv.gateway.replies import ReplyStyle
from sessionkv.gateway.reports import extension
from sessionkv.gateway.services import ServedModel, Services
from sessionkv.gateway.side_by_side import all_of, merged
from sessionkv.gateway.sse import STREAMED, EventStream, data, progress, unless_gone
from sessionkv.types import SamplingParams


def router(services: Services) -> APIRouter:
    """Routes of Chat Completions."""
    routes = APIRouter(tags=["chat"])

    @routes.post("/v1/chat/completions", response_model=None, responses=STREAMED)
    async def create(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, at once or as a stream."""
        served = await services.model()
        served.require(body.model)
        body.check()
        demand = body.demand()
        grammar = demand.grammar(served.reply_style)
        if demand.tools and demand.schema is None and grammar is None:
            raise refused("tool_choice", "required", "this model's template writes no calls")
        wanted = sampling_of(
            body,
            max_tokens=body.most_tokens,
            logprobs=body.num_logprobs,
            grammar=grammar,
            fit_window=True,
        )
        transcript = body.transcript()
        keeping = keeping_of(body, transcript, request.headers, max_tokens=body.most_tokens)
        caller = await services.caller(request)
        asked = _Asked(
            body,
            caller,
            served,
            wanted,
            [caller.conversations.begin(transcript, keeping) for _ in wanted],
        )
        if body.stream:
            return EventStream(asked.events(), ping_s=services.settings.ping_s)
        return JSONResponse(await unless_gone(request, asked.whole()))

    return routes


class _Asked:
    """One request under way."""

    def __init__(
        self,
        body: ChatRequest,
        caller: Caller,
        served: ServedModel,
        wanted: Sequence[SamplingParams],
        exchanges: Sequence[Exchange],
    ) -> None:
        self._body = body
        self._caller = caller
        self._wanted = wanted
        self._exchanges = exchanges
        style = served.reply_style
        if not body.tools or body.tool_choice == "none":
            style = style.without_calls()
        self._choices = [_choice(style, body) for _ in wanted]
        self._logprobs = [StreamedLogprobs() for _ in wanted]
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.id,
            "service_tier": tier_of(body),
        }

    def _options(self, index: int) -> TurnOptions:
        return {"sampling": self._wanted[index], "priority": priority_of(self._body)}

    def _end(self, index: int, result: TurnResult) -> list[dict[str, Any]]:
        """The last deltas of an answer; its exchange is being kept."""
        deltas = self._choices[index].end(result)
        self._exchanges[index].keep(self._choices[index].message)
        return deltas

    async def _told(self, entries: Logprobs | None) -> dict[str, Any] | None:
        if self._body.num_logprobs is None or entries is None:
            return None
        pieces = await self._caller.pieces.of_logprobs(self._caller.client, entries)
        return chat_logprobs(entries, pieces, tops=self._body.num_logprobs)

    def _usage(self, results: Sequence[TurnResult]) -> dict[str, Any]:
        thoughts = sum(
            choice.reasoning_tokens(result.usage.completion_tokens)
            for choice, result in zip(self._choices, results, strict=True)
        )
        return usage_map(results, reasoning_tokens=thoughts)

    async def _close(self) -> None:
        for exchange in self._exchanges:
            await exchange.close()

    # At once ---------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        try:
            results = await all_of(
                [
                    exchange.run(**self._options(index))
                    for index, exchange in enumerate(self._exchanges)
                ]
            )
            choices = [await self._whole_choice(*item) for item in enumerate(results)]
            for exchange in self._exchanges:
                await exchange.kept()
        finally:
            await self._close()
        usage = self._usage(results)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage,
            "sessionkv": extension(results),
        }

    async def _whole_choice(self, index: int, result: TurnResult) -> dict[str, Any]:
        choice = self._choices[index]
        choice.feed(result.text)
        self._end(index, result)
        return {
            "index": index,
            "message": choice.message,
            "logprobs": await self._told(result.logprobs),
            "finish_reason": choice.finish_reason,
        }

    # As a stream -----------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing the generator ends its turns."""
        options = self._body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        streams = [
            exchange.stream(**self._options(index))
            for index, exchange in enumerate(self._exchanges)
        ]
        together = merged(streams)
        results: dict[int, TurnResult] = {}
        begun: set[int] = set()
        try:
            async for index, event in together:
                if event.progress is not None:
                    yield progress(event.progress)
                    continue
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(_Piece(index, {"role": "assistant", "content": ""}))
                for piece in await self._pieces(index, event):
                    yield self._chunk(piece)
                if event.result is not None:
                    results[index] = event.result
                    await self._exchanges[index].kept()
                    reason = self._choices[index].finish_reason
                    last = _Piece(index, {}, reason=reason, result=event.result)
                    yield self._chunk(last)
            ordered = [results[index] for index in sorted(results)]
            if has_usage:
                rest = {"usage": self._usage(ordered), "sessionkv": extension(ordered)}
                yield data({**self._head, "object": "chat.completion.chunk", "choices": [], **rest})
            yield b"data: [DONE]\n\n"
        finally:
            await together.aclose()
            for stream in streams:
                await stream.aclose()
            await self._close()

    async def _pieces(self, index: int, event: StreamEvent) -> list[_Piece]:
        """What one event tells: its log-probabilities go with the first of it."""
        deltas = self._choices[index].feed(event.text)
        if event.result is not None:
            deltas += self._end(index, event.result)
        pieces = [_Piece(index, delta) for delta in deltas]
        if self._body.num_logprobs is not None:
            entries = await self._logprobs[index].next(
                event, self._caller.pieces, self._caller.client
            )
            if entries:
                pieces = pieces or [_Piece(index, {})]
                pieces[0].logprobs = await self._told(entries)
        return pieces

    def _chunk(self, piece: _Piece) -> bytes:
        value: dict[str, Any] = {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [
                {
                    "index": piece.index,
                    "delta": piece.delta,
                    "logprobs": piece.logprobs,
                    "finish_reason": piece.reason,
                }
            ],
        }
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            value["usage"] = None
        if piece.result is not None:
            value["sessionkv"] = extension([piece.result])
        return data(value)


def _choice(style: ReplyStyle, body: ChatRequest) -> Choice:
    return Choice(style, only_one_call=body.parallel_tool_calls is False)


@dataclass(slots=True)
class _Piece:
    """One chunk to be."""

    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None = None
    reason: str | None = None
    result: TurnResult | None = None
