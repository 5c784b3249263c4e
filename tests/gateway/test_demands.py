"""Answers that a request holds to a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sessionkv.types.reply_style import ReplyStyle
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, tools_folder

CHAT = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("look", "count")
]
THINKS = ReplyStyle("hermes", ("<think>", "</think>"), starts_in_reasoning=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    """Whatever the model would say is the hash's, so only the grammar makes it anything."""
    folder = tools_folder(tmp_path_factory.mktemp("text"))
    style = ReplyStyle("hermes")
    with http_engine(
        engine_config(blocks=1024), runner={"text_dir": folder}, reply_style=style
    ) as engine:
        yield engine


def ask(served: HttpEngine, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go"}], "tools": TOOLS}
    answer = served.post(CHAT, {**body, "max_tokens": 400, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_made(served: HttpEngine, seed: int) -> None:
    choice = ask(served, tool_choice="required", parallel_tool_calls=False, seed=seed)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("look", "count")
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)


def test_a_named_function_is_called(served: HttpEngine) -> None:
    choice = ask(served, tool_choice={"type": "function", "function": {"name": "count"}})
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "count"


def test_json_of_a_schema(served: HttpEngine) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    choice = ask(served, response_format=form, tool_choice="none")
    assert json.loads(choice["message"]["content"])["n"] in (1, 2)
    assert choice["finish_reason"] == "stop"


def test_json_or_a_call_where_both_may_be(served: HttpEngine) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    message = ask(served, response_format=form)["message"]
    assert json.loads(message["content"] or message["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "no type"}},
                }
            },
            "response_format",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ],
)
def test_what_cannot_be_demanded_is_said(served: HttpEngine, fields: Any, param: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go"}], "tools": TOOLS}
    answer = served.post(CHAT, body | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "style",
    [
        THINKS,
        ReplyStyle("llama3"),
        ReplyStyle("mistral"),
        ReplyStyle("qwen3_coder"),
        ReplyStyle("hermes", THINKS.reasoning, True),
    ],
)
def test_calls_in_each_models_way(tmp_path: Path, style: ReplyStyle) -> None:
    config = engine_config(blocks=1024)
    said = b"It is clear.</think>" if style.starts_in_reasoning else None
    script = iter(said or b"")
    runner = {"text_dir": tools_folder(tmp_path), "script": lambda ids: next(script, None)}
    with http_engine(config, runner=runner, reply_style=style) as engine:
        choice = ask(engine, tool_choice="required")
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] in ("look", "count")
        if said:
            assert choice["message"]["reasoning_content"] == "It is clear."


@pytest.mark.parametrize("schema", [{"type": "no type"}, {"enum": ["x" * 300_000]}])
@pytest.mark.parametrize("stream", [False, True])
def test_schemas_of_tools_that_cannot_be_demanded_are_named_as_they_were_sent(
    served: HttpEngine, schema: Any, stream: bool
) -> None:
    user = {"role": "user", "content": "Go"}
    chat = {"type": "function", "function": {"name": "look", "parameters": schema}}
    for path, fields in (
        (CHAT, {"tools": [chat], "tool_choice": "required"}),
        (
            "/v1/messages",
            {"tools": [{"name": "look", "input_schema": schema}], "tool_choice": {"type": "any"}},
        ),
    ):
        body = {"model": MODEL, "max_tokens": 9, "messages": [user], "stream": stream, **fields}
        answer = served.post(path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        assert "grammar" not in answer.json()["error"]["message"].partition(";")[0]
