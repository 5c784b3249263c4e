"""One request of the Messages API under way: its turn, and its answer at once or as a stream."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from sessionkv.client import StreamEvent, TurnResult
from sessionkv.client.options import TurnOptions
from sessionkv.errors import InvalidRequest, PromptTooLong, SessionKVError
from sessionkv.gateway.anthropic.blocks import Event, MessageContent
from sessionkv.gateway.anthropic.cache_control import longest_ttl
from sessionkv.gateway.anthropic.checks import demand_of, sampling_of
from sessionkv.gateway.anthropic.convert import assistant_message, convert
from sessionkv.gateway.anthropic.diagnostics import Fingerprints, fingerprint
from sessionkv.gateway.anthropic.kept import keeping_of
from sessionkv.gateway.anthropic.schema import MessagesRequest
from sessionkv.gateway.anthropic.usage import usage_map
from sessionkv.gateway.clients import Caller
from sessionkv.gateway.reports import extension
from sessionkv.gateway.services import ServedModel
from sessionkv.gateway.sse import named as framed

FORM = "output_config.format.schema"


class Asked:
    """Answer it once: :meth:`whole` or :meth:`events`."""

    def __init__(
        self,
        body: MessagesRequest,
        headers: Mapping[str, str],
        caller: Caller,
        served: ServedModel,
        fingerprints: Fingerprints,
    ) -> None:
        """Read the request.

        Raises:
            InvalidRequest: Naming the parameter.
        """
        self._body = body
        self._served = served
        self._fingerprints = fingerprints
        self._converted = convert(body)
        self._ttl = longest_ttl(body)
        self._demand = demand_of(body, self._converted.tools.all)
        with self._demand.naming(FORM):
            grammar = self._demand.grammar(served.reply_style)
            self._sampling = sampling_of(body, grammar=grammar)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._answer = self._new_content()
        transcript = self._converted.transcript
        keeping = keeping_of(body, transcript, headers)
        self._exchange = caller.conversations.begin(transcript, keeping)
        self._exchange.ends_at = lambda: self._answer.ends_at

    @property
    def _may_end_early(self) -> bool:
        choice = self._body.tool_choice
        return choice is not None and bool(choice.disable_parallel_tool_use)

    def _new_content(self) -> MessageContent:
        style, choice, thinking = self._served.reply_style, self._body.tool_choice, None
        if not self._body.tools or (choice is not None and choice.type == "none"):
            style = style.without_calls()
        asked = self._body.thinking
        if asked is not None and asked.type != "disabled":
            thinking = asked.display or "summarized"
        return MessageContent(
            style,
            thinking=thinking,
            only_one_call=self._may_end_early,
            tools=self._converted.tools.all,
        )

    async def whole(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            SessionKVError: The turn failed.
        """
        result = None
        async with aclosing(self._told()) as told:
            async for event, _ in told:
                result = event.result
        if result is None:
            raise SessionKVError("the turn ended without a result")
        return {
            **self._message(result.usage.prompt_tokens, result.cache.cached_tokens),
            "content": self._answer.content,
            **self._ending(result),
            "usage": self._usage(result),
            "sessionkv": self._report(result),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing the generator ends its turn.

        Raises:
            SessionKVError: The turn failed.
        """
        has_begun = False
        async with aclosing(self._told()) as told:
            async for event, parts in told:
                if not has_begun and (start := self._start(event)) is not None:
                    has_begun = True
                    yield framed("message_start", start)
                elif event.progress is not None:
                    yield framed("ping", _progress(event))
                last = [] if event.result is None else self._last(event.result)
                for part in (*parts, *last):
                    yield framed(part["type"], part)

    async def _told(self) -> AsyncGenerator[tuple[StreamEvent, list[Event]], None]:
        """Events of the turn, and what each tells of the answer's content.

        What is refused is told in the words of the API.
        """
        is_stream = bool(self._body.stream)
        options: TurnOptions = {
            "sampling": self._sampling,
            "progress": is_stream,
            "deltas": is_stream or self._may_end_early,
        }
        try:
            with self._demand.naming(FORM):
                async with aclosing(self._exchange.stream(**options)) as turn:
                    async for event in turn:
                        yield event, await self._parts(event)
        except PromptTooLong as error:
            raise _too_long(error) from None
        except InvalidRequest as error:
            raise self._converted.renamed(error) from None
        finally:
            await self._exchange.close()

    async def _parts(self, event: StreamEvent) -> list[Event]:
        """What an event tells; by the last one the answer is kept."""
        parts = self._answer.feed(event.text)
        if event.result is not None:
            parts += self._answer.end()
            self._keep(event.result)
            await self._exchange.kept()
        return parts

    def _keep(self, result: TurnResult) -> None:
        if self._body.diagnostics is not None:
            found = fingerprint(self._served.id, self._converted.transcript)
            self._fingerprints.put(self._id, found, prompt_tokens=result.usage.prompt_tokens)
        self._exchange.keep(assistant_message(self._answer.content))

    def _start(self, event: StreamEvent) -> dict[str, Any] | None:
        """The first event, as soon as it is known what the cache has."""
        if event.progress is not None:
            prompt, cached = event.progress.prompt_tokens, event.progress.cached_tokens
        elif event.result is not None:
            prompt, cached = event.result.usage.prompt_tokens, event.result.cache.cached_tokens
        else:
            return None
        return {"type": "message_start", "message": self._message(prompt, cached)}

    def _last(self, result: TurnResult) -> list[Event]:
        usage = self._usage(result)
        del usage["cache_creation"], usage["service_tier"]
        return [
            {"type": "message_delta", "delta": self._ending(result), "usage": usage},
            {"type": "message_stop", "sessionkv": self._report(result)},
        ]

    def _message(self, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """The answer as it begins."""
        diagnostics = None
        if self._body.diagnostics is not None:
            diagnostics = self._fingerprints.compare(
                self._body.diagnostics.previous_message_id,
                self._served.id,
                self._converted.transcript,
                cached_tokens=cached_tokens,
            )
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._served.id,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "diagnostics": diagnostics,
            "usage": usage_map(
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                output_tokens=0,
                ttl=self._ttl,
            ),
        }

    def _ending(self, result: TurnResult) -> dict[str, Any]:
        is_full = result.usage.completion_tokens < self._body.max_tokens
        reason, sequence = self._answer.stop_reason(result, is_window_full=is_full)
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, result: TurnResult) -> dict[str, Any]:
        return usage_map(
            prompt_tokens=result.usage.prompt_tokens,
            cached_tokens=result.cache.cached_tokens,
            output_tokens=result.usage.completion_tokens,
            ttl=self._ttl,
        )

    def _report(self, result: TurnResult) -> dict[str, Any]:
        rewrites = [*self._converted.rewrites, *self._exchange.rewrites]
        return extension([result], rewrites)


def _progress(event: StreamEvent) -> dict[str, Any]:
    """A ping that says how far the prompt is."""
    progress = event.progress
    if progress is None:
        return {"type": "ping"}
    told = {"prompt_tokens": progress.prompt_tokens, "done_tokens": progress.done_tokens}
    return {"type": "ping", "sessionkv": {"progress": told}}


def _too_long(error: PromptTooLong) -> PromptTooLong:
    """In the words by which clients know that it is time to compact."""
    prompt, window = error.details["n_prompt"], error.details["n_ctx"]
    told = PromptTooLong(prompt, error.details["max_tokens"], window)
    told.message = f"prompt is too long: {prompt} tokens > {window - 1} maximum"
    return told
