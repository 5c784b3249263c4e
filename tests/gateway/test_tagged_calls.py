"""Calls that a model writes as tags, as Qwen3-Coder does, at every split of their text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sessionkv.gateway.replies import (
    CallArguments,
    CallBegins,
    CallEnds,
    ReplyEvent,
    ReplyParser,
    ReplyStyle,
    Text,
    joined,
)

STYLE = ReplyStyle("qwen3_coder")
PROPERTIES = {
    "city": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": ["number", "null"]},
    "on": {"type": "boolean"}, "deep": {"anyOf": [{"type": "object"}, {"type": "array"}]},
    "few": {"enum": [1, 2]}, "free": {}, "maybe": {"type": ["string", "null"]},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}}]


def parse(*pieces: str) -> list[ReplyEvent]:
    reader = ReplyParser(STYLE, new_id=lambda: "id", tools=TOOLS)
    return joined([e for piece in pieces for e in reader.feed(piece)] + reader.end())


def written(name: str = "f", **values: str) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        ({"city": '\n <b> "q" \\ é\U0001f600 </parameter \n'},
         {"city": '\n <b> "q" \\ é\U0001f600 </parameter \n'}),
        ({"city": ""}, {"city": ""}),
        ({"city": "5", "free": "7", "maybe": "null", "new": "8"},
         {"city": "5", "free": "7", "maybe": "null", "new": "8"}),
        ({"n": "3", "x": "2.5", "on": "True"}, {"n": 3, "x": 2.5, "on": True}),
        ({"n": " -3 ", "x": "None", "on": "false"}, {"n": -3, "x": None, "on": False}),
        ({"deep": '{"a": [1, {"b": "</function>"}]}'}, {"deep": {"a": [1, {"b": "</function>"}]}}),
        ({"few": "2"}, {"few": 2}),
        ({"deep": "[]"}, {"deep": []}),
        ({"n": "three", "x": "NaN", "on": "3"}, {"n": "three", "x": "NaN", "on": "3"}),
        ({"n": "true", "deep": "{"}, {"n": "true", "deep": "{"}),
    ],
)  # fmt: skip
def test_values_have_the_types_of_the_schema(values: Any, expected: Any) -> None:
    reply = f"I look.\n{written(**values)}\nDone."
    events = parse(reply)
    assert isinstance(events[2], CallArguments)
    assert json.loads(events[2].text) == expected
    whole = [Text("I look."), CallBegins(0, "id", "f"), events[2], CallEnds(0), Text("Done.")]
    assert events == whole
    assert parse(*reply) == whole
    for at in range(len(reply)):
        assert parse(reply[:at], reply[at:]) == whole


def test_text_comes_as_it_is_written_and_the_end_of_a_call_is_known() -> None:
    reader = ReplyParser(STYLE, new_id=lambda: "id", tools=TOOLS)
    first = "<tool_call>\n<function=f>\n<parameter=city>\nOs"
    assert reader.feed(first) == [CallBegins(0, "id", "f"), CallArguments(0, '{"city": "Os')]
    assert reader.feed("lo\n</para") == [CallArguments(0, "lo")]
    assert reader.feed("x") == [CallArguments(0, "\\n</parax")]
    assert reader.is_inside_call
    rest = "\n</parameter>\n</function>\n</tool_call>"
    assert reader.feed(rest) == [CallArguments(0, '"}'), CallEnds(0)]
    assert reader.first_call_end == len(first + "lo\n</parax" + rest)


def test_several_calls() -> None:
    events = parse(written(city="a") + "\n" + written("g", n="1"))
    assert [event for event in events if isinstance(event, CallBegins)] == [
        CallBegins(0, "id", "f"),
        CallBegins(1, "id", "g"),
    ]
    assert events[-2:] == [CallArguments(1, '{"n": "1"}'), CallEnds(1)]  # a tool nobody knows


@pytest.mark.parametrize(
    "reply",
    ["a <tool_call> b", "<tool_call>\n<fun", "<tool_call><function=>", '<tool_call>{"a":1}'],
)
def test_what_is_no_call_is_text(reply: str) -> None:
    assert parse(reply) == parse(*reply) == [Text(reply)]


@pytest.mark.parametrize("cut", range(len("<tool_call>\n<function=f>"), len(written(n="12")) - 23))
def test_a_call_that_the_end_cuts_off_is_not_complete(cut: int) -> None:
    events = parse(written(n="12")[:cut])
    assert events[0] == CallBegins(0, "id", "f")
    assert not any(isinstance(event, CallEnds | Text) for event in events)


def test_what_goes_wrong_once_begun_stays_incomplete() -> None:
    again = "<tool_call><function=f><parameter=n>1</parameter><parameter=n>2</parameter>"
    for reply in (again, "<tool_call><function=f> oops"):
        events = parse(reply)
        assert not any(isinstance(event, CallEnds) for event in events)
        assert parse(*reply) == events
