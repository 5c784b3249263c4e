"""The content of an answer as it comes: blocks, and the events of a stream that tell of them."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
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
    new_call_id,
)
from sessionkv.types import FinishReason

Event = dict[str, Any]


class MessageContent:
    """That of one answer under way. Feed it the reply's text; it gives events and keeps the blocks.

    A call that the reply's end cuts off is part of the events, which cannot be taken back, but not
    of :attr:`content`.
    """

    def __init__(
        self,
        style: ReplyStyle,
        *,
        thinking: str | None,
        only_one_call: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Start before the reply.

        Args:
            style: How the model writes; without calls where there are no tools.
            thinking: ``"summarized"`` tells what the model thinks, ``"omitted"`` that it does; None
                tells nothing of it.
            only_one_call: What follows the first call is left out.
            tools: As the template is given them.
        """
        new_id = new_call_id if style.tool_calls == "mistral" else _tool_use_id
        self._parser = ReplyParser(style, new_id=new_id, tools=tools)
        self._thinking = thinking
        self._only_one_call = only_one_call
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._arguments = ""
        self._complete: set[int] = set()  # places of complete calls

    @property
    def content(self) -> list[dict[str, Any]]:
        """The blocks, calls that are not complete left out."""
        return [
            block
            for place, block in enumerate(self._blocks)
            if block["type"] != "tool_use" or place in self._complete
        ]

    @property
    def ends_at(self) -> int | None:
        """After how many characters the reply is over: what comes is left out; None until then."""
        return self._parser.first_call_end if self._is_over else None

    @property
    def _is_over(self) -> bool:
        return self._only_one_call and bool(self._complete)

    def feed(self, text: str) -> list[Event]:
        """Take the reply's next piece."""
        return self._events(self._parser.feed(text))

    def end(self) -> list[Event]:
        """The reply is over."""
        return [*self._events(self._parser.end()), *self._close()]

    def stop_reason(self, result: TurnResult, *, is_window_full: bool) -> tuple[str, str | None]:
        """Why the answer ended, and the stop sequence that ended it; after :meth:`end`.

        Args:
            result: The turn's.
            is_window_full: A reply that ended by length has fewer tokens than were asked for.
        """
        calls = {i for i, block in enumerate(self._blocks) if block["type"] == "tool_use"}
        if calls and calls == self._complete:
            return "tool_use", None
        if result.finish_reason is FinishReason.LENGTH:
            return ("model_context_window_exceeded" if is_window_full else "max_tokens"), None
        if isinstance(result.stop, str):
            return "stop_sequence", result.stop
        return "end_turn", None

    def _events(self, parsed: list[ReplyEvent]) -> list[Event]:
        return [event for part in parsed for event in self._told(part)]

    def _told(self, event: ReplyEvent) -> Iterator[Event]:
        if self._is_over:
            return
        match event:
            case Text(text):
                if self._kind != "text":
                    yield from self._begin({"type": "text", "text": ""})
                self._blocks[-1]["text"] += text
                yield self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                yield from self._reasoning(text)
            case CallBegins(_, call_id, name):
                yield from self._begin(
                    {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                )
                self._arguments = ""
            case CallArguments(_, text):
                self._arguments += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnds():
                self._blocks[-1]["input"] = json.loads(self._arguments)
                self._complete.add(len(self._blocks) - 1)
                yield from self._close()

    @property
    def _kind(self) -> str | None:
        return self._blocks[-1]["type"] if self._is_open else None

    def _reasoning(self, text: str) -> Iterator[Event]:
        if self._thinking is None:
            return
        if self._kind != "thinking":
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if self._thinking != "omitted":
            self._blocks[-1]["thinking"] += text
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        yield {
            "type": "content_block_start",
            "index": len(self._blocks) - 1,
            "content_block": dict(block),
        }

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        block = self._blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = _signature(block["thinking"])
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _tool_use_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _signature(thinking: str) -> str:
    """Clients send it back with the thinking; nothing is decided by it."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()
