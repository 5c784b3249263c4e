"""Tools of a request, and what their results say to the model.

A tool that is to be loaded later (``defer_loading``) is not in the prompt. Where a result refers to
it, its definition stands in the result, so that nothing before it changes. What a result holds
that no model here can read is replaced by a line that says so: a result is the work of a tool,
and would else end the conversation for good.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.anthropic.schema import Block, Tool
from sessionkv.gateway.errors import refused
from sessionkv.gateway.left_out import left_out
from sessionkv.types import utf8_bytes

JOINT = "\n\n"


@dataclass(frozen=True, slots=True)
class Tools:
    """As templates take them.

    Attributes:
        in_prompt: In the order of the request.
        later: Those that are to be loaded later, by name.
    """

    in_prompt: Sequence[Mapping[str, Any]] = ()
    later: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def all(self) -> Sequence[Mapping[str, Any]]:
        """What may be called."""
        return (*self.in_prompt, *self.later.values())


def read_tools(tools: Sequence[Tool]) -> Tools:
    """Tools of a request.

    Raises:
        InvalidRequest: Naming the field.
    """
    read = [(tool, _function(tool, f"tools[{i}]")) for i, tool in enumerate(tools)]
    return Tools(
        [function for tool, function in read if not tool.defer_loading],
        {tool.name: function for tool, function in read if tool.defer_loading},
    )


def result_text(block: Block, at: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
    """What a result says.

    Args:
        block: Of type ``tool_result``.
        at: The field of its content.
        tools: Of the request.

    Returns:
        The text, and of each piece that is left out of it the field and the type.

    Raises:
        InvalidRequest: Naming the field.
    """
    content = block.content or ""
    parts = [content] if isinstance(content, str) else []
    unread = []
    for k, part in enumerate(() if isinstance(content, str) else content):
        if part.type == "text":
            if part.text is None:
                raise InvalidRequest(f"{at}[{k}].text", None, "text")
            parts.append(part.text)
        elif part.type == "tool_reference":
            parts.append(_definition(part, tools))
        else:
            unread.append((f"{at}[{k}]", part.type))
            parts.append(left_out(part.type))
    text = JOINT.join(parts)
    utf8_bytes(at, text)
    return (f"Error: {text}" if block.is_error else text), unread


def _definition(reference: Block, tools: Tools) -> str:
    """A tool as the model may call it from here on; of one that is in the prompt the name."""
    name = (reference.model_extra or {}).get("tool_name")
    function = tools.later.get(str(name))
    return str(name) if function is None else json.dumps(function, ensure_ascii=False)


def _function(tool: Tool, at: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise refused(f"{at}.type", tool.type, "tools run at the client; use type custom")
    if tool.input_schema is None:
        raise InvalidRequest(f"{at}.input_schema", None, "a JSON schema")
    check_json(tool.input_schema, f"{at}.input_schema")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def check_json(value: object, at: str) -> None:
    """See that a value can be written down.

    Raises:
        InvalidRequest: It holds what no UTF-8 has, or nests too deep.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(at, "a lone surrogate", "text without lone surrogates") from None
    except RecursionError:
        raise InvalidRequest(at, "nested deeper", "less nesting") from None
