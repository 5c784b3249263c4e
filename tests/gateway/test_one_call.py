"""An answer of one call ends with it: billed, kept and told are the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sessionkv.gateway.conversations import NAMES
from tests.builders.agent_text import call, write_agent_text
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

SAID = "<think>\nWhich é?\n</think>\n\nI look.\n" + call("look", '{"city": "Oslo"}')
# It would go on for thousands of tokens more: time enough to hear that it is over.
REPLY = SAID + "\n" + call("look", '{"city": "Rome"}') + "x" * 2500
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
NEW_TURN = len("\nuser\n<tool_response>\n\n</tool_response>\nassistant\n") + 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_agent_text(tmp_path_factory.mktemp("text"))
    runner = {"text_dir": folder, "script": replies(REPLY, "Cold.")}
    with http_engine(engine_config(blocks=900), runner=runner) as engine:
        yield engine


def chat(messages: list[Any], **fields: Any) -> dict[str, Any]:
    function = {"name": "look", "parameters": SCHEMA}
    tools = {"tools": [{"type": "function", "function": function}], "parallel_tool_calls": False}
    return {"model": MODEL, "max_tokens": 2700, "messages": messages, **tools, **fields}


def kept(served: HttpEngine, question: str) -> str:
    """The reply to a question as it is kept."""
    with served.engine.client() as client:
        for info in client.sessions(NAMES):
            path = client.session(info.name).nodes()
            if len(path) == 2 and path[1].messages[-1]["content"] == question:
                return str((path[1].reply or {})["content"])
    raise AssertionError("the answer was not kept")


@pytest.mark.parametrize("stream", [False, True])
def test_in_chat_completions(served: HttpEngine, stream: bool) -> None:
    question = f"Is it cold? {stream}"
    messages: list[Any] = [{"role": "user", "content": question}]
    if stream:
        *chunks, usage, _ = served.stream(
            "/v1/chat/completions",
            chat(messages, stream=True, stream_options={"include_usage": True}),
        )
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        arguments = "".join(part["function"]["arguments"] for part in calls)
        function = {"name": calls[0]["function"]["name"], "arguments": arguments}
        message: dict[str, Any] = {"role": "assistant", "content": "I look."}
        message["tool_calls"] = [calls[0] | {"function": function}]
        reason, answer = chunks[-1]["choices"][0]["finish_reason"], usage
    else:
        answer = served.post("/v1/chat/completions", chat(messages)).json()
        message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
    assert reason == "tool_calls"
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "look", "arguments": '{"city": "Oslo"}'}
    assert answer["usage"]["completion_tokens"] == len(SAID.encode())
    assert kept(served, question) == SAID
    result = {"role": "tool", "tool_call_id": made["id"], "content": "cold"}
    second = served.post("/v1/chat/completions", chat([*messages, message, result])).json()
    assert second["choices"][0]["message"]["content"] == "Cold."
    report = second["sessionkv"]["cache"]
    assert report["miss"]["reason"] == "none"
    new = NEW_TURN + len("cold") + 1  # the first answer's end too; its last token has KV or not
    assert report["computed_tokens"] in (new, new + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_in_messages(served: HttpEngine, stream: bool) -> None:
    question = f"Is it colder? {stream}"
    one = {"type": "auto", "disable_parallel_tool_use": True}
    body: dict[str, Any] = {
        "model": MODEL, "max_tokens": 2700, "messages": [{"role": "user", "content": question}],
        "tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": one,
    }  # fmt: skip
    if stream:
        found = served.stream("/v1/messages", body | {"stream": True})
        (usage,) = (event["usage"] for event in found if event["type"] == "message_delta")
        starts = [e["content_block"] for e in found if e["type"] == "content_block_start"]
        content = [{"type": "text", "text": "I look."}, starts[1] | {"input": {"city": "Oslo"}}]
    else:
        answer = served.post("/v1/messages", body).json()
        usage, content = answer["usage"], answer["content"]
        assert answer["stop_reason"] == "tool_use"
    assert usage["output_tokens"] == len(SAID.encode())
    assert kept(served, question) == SAID
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "cold"}
    more = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    second = served.post("/v1/messages", body | {"messages": [*body["messages"], *more]}).json()
    assert second["content"] == [{"type": "text", "text": "Cold."}]
    assert second["sessionkv"]["cache"]["miss"]["reason"] == "none"
