"""A call that the token limit cut off, presented as one that is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.apis import CHAT, CHATS, MESSAGES, RESPONSES, Api, says
from tests.builders.gateway import HttpEngine, http_engine, tools_folder

WHOLE = '<tool_call>\n{"name": "f", "arguments": {"x": "a long one"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"x": 1,}}\n</tool_call>\n' + WHOLE
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
GIVEN = {"x": "a long one"}
COMPLETE = len(WHOLE) - len("}\n</tool_call>")
"""Tokens from which on the arguments are whole: only marks of the call's end lack."""
STREAMS = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    script = says({"whole": WHOLE, "broken": BROKEN})
    runner = {"text_dir": tools_folder(tmp_path_factory.mktemp("text")), "script": script}
    with http_engine(runner=runner) as engine:
        yield engine


@STREAMS
@pytest.mark.parametrize("api", CHATS, ids=repr)
@pytest.mark.parametrize("cut", [*range(12, COMPLETE, 7), COMPLETE - 1])
def test_a_call_that_was_cut_is_complete(
    served: HttpEngine, api: Api, cut: int, stream: bool
) -> None:
    said = api.say(served, api.body("whole", tools=TOOLS, limit=cut), stream=stream)
    assert (said.reason, said.usage[2]) == ("length", cut)
    assert len(said.calls) <= 1
    assert not any(is_json(arguments) for _, arguments in said.calls)
    if api is MESSAGES and not stream:  # has arguments as a value, of which there is no half
        assert said.calls == []


@STREAMS
@pytest.mark.parametrize("api", CHATS, ids=repr)
@pytest.mark.parametrize("limit", [COMPLETE, len(WHOLE), len(WHOLE) + 1, 200])
def test_a_complete_call_is_cut(served: HttpEngine, api: Api, limit: int, stream: bool) -> None:
    said = api.say(served, api.body("whole", tools=TOOLS, limit=limit), stream=stream)
    ((name, arguments),) = said.calls
    assert (name, json.loads(arguments)) == ("f", GIVEN)
    is_full = limit <= len(WHOLE) and api is not MESSAGES  # nothing was left for the answer's end
    assert said.reason == ("length" if is_full else "tool_calls")


@pytest.mark.parametrize("asked", ["whole", "broken"])
def test_an_item_that_is_not_complete_is_completed(served: HttpEngine, asked: str) -> None:
    body = RESPONSES.body(asked, tools=TOOLS, limit=COMPLETE - 1 if asked == "whole" else 200)
    for answer in (
        served.post(RESPONSES.path, body).json(),
        served.stream(RESPONSES.path, body | {"stream": True})[-1]["response"],
    ):
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        assert [call["status"] == "completed" for call in calls] == [
            is_json(call["arguments"]) for call in calls
        ]
        assert calls[0]["status"] == "incomplete"


@STREAMS
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=repr)
def test_a_broken_call_before_a_good_one_is_finished(
    served: HttpEngine, api: Api, parallel: bool, stream: bool
) -> None:
    fields: dict[str, Any] = {"parallel_tool_calls": parallel}
    if api is MESSAGES:
        fields = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": not parallel}}
    said = api.say(served, api.body("broken", tools=TOOLS, **fields), stream=stream)
    assert said.reason == ("stop" if api is MESSAGES else "length")
    if api is MESSAGES and not stream:
        assert [json.loads(arguments) for _, arguments in said.calls] == [GIVEN]
    else:
        assert not is_json(said.calls[0][1])


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
