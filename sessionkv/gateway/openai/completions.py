"""``/v1/completions``: prompts without a template. Nothing of them is kept beside the cache."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from sessionkv.client import AsyncStream, StreamEvent
from sessionkv.client.options import GenerateOptions
from sessionkv.errors import InvalidRequest
from sessionkv.gateway.clients import Caller
from sessionkv.gateway.errors import refused
from sessionkv.gateway.openai.answers import Answers, Choice, Names, Part
from sessionkv.gateway.openai.logprobs import CompletionLogprobs, StreamedLogprobs, joined
from sessionkv.gateway.openai.sampling import priority_of, sampling_of
from sessionkv.gateway.openai.schema import Sampling
from sessionkv.gateway.services import Services
from sessionkv.gateway.sse import STREAMED, EventStream, unless_gone
from sessionkv.types import SamplingParams, utf8_bytes

NAMES = Names("cmpl", "text_completion", "text_completion")
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
        caller = await services.caller(request)
        choices = [
            PromptChoice(body, caller, prompt, sampling)
            for prompt in body.prompts()
            for sampling in wanted
        ]
        answers = Answers(body, served, NAMES, choices)
        if body.stream:
            return EventStream(answers.events(), ping_s=services.settings.ping_s)
        return JSONResponse(await unless_gone(request, answers.whole()))

    return routes


class PromptChoice(Choice):
    """One answer to one prompt."""

    def __init__(
        self, body: CompletionRequest, caller: Caller, prompt: Prompt, sampling: SamplingParams
    ) -> None:
        """Of a request."""
        self._body = body
        self._client = caller.client
        self._pieces = caller.pieces
        self._prompt = prompt
        self._sampling = sampling
        self._logprobs = CompletionLogprobs()
        self._streamed = StreamedLogprobs()

    def turn(self) -> AsyncStream:
        """Run it."""
        body = self._body
        options: GenerateOptions = {
            "sampling": self._sampling,
            "priority": priority_of(body),
            "progress": bool(body.stream),
            "deltas": bool(body.stream),
        }
        if body.echo and body.logprobs is not None:
            options["prompt_logprobs"] = body.logprobs
        if isinstance(self._prompt, str):
            return self._client.stream_generate(self._prompt, **options)
        return self._client.stream_generate(tokens=self._prompt, **options)

    async def opening(self) -> list[Part]:
        """The prompt, where it is asked for."""
        text = await self._echoed()
        return [_part(text)] if text else []

    async def told(self, event: StreamEvent) -> list[Part]:
        """What an event tells."""
        text = "" if self._body.max_tokens == 0 else event.text
        logprobs = await self._logprobs_of(event)
        if event.result is not None:
            return [_part(text, logprobs, event.result.finish_reason.value)]
        return [_part(text, logprobs)] if text or logprobs else []

    def whole(self, parts: Sequence[Part]) -> Part:
        """The answer as one text."""
        text = "".join(part["text"] for part in parts)
        tops = self._body.logprobs
        none = None if tops is None else CompletionLogprobs().of((), {}, tops=tops)
        logprobs = joined([none, *(part["logprobs"] for part in parts)])
        return _part(text, logprobs, parts[-1]["finish_reason"])

    async def close(self) -> None:
        """Nothing of it is kept."""

    async def _echoed(self) -> str:
        if not self._body.echo:
            return ""
        # Half a character at the end is finished, and shown, by the answer.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(await self._spelled(), final=self._body.max_tokens == 0)

    async def _spelled(self) -> bytes:
        """What the prompt's tokens stand for."""
        if isinstance(self._prompt, str):
            return self._prompt.encode()
        pieces = await self._pieces.of(self._client, self._prompt)
        return b"".join(pieces[token_id] for token_id in self._prompt)

    async def _logprobs_of(self, event: StreamEvent) -> dict[str, Any] | None:
        """Those of the prompt come with the end, where the answer is told as a whole."""
        if self._body.logprobs is None:
            return None
        entries = await self._streamed.next(event, self._pieces, self._client)
        if self._body.max_tokens == 0:
            entries = ()
        of_prompt = None if event.result is None else event.result.prompt_logprobs
        first = None
        if of_prompt is not None:
            known = await self._pieces.of_logprobs(self._client, of_prompt)
            rest = b"".join(known[entry[0].token_id] for entry in of_prompt)
            whole = await self._spelled()
            first = whole[: max(0, len(whole) - len(rest))].decode(errors="replace")
            entries = (*of_prompt, *entries)
        if not entries and first is None:
            return None
        known = await self._pieces.of_logprobs(self._client, entries)
        return self._logprobs.of(entries, known, tops=self._body.logprobs, first=first)


def _part(
    text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> Part:
    return {"text": text, "logprobs": logprobs, "finish_reason": finish_reason}
