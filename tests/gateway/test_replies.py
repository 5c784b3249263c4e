"""Replies taken apart: every form of call, every way in which one may go wrong, any pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessionkv.gateway.replies import (
    CallArguments,
    CallBegins,
    CallEnds,
    Reasoning,
    ReplyEvent,
    ReplyParser,
    ReplyStyle,
    Text,
    joined,
    new_call_id,
)

THINK = ("<think>", "</think>")
HERMES, LLAMA3, MISTRAL = (ReplyStyle(name) for name in ("hermes", "llama3", "mistral"))
STYLES = [
    ReplyStyle(name, marks, inside, name == "llama3" and inside)
    for name in (None, "hermes", "llama3", "mistral")
    for marks, inside in ((None, False), (THINK, False), (THINK, True))
]


def parser(style: ReplyStyle) -> ReplyParser:
    counter = itertools.count()
    return ReplyParser(style, new_id=lambda: f"id{next(counter)}")


def parse(style: ReplyStyle, *pieces: str) -> list[ReplyEvent]:
    reader = parser(style)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return joined(events + reader.end())


def call(index: int, name: str, arguments: str, *, complete: bool = True) -> list[ReplyEvent]:
    ends: list[ReplyEvent] = [CallEnds(index)] if complete else []
    return [CallBegins(index, f"id{index}", name), CallArguments(index, arguments), *ends]


WEATHER = '{"city": "Oslo", "days": [1, 2.5e1], "deep": {"x": null, "y": {}}}'


@pytest.mark.parametrize(
    ("style", "reply", "expected"),
    [
        (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {WEATHER}}}\n</tool_call>', WEATHER),
        (HERMES, f'<tool_call>{{"arguments":{WEATHER},"name":"f"}}</tool_call>', WEATHER),
        (HERMES, f'<tool_call>{{"name":"f","arguments":{json.dumps(WEATHER)}}}', WEATHER),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "{}"),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "{}"),
        (HERMES, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "{}"),
        (HERMES, '<tool_call>{"name":"f","arguments":{},"why":[{"a":"}"}]}</tool_call>', "{}"),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a":"1\n2"}}', '{"a":"1\\n2"}'),
        (LLAMA3, f'{{"name": "f", "parameters": {WEATHER}}}', WEATHER),
        (LLAMA3, f' {{"type": "function", "name": "f", "parameters": {WEATHER}}}', WEATHER),
        (LLAMA3, f'<|python_tag|>{{"name": "f", "parameters": {WEATHER}}}', WEATHER),
        (MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {WEATHER}}}]', WEATHER),
        (MISTRAL, f'[TOOL_CALLS][{{"name":"f","arguments":{WEATHER},"id":"123456789"}}]', WEATHER),
        (MISTRAL, f"[TOOL_CALLS]f[ARGS]{WEATHER}", WEATHER),
        (MISTRAL, f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS] {WEATHER}", WEATHER),
    ],
)
def test_every_form_of_a_call(style: ReplyStyle, reply: str, expected: str) -> None:
    assert parse(style, reply) == call(0, "f", expected)


@pytest.mark.parametrize(
    ("style", "reply"),
    [
        (
            HERMES,
            '<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>\n'
            '<tool_call>\n{"name":"g","arguments":{"y":2}}\n</tool_call>',
        ),
        (LLAMA3, '{"name":"f","parameters":{"x":1}}; {"name":"g","parameters":{"y":2}}'),
        (
            LLAMA3,
            '{"name":"f","parameters":{"x":1}}\n<|python_tag|>{"name":"g","parameters":{"y":2}}',
        ),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name":"f","arguments":{"x":1}}, {"name":"g","arguments":{"y":2}}]',
        ),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x":1}[TOOL_CALLS]g[ARGS]{"y":2}'),
    ],
)
def test_two_calls_have_two_indices_and_two_ids(style: ReplyStyle, reply: str) -> None:
    assert parse(style, reply) == [*call(0, "f", '{"x":1}'), *call(1, "g", '{"y":2}')]
    reader = ReplyParser(style)
    begun = [event for event in reader.feed(reply) if isinstance(event, CallBegins)]
    assert len({event.id for event in begun}) == 2
    assert (reader.complete_calls, reader.is_inside_call) == (2, False)


@pytest.mark.parametrize(
    ("style", "first", "second"),
    [
        ("llama3", '{"name":"f","parameters":{"x":1}}', '; {"name":"g","parameters":{}}'),
        ("llama3", '<|python_tag|>{"name":"f","parameters":{"x":1}}', "<|python_tag|>{}"),
        ("hermes", '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>', "<tool_call>"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x":1}', "[TOOL_CALLS]g[ARGS]{}"),
    ],
)
def test_what_follows_a_single_call_is_text(style: str, first: str, second: str) -> None:
    single = ReplyStyle(style, single_call=True)
    assert parse(single, first + second) == [*call(0, "f", '{"x":1}'), Text(second)]
    assert parse(single, *first, *second) == parse(single, first + second)


@pytest.mark.parametrize(
    ("style", "first", "rest"),
    [
        (HERMES, 'So: <tool_call>{"name":"f","arguments":{}}\n</tool_call>', "\n<tool_call>{"),
        (HERMES, '<tool_call>{"name":"f","arguments":{}}', " no closer"),
        (HERMES, '<tool_call>{"name":"f","arguments":{}', "x} broken behind its arguments"),
        (LLAMA3, '{"name":"f","parameters":{"x":{}}}', '; {"name":"g","parameters":{}}'),
        (MISTRAL, '[TOOL_CALLS] [{"name":"f","arguments":{}} ]', "\n"),
        (MISTRAL, '[TOOL_CALLS] [{"name":"f","arguments":{}}', ' , {"name":"g"'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x":1}', "[TOOL_CALLS]g"),
    ],
)
@pytest.mark.parametrize("thought", ["", "<think>Hm. <tool_call></think>\n"])
def test_where_the_first_call_ends(style: ReplyStyle, first: str, rest: str, thought: str) -> None:
    reader = parser(ReplyStyle(style.tool_calls, THINK if thought else None))
    reply = thought + first + rest
    ends = [(reader.feed(char), reader.first_call_end)[1] for char in reply]
    assert ends[-1] == len(thought + first)
    assert set(ends) == {None, len(thought + first)}
    whole = parser(ReplyStyle(style.tool_calls, THINK if thought else None))
    whole.feed(reply)
    assert whole.first_call_end == len(thought + first)


def test_ids_are_nine_letters_and_digits() -> None:
    assert len(new_call_id()) == 9
    assert new_call_id().isalnum()


def test_text_around_calls_is_text_without_the_space_beside_them() -> None:
    reply = 'I look.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\nThen I wait. '
    assert parse(HERMES, reply) == [
        Text("I look."),
        *call(0, "f", "{}"),
        Text("Then I wait. "),
    ]


@pytest.mark.parametrize(
    ("style", "reply"),
    [
        (HERMES, "a <tool_call> is a mark"),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "name": "g"}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f'),
        (HERMES, "<tool_call>"),
        (HERMES, "<tool_ca"),
        (LLAMA3, '{"name": "Oslo", "people": 3}'),
        (LLAMA3, '{"name": "Oslo"}'),
        (LLAMA3, '[{"name": "f", "parameters": {}}]'),
        (LLAMA3, 'So: {"name": "f", "parameters": {}}'),
        (LLAMA3, '<|python_tag|>search.call(query="x")'),
        (MISTRAL, "[TOOL_CALLS] nothing\nmore"),
        (MISTRAL, '[TOOL_CALLS] ["f"]'),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]1"),
        (MISTRAL, "[TOOL_CALLS]f[ARG"),
    ],
)
def test_what_is_no_call_is_text(style: ReplyStyle, reply: str) -> None:
    assert parse(style, reply) == [Text(reply)]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ('<tool_call>{"name":"f","arguments":{"x": 12', call(0, "f", '{"x": 12', complete=False)),
        ('<tool_call>{"name":"f","arguments":{', call(0, "f", "{", complete=False)),
        ('<tool_call>{"name":"f","arguments":{}', call(0, "f", "{}")),
        ('<tool_call>{"name":"f","arguments":{}}</tool', call(0, "f", "{}")),
    ],
)
def test_a_call_that_the_end_cuts_off_is_not_complete(cut: str, expected: list[ReplyEvent]) -> None:
    reader = parser(HERMES)
    assert joined(reader.feed(cut) + reader.end()) == expected
    is_complete = isinstance(expected[-1], CallEnds)
    assert (reader.complete_calls, reader.is_inside_call) == (int(is_complete), not is_complete)


def test_a_call_that_goes_wrong_once_begun_stays_incomplete_and_its_rest_is_text() -> None:
    reply = '<tool_call>{"name":"f","arguments":{"x": oops</tool_call> Sorry.'
    reader = parser(HERMES)
    events = joined(reader.feed(reply) + reader.end())
    assert events == [
        *call(0, "f", '{"x": ', complete=False),
        Text("oops</tool_call> Sorry."),
    ]
    assert reader.is_inside_call


@pytest.mark.parametrize("number", ["1e999", "01", "1.", "-", "9" * 300, "nul", "True", "NaN"])
def test_numbers_and_words_that_are_no_json_end_a_call(number: str) -> None:
    reader = parser(HERMES)
    reader.feed(f'<tool_call>{{"name":"f","arguments":{{"x":{number}}}}}')
    assert (reader.complete_calls, reader.is_inside_call) == (0, True)


def test_half_of_a_surrogate_pair_is_no_argument() -> None:
    reader = parser(HERMES)
    reader.feed('<tool_call>{"name":"f","arguments":{"x":"\\ud83d"}}')
    assert reader.is_inside_call
    whole = parse(HERMES, '<tool_call>{"name":"f","arguments":{"x":"\\ud83d\\ude00"}}')
    assert whole == call(0, "f", '{"x":"\\ud83d\\ude00"}')


def test_without_tools_a_call_is_text() -> None:
    reply = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert parse(HERMES.without_calls(), reply) == [Text(reply)]


@pytest.mark.parametrize(
    ("inside", "reply", "expected"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
        (False, "Yes <think>no</think>", [Text("Yes <think>no</think>")]),
        (False, " <think></think>Yes.", [Text("Yes.")]),
        (False, "<thin", [Text("<thin")]),
        (False, "<think>Hm. </th", [Reasoning("Hm. </th")]),
        (True, "Hm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
        (True, "<think>\nHm.</think> Yes.", [Reasoning("Hm."), Text("Yes.")]),
        (True, "Hm. A < b </think>Yes </think>.", [Reasoning("Hm. A < b"), Text("Yes </think>.")]),
        (True, "Hm.", [Reasoning("Hm.")]),
    ],
)
def test_reasoning(inside: bool, reply: str, expected: list[ReplyEvent]) -> None:
    assert parse(ReplyStyle(None, THINK, inside), reply) == expected


def test_a_call_behind_reasoning() -> None:
    reply = '<think>f?</think>\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>'
    style = ReplyStyle("hermes", THINK)
    assert parse(style, reply) == [Reasoning("f?"), *call(0, "f", "{}")]


def test_text_is_held_back_only_while_it_may_begin_a_mark() -> None:
    reader = parser(HERMES)
    assert reader.feed("Go <tool") == [Text("Go")]
    assert reader.feed("box>!") == [Text(" <toolbox>!")]


def test_name_and_arguments_come_as_soon_as_they_are_certain() -> None:
    reader = parser(HERMES)
    assert reader.feed('<tool_call>{"name": "f", ') == []
    assert reader.feed('"arguments": {"x"') == [CallBegins(0, "id0", "f"), CallArguments(0, '{"x"')]
    assert reader.is_inside_call
    assert reader.feed(": 1") == [CallArguments(0, ": 1")]
    assert reader.feed("}") == [CallArguments(0, "}"), CallEnds(0)]


PIECES = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[", "]", ",", ";",
    "<think>", "</think>", "{", "}", '"', ":", '"name"', '"f"', '"arguments"', '"parameters"', " ",
    "\n", "f", "1", "\\", "null", '{"name":"f","arguments":{"x":[1,"a"]}}', "text",
    '{"name":"g","parameters":{}}', "é", "\x00",
)  # fmt: skip
REPLIES = st.lists(st.sampled_from(PIECES), max_size=20).map("".join)


@given(st.sampled_from(STYLES), REPLIES, st.data())
def test_any_pieces_give_the_same_events(
    style: ReplyStyle, reply: str, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(reply)), max_size=6).map(sorted))
    bounds = [0, *cuts, len(reply)]
    pieces = [reply[a:b] for a, b in itertools.pairwise(bounds)]
    assert parse(style, *pieces) == parse(style, reply) == parse(style, *reply)


@given(st.sampled_from(STYLES), REPLIES)
def test_nothing_is_lost_and_complete_calls_are_json(style: ReplyStyle, reply: str) -> None:
    events = parse(style, reply)
    ended = {event.index for event in events if isinstance(event, CallEnds)}
    begun = [event.index for event in events if isinstance(event, CallBegins)]
    assert begun == list(range(len(begun)))
    at = 0
    for event in events:
        text = getattr(event, "text", "")
        if isinstance(event, CallArguments):
            if event.index in ended:
                assert isinstance(json.loads(event.text), dict)
            continue
        at = reply.index(text, at) + len(text)  # in order, none of it twice
    if not begun and style.reasoning is None:
        assert "".join(getattr(event, "text", "") for event in events) == reply
