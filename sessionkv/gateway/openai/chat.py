"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from sessionkv.client import StreamEvent
from sessionkv.client.options import TurnOptions
from sessionkv.gateway.clients import Caller
from sessionkv.gateway.conversations import Exchange
from sessionkv.gateway.grammars import Demand, check_calls
from sessionkv.gateway.keeping import keeping_of
from sessionkv.gateway.openai.answers import Answers, Choice, Names, Part
from sessionkv.gateway.openai.chat_message import ChatReply
from sessionkv.gateway.openai.chat_request import ChatRequest
from sessionkv.gateway.openai.logprobs import StreamedLogprobs, chat_logprobs, joined
from sessionkv.gateway.openai.sampling import priority_of, sampling_of
from sessionkv.gateway.services import Services
from sessionkv.gateway.sse import STREAMED, EventStream, unless_gone
from sessionkv.types import SamplingParams

FORM = "response_format"
NAMES = Names("chatcmpl", "chat.completion", "chat.completion.chunk")


def router(services: Services) -> APIRouter:
    """Routes of Chat Completions."""
    routes = APIRouter(tags=["chat"])

    @routes.post("/v1/chat/completions", response_model=None, responses=STREAMED)
    async def create(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, at once or as a stream."""
        served = await services.model()
        served.require(body.model)
        body.check()
        check_calls(body.tools or (), served.reply_style)
        demand = body.demand()
        grammar = demand.grammar(served.reply_style)
        with demand.naming(FORM):
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
        style = served.reply_style
        if not body.tools or body.tool_choice == "none":
            style = style.without_calls()
        choices = [
            ChatChoice(
                body,
                caller,
                exchange=caller.conversations.begin(transcript, keeping),
                sampling=sampling,
                reply=ChatReply(
                    style,
                    only_one_call=body.parallel_tool_calls is False,
                    tools=transcript.tools or (),
                ),
                demand=demand,
            )
            for sampling in wanted
        ]
        answers = Answers(body, served, NAMES, choices)
        if body.stream:
            return EventStream(answers.events(), ping_s=services.settings.ping_s)
        return JSONResponse(await unless_gone(request, answers.whole()))

    return routes


class ChatChoice(Choice):
    """One answer."""

    def __init__(
        self,
        body: ChatRequest,
        caller: Caller,
        *,
        exchange: Exchange,
        sampling: SamplingParams,
        reply: ChatReply,
        demand: Demand,
    ) -> None:
        """Of a request.

        Args:
            body: The request.
            caller: Whose it is.
            exchange: To be run.
            sampling: How.
            reply: Reads what the model says.
            demand: What ``sampling`` holds it to.
        """
        self._caller = caller
        self._exchange = exchange
        self._reply = reply
        self._demand = demand
        self._tops = body.num_logprobs
        self._logprobs = StreamedLogprobs()
        exchange.ends_at = lambda: reply.ends_at
        self._options: TurnOptions = {
            "sampling": sampling,
            "priority": priority_of(body),
            "progress": bool(body.stream),
            "deltas": bool(body.stream) or body.parallel_tool_calls is False,
        }

    async def turn(self) -> AsyncGenerator[StreamEvent, None]:
        """Run it."""
        with self._demand.naming(FORM):
            async with aclosing(self._exchange.stream(**self._options)) as events:
                async for event in events:
                    yield event

    async def opening(self) -> list[Part]:
        """Who speaks."""
        return [_part({"role": "assistant", "content": ""})]

    async def told(self, event: StreamEvent) -> list[Part]:
        """What an event tells: its log-probabilities go with the first of it."""
        deltas = self._reply.feed(event.text)
        if event.result is not None:
            deltas += self._reply.end(event.result)
            self._exchange.keep(self._reply.message)
        parts = [_part(delta) for delta in deltas]
        logprobs = await self._logprobs_of(event)
        if logprobs is not None:
            parts = parts or [_part({})]
            parts[0]["logprobs"] = logprobs
        if event.result is not None:
            await self._exchange.kept()
            parts.append(_part({}, reason=self._reply.finish_reason))
        return parts

    async def _logprobs_of(self, event: StreamEvent) -> dict[str, Any] | None:
        if self._tops is None:
            return None
        pieces, client = self._caller.pieces, self._caller.client
        entries = await self._logprobs.next(event, pieces, client)
        if not entries:
            return None
        return chat_logprobs(entries, await pieces.of_logprobs(client, entries), tops=self._tops)

    def whole(self, parts: Sequence[Part]) -> Part:
        """The answer as one message."""
        none = None if self._tops is None else chat_logprobs((), {}, tops=self._tops)
        return {
            "message": self._reply.message,
            "logprobs": joined([none, *(part["logprobs"] for part in parts)]),
            "finish_reason": self._reply.finish_reason,
        }

    def reasoning_tokens(self, completion: int) -> int:
        """How many of the generated tokens are reasoning."""
        return self._reply.reasoning_tokens(completion)

    @property
    def rewrites(self) -> Sequence[Mapping[str, str]]:
        """What was put elsewhere in the prompt."""
        return self._exchange.rewrites

    async def close(self) -> None:
        """Leave nothing behind but what was kept."""
        await self._exchange.close()


def _part(delta: dict[str, Any], *, reason: str | None = None) -> Part:
    return {"delta": delta, "logprobs": None, "finish_reason": reason}
