import pytest

from sessionkv.text.history import same_message
from sessionkv.text.messages import Message, ToolCall
from sessionkv.text.spoken import calls_in, same_spoken

OSLO = '{"city":"Oslo", "n": 2}'


@pytest.mark.parametrize(
    ("text", "before"),
    [
        (f'Wait.\n<tool_call>\n{{"name": "f", "arguments": {OSLO}}}\n</tool_call>', "Wait."),
        (f'{{"name": "f", "parameters": {OSLO}}}', ""),
        (f'<|python_tag|>{{"name": "f", "parameters": {OSLO}}}', ""),
        (f'Wait.[TOOL_CALLS][{{"name": "f", "arguments": {OSLO}}}]', "Wait."),
        (f"Wait. [TOOL_CALLS]f[ARGS]{OSLO}", "Wait."),
    ],
)
def test_a_call_is_found_in_each_form(text: str, before: str) -> None:
    said, (call,) = calls_in(text)
    assert said.strip() == before
    assert (call.name, call.parsed()) == ("f", {"city": "Oslo", "n": 2})


@pytest.mark.parametrize("text", ["{", "no call", '{"a": 1}', '{"name": "f"}', "{" * 5000, "[1]"])
def test_what_is_no_call_stays_text(text: str) -> None:
    assert calls_in(text) == (text, ())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('<t>\n{"a": 1, "b": 2}\n</t>', '<t>{"b":2,"a":1}</t>', True),
        ('x {"a": 1}', 'y {"a": 1}', False),
        ('{"a": 1}', '{"a": 1.0}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": " 1"}', '{"a": "1"}', False),
        ('{"a": 1}{"b": 2}', '{"b": 2}{"a": 1}', False),
        ('{"a": 1} ', '{"a": 1} b', False),
        ("{a: 1}", "{a:1}", False),
        ("<think>hm</think>A", "<think>\nhm\n</think>\n\nA", True),
        ("<think>hm</think>A", "<think>h m</think>A", False),
    ],
)
def test_the_same_but_for_the_spelling_of_json(one: str, other: str, same: bool) -> None:
    assert same_spoken(one, other) is same
    assert same_spoken(other, one) is same


def called(arguments: str = OSLO, *, content: str | None = None, name: str = "f") -> Message:
    return Message("assistant", content, tool_calls=(ToolCall(name, arguments, "c1"),))


SAID = f'<think>hm</think>\nWait.\n<tool_call>\n{{"name": "f", "arguments": {OSLO}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("sent", "same"),
    [
        (called(content="Wait."), True),
        (called('{"n": 2, "city": "Oslo"}', content="<think>hm</think>Wait."), True),
        (called(content="Wait"), False),
        (called(content=None), False),
        (called('{"city": "Oslo", "n": 3}', content="Wait."), False),
        (called(name="g", content="Wait."), False),
        (Message("assistant", "Wait."), False),
        (Message("user", SAID), False),
    ],
)
def test_a_reply_as_written_and_the_message_a_client_makes_of_it(sent: Message, same: bool) -> None:
    assert same_message(Message("assistant", SAID), sent) is same
