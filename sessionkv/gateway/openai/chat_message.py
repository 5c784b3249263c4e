"""One answer of Chat Completions as it comes: its deltas, and the whole message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sessionkv.client import TurnResult
from sessionkv.gateway.replies import (
    CallArguments,
    CallBegins,
    CallEnds,
    Reasoning,
    ReplyEvent,
    ReplyParser,
    ReplyStyle,
    Text,
)
from sessionkv.types import FinishReason


class ChatReply:
    """Takes the reply's text apart. What streams tell piece by piece adds up to :attr:`message`.

    Attributes:
        finish_reason: Set by :meth:`end`.
    """

    def __init__(
        self,
        style: ReplyStyle,
        *,
        only_one_call: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Start before the reply.

        Args:
            style: How the model writes calls and reasoning; without calls where none are wanted.
            only_one_call: Calls after the first are left out, and what comes behind it.
            tools: As the template is given them.
        """
        self.finish_reason: str | None = None
        self._parser = ReplyParser(style, tools=tools)
        self._only_one_call = only_one_call
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._complete: set[int] = set()

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Take the next piece; what it tells, as deltas."""
        return self._deltas(self._parser.feed(text)) if text else []

    def end(self, result: TurnResult) -> list[dict[str, Any]]:
        """The reply is over; what was held back."""
        deltas = self._deltas(self._parser.end())
        self.finish_reason = "length" if result.finish_reason is FinishReason.LENGTH else "stop"
        if self._calls:
            if not self._complete.issuperset(range(len(self._calls))):
                self.finish_reason = "length"  # never a call that is not complete as one that is
            elif self.finish_reason == "stop" or self._only_one_call:
                self.finish_reason = "tool_calls"
        return deltas

    @property
    def ends_at(self) -> int | None:
        """After how many characters the reply is over: what comes is left out; None until then."""
        is_over = self._only_one_call and 0 in self._complete
        return self._parser.first_call_end if is_over else None

    def reasoning_tokens(self, completion: int) -> int:
        """How many of the reply's tokens are reasoning, by its share of what was told."""
        thought = sum(map(len, self._reasoning))
        told = sum(map(len, self._text)) + sum(
            len(call["function"]["name"]) + len(call["function"]["arguments"])
            for call in self._calls
        )
        return round(completion * thought / (thought + told)) if thought else 0

    @property
    def message(self) -> dict[str, Any]:
        """What was told so far, as a message."""
        text = "".join(self._text)
        content = text if text or not self._calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _deltas(self, events: list[ReplyEvent]) -> list[dict[str, Any]]:
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: ReplyEvent) -> dict[str, Any] | None:
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            return {"reasoning_content": event.text}
        if self._only_one_call and (len(self._calls) > 1 or getattr(event, "index", 0) > 0):
            return None
        if isinstance(event, Text):
            if self._only_one_call and self._calls:
                return None
            self._text.append(event.text)
            return {"content": event.text}
        if isinstance(event, CallBegins):
            function = {"name": event.name, "arguments": ""}
            call = {"id": event.id, "type": "function", "function": function}
            self._calls.append(call)
            return {"tool_calls": [{"index": event.index, **call, "function": dict(function)}]}
        if isinstance(event, CallEnds):
            self._complete.add(event.index)
        if isinstance(event, CallArguments):
            self._calls[event.index]["function"]["arguments"] += event.text
            function = {"arguments": event.text}
            return {"tool_calls": [{"index": event.index, "function": function}]}
        return None
