import pytest

from sessionkv.text.history import StoredMessage, match_history, same_message
from sessionkv.text.messages import Message, ToolCall


def stored(*messages):
    return [StoredMessage(m, i, i * 10) for i, m in enumerate(messages)]


def calling(arguments, *, call_id="c", name="f"):
    return Message("assistant", None, tool_calls=(ToolCall(name, arguments, call_id),))


USER, REPLY = Message("user", "hi"), Message("assistant", "hello")
THINKING = Message("assistant", "<think>\nhm\n</think>\n\nhello")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (REPLY, Message("assistant", " hello\n")),
        (Message("assistant", "<think>\nhm</think>\n\nhello"), REPLY),
        (REPLY, Message("assistant", "<think></think>hello")),
        (Message("assistant", "hello", reasoning="hm"), REPLY),
        (THINKING, Message("assistant", "hello", reasoning=" hm\n")),
        (THINKING, Message("assistant", "hello", reasoning="")),
        (calling('{"a": 1, "b": [2]}'), calling('{"b":[2],"a":1}')),
        (calling("not json"), calling("not json")),
        (Message("assistant", None, tool_calls=(ToolCall("f", "{}"),)),
         Message("assistant", "", tool_calls=(ToolCall("f", ""),))),
    ],
)  # fmt: skip
def test_equal(old, new):
    assert same_message(old, new)
    assert same_message(new, old)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (USER, Message("system", "hi")),
        (USER, Message("user", "hi!")),
        (USER, Message("user", "hi", name="bob")),
        (Message("user", "e\u0301"), Message("user", "\u00e9")),
        (Message("user", "<think>a</think>hi"), USER),
        (Message("assistant", "<think>a</think>x"), Message("assistant", "<think>b</think>x")),
        (Message("assistant", "x", reasoning="a"), Message("assistant", "x", reasoning="b")),
        (THINKING, Message("assistant", "hello", reasoning="other")),
        (THINKING, Message("assistant", "<think></think>hello")),
        (THINKING, Message("assistant", "<think>hm</think>hello", reasoning="other")),
        (THINKING, Message("assistant", "<think>other</think>hello", reasoning="hm")),
        (
            Message("assistant", "<think></think>hello"),
            Message("assistant", "hello", reasoning="a"),
        ),
        (Message("user", "hi", reasoning="a"), Message("user", "hi", reasoning="b")),
        (calling('{"a": 1}'), calling('{"a": true}')),
        (calling('{"a": 1}'), calling('{"a": 2}')),
        (calling('{"a":'), calling('{"b":')),
        (calling("{}"), calling("{}", call_id="d")),
        (calling("{}"), calling("{}", name="g")),
        (calling("{}"), Message("assistant", "")),
        (Message("tool", "r", tool_call_id="c"), Message("tool", "r", tool_call_id="d")),
    ],
)
def test_different(old, new):
    assert not same_message(old, new)
    assert not same_message(new, old)


def test_all_stored_messages_match_a_longer_history():
    match = match_history(stored(USER, REPLY), [USER, REPLY, USER])
    assert (match.num_matching, match.first_difference) == (2, None)


def test_a_shorter_history_has_no_difference():
    match = match_history(stored(USER, REPLY), [USER])
    assert (match.num_matching, match.first_difference) == (1, None)


def test_first_difference_is_shown_from_both_sides():
    old, new = "x" * 200 + "OLD", "x" * 200 + "NEW"
    match = match_history(
        stored(USER, Message("assistant", old)), [USER, Message("assistant", new)]
    )
    assert match.num_matching == 1
    difference = match.first_difference
    assert difference.index == 1
    assert difference.expected == "x" * 20 + "OLD"
    assert difference.found == "x" * 20 + "NEW"


def test_difference_in_a_tool_call_is_shown():
    match = match_history(stored(calling('{"a": 1}')), [calling('{"a": 2}')])
    assert "1}" in match.first_difference.expected
    assert "2}" in match.first_difference.found
