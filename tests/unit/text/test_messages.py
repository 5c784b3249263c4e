import json

import pytest

from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest
from sessionkv.text.messages import (
    Message,
    ToolCall,
    check_system,
    dump_messages,
    freeze_tools,
    load_messages,
    normalise,
    user_message,
)

LIMITS = LimitsConfig(messages=4, depth=8)


def call(arguments, **more):
    return {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    } | more


def assistant(*calls, content=None):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def test_plain_messages():
    assert normalise([{"role": "user", "content": "hi", "extra": 1}], LIMITS) == (
        Message("user", "hi"),
    )


def test_text_parts_are_joined_with_nothing_between():
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert normalise([{"role": "user", "content": parts}], LIMITS)[0].content == "AB"


def test_developer_is_system_and_leading_ones_are_merged():
    items = [
        {"role": "developer", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]
    assert normalise(items, LIMITS) == (
        Message("system", "a\n\nb"),
        Message("user", "c"),
        Message("system", "d"),
    )


def test_tool_calls_keep_the_arguments_text():
    (message,) = normalise([assistant(call('{"b": 1, "a":2}'))], LIMITS)
    assert message == Message(
        "assistant", None, tool_calls=(ToolCall("f", '{"b": 1, "a":2}', "c1"),)
    )
    assert message.tool_calls[0].parsed() == {"b": 1, "a": 2}


@pytest.mark.parametrize(
    ("arguments", "text", "parsed"),
    [
        ({"b": "é", "a": 2}, '{"b": "é", "a": 2}', {"b": "é", "a": 2}),
        ('{"a":', '{"a":', None),
        ("[1]", "[1]", None),
        ("", "", {}),
        (None, "{}", {}),
    ],
)
def test_arguments(arguments, text, parsed):
    (message,) = normalise([assistant(call(arguments))], LIMITS)
    assert message.tool_calls[0].arguments == text
    assert message.tool_calls[0].parsed() == parsed


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ([{"role": "user", "content": "x"}] * 5, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "bot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "a\ud83d"}],
         "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
         "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}],
         "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [call("{}")]}], "messages[0].tool_calls"),
        ([assistant()], "messages[0].content"),
        ([assistant("x")], "messages[0].tool_calls[0]"),
        ([assistant(call("{}", type="custom"))], "messages[0].tool_calls[0].type"),
        ([assistant(call(3))], "messages[0].tool_calls[0].function.arguments"),
        ([assistant(call('{"a": "\\ud83d"}'))], "messages[0].tool_calls[0].function.arguments.a"),
        ([assistant(call({"a": [[[[[[[[[1]]]]]]]]]}))],
         "messages[0].tool_calls[0].function.arguments.a" + "[0]" * 8),
        ([assistant(call({"a": float("nan")}))], "messages[0].tool_calls[0].function.arguments.a"),
        ([assistant(call({"a": b"x"}))], "messages[0].tool_calls[0].function.arguments.a"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(items, field):
    with pytest.raises(InvalidRequest) as caught:
        normalise(items, LIMITS)
    assert caught.value.details["field"] == field
    caught.value.message.encode()  # an error about a surrogate can itself be sent


def test_image_parts_say_not_supported():
    with pytest.raises(InvalidRequest, match="not supported"):
        normalise([{"role": "user", "content": [{"type": "image_url"}]}], LIMITS)


def test_single_texts():
    assert user_message("hi") == Message("user", "hi")
    assert check_system(None) is None
    assert check_system("x") == "x"
    with pytest.raises(InvalidRequest, match="text"):
        user_message(b"hi")
    with pytest.raises(InvalidRequest, match="system"):
        check_system("\ud800")


def test_tools_keep_the_clients_order():
    tools = [{"b": 1, "a": {"z": "é", "y": None}}]
    assert freeze_tools(tools, LIMITS) == '[{"b": 1, "a": {"z": "é", "y": null}}]'
    assert freeze_tools(None, LIMITS) is freeze_tools([], LIMITS) is None


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("x", "tools"),
        ([1], "tools[0]"),
        (
            [{"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {"i": 1}}}}}}}}}],
            "tools[0].a.b.c.d.e.f.g.h.i",
        ),
        ([{}, {"a": "\ud800"}], "tools[1].a"),
    ],
)
def test_wrong_tools_are_named(tools, field):
    with pytest.raises(InvalidRequest) as caught:
        freeze_tools(tools, LIMITS)
    assert caught.value.details["field"] == field


def test_messages_come_back_from_bytes():
    messages = (
        Message("system", "é"),
        Message("user", "x", name="bob"),
        Message("assistant", None, reasoning="hm", tool_calls=(ToolCall("f", '{"a":', "c1"),)),
        Message("tool", "r", tool_call_id="c1"),
    )
    assert load_messages(dump_messages(messages)) == messages
    assert json.loads(dump_messages(messages))[2]["reasoning_content"] == "hm"


def test_deeply_nested_arguments_text_is_only_text():
    (message,) = normalise([assistant(call('{"a":' + "[" * 100_000))], LIMITS)
    assert message.tool_calls[0].parsed() is None
