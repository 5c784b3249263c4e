"""What the Messages API refuses: by name, with a true status, in its own shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sessionkv.errors import Overloaded
from sessionkv.gateway.errors import Problem, problem_of
from tests.builders.agent_text import write_agent_text
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_agent_text(tmp_path_factory.mktemp("text"))
    with http_engine(runner={"text_dir": folder, "script": replies("Yes.")}) as engine:
        yield engine


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 20, "messages": [USER], **fields}


def content(*blocks: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": list(blocks)}]


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": content()}, "messages[0].content"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": content({"type": "image", "source": {}})}, "messages[0].content[0].type"),
        ({"messages": content({"type": "document"})}, "messages[0].content[0].type"),
        ({"messages": content({"type": "tool_use"})}, "messages[0].content[0].type"),
        ({"messages": content({"type": "text"})}, "messages[0].content[0].text"),
        ({"messages": content({"type": "tool_result"})}, "messages[0].content[0].tool_use_id"),
        (
            {
                "messages": content(
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}]}
                )
            },
            "messages[0].content[0].content[0].text",
        ),
        (
            {"messages": [USER, *content({"type": "tool_use", "id": "1"}, role="assistant"), USER]},
            "messages[1].content[0].name",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "So"}]}, "messages[1].role"),
        ({"system": [{"type": "image", "text": "x"}]}, "system[0].type"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"speed": "fast"}, "speed"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
            "output_config.format.schema",
        ),
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        (
            {"messages": content(text("", cache_control=EPHEMERAL))},
            "messages[0].content[0].cache_control",
        ),
        (
            {"messages": content(*[text(c, cache_control=EPHEMERAL) for c in "abcde"])},
            "messages[0].content[4].cache_control",
        ),
        (
            {
                "system": [text("a", cache_control=EPHEMERAL)],
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
            },
            "cache_control.ttl",
        ),
    ],
)
def test_refused_by_name(served: HttpEngine, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = served.post(MESSAGES, body(**fields, stream=stream))
        assert answer.status_code == 400, answer.text
        value = answer.json()
        assert value["type"] == "error"
        assert value["error"]["type"] == "invalid_request_error"
        assert value["error"]["param"] == param, value
        assert param.rpartition(".")[2] in value["error"]["message"]


def test_null_is_absent_and_what_nobody_knows_is_ignored(served: HttpEngine) -> None:
    nulls = (
        "system", "tools", "tool_choice", "temperature", "top_k", "top_p", "stop_sequences",
        "metadata", "stream", "thinking", "service_tier", "container", "mcp_servers",
        "cache_control", "output_config", "diagnostics", "speed", "inference_geo",
    )  # fmt: skip
    answer = served.post(MESSAGES, body(**dict.fromkeys(nulls), context_management={"edits": []}))
    assert answer.status_code == 200, answer.text
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto", "tools": [], "mcp_servers": []}
    answer = served.post(MESSAGES, body(**fields, output_config={"effort": "high"}))
    assert answer.status_code == 200, answer.text


def test_headers_of_the_api_are_accepted(served: HttpEngine) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "any"}
    assert served.post(MESSAGES, body(), headers=headers).status_code == 200


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_another_model_is_not_found(served: HttpEngine, path: str) -> None:
    answer = served.post(path, body(model="claude-opus"))
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


def test_what_is_no_json_and_what_is_too_large(served: HttpEngine) -> None:
    answer = served.http.post(MESSAGES, content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    with http_engine(body_bytes=1000) as small:
        answer = small.post(MESSAGES, body(system="x" * 1000))
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "request_too_large"


def test_tools_are_refused_where_the_template_has_none() -> None:
    with http_engine(runner={"script": replies("Yes.")}) as plain:
        answer = plain.post(MESSAGES, body(tools=[TOOL]))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"


def test_an_engine_that_is_full_is_overloaded_and_a_caller_that_asks_too_much_is_not() -> None:
    full = problem_of(Overloaded("1,024 turns wait", retry_after_s=2.5)).response(MESSAGES)
    assert (full.status_code, full.headers["retry-after"]) == (529, "3")
    assert json.loads(full.body)["error"]["type"] == "overloaded_error"
    much = Problem(429, "quota_exceeded", "too many turns of one key").response(MESSAGES)
    assert much.status_code == 429
    assert json.loads(much.body)["error"]["type"] == "rate_limit_error"
