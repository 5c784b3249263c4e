"""The events of a response: their order, their numbers, and the official types of each."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from sessionkv.gateway.openai.response_events import ResponseWriter, output_of
from sessionkv.gateway.openai.response_items import unsealed
from sessionkv.gateway.replies import CallArguments, CallBegins, CallEnds, Reasoning, Text

OFFICIAL: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ID = "resp_" + "0a" * 16
BODY = {
    "id": ID,
    "object": "response",
    "created_at": 1,
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
CALL = [
    CallBegins(0, "c1", "look"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ": 1}"),
    CallEnds(0),
]


def told(pieces: list[Any], status: str = "completed", **options: Any) -> list[dict[str, Any]]:
    """All events of a reply, each piece fed alone; every one is what the official types say."""
    writer = ResponseWriter(ID, **options)
    events = writer.begin({**BODY, "status": "in_progress"})
    for piece in pieces:
        events += writer.feed([piece])
    events += writer.end(is_cut=status == "incomplete")
    events.append(writer.become({**BODY, "status": status, "output": writer.output}))
    for event in events:
        assert OFFICIAL.validate_python(event).to_dict() is not None
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_text_is_told_in_the_order_of_the_api() -> None:
    events = told([Text("he"), Text("llo")])
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [e["delta"] for e in events if "delta" in e] == ["he", "llo"]
    (item,) = events[-1]["response"]["output"]
    assert item["id"] == f"msg_{'0a' * 16}_o0"
    assert (item["status"], item["content"][0]["text"]) == ("completed", "hello")
    assert events[2]["item"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    events = told([Reasoning("h"), Reasoning("m"), Text("so"), *CALL, Text("x")], seals=True)
    assert kinds(events)[2:-1] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "message"]
    assert [e["output_index"] for e in events if "output_index" in e] == sorted(
        e["output_index"] for e in events if "output_index" in e
    )
    assert output[2]["arguments"] == '{"a": 1}'
    assert (output[2]["call_id"], output[2]["name"]) == ("c1", "look")
    assert unsealed(output[0]["encrypted_content"]) == "hm"


@pytest.mark.parametrize(
    ("pieces", "status", "statuses"),
    [
        ([Text("a")], "incomplete", ["incomplete"]),
        ([Reasoning("a"), Text("b")], "incomplete", ["completed", "incomplete"]),
        (CALL[:2], "incomplete", ["incomplete"]),
        # A call that went wrong stays incomplete, whatever is said behind it.
        ([*CALL[:2], Text("oops")], "completed", ["incomplete", "completed"]),
        (CALL[:2], "completed", ["incomplete"]),
        ([*CALL, CallBegins(1, "c2", "see"), CallEnds(1)], "completed", ["completed"] * 2),
        ([], "completed", ["completed"]),
        (CALL, "incomplete", ["completed"]),
    ],
)
def test_only_what_is_whole_is_completed(
    pieces: list[Any], status: str, statuses: list[str]
) -> None:
    events = told(pieces, status)
    assert events[-1]["type"] == f"response.{status}"
    assert [item["status"] for item in events[-1]["response"]["output"]] == statuses
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_a_whole_reply_gives_the_same_items_as_its_stream() -> None:
    pieces = [Reasoning("hm"), Text("so"), *CALL]
    streamed = told(pieces)[-1]["response"]["output"]
    assert output_of(ID, pieces, is_cut=False) == streamed
