"""Grammars that hold a model to what a request demands: a call of a tool, JSON as the answer.

Where the model thinks before it answers, its thoughts may come first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.errors import refused
from sessionkv.gateway.replies.xml_call import kinds_of
from sessionkv.types.grammars import Grammar
from sessionkv.types.reply_style import ReplyStyle

Tool = Mapping[str, Any]
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Demand:
    """What an answer has to be; with both kinds given, one of the two.

    Attributes:
        schema: JSON of this schema; None where no JSON is demanded.
        tools: A call of one of these; empty where none is demanded.
        several: More than one call may be made.
    """

    schema: Mapping[str, Any] | None = None
    tools: Sequence[Tool] = ()
    several: bool = True

    def grammar(self, style: ReplyStyle) -> Grammar | None:
        """For a model's way of writing; None where nothing is demanded, or it calls no tools."""
        calls = None
        if self.tools:
            several = self.several and not style.single_call
            calls = _calls(self.tools, style, several=several)
        if calls is None and self.schema is None:
            return None
        if calls is None and style.reasoning is None:
            return {"json_schema": json.dumps(self.schema)}
        starts, rules = ([], []) if calls is None else calls
        if self.schema is not None:
            starts, rules = [*starts, "answer"], [*rules, f"answer: {_json(self.schema)}"]
        return {"lark": "\n".join(_behind_thoughts(" | ".join(starts), rules, style))}

    @contextmanager
    def naming(self, form: str) -> Iterator[None]:
        """Around what may find fault with the grammar: named is the field that demanded it.

        Args:
            form: The API's field of the schema.

        Raises:
            InvalidRequest: Of that field, or of ``tools`` where calls alone are demanded.
        """
        try:
            yield
        except InvalidRequest as error:
            field = str(error.details["field"])
            if not field.startswith("sampling.grammar"):
                raise
            name = "tools" if self.schema is None else form
            found, allowed = error.details["value"], error.details["allowed"]
            message = error.message.replace(field, name, 1)
            raise InvalidRequest(name, found, allowed, message=message) from None


def check_calls(tools: Sized, style: ReplyStyle) -> None:
    """See whether a model can be given tools.

    Raises:
        InvalidRequest: Its template writes no calls that are understood here.
    """
    if len(tools) and style.tool_calls is None:
        why = "the model's chat template has no tool calls that are understood here"
        raise refused("tools", len(tools), why)


ANY_JSON = Demand(schema=_ANY_OBJECT)
"""An answer that is any JSON object."""


def _calls(
    tools: Sequence[Tool], style: ReplyStyle, *, several: bool
) -> tuple[list[str], list[str]] | None:
    """A rule's name and the rules that it needs."""
    if style.tool_calls == "qwen3_coder":
        return _tagged([tool["function"] for tool in tools], several=several)
    key = "parameters" if style.tool_calls == "llama3" else "arguments"
    calls = [_call(tool["function"], key) for tool in tools]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if style.tool_calls == "hermes":
        start = r'calls: call ("\n" call)*' if several else "calls: call"
        mark = r'call: "<tool_call>\n" body "\n</tool_call>"'
        return ["calls"], [start, mark, f"body: {_json(call)}"]
    if style.tool_calls == "llama3":
        start = 'calls: call (";" call)*' if several else "calls: call"
        return ["calls"], [start, f"call: {_json(call)}"]
    if style.tool_calls == "mistral":
        most = {} if several else {"maxItems": 1}
        listed = {"type": "array", "items": call, "minItems": 1, **most}
        return ["calls"], ['calls: "[TOOL_CALLS]" body', f"body: {_json(listed)}"]
    return None


def _tagged(
    functions: Sequence[Mapping[str, Any]], *, several: bool
) -> tuple[list[str], list[str]]:
    """Parameters in the order of the schema; a value that is no text is JSON of its own schema."""
    bodies: list[str] = []
    rules = ['calls: call ("\\n" call)*' if several else "calls: call"]
    for i, function in enumerate(functions):
        schema = function.get("parameters") or {}
        required = schema.get("required") or ()
        parts = []
        for j, (key, value) in enumerate((schema.get("properties") or {}).items()):
            name = f"p{i}_{j}"
            parts.append(name if key in required else f"{name}?")
            opening = json.dumps(f"<parameter={key}>\n")
            if any(kinds_of(value)):
                rules += [
                    f'{name}: {opening} v{name} "\\n</parameter>\\n"',
                    f"v{name}: {_json(value)}",
                ]
            else:
                rules.append(f"{name}: {opening} value")
        head = json.dumps(f"<function={function['name']}>\n")
        rules.append(f"f{i}: {' '.join([head, *parts])}")
        bodies.append(f"f{i}")
    call = f'call: "<tool_call>\\n" ({" | ".join(bodies)}) "</function>\\n</tool_call>"'
    value = r'value[suffix="\n</parameter>\n"]: /(.|\n)*/'  # up to the first of these
    return ["calls"], [*rules, call, value]


def _call(function: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            key: function.get("parameters") or _ANY_OBJECT,
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def _behind_thoughts(start: str, rules: Sequence[str], style: ReplyStyle) -> list[str]:
    if style.reasoning is None:
        return [f"start: {start}", *rules]
    opening, closing = map(json.dumps, style.reasoning)
    first = "thinking" if style.starts_in_reasoning else "thinking?"
    marks = "" if style.starts_in_reasoning else f"{opening} "
    thinking = f"thinking: {marks}thoughts SPACE"
    thoughts = rf"thoughts[suffix={closing}]: /(.|\n)*/"  # up to the first of these
    return [f"start: {first} ({start})", *rules, thinking, thoughts, r"SPACE: /[ \n]{0,4}/"]
