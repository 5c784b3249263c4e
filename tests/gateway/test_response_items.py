"""Items and messages of the Responses API, as the official types have them."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.openai.response_ids import (
    ItemPlace,
    call_ids,
    is_response_id,
    item_ids,
    new_response_id,
    place_of,
)
from sessionkv.gateway.openai.response_items import (
    from_messages,
    from_tools,
    sealed,
    to_messages,
    to_tools,
    unsealed,
)

OFFICIAL: TypeAdapter[Any] = TypeAdapter(ResponseItem)
OWNER = "resp_" + "0a" * 16
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([USER], [USER]),
        ([{"type": "message", **USER, "id": "msg_1", "status": "completed"}], [USER]),
        (
            [
                {
                    "role": "developer",
                    "content": [
                        {"type": "input_text", "text": "be"},
                        {"type": "input_text", "text": " brief"},
                    ],
                }
            ],
            [{"role": "developer", "content": "be brief"}],
        ),
        ([said("a"), said("b")], [
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
        ]),
        ([THOUGHT, said("a"), CALL], [
            {
                "role": "assistant",
                "content": "a",
                "reasoning_content": "hm",
                "tool_calls": [CALLED],
            }
        ]),
        ([CALL, {**CALL, "call_id": "c2"}, {
            "type": "function_call_output", "call_id": "c1", "output": "42"
        }, {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "43"}],
        }], [
            {"role": "assistant", "content": None, "tool_calls": [CALLED, {**CALLED, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "tool", "tool_call_id": "c2", "content": "43"},
        ]),
        # Text behind a call is another message: in a template calls come last.
        ([CALL, said("a")], [
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "assistant", "content": "a"},
        ]),
        ([THOUGHT, USER], [
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
            USER,
        ]),
        # Of others' sealed reasoning nothing is known; of our own, what it was.
        ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, said("a")], [
            {"role": "assistant", "content": "a"}
        ]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": sealed("hm…")}, said("a")], [
            {"role": "assistant", "content": "a", "reasoning_content": "hm…"}
        ]),
        ([{"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+a"}], [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "patch", "arguments": {"input": "+a"}},
                    }
                ],
            }
        ]),
    ],
)  # fmt: skip
def test_items_become_messages(items: list[Any], messages: list[Any]) -> None:
    assert to_messages(items) == messages


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "web_search_call"}, "input[1].type"),
        ({}, "input[1].type"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user", "content": 3}, "input[1].content"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": ["x"]}, "input[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[1].content[0].type",
        ),
        ({"type": "function_call", "call_id": "a"}, "input[1].name"),
        ({"type": "function_call", "name": "a"}, "input[1].call_id"),
        ({"type": "function_call_output", "call_id": "a"}, "input[1].output"),
    ],
)
def test_an_item_that_cannot_be_read_is_named(item: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_messages([USER, item])
    assert caught.value.details["field"] == field


MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "hm",
        "tool_calls": [CALLED, {**CALLED, "id": "c2"}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
    {"role": "tool", "tool_call_id": "c2", "content": ""},
    {"role": "assistant", "content": "b"},
]


def test_messages_become_items_that_the_official_types_take_and_come_back() -> None:
    items = from_messages(MESSAGES, item_ids(OWNER, "i"))
    for item in items:
        OFFICIAL.validate_python(item, strict=True)
    kinds = [item["type"] for item in items]
    assert kinds == [
        "message",
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
        "message",
    ]
    assert to_messages(items) == MESSAGES
    assert [place_of(item["id"]) for item in items] == [
        ItemPlace(OWNER, "i", index) for index in range(9)
    ]


def test_ids_tell_responses_from_items_and_calls_are_the_same_each_time() -> None:
    response_id = new_response_id()
    assert is_response_id(response_id)
    assert not is_response_id(response_id[:-1])
    assert not is_response_id("resp_" + "٣" * 32)
    for item_id in ("msg_1", response_id, item_ids(OWNER, "o")("message", 0) + "x", "msg_"):
        assert place_of(item_id) is None
    first, again = call_ids(response_id), call_ids(response_id)
    ids = [first() for _ in range(4)]
    assert [again() for _ in range(4)] == ids
    assert len(set(ids)) == 4
    assert {len(call_id) for call_id in ids} == {9}


def test_tools_that_are_no_functions_are_left_out() -> None:
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
    tools = to_tools([{"type": "web_search"}, look, {"type": "namespace", "name": "x"}])
    assert tools == [
        {
            "type": "function",
            "function": {"name": "look", "parameters": {"type": "object"}, "strict": False},
        }
    ]
    assert from_tools(tools) == [{**look, "description": None}]
    with pytest.raises(InvalidRequest, match=r"tools\[0\].name"):
        to_tools([{"type": "function"}])


@pytest.mark.parametrize("value", [None, 3, "", "x", "skv1.%", "skv1.gA=="])
def test_what_was_not_sealed_here_is_nothing(value: object) -> None:
    assert unsealed(value) == ""
