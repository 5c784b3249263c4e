"""Streamed calls without an index or an id of their own, which clients take for one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.builders.apis import CHATS, MESSAGES, RESPONSES, Api, says
from tests.builders.gateway import MODEL, HttpEngine, http_engine, tools_folder

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
]
TWO = (
    '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"y":2}}\n</tool_call>'
)
TWICE = TWO.replace('"g"', '"f"').replace('"y"', '"x"').replace("2", "1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = tools_folder(tmp_path_factory.mktemp("text"))
    with http_engine(
        runner={"text_dir": folder, "script": says({"Go": TWO, "Twice": TWICE})}
    ) as engine:
        yield engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_two_calls_are_one(served: HttpEngine, api: Api, stream: bool) -> None:
    for asked, expected in (
        ("Go", [("f", {"x": 1}), ("g", {"y": 2})]),
        ("Twice", [("f", {"x": 1}), ("f", {"x": 1})]),
    ):
        said = api.say(served, api.body(asked, tools=TOOLS), stream=stream)
        assert [(name, json.loads(arguments)) for name, arguments in said.calls] == expected
        assert (said.reason, said.text.strip()) == ("tool_calls", "")


def test_openais_client_reads_one_call(served: HttpEngine) -> None:
    deltas = []
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
        client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "Go"}], tools=TOOLS
        ) as stream,
    ):
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                deltas += event.chunk.choices[0].delta.tool_calls or []
        message = stream.get_final_completion().choices[0].message
    first = {}
    for delta in deltas:
        first.setdefault(delta.index, delta)
    assert [(first[i].function.name, bool(first[i].id)) for i in (0, 1)] == [
        ("f", True),
        ("g", True),
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"x": 1}, {"y": 2}]


def test_openais_client_reads_one_item(served: HttpEngine) -> None:
    tools = [RESPONSES.tool(tool["function"]) for tool in TOOLS]
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
        client.responses.stream(model=MODEL, input="Go", tools=tools) as stream,
    ):
        done = [event.item for event in stream if event.type == "response.output_item.done"]
        response = stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("f", {"x": 1}), ("g", {"y": 2})]
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    assert [item.call_id for item in done] == [call.call_id for call in calls]


def test_anthropics_client_reads_one_block(served: HttpEngine) -> None:
    tools = [MESSAGES.tool(tool["function"]) for tool in TOOLS]
    with (
        anthropic.Anthropic(base_url=served.url, api_key="none") as client,
        client.messages.stream(
            model=MODEL, max_tokens=200, messages=[{"role": "user", "content": "Go"}], tools=tools
        ) as stream,
    ):
        message = stream.get_final_message()
    uses = [block for block in message.content if block.type == "tool_use"]
    assert [(use.name, use.input) for use in uses] == [("f", {"x": 1}), ("g", {"y": 2})]
    assert len({use.id for use in uses}) == 2
