"""Messages as clients send them, checked once and frozen; everything after works on these.

Rules: ``developer`` means ``system``; system messages at the start are merged, a blank line
between them; text parts are joined with nothing between; images and other parts are refused;
content may be absent only beside tool calls; lone surrogates are refused, naming the field. Knows
nothing of templates and tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest
from sessionkv.types import utf8_bytes

_CHECKED = 1000  # deeper than any limit: what comes from the journal was checked on its way in

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant asked for.

    Attributes:
        arguments: JSON text as the client gave it (or as its map was written out); it may be
            malformed, as models do write such.
    """

    name: str
    arguments: str
    id: str | None = None

    def parsed(self) -> Mapping[str, Any] | None:
        """The arguments as a map (empty text is an empty map); None where they are not one."""
        try:
            value = json.loads(self.arguments) if self.arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``content`` is None only beside tool calls."""

    role: str
    content: str | None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def to_map(self) -> dict[str, Any]:
        """Plain map in the form clients send, absent fields left out."""
        value: dict[str, Any] = {"role": self.role, "content": self.content}
        for key, field in _OPTIONAL:
            if (text := getattr(self, field)) is not None:
                value[key] = text
        if self.tool_calls:
            value["tool_calls"] = [call_map(call, call.arguments) for call in self.tool_calls]
        return value


_OPTIONAL = (("name", "name"), ("tool_call_id", "tool_call_id"), ("reasoning_content", "reasoning"))


def call_map(call: ToolCall, arguments: Any) -> dict[str, Any]:
    """A tool call in the form clients and templates use."""
    head = {} if call.id is None else {"id": call.id}
    return head | {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def normalise(
    messages: object, limits: LimitsConfig, *, field: str = "messages"
) -> tuple[Message, ...]:
    """Check what a client sent and freeze it.

    Args:
        messages: The decoded value of the field.
        limits: ``messages`` bounds their number, ``depth`` the nesting of tool arguments.
        field: Name of the field for errors.

    Raises:
        InvalidRequest: Naming the field (``messages[2].content``), its value, what is allowed.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest(field, messages, "a list of at least one message")
    if len(messages) > limits.messages:
        raise InvalidRequest(field, f"{len(messages)} messages", f"at most {limits.messages}")
    reader = _Reader(limits.depth)
    read = [reader.message(item, f"{field}[{i}]") for i, item in enumerate(messages)]
    return _merge_leading_system(read)


def user_message(text: object, *, field: str = "text") -> Message:
    """One user message of plain text.

    Raises:
        InvalidRequest: It is not a string, or has a lone surrogate.
    """
    return Message("user", _text(text, field))


def check_system(system: object, *, field: str = "system") -> str | None:
    """A system prompt: text or None.

    Raises:
        InvalidRequest: It is not a string, or has a lone surrogate.
    """
    return None if system is None else _text(system, field)


def freeze_tools(tools: object, limits: LimitsConfig, *, field: str = "tools") -> str | None:
    """Tools as JSON text in the client's own order; None where there are none.

    Raises:
        InvalidRequest: Not a list of maps of plain values, nested too deep, or a lone surrogate.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise InvalidRequest(field, tools, "a list of tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequest(f"{field}[{i}]", tool, "a map")
        _check_plain(tool, f"{field}[{i}]", limits.depth)
    return json.dumps(tools, ensure_ascii=False, default=dict) if tools else None


def dump_messages(messages: Sequence[Message]) -> bytes:
    """Messages as bytes for the journal; :func:`load_messages` is the way back."""
    return json.dumps([m.to_map() for m in messages], ensure_ascii=False).encode()


def load_messages(blob: bytes) -> tuple[Message, ...]:
    """Messages from :func:`dump_messages`, checked again.

    Bytes from the journal or from elsewhere go through :mod:`sessionkv.text.stored`, which makes
    one error of all that they can raise here.

    Raises:
        InvalidRequest: Naming the first thing that is not as a message has it.
        ValueError: No UTF-8, or no JSON.
        RecursionError: Nested past all sense.
    """
    items = json.loads(blob)
    if not isinstance(items, list):
        raise InvalidRequest("messages", type(items).__name__, "a list")
    reader = _Reader(depth=_CHECKED)
    return tuple(reader.message(item, f"[{i}]") for i, item in enumerate(items))


def check_stored_tools(tools_json: object) -> str | None:
    """Tools as :func:`freeze_tools` wrote them down, or None.

    Raises:
        InvalidRequest: They are not text, or not of tools.
        ValueError: The text is no JSON.
        RecursionError: Nested past all sense.
    """
    if tools_json is None:
        return None
    tools = json.loads(_text(tools_json, "tools"))
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest("tools", tools, "a list of maps")
    for i, tool in enumerate(tools):
        _check_plain(tool, f"tools[{i}]", _CHECKED)
    return str(tools_json)


def _merge_leading_system(messages: list[Message]) -> tuple[Message, ...]:
    count = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    if count < 2:
        return tuple(messages)
    text = "\n\n".join(m.content or "" for m in messages[:count])
    return (replace(messages[0], content=text), *messages[count:])


@dataclass(frozen=True, slots=True)
class _Reader:
    depth: int

    def message(self, item: object, field: str) -> Message:
        if not isinstance(item, Mapping):
            raise InvalidRequest(field, item, "a map with role and content")
        role = item.get("role")
        if role not in ROLES:
            raise InvalidRequest(f"{field}.role", role, f"one of {', '.join(ROLES)}")
        calls = self._calls(item.get("tool_calls"), role, f"{field}.tool_calls")
        return Message(
            role="system" if role == "developer" else str(role),
            content=_content(item.get("content"), f"{field}.content", optional=bool(calls)),
            name=_optional(item, "name", field),
            tool_call_id=_optional(item, "tool_call_id", field),
            reasoning=_optional(item, "reasoning_content", field),
            tool_calls=calls,
        )

    def _calls(self, calls: object, role: object, field: str) -> tuple[ToolCall, ...]:
        if calls is None or calls == []:
            return ()
        if not isinstance(calls, list | tuple):
            raise InvalidRequest(field, calls, "a list")
        if role != "assistant":
            raise InvalidRequest(field, calls, "absent: only an assistant message has tool calls")
        return tuple(self._call(call, f"{field}[{i}]") for i, call in enumerate(calls))

    def _call(self, call: object, field: str) -> ToolCall:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise InvalidRequest(field, call, "a map with a function")
        if call.get("type", "function") not in ("function", None):
            raise InvalidRequest(f"{field}.type", call["type"], "function")
        function = call["function"]
        name = _text(function.get("name"), f"{field}.function.name")
        arguments = self._arguments(function.get("arguments"), f"{field}.function.arguments")
        return ToolCall(name, arguments, _optional(call, "id", field))

    def _arguments(self, value: object, field: str) -> str:
        if value is None:
            return "{}"
        if isinstance(value, Mapping):
            _check_plain(value, field, self.depth)
            return json.dumps(value, ensure_ascii=False, default=dict)
        text = _text(value, field)
        parsed = ToolCall("", text).parsed()
        if parsed is not None:  # JSON escapes can hide a lone surrogate from the check of the text
            _check_plain(parsed, field, self.depth)
        return text


def _content(value: object, field: str, *, optional: bool) -> str | None:
    if value is None and optional:
        return None
    if isinstance(value, str):
        return _text(value, field)
    if not isinstance(value, list | tuple):
        raise InvalidRequest(field, value, "text, or a list of text parts")
    return "".join(_part(part, f"{field}[{j}]") for j, part in enumerate(value))


def _part(part: object, field: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(field, part, "a map with type and text")
    if part.get("type") != "text":
        raise InvalidRequest(f"{field}.type", part.get("type"), "text; others are not supported")
    return _text(part.get("text"), f"{field}.text")


def _optional(item: Mapping[str, Any], key: str, field: str) -> str | None:
    value = item.get(key)
    return None if value is None else _text(value, f"{field}.{key}")


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(field, value, "text")
    utf8_bytes(field, value)
    return value


def _check_plain(value: object, field: str, depth: int) -> None:
    """Only plain values, nested at most ``depth`` deep, without lone surrogates."""
    if depth < 0:
        raise InvalidRequest(field, "nested deeper", "less nesting")
    if isinstance(value, str):
        _text(value, field)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(item, f"{field}.{_text(key, field)[:40]}", depth - 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_plain(item, f"{field}[{i}]", depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(field, value, "a finite number")
    elif not isinstance(value, bool | int | float | None):
        raise InvalidRequest(field, type(value).__name__, "a plain value")
