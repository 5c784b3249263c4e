"""Whatever a body of the Messages API holds, it is read or refused by name, nothing else."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.anthropic.cache_control import longest_ttl
from sessionkv.gateway.anthropic.checks import check_answer, check_prompt, demand_of, sampling_of
from sessionkv.gateway.anthropic.convert import assistant_message, convert
from sessionkv.gateway.anthropic.schema import MessagesRequest
from sessionkv.gateway.errors import invalid_body
from sessionkv.gateway.replies import ReplyStyle

ANSWER = [
    {"type": "thinking", "thinking": "t", "signature": "s"},
    {"type": "text", "text": "a"},
    {"type": "tool_use", "id": "1", "name": "look", "input": {"a": 1}},
    {"type": "text", "text": "b"},
]
WHOLE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 2000,
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ANSWER},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "r"}],
                },
                {"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "temperature": 0.5,
}
ODD = st.sampled_from(
    [
        None, 0, -1, 2**70, 1.5, float("nan"), "", "x", "\ud83d", "user", "text", "tool_use",
        [], {}, [{}], [None], True, {"type": "text"}, {"type": "text", "text": "\ud83d"}, [[]],
        {"type": "ephemeral"}, {"a": {"b": ["\ud83d"]}}, {"type": "tool"}, "any", "1h",
    ]
)  # fmt: skip


def read(value: Any) -> None:
    """As the route does."""
    body = MessagesRequest.model_validate(value)
    check_prompt(body)
    check_answer(body, ReplyStyle("hermes"))
    converted = convert(body)
    longest_ttl(body)
    grammar = demand_of(body, converted.transcript.tools or ()).grammar(ReplyStyle("hermes"))
    sampling_of(body, grammar=grammar)


def refused_field(value: Any) -> str | None:
    """What of a body is refused; None where nothing is, empty where it is not said."""
    try:
        read(value)
    except InvalidRequest as error:
        return str(error.details["field"])
    except ValidationError as error:
        return invalid_body(error.errors()).param or ""
    return None


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    found = [(*at, key) for key in keys]
    return found + [place for key in keys for place in places(value[key], (*at, key))]


def test_the_whole_body_is_read() -> None:
    read(WHOLE)
    converted = convert(MessagesRequest.model_validate(WHOLE))
    roles = [message["role"] for message in converted.transcript.messages]
    assert roles == ["system", "user", "assistant", "tool", "user"]
    origins = ["system", "messages[0]", "messages[1]", "messages[2].content[0]", "messages[2]"]
    assert converted.origins == origins
    assert converted.transcript.messages[2] == assistant_message(ANSWER)
    assert converted.transcript.messages[2]["content"] == "a\n\nb"
    assert converted.transcript.messages[3]["content"] == "Error: r"


@given(st.lists(st.tuples(st.integers(0, 10_000), ODD), min_size=1, max_size=3))
def test_any_other_body_is_read_or_refused(changes: list[tuple[int, Any]]) -> None:
    value = copy.deepcopy(WHOLE)
    for number, odd in changes:
        found = places(value)
        place = found[number % len(found)]
        holder = value
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = copy.deepcopy(odd)
    assert refused_field(value) != ""
