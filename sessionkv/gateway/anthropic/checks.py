"""What of a request is refused by its name before anything is asked of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.anthropic.schema import CountTokensRequest, MessagesRequest, ToolChoice
from sessionkv.gateway.errors import refused
from sessionkv.gateway.grammars import Demand, check_calls
from sessionkv.gateway.replies import ReplyStyle
from sessionkv.types import SamplingParams, utf8_bytes
from sessionkv.types.grammars import Grammar
from sessionkv.types.sampling import MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS

_REFUSED = {
    "container": "code runs at the client",
    "mcp_servers": "tools run at the client",
    "inference_geo": "it runs where the engine is",
}


def check_prompt(body: CountTokensRequest) -> None:
    """Refuse what no prompt may ask for.

    Raises:
        InvalidRequest: Naming the parameter.
    """
    for name, why in _REFUSED.items():
        if value := getattr(body, name, None):
            raise refused(name, value, why)
    names = [tool.name for tool in body.tools or ()]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequest(f"tools[{i}].name", name, "a name that no other tool has")


def check_answer(body: MessagesRequest, style: ReplyStyle) -> None:
    """Refuse what no answer can do; after :func:`check_prompt`.

    Raises:
        InvalidRequest: Naming the parameter.
    """
    check_calls(body.tools or (), style)
    if body.tool_choice is not None:
        _check_choice(body.tool_choice, [tool.name for tool in body.tools or ()])
    if body.messages[-1].role == "assistant":
        last = f"messages[{len(body.messages) - 1}].role"
        raise refused(last, "assistant", "an answer cannot be begun for the model")
    _check_format(body)
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled":
        budget = thinking.budget_tokens
        if budget is None or budget >= body.max_tokens:
            allowed = f"1024 or more, and below max_tokens ({body.max_tokens})"
            raise InvalidRequest("thinking.budget_tokens", budget, allowed)


def _check_choice(choice: ToolChoice, names: list[str]) -> None:
    if choice.type in ("auto", "none"):
        return
    if not names:
        raise InvalidRequest("tool_choice.type", choice.type, "auto or none, without tools")
    if choice.type == "tool" and choice.name not in names:
        raise InvalidRequest("tool_choice.name", choice.name, "a tool's name")


def _check_format(body: MessagesRequest) -> None:
    form = None if body.output_config is None else body.output_config.format
    if form is None:
        return
    if form.get("type") != "json_schema":
        raise InvalidRequest("output_config.format.type", form.get("type"), "json_schema")
    if not isinstance(form.get("schema"), Mapping):
        raise InvalidRequest("output_config.format.schema", form.get("schema"), "a JSON schema")


def demand_of(body: MessagesRequest, tools: Sequence[Mapping[str, Any]]) -> Demand:
    """What the answer is held to by a grammar; after :func:`check_answer`.

    Args:
        body: The request.
        tools: Its tools, as the template is given them.
    """
    choice = body.tool_choice
    several = choice is None or not choice.disable_parallel_tool_use
    if choice is not None and choice.type == "tool":
        named = [tool for tool in tools if tool["function"]["name"] == choice.name]
        return Demand(tools=named, several=False)
    if choice is not None and choice.type == "any":
        return Demand(tools=tools, several=several)
    form = None if body.output_config is None else body.output_config.format
    if form is None:
        return Demand()
    may_call = choice is None or choice.type != "none"
    return Demand(form["schema"], tools if may_call else (), several)


def sampling_of(body: MessagesRequest, *, grammar: Grammar | None) -> SamplingParams:
    """How the answer is sampled. More tokens than the window has left are what it has left.

    Raises:
        InvalidRequest: Naming the parameter.
    """
    stops = body.stop_sequences or []
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop_sequences", f"{len(stops)} long", f"at most {MAX_STOP_STRINGS}")
    for i, text in enumerate(stops):
        size = utf8_bytes(f"stop_sequences[{i}]", text)
        if not 0 < size <= MAX_STOP_STRING_BYTES:
            allowed = f"1 to {MAX_STOP_STRING_BYTES} bytes"
            raise InvalidRequest(f"stop_sequences[{i}]", f"{size} bytes long", allowed)
    given: dict[str, Any] = {
        name: getattr(body, name) for name in ("temperature", "top_k", "top_p")
    }
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"max_tokens": body.max_tokens, "stop": tuple(stops), "grammar": grammar}
    return SamplingParams(fit_window=True, **given)
