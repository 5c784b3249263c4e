"""From Anthropic's messages to the chat messages of the engine, and what of them is refused.

Messages of one role in a row are one. Pieces of text in one are joined by a blank line. Thinking
goes along as reasoning, which the template keeps or drops; results of tools become messages of
their own. Only the line in which Claude Code counts its requests
is taken out of the system prompt: it is not meant for the model, and differs each time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.anthropic.schema import Block, CountTokensRequest
from sessionkv.gateway.anthropic.tools import JOINT, Tools, check_json, read_tools, result_text
from sessionkv.gateway.errors import refused
from sessionkv.gateway.transcript import Message, Transcript
from sessionkv.types import utf8_bytes

_BILLING = re.compile(r"^[ \t]*x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE | re.MULTILINE)
_OF_ENGINE = re.compile(r"messages\[(\d+)\](?:\.content|\.reasoning_content|\.tool_calls\[\d+\])?")


@dataclass(frozen=True, slots=True)
class Converted:
    """A request's conversation.

    Attributes:
        transcript: For the engine.
        origins: For each of its messages the field that it comes from.
        tools: All tools, also those that are not in the prompt until a result refers to them.
        rewrites: What was changed on the way, for the report.
    """

    transcript: Transcript
    origins: Sequence[str]
    tools: Tools
    rewrites: Sequence[Mapping[str, str]] = ()

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """An error of the engine about one of its messages, as one about the request's field."""
        match = _OF_ENGINE.match(str(error.details.get("field")))
        if match is None or int(match[1]) >= len(self.origins):
            return error
        origin = self.origins[int(match[1])]
        allowed = str(error.details.get("allowed"))
        return InvalidRequest(origin, error.details.get("value"), allowed)


def convert(body: CountTokensRequest) -> Converted:
    """Read a request's conversation.

    Raises:
        InvalidRequest: Naming the field.
    """
    tools = read_tools(body.tools or ())
    builder = _Builder(tools)
    rewrites: list[Mapping[str, str]] = []
    system, has_billing = _system(body)
    if has_billing:
        rewrites.append({"field": "system", "removed": "x-anthropic-billing-header"})
    if system is not None:
        builder.add({"role": "system", "content": system}, "system")
    for i, message in enumerate(body.messages):
        content = message.content
        if isinstance(content, str):
            utf8_bytes(f"messages[{i}].content", content)
        blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
        if not blocks and message.role != "assistant":
            raise InvalidRequest(f"messages[{i}].content", "empty", "at least one block")
        builder.take(message.role, blocks, f"messages[{i}]")
    builder.flush()
    transcript = Transcript(builder.messages, tools.in_prompt or None, builder.origins)
    rewrites += builder.rewrites
    return Converted(transcript, builder.origins, tools, rewrites)


def assistant_message(blocks: Iterable[Mapping[str, Any]]) -> Message:
    """An answer's blocks as the message that :func:`convert` will make of them."""
    builder = _Builder(Tools())
    builder.take("assistant", [Block.model_validate(dict(block)) for block in blocks], "answer")
    builder.flush()
    return builder.messages[0]


def _system(body: CountTokensRequest) -> tuple[str | None, bool]:
    """The system prompt, and whether a line was taken out of it."""
    if body.system is None:
        return None, False
    whole = [body.system] if isinstance(body.system, str) else [b.text for b in body.system]
    for i, text in enumerate(whole):
        utf8_bytes("system" if isinstance(body.system, str) else f"system[{i}].text", text)
    texts = [_BILLING.sub("", text) for text in whole]
    kept = [text for text in texts if text.strip()]
    return JOINT.join(kept) if kept else None, texts != whole


@dataclass(slots=True)
class _Builder:
    """Chat messages as they grow out of blocks."""

    tools: Tools
    rewrites: list[Mapping[str, str]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)  # of tools, by id of call
    _role: str = ""
    _at: str = ""  # where the open message began
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, message: dict[str, Any], at: str) -> None:
        """A whole message."""
        self.messages.append(message)
        self.origins.append(at)

    def take(self, role: str, blocks: Sequence[Block], at: str) -> None:
        """The blocks of one of the request's messages."""
        if role != self._role:
            self.flush()
            self._role, self._at = role, at
        for j, block in enumerate(blocks):
            kind = _KINDS.get((role, block.type))
            where = f"{at}.content[{j}]"
            if kind is None:
                allowed = ", ".join(t for r, t in _KINDS if r == role)
                raise refused(f"{where}.type", block.type, f"use {allowed}")
            getattr(self, kind)(block, where)

    def flush(self) -> None:
        """The open message is over."""
        role, self._role = self._role, ""
        if role == "assistant":
            text = JOINT.join(self._texts)
            message: dict[str, Any] = {"role": role, "content": text}
            if self._calls:
                message |= {"content": text or None, "tool_calls": self._calls}
            if self._thoughts:
                message["reasoning_content"] = JOINT.join(self._thoughts)
            self.add(message, self._at)
        elif self._texts:
            self.add({"role": role, "content": JOINT.join(self._texts)}, self._at)
        self._texts, self._thoughts, self._calls = [], [], []

    def _text(self, block: Block, at: str) -> None:
        if block.text is None:
            raise InvalidRequest(f"{at}.text", None, "text")
        utf8_bytes(f"{at}.text", block.text)
        self._texts.append(block.text)

    def _thinking(self, block: Block, at: str) -> None:
        if block.thinking:
            utf8_bytes(f"{at}.thinking", block.thinking)
            self._thoughts.append(block.thinking)

    def _redacted(self, block: Block, at: str) -> None:
        """Nothing that a model here could read."""

    def _tool_use(self, block: Block, at: str) -> None:
        if not block.id or not block.name:
            raise InvalidRequest(f"{at}.{'name' if block.id else 'id'}", None, "text")
        arguments = block.input or {}
        check_json(arguments, f"{at}.input")
        self._names[block.id] = block.name
        function = {"name": block.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        self._calls.append({"id": block.id, "type": "function", "function": function})

    def _tool_result(self, block: Block, at: str) -> None:
        if not block.tool_use_id:
            raise InvalidRequest(f"{at}.tool_use_id", None, "the id of a tool_use block")
        if self._texts:
            self.flush()
            self._role = "user"
        text, unread = result_text(block, f"{at}.content", self.tools)
        self.rewrites += [{"field": field, "removed": kind} for field, kind in unread]
        message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
        if block.tool_use_id in self._names:
            message["name"] = self._names[block.tool_use_id]
        self.add(message, at)
        self._at = at.partition(".")[0]


_KINDS = {
    ("user", "text"): "_text",
    ("user", "tool_result"): "_tool_result",
    ("assistant", "text"): "_text",
    ("assistant", "thinking"): "_thinking",
    ("assistant", "redacted_thinking"): "_redacted",
    ("assistant", "tool_use"): "_tool_use",
    ("system", "text"): "_text",
}
