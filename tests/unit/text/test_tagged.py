"""Calls that a model writes as tags, beside the parsed ones that a client sends back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sessionkv.text.follow import follow_ids
from sessionkv.text.history import StoredMessage, same_message
from sessionkv.text.messages import Message, ToolCall
from sessionkv.text.spoken import same_spoken
from sessionkv.text.tagged import read_tagged
from sessionkv.types import MissReason
from tests.builders import text as built
from tests.builders.agent_text import TAGGED_TEMPLATE, tagged_call

CODE = "def f():\n    return '  <b>'\n"


def sent(*calls: tuple[str, Any], content: str | None = None) -> Message:
    parsed = [ToolCall(name, json.dumps(values), f"c{i}") for i, (name, values) in enumerate(calls)]
    return Message("assistant", content, tool_calls=tuple(parsed))


def same(said: str, message: Message) -> bool:
    """Either way round."""
    stored = Message("assistant", said)
    one, other = same_message(stored, message), same_message(message, stored)
    assert one is other
    return one


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("Oslo", "Oslo"), ("", ""), (CODE, CODE), ("\n x \n", "\n x \n"), ("3", "3"), ("3", 3),
        (" 3 ", 3), ("2.50", 2.5), ("true", True), ("True", True), ("false", "false"),
        ("None", None), ("null", None), ('{"b":2,"a":[1]}', {"a": [1], "b": 2}),
        ('{"b":2}', '{"b":2}'), ("[]", []), ('"x"', '"x"'), ("NaN", "NaN"),
    ],
)  # fmt: skip
def test_a_value_is_what_it_says(written: str, value: Any) -> None:
    assert same(tagged_call("f", a=written), sent(("f", {"a": value})))


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("Oslo", "oslo"), ("Oslo", " Oslo"), (" Oslo", "Oslo"), (CODE, CODE.rstrip()),
        (CODE, CODE.replace("    ", "  ")), ("3", " 3"), ("3", 4), ("3", 3.0), ("3.0", 3),
        ("1", True), ("true", 1), ("true", False), ("true", "True"), ("null", False), ("", None),
        ("null", ""), ('{"b":2}', '{"b": 2}'), ('{"b":2}', {"b": 3}), ('{"b":2}', {"b": 2.0}),
        ('{"b":true}', {"b": 1}), ("[1,2]", [2, 1]), ('"x"', "x"), ("NaN", float("nan")),
        ("e\u0301", "\u00e9"), ("[" * 5000, []),
    ],
)  # fmt: skip
def test_and_nothing_else(written: str, value: Any) -> None:
    assert not same(tagged_call("f", a=written), sent(("f", {"a": value})))


TWO = f"I look.\n{tagged_call('f', a='1', b='x')}\n{tagged_call('g')}\n"


def test_a_whole_reply() -> None:
    calls = ("f", {"b": "x", "a": 1}), ("g", {})
    assert same(TWO, sent(*calls, content="I look."))
    assert same(f"<think>\nhm\n</think>\n\n{TWO}", sent(*calls, content="I look."))
    tight = "<tool_call><function=f><parameter=a>1</parameter></function>"
    assert same(tight, sent(("f", {"a": 1})))


@pytest.mark.parametrize(
    "message",
    [
        sent(("f", {"a": 1, "b": "x"}), ("g", {})),
        sent(("f", {"a": 1, "b": "x"}), ("g", {}), content="I looked."),
        sent(("f", {"a": 1, "b": "x"}), content="I look."),
        sent(("g", {}), ("f", {"a": 1, "b": "x"}), content="I look."),
        sent(("f", {"a": 1}), ("g", {}), content="I look."),
        sent(("f", {"a": 1, "b": "x", "c": None}), ("g", {}), content="I look."),
        sent(("f", {"a": 1, "c": "x"}), ("g", {}), content="I look."),
        sent(("f", {"a": 1, "b": "x"}), ("h", {}), content="I look."),
        sent(("f", {"a": 1, "b": "x"}), ("g", {}), ("g", {}), content="I look."),
        Message("assistant", "I look."),
    ],
)
def test_a_reply_that_was_changed(message: Message) -> None:
    assert not same(TWO, message)


@pytest.mark.parametrize(
    "said",
    [
        tagged_call("f", a="1") + " Done.",
        tagged_call("f", a="1") + " and " + tagged_call("f", a="1"),
        tagged_call("f", a="1")[: -len("</function>\n</tool_call>")],
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>1</parameter></function>",
        "<tool_call><function=f><parameter=a>1</parameter>x</function></tool_call>",
        "<tool_call><function=f><parameter=a>1</parameter></parameter></function>",
        "<function=f><parameter=a>1</parameter></function>",
        "<tool_call><function= >", "<tool_call><function=f><parameter=>1</parameter></function>",
    ],
)  # fmt: skip
def test_what_is_no_whole_call_is_none(said: str) -> None:
    assert read_tagged(said, ()) == (said, ())
    assert not same(said, sent(("f", {"a": 1})))


def test_a_call_written_in_a_value_is_no_call() -> None:
    inner = '{"name": "f", "arguments": {"a": 1}}'
    for said in (tagged_call("g", x=inner), tagged_call("g", x=inner) + " Done."):
        assert not same(f"I look.\n{said}", sent(("f", {"a": 1}), content="I look."))
    assert same(tagged_call("g", x=inner), sent(("g", {"x": inner})))
    quoted = json.dumps({"x": tagged_call("f").replace("\n", "")})
    hermes = f'<tool_call>\n{{"name": "g", "arguments": {quoted}}}\n</tool_call>'
    assert same(hermes, sent(("g", json.loads(quoted))))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (tagged_call("f", a="x"), "<tool_call><function=f><parameter=a>x</parameter></function>",
         True),
        (tagged_call("f", a="x", b="y"), tagged_call("f", b="y", a="x"), True),
        (tagged_call("f", a="x  y"), tagged_call("f", a="x y"), False),
        (tagged_call("f", a="x"), tagged_call("f", a=" x"), False),
        (tagged_call("f", a='{"a":1}'), tagged_call("f", a='{"a": 1}'), False),
        (tagged_call("f", a="true"), tagged_call("f", a="True"), False),
        (tagged_call("f", a="x"), tagged_call("g", a="x"), False),
        ("I " + tagged_call("f"), "You " + tagged_call("f"), False),
    ],
)  # fmt: skip
def test_two_texts_are_the_same_but_for_space_between_tags(
    one: str, other: str, expected: bool
) -> None:
    assert same_spoken(one, other) is same_spoken(other, one) is expected


SAID = "I look.\n\n" + tagged_call("f", on="true", n=" 2", at='{"b":1}', code=CODE)
VALUES = {"on": True, "n": 2, "at": {"b": 1}, "code": CODE}
ASKED, RESULT = Message("user", "Look."), Message("tool", "cold", tool_call_id="c0")


def follow(values: Any) -> tuple[bool, str]:
    """Whether the prompt goes on from the stored log, and what it says."""
    text = built.with_template(TAGGED_TEMPLATE)
    root = text.root(None, None, now_s=0.0)
    prompt = text.delta(root, (ASKED,), first=True, closed=False)
    reply = (*text.encoder.encode_text_inside(SAID), text.closing_id)
    log = [*root.ids, *prompt, *reply]
    start = len(root.ids) + len(prompt)
    stored = [
        StoredMessage(ASKED, 1, start),
        StoredMessage(Message("assistant", SAID), 1, len(log), reply),
    ]
    messages = (ASKED, sent(("f", values), content="I look."), RESULT)
    followed = follow_ids(text, root, messages, stored=stored, log=log)
    is_same = list(followed.ids[: len(log)]) == log
    assert is_same is (followed.miss.reason is MissReason.NONE)
    return is_same, text.decode(followed.ids, special=True)


def test_a_call_that_is_the_same_keeps_its_ids() -> None:
    is_same, said = follow(VALUES)
    assert is_same
    assert SAID in said


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"on": False}, "False"), ({"on": "True"}, "True"), ({"n": 3}, "3"), ({"n": "2"}, "2"),
        ({"at": '{"b": 1}'}, '{"b": 1}'), ({"code": CODE.replace("    ", "  ")}, "\n  return"),
    ],
)  # fmt: skip
def test_the_model_sees_every_change(change: Any, shown: str) -> None:
    is_same, said = follow(VALUES | change)
    assert not is_same
    assert shown in said
    assert SAID not in said
