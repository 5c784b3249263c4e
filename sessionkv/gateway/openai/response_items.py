"""Items of the Responses API and messages of a chat template, each made from the other.

Pure. Items that follow each other and make up one message of the assistant (reasoning, text, calls)
become one message, and come apart again in that order.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.left_out import left_out
from sessionkv.types import utf8_bytes

Item = Mapping[str, Any]
Message = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_SEALED = "skv1."
_SUMMARY = "Of the conversation so far this summary was kept; go on from it:\n\n"
"""Stands before the summary of an item ``compaction``, which is said as the user's message."""


def is_summary(message: Mapping[str, Any]) -> bool:
    """Whether a message is what an item ``compaction`` says."""
    return message["role"] == "user" and (message.get("content") or "").startswith(_SUMMARY)


def to_messages(items: Sequence[Item], *, field: str = "input") -> list[Message]:
    """Messages that say what the items say.

    Args:
        items: As clients send them; references were replaced by what they refer to.
        field: Name of the list for errors.

    Raises:
        InvalidRequest: Naming the item, its value and what is allowed.
    """
    builder = _Builder()
    for index, item in enumerate(items):
        builder.add(item, f"{field}[{index}]")
    return builder.finish()


class _Builder:
    """Collects messages; the assistant's last one may still grow."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._open: Message | None = None

    def add(self, item: Item, field: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, field)
        elif kind == "reasoning":
            self._reasoning(item, field)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, field, kind)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _text(_readable(item.get("output")), f"{field}.output")
            call_id = _string(item, "call_id", field)
            self._plain({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "compaction":
            self._plain({"role": "user", "content": _SUMMARY + _summary(item, field)})
        else:
            raise InvalidRequest(
                f"{field}.type",
                kind,
                "message, reasoning, function_call, function_call_output, compaction or "
                "item_reference",
            )

    def finish(self) -> list[Message]:
        self._close()
        return self._messages

    def _message(self, item: Item, field: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise InvalidRequest(f"{field}.role", role, f"one of {', '.join(ROLES)}")
        content = _text(item.get("content"), f"{field}.content")
        if role != "assistant":
            self._plain({"role": role, "content": content})
        elif self._open is not None and self._open["content"] is None and not self._calls():
            self._open["content"] = content
        else:
            self._begin()["content"] = content

    def _reasoning(self, item: Item, field: str) -> None:
        text = _text(item.get("content") or [], f"{field}.content")
        text = text or unsealed(item.get("encrypted_content"))
        if text:
            self._begin()["reasoning_content"] = text

    def _call(self, item: Item, field: str, kind: str) -> None:
        name = _string(item, "name", field)
        if isinstance(item.get("namespace"), str):
            name = name_within(item["namespace"], name)
        call_id = _string(item, "call_id", field)
        if kind == "function_call":
            arguments = item.get("arguments") or "{}"
            if not isinstance(arguments, Mapping):
                arguments = _string({"arguments": arguments}, "arguments", field)
        else:
            arguments = {"input": _string(item, "input", field)}
        message = self._open or self._begin()
        message.setdefault("tool_calls", []).append(
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )

    def _calls(self) -> bool:
        return self._open is not None and "tool_calls" in self._open

    def _begin(self) -> Message:
        self._close()
        self._open = {"role": "assistant", "content": None}
        return self._open

    def _plain(self, message: Message) -> None:
        self._close()
        self._messages.append(message)

    def _close(self) -> None:
        if self._open is not None:
            if self._open["content"] is None and not self._calls():
                self._open["content"] = ""
            self._messages.append(self._open)
        self._open = None


def _summary(item: Item, field: str) -> str:
    text = unsealed(item.get("encrypted_content"))
    if not text:
        where, value = f"{field}.encrypted_content", item.get("encrypted_content")
        raise InvalidRequest(where, value, "what /v1/responses/compact has answered here")
    return text


def _string(item: Item, key: str, field: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{key}", value, "a string")
    utf8_bytes(f"{field}.{key}", value)
    return value


def _text(content: object, field: str) -> str:
    """Text of a string or of a list of parts, with nothing between them."""
    if isinstance(content, str):
        utf8_bytes(field, content)
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(field, content, "text, or a list of parts")
    return "".join(_part(part, f"{field}[{i}]") for i, part in enumerate(content))


def _readable(output: object) -> object:
    """A tool's output with a line in the place of each part that no model here reads.

    A refusal would end the client's conversation, which has the part for good.
    """
    if not isinstance(output, list):
        return output
    parts: list[object] = []
    for part in output:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            part = {"type": "input_text", "text": left_out(kind)}
        parts.append(part)
    return parts


def _part(part: object, field: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(field, part, "a map with type and text")
    if part.get("type") not in _TEXT_PARTS:
        raise InvalidRequest(
            f"{field}.type", part.get("type"), "input_text or output_text; others are not supported"
        )
    return _string(part, "refusal" if part["type"] == "refusal" else "text", field)


def from_messages(
    messages: Iterable[Mapping[str, Any]], new_id: Callable[[str, int], str]
) -> list[dict[str, Any]]:
    """Items that say what the messages say, as they are listed.

    Args:
        messages: Of a template.
        new_id: Makes an id of an item's type and its number.
    """
    items: list[dict[str, Any]] = []

    def add(kind: str, **fields: Any) -> None:
        item_id = new_id(kind, len(items))
        items.append({"id": item_id, "type": kind, "status": "completed", **fields})

    for message in messages:
        role, content = message["role"], message.get("content")
        if message.get("reasoning_content"):
            add("reasoning", summary=[], content=[reasoning_part(message["reasoning_content"])])
        if content and is_summary(message):
            item_id = new_id("compaction", len(items))
            items.append(summary_item(item_id, str(content)[len(_SUMMARY) :]))
        elif role == "tool":
            call_id = message.get("tool_call_id") or ""
            add("function_call_output", call_id=call_id, output=content or "")
        elif role == "assistant":
            if content or not message.get("tool_calls"):
                add("message", role=role, content=[output_part(content or "")])
        else:
            add("message", role=role, content=[{"type": "input_text", "text": content or ""}])
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = function.get("arguments") or "{}"
            call_id = call.get("id") or ""
            add("function_call", call_id=call_id, name=function["name"], arguments=arguments)
    return items


def output_part(text: str) -> dict[str, Any]:
    """A message's text as it was given out."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str) -> dict[str, Any]:
    """A piece of reasoning."""
    return {"type": "reasoning_text", "text": text}


def sealed(text: str) -> str:
    """Text as clients carry it that only hand it back: written down, not encrypted."""
    return _SEALED + base64.urlsafe_b64encode(text.encode()).decode()


def summary_item(item_id: str, summary: str) -> dict[str, Any]:
    """An item that stands for a conversation of which a summary was made."""
    return {"id": item_id, "type": "compaction", "encrypted_content": sealed(summary)}


def unsealed(value: object) -> str:
    """The way back from :func:`sealed`; nothing where it is of another maker."""
    if not isinstance(value, str) or not value.startswith(_SEALED):
        return ""
    try:
        return base64.urlsafe_b64decode(value[len(_SEALED) :]).decode()
    except (binascii.Error, ValueError):
        return ""


# Tools -----------------------------------------------------------------------------------------


def to_tools(tools: Sequence[Item], *, field: str = "tools") -> list[dict[str, Any]]:
    """Function tools as templates take them, those of a namespace under a name with it.

    Tools of other types are left out.

    Raises:
        InvalidRequest: A function is not described as one.
    """
    found = []
    for index, tool in enumerate(tools):
        if tool.get("type") == "namespace":
            found += _within(tool, f"{field}[{index}]")
        if tool.get("type") != "function":
            continue
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"{field}[{index}].name", name, "a name")
        parameters = tool.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidRequest(f"{field}[{index}].parameters", parameters, "a map")
        keys = ("name", "description", "parameters", "strict")
        function = {key: tool[key] for key in keys if tool.get(key) is not None}
        found.append({"type": "function", "function": function})
    return found


def _within(namespace: Item, field: str) -> list[dict[str, Any]]:
    name, tools = namespace.get("name"), namespace.get("tools") or []
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field}.name", name, "a name")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest(f"{field}.tools", tools, "a list of tools")
    within = [tool for tool in tools if tool.get("type") == "function"]
    found = to_tools(within, field=f"{field}.tools")
    for tool in found:
        tool["function"]["name"] = name_within(name, tool["function"]["name"])
    return found


def name_within(namespace: str, name: str) -> str:
    """A function of a namespace as the model knows it."""
    return f"{namespace.removesuffix('__')}__{name}"


def spaces_of(tools: Sequence[Item]) -> list[tuple[str, int, int]]:
    """Of each namespace its name, and where its functions are in :func:`to_tools`: first and count.

    For tools that :func:`to_tools` has read.
    """
    spaces, first = [], 0
    for tool in tools:
        count = len(to_tools([tool]))
        if tool.get("type") == "namespace" and count:
            spaces.append((tool["name"], first, count))
        first += count
    return spaces


def namespaces_of(
    spaces: Iterable[tuple[str, int, int]], tools: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[str, str]]:
    """Of each function of a namespace, by the name that the model knows: namespace and own name.

    Args:
        spaces: From :func:`spaces_of`.
        tools: As templates take them.
    """
    found = {}
    for space, first, count in spaces:
        for tool in tools[first : first + count]:
            name = tool["function"]["name"]
            found[name] = (space, name[len(name_within(space, "")) :])
    return found


def from_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The way back from :func:`to_tools`."""
    absent = {"description": None, "parameters": None, "strict": None}
    return [{"type": "function", **absent, **tool["function"]} for tool in tools]
