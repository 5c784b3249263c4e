"""Requests of the shapes in which agents send them, and what is made of each.

What the agents say in them is left out; which fields, blocks and headers there are is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sessionkv.gateway.anthropic.checks import check_answer, demand_of
from sessionkv.gateway.anthropic.convert import convert
from sessionkv.gateway.anthropic.schema import MessagesRequest
from sessionkv.gateway.conversations import NAMES
from sessionkv.types.reply_style import ReplyStyle
from tests.builders.agent_text import call, write_agent_text
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
WINDOW = 4096
SAID = ("It is so.", "You are welcome.")
SEARCH = call("Look", "{}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_agent_text(tmp_path_factory.mktemp("text"))
    said = {b"SEARCH": replies(SEARCH, *SAID), b"naming": replies('{"title": "Mend"}')}

    def script(ids: Sequence[int]) -> int | None:
        prompt = bytes(i % 256 for i in ids)
        return next((said[word] for word in said if word in prompt), replies(*SAID))(ids)

    runner = {"text_dir": folder, "script": script}
    config = engine_config(blocks=4096, host_blocks=4096, max_model_len=WINDOW)
    with http_engine(config, runner=runner) as engine:
        yield engine


LOOK: dict[str, Any] = {"name": "Look", "input_schema": {"type": "object"}}
FETCH = {"name": "Fetch", "description": "Fetches.", "input_schema": {"type": "object"}}
LATER: list[dict[str, Any]] = [LOOK, {**FETCH, "defer_loading": True}]


def result(use: str, *content: dict[str, Any]) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": use, "content": list(content)}
    return {"role": "user", "content": [block]}


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def kept(served: HttpEngine) -> int:
    with served.engine.client() as client:
        return len(client.sessions(NAMES))


TITLES: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenCode, a title": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "You are a title generator. A thread needs one."},
                *user("Find a title for:\n", '"Mend the test"'),
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "OpenCode, a summary": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "You are a context summarization agent."},
                *user("<conversation>\n[User]: Mend it.\n</conversation>"),
            ],
            "stream": True,
        },
    ),
    "Claude Code, a title": (
        MESSAGES,
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1;"},
                {"type": "text", "text": "You are the agent."},
                {"type": "text", "text": "You are naming a coding session for a list."},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "<session>Mend</session>"}]}
            ],
            "tools": [],
            "output_config": {
                "effort": "high",
                "format": {
                    "type": "json_schema",
                    "schema": {
                        "type": "object",
                        "properties": {"title": {"type": "string"}},
                        "required": ["title"],
                        "additionalProperties": False,
                    },
                },
            },
            "stream": True,
        },
    ),
}


@pytest.mark.parametrize("name", TITLES)
def test_a_helper_is_known_by_its_system_prompt_however_long_it_may_answer(
    served: HttpEngine, name: str
) -> None:
    path, body = TITLES[name]
    before = kept(served)
    events = served.stream(path, {"model": MODEL, "max_tokens": 32_000, **body})
    assert events
    assert kept(served) == before


def test_what_people_ask_at_length_is_no_helper(served: HttpEngine) -> None:
    before = kept(served)
    body = {"model": MODEL, "max_tokens": 2000, "messages": user("Suggest a title for my book.")}
    assert served.post(CHAT, body).status_code == 200
    assert kept(served) == before + 1


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": user("Hi"), "max_tokens": 32_000}),
        (CHAT, {"messages": user("Hello"), "max_completion_tokens": 2**31 - 1}),
        (MESSAGES, {"messages": user("Hi"), "max_tokens": 32_000}),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 32_000}),
    ],
)
def test_more_than_the_window_has_left_may_be_asked_for(
    served: HttpEngine, path: str, asked: dict[str, Any]
) -> None:
    answer = served.post(path, {"model": MODEL, **asked})
    assert answer.status_code == 200, answer.text
    assert SAID[0] in answer.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_answer_ends_where_the_window_does(served: HttpEngine, path: str) -> None:
    prompt = "x" * (WINDOW - 60)
    asked = {"messages": user(prompt)} if path == CHAT else {"input": prompt}
    answer = served.post(path, {"model": MODEL, "ignore_eos": True, **asked}).json()
    usage = answer["usage"]
    assert usage["total_tokens"] == WINDOW


def test_a_tool_that_is_loaded_later_changes_nothing_before_it(served: HttpEngine) -> None:
    def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"model": MODEL, "max_tokens": 100, "tools": LATER, "messages": messages}
        answer = served.post(MESSAGES, body)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def total(value: dict[str, Any]) -> int:
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(value["usage"][name] for name in names)

    messages: list[dict[str, Any]] = user("SEARCH the tools")
    first = ask(messages)
    (use,) = (block["id"] for block in first["content"] if block["type"] == "tool_use")
    found = result(use, {"type": "tool_reference", "tool_name": "Fetch"})
    messages = [*messages, {"role": "assistant", "content": first["content"]}, found]
    second = ask(messages)
    before = total(first) + first["usage"]["output_tokens"] - 1
    assert second["usage"]["cache_read_input_tokens"] == before
    function = {"name": "Fetch", "description": "Fetches.", "parameters": FETCH["input_schema"]}
    said = {"type": "text", "text": json.dumps({"type": "function", "function": function})}
    told: list[dict[str, Any]] = [*messages[:-1], result(use, said)]
    assert count(served, LATER, messages) == count(served, [LOOK], told)


def count(served: HttpEngine, tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> int:
    body = {"model": MODEL, "tools": tools, "messages": messages}
    return int(served.post(f"{MESSAGES}/count_tokens", body).json()["input_tokens"])


def test_a_tool_that_is_loaded_later_may_be_the_one_to_call() -> None:
    choice = {"type": "tool", "name": "Fetch"}
    asked = {"model": MODEL, "max_tokens": 9, "tools": LATER, "messages": user("Go.")}
    body = MessagesRequest.model_validate(asked | {"tool_choice": choice})
    check_answer(body, ReplyStyle("hermes"))
    demand = demand_of(body, convert(body).tools.all)
    assert [tool["function"]["name"] for tool in demand.tools] == ["Fetch"]


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "something_new"])
def test_what_a_result_holds_beside_text_is_left_out_and_said(
    served: HttpEngine, kind: str
) -> None:
    messages: list[dict[str, Any]] = [
        *user("SEARCH"),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "Look"}]},
        result("1", {"type": "text", "text": "Here."}, {"type": kind, "source": {"data": "x"}}),
    ]
    body = {"model": MODEL, "max_tokens": 8, "tools": [LOOK], "messages": messages}
    answer = served.post(MESSAGES, body).json()
    rewrites = answer["sessionkv"]["rewrites"]
    assert rewrites == [{"field": "messages[2].content[0].content[1]", "removed": kind}]
    text = f"Here.\n\n[{kind} left out: this model reads text alone]"
    told: list[dict[str, Any]] = [*messages[:-1], result("1", {"type": "text", "text": text})]
    assert count(served, [LOOK], messages) == count(served, [LOOK], told)


def test_another_display_of_thinking_is_the_summary(served: HttpEngine) -> None:
    thinking = {"type": "adaptive", "display": "updates"}
    body = {"model": MODEL, "max_tokens": 8, "messages": user("Hi"), "thinking": thinking}
    assert served.post(MESSAGES, body).status_code == 200


CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "Look", "strict": False, "parameters": {"type": "object"}},
    {
        "type": "namespace",
        "name": "mcp__sky",
        "description": "Of a server.",
        "tools": [
            {"type": "function", "name": "Look", "strict": False, "parameters": {"type": "object"}},
            {"type": "custom", "name": "other"},
        ],
    },
    {"type": "web_search", "external_web_access": False},
]


class Codex:
    """Sends everything with each request, and has nothing stored."""

    def __init__(self) -> None:
        said = [("developer", "Be an agent."), ("developer", "Skills."), ("user", "Work in /src.")]
        self.items = [self.item(role, text) for role, text in said]

    @staticmethod
    def item(role: str, text: str) -> dict[str, Any]:
        part = {"type": "input_text", "text": text}
        return {"type": "message", "id": f"msg_{text}", "role": role, "content": [part]}

    def ask(self, served: HttpEngine, *items: dict[str, Any]) -> dict[str, Any]:
        self.items += items
        body = {
            "model": MODEL,
            "stream": True,
            "store": False,
            "input": self.items,
            "tools": CODEX_TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "a-session",
            "client_metadata": {"turn_id": str(len(self.items))},
        }
        headers = {"session-id": "a-session", "x-codex-turn-metadata": "{}"}
        response = served.stream(RESPONSES, body, headers=headers)[-1]["response"]
        self.items += response["output"]
        found: dict[str, Any] = response
        return found


def test_what_is_not_stored_is_found_by_its_content_also_after_a_restart(tmp_path: Path) -> None:
    (text := tmp_path / "text").mkdir()
    thoughtful = f"<think>\nWhere?\n</think>\n\nI look.\n{SEARCH}"
    runner = {"text_dir": write_agent_text(text), "script": replies(thoughtful, *SAID)}
    config = engine_config(tmp_path / "store", blocks=512, disk_bytes=64 * 1024**2)
    codex = Codex()
    with http_engine(config, runner=runner) as served:
        first = codex.ask(served, codex.item("user", "Look."))
        call_id = first["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "Here."}
        second = codex.ask(served, result)
        assert second["output"][0]["content"][0]["text"] == SAID[0]
        known = first["usage"]["total_tokens"] - 1
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == known
        assert second["sessionkv"]["cache"]["miss"]["reason"] == "none"
        assert served.http.get(f"{RESPONSES}/{second['id']}").status_code == 404
    with http_engine(config, runner=runner) as served:
        third = codex.ask(served, codex.item("user", "Thank you."))
        assert third["output"][0]["content"][0]["text"] == SAID[1]
        known = second["usage"]["total_tokens"] - 1
        cache = third["sessionkv"]["cache"]
        assert cache["cached_tokens"] >= known - known % config.cache.block_size
        assert cache["miss"]["reason"] == "none"


def test_a_helper_that_is_not_stored_leaves_nothing(served: HttpEngine) -> None:
    before = kept(served)
    body = {"model": MODEL, "input": "Hi", "store": False}
    for fields in (
        {"instructions": "You are a title generator."},
        {"metadata": {"sessionkv_helper": "true"}},
    ):
        assert served.post(RESPONSES, body | fields).status_code == 200
    assert kept(served) == before


def test_tools_of_a_namespace_are_called_by_it_and_their_name(tmp_path: Path) -> None:
    runner = {
        "text_dir": write_agent_text(tmp_path),
        "script": replies(SEARCH, call("mcp__sky__Look", '{"city": "Oslo"}'), *SAID),
    }
    codex, calls = Codex(), []
    with http_engine(engine_config(blocks=512), runner=runner) as served:
        found = codex.ask(served, codex.item("user", "Look."))
        image = [{"type": "input_image", "image_url": "data:image/png;base64,xx"}]
        for output in ("Here.", image):
            (made,) = found["output"]
            calls.append((made.get("namespace"), made["name"], made["arguments"]))
            before = found["usage"]["total_tokens"] - 1
            result = {"type": "function_call_output", "output": output}
            found = codex.ask(served, result | {"call_id": made["call_id"]})
            assert found["usage"]["input_tokens_details"]["cached_tokens"] == before
    assert calls == [(None, "Look", "{}"), ("mcp__sky", "Look", '{"city": "Oslo"}')]
    assert found["output"][0]["content"][0]["text"] == SAID[0]


def test_a_stored_response_read_again_calls_by_namespace_and_name(tmp_path: Path) -> None:
    runner = {
        "text_dir": write_agent_text(tmp_path),
        "script": replies(call("mcp__sky__Look", '{"city": "Oslo"}'), SAID[0]),
    }
    body: dict[str, Any] = {"model": MODEL, "input": "Look.", "tools": CODEX_TOOLS}
    with http_engine(engine_config(blocks=512), runner=runner) as served:
        conversation = served.post("/v1/conversations", {}).json()["id"]
        made = served.post(RESPONSES, body | {"conversation": conversation}).json()
        (item,) = made["output"]
        assert (item["namespace"], item["name"]) == ("mcp__sky", "Look")
        assert served.http.get(f"{RESPONSES}/{made['id']}").json()["output"] == [item]
        listed = served.http.get(f"/v1/conversations/{conversation}/items").json()["data"]
        assert listed[0] == item
        # What goes on from it finds its cache: to the model the name is one.
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "Sun."}
        after = body | {"input": [result], "previous_response_id": made["id"]}
        cached = served.post(RESPONSES, after).json()["usage"]["input_tokens_details"]
        assert cached["cached_tokens"] == made["usage"]["total_tokens"] - 1
