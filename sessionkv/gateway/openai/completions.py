"""``/v1/completions``: prompts without a template. Nothing of them is kept beside the cache."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from sessionkv.client import StreamEvent, TurnResult
from sessionkv.client.options import GenerateOptions
from sessionkv.errors import InvalidRequest
from sessionkv.gateway.clients import Caller
from sessionkv.gateway.errors import refused
from sessionkv.gateway.openai.logprobs import CompletionLogprobs, StreamedLogprobs
from sessionkv.gateway.openai.sampling import priority_of, sampling_of, tier_of
from sessionkv.gateway.openai.schema import Sampling
from sessionkv.gateway.openai.usage import usage_map
from sessionkv.gateway.reports import extension
from sessionkv.gateway.services import ServedModel, Services
from sessionkv.gateway.side_by_side import all_of, merged
from sessionkv.gateway.sse import STREAMED, EventStream, data, progress, unless_gone
from sessionkv.types import SamplingParams, utf8_bytes

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
"""The API's own."""
Tokens = Annotated[list[int], Field(min_length=1)]
Prompt = str | Tokens


class CompletionRequest(Sampling):
    """Body of a request."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    max_tokens: int | None = Field(
        None, description="Most tokens of each answer (16); 0 with `echo` gives the prompt alone."
    )
    echo: bool | None = Field(None, description="Begin each answer with its prompt.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = Field(None, description="Refused, unless it equals `n`.")
    suffix: str | None = Field(None, description="Refused.")

    def prompts(self) -> list[Prompt]:
        """Each of them."""
        given: Any = self.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        return list(given)

    def check(self) -> None:
        """Refuse what is not honoured.

        Raises:
            InvalidRequest: Naming the parameter.
        """
        if self.suffix:
            raise refused("suffix", self.suffix, "text is only continued")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refused("best_of", self.best_of, "every answer is given; use n")
        if self.echo and self.logprobs is not None and self.stream:
            raise refused("echo", True, "with logprobs only in whole answers")
        num_prompts = len(self.prompts())
        if num_prompts > MAX_PROMPTS:
            raise InvalidRequest("prompt", f"{num_prompts} prompts", f"at most {MAX_PROMPTS}")
        if num_prompts * (self.n or 1) > MAX_PROMPTS:
            raise InvalidRequest("n", self.n, f"at most {MAX_PROMPTS} answers to all prompts")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens", 0, "at least 1, without echo")

    def check_prompts(self, vocab_size: int) -> None:
        """See that each of several prompts can be read: none may fail behind another's answer.

        Args:
            vocab_size: Of the served model.

        Raises:
            InvalidRequest: Naming the prompt.
        """
        prompts = self.prompts()
        for i, prompt in enumerate(prompts if len(prompts) > 1 else ()):
            if isinstance(prompt, str):
                utf8_bytes(f"prompt[{i}]", prompt)
                continue
            for j, token_id in enumerate(prompt):
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(f"prompt[{i}][{j}]", token_id, f"0 to {vocab_size - 1}")


def router(services: Services) -> APIRouter:
    """Routes of Completions."""
    routes = APIRouter(tags=["completions"])

    @routes.post("/v1/completions", response_model=None, responses=STREAMED)
    async def create(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts, at once or as a stream."""
        served = await services.model()
        served.require(body.model)
        body.check()
        body.check_prompts(served.limits["vocab_size"])
        most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1
        wanted = sampling_of(body, max_tokens=most, logprobs=body.logprobs)
        if body.max_tokens is None:  # nobody asked for so many
            wanted = [replace(one, fit_window=True) for one in wanted]
        asked = _Asked(body, await services.caller(request), served, wanted)
        if body.stream:
            return EventStream(asked.events(), ping_s=services.settings.ping_s)
        return JSONResponse(await unless_gone(request, asked.whole()))

    return routes


class _Asked:
    """One request under way; answers are numbered prompt by prompt."""

    def __init__(
        self,
        body: CompletionRequest,
        caller: Caller,
        served: ServedModel,
        wanted: Sequence[SamplingParams],
    ) -> None:
        self._body = body
        self._caller = caller
        self._turns = [(prompt, sampling) for prompt in body.prompts() for sampling in wanted]
        self._n = len(wanted)
        self._logprobs = [CompletionLogprobs() for _ in self._turns]
        self._streamed = [StreamedLogprobs() for _ in self._turns]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.id,
            "service_tier": tier_of(body),
        }

    def _options(self, sampling: SamplingParams, *, is_stream: bool = False) -> GenerateOptions:
        options: GenerateOptions = {
            "sampling": sampling,
            "priority": priority_of(self._body),
            "progress": is_stream,
        }
        if self._body.echo and self._body.logprobs is not None:
            options["prompt_logprobs"] = self._body.logprobs
        return options

    async def _echoed(self, prompt: Prompt) -> str:
        if not self._body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        pieces = await self._caller.pieces.of(self._caller.client, prompt)
        return b"".join(pieces[token_id] for token_id in prompt).decode(errors="replace")

    def _said(self, text: str) -> str:
        return "" if self._body.max_tokens == 0 else text

    async def _next(self, index: int, event: StreamEvent) -> dict[str, Any] | None:
        """What an event of a stream tells; an echo has none there."""
        if self._body.logprobs is None:
            return None
        told, client, pieces = self._logprobs[index], self._caller.client, self._caller.pieces
        entries = await self._streamed[index].next(event, pieces, client)
        if not entries:
            return None
        known = await pieces.of_logprobs(client, entries)
        return told.of(entries, known, tops=self._body.logprobs)

    async def _told(self, index: int, event: TurnResult) -> dict[str, Any] | None:
        if self._body.logprobs is None or event.logprobs is None:
            return None
        told, tops = self._logprobs[index], self._body.logprobs
        entries = () if self._body.max_tokens == 0 else event.logprobs
        client = self._caller.client
        if event.prompt_logprobs is None:
            return told.of(
                entries, await self._caller.pieces.of_logprobs(client, entries), tops=tops
            )
        entries = (*event.prompt_logprobs, *entries)
        pieces = await self._caller.pieces.of_logprobs(client, entries)
        rest = b"".join(pieces[entry[0].token_id] for entry in event.prompt_logprobs)
        whole = (await self._echoed(self._turns[index][0])).encode()
        first = whole[: max(0, len(whole) - len(rest))].decode(errors="replace")
        return told.of(entries, pieces, tops=tops, first=first)

    def _rest(self, results: Sequence[TurnResult]) -> dict[str, Any]:
        return {"usage": usage_map(results, each=self._n), "sessionkv": extension(results)}

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        client = self._caller.client
        work = [
            client.generate(
                prompt if isinstance(prompt, str) else None,
                tokens=None if isinstance(prompt, str) else prompt,
                **self._options(sampling),
            )
            for prompt, sampling in self._turns
        ]
        results = await all_of(work)
        choices = [
            {
                "index": index,
                "text": await self._echoed(self._turns[index][0]) + self._said(result.text),
                "logprobs": await self._told(index, result),
                "finish_reason": result.finish_reason.value,
            }
            for index, result in enumerate(results)
        ]
        return {**self._head, "choices": choices, **self._rest(results)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing the generator ends its turns."""
        options = self._body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        client = self._caller.client
        streams = [
            client.stream_generate(
                prompt if isinstance(prompt, str) else None,
                tokens=None if isinstance(prompt, str) else prompt,
                **self._options(sampling, is_stream=True),
            )
            for prompt, sampling in self._turns
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
                    if text := await self._echoed(self._turns[index][0]):
                        yield self._chunk(index, text)
                told = await self._next(index, event)
                text = self._said(event.text)
                if event.result is not None:
                    results[index] = event.result
                    yield self._chunk(index, text, told, event.result)
                elif text or told:
                    yield self._chunk(index, text, told)
            if has_usage:
                ordered = [results[index] for index in sorted(results)]
                yield data({**self._head, "choices": [], **self._rest(ordered)})
            yield b"data: [DONE]\n\n"
        finally:
            await together.aclose()
            for stream in streams:
                await stream.aclose()

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        result: TurnResult | None = None,
    ) -> bytes:
        reason = None if result is None else result.finish_reason.value
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        value: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            value["usage"] = None
        if result is not None:
            value["sessionkv"] = extension([result])
        return data(value)
