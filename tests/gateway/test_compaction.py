"""Conversations that are made shorter, and what goes on from there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from sessionkv.client.results import NodeInfo
from sessionkv.gateway.openai.response_ids import session_of
from sessionkv.types.reply_style import ReplyStyle
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies
from tests.builders.tool_text import write_tool_text

URL = "/v1/responses"
SAID = ("Paris.", "<think>Hm.</think>They asked for capitals.", "Rome.")
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_tool_text(tmp_path_factory.mktemp("text"))
    style = ReplyStyle("hermes", ("<think>", "</think>"))
    script = {"text_dir": folder, "script": replies(*SAID)}
    with http_engine(runner=script, reply_style=style) as engine:
        yield engine


def compact(served: HttpEngine, status: int = 200, **fields: Any) -> dict[str, Any]:
    answer = served.post(f"{URL}/compact", {"model": MODEL} | fields)
    assert answer.status_code == status, answer.text
    value: dict[str, Any] = answer.json()
    return value


def node_of(served: HttpEngine, response_id: str) -> NodeInfo:
    with served.engine.client() as client:
        return client.session(session_of(response_id)).node()


def test_what_users_said_stays_and_the_rest_is_a_summary(served: HttpEngine) -> None:
    asked = {"model": MODEL, "instructions": "Help.", "tools": [TOOL]}
    first = served.post(URL, asked | {"input": "The capital of France?"}).json()
    short = compact(served, previous_response_id=first["id"], input="And of Italy?")
    assert short["object"] == "response.compaction"
    *users, summary = short["output"]
    texts = [item["content"][0]["text"] for item in users]
    assert texts == ["The capital of France?", "And of Italy?"]
    assert summary["type"] == "compaction"
    assert "capitals" not in summary["encrypted_content"]
    # Asked behind the conversation as it was, whose cache is found.
    assert short["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]
    assert short["usage"]["output_tokens"] > 0
    assert served.http.get(f"{URL}/{short['id']}").status_code == 404
    next_input = [*short["output"], {"role": "user", "content": "Go on."}]
    second = served.post(URL, asked | {"input": next_input}).json()
    said = [str(message["content"]) for message in node_of(served, second["id"]).messages]
    assert said[:2] == texts
    assert said[2].endswith(":\n\nThey asked for capitals.")
    assert said[3:] == ["Go on."]
    listed = served.http.get(f"{URL}/{second['id']}/input_items", params={"order": "asc"}).json()
    assert [item["type"] for item in listed["data"]] == [*["message"] * 2, "compaction", "message"]
    assert listed["data"][2]["encrypted_content"] == summary["encrypted_content"]


def test_a_conversation_that_its_client_keeps_is_made_shorter(served: HttpEngine) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "The capital of France?"},
        {"role": "assistant", "content": "Paris."},
    ]
    short = compact(served, input=items, instructions="Help.")
    assert [item["type"] for item in short["output"]] == ["message", "compaction"]
    again = compact(served, input=[*short["output"], *items])
    kinds = [item["type"] for item in again["output"]]
    assert kinds == ["message", "message", "compaction"]  # the new summary has the earlier one
    thrice = compact(served, input=[*again["output"], *again["output"], *items])
    assert [item["type"] for item in thrice["output"]] == [*["message"] * 5, "compaction"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": "x", "model": "gpt-4"}, 404, "model"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, 400,
         "input[0].encrypted_content"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_shorter_is_refused(
    served: HttpEngine, fields: dict[str, Any], status: int, param: str
) -> None:
    error = compact(served, status, **fields)["error"]
    assert error["param"] == param


def test_the_official_clients_go_on_from_it(served: HttpEngine) -> None:
    options: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": "none"}
    with openai.OpenAI(**options) as client:
        first = client.responses.create(model=MODEL, input="One?")
        short = client.responses.compact(model=MODEL, previous_response_id=first.id)
        output: Any = [item.to_dict(warnings=False) for item in short.output]
        second = client.responses.create(model=MODEL, input=[*output, *_user("Two?")])
        assert second.output_text == SAID[0]

    async def again() -> Any:
        async with openai.AsyncOpenAI(**options) as client:
            return await client.responses.compact(model=MODEL, input="One?")

    assert asyncio.run(again()).output[-1].type == "compaction"


def test_the_agents_sdk_keeps_a_session_that_grows_no_longer(served: HttpEngine) -> None:
    # Imported here, since it takes seconds.
    import agents
    from agents.memory import OpenAIResponsesCompactionSession
    from agents.models.openai_responses import OpenAIResponsesModel

    async def run() -> list[Any]:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            agent = agents.Agent(name="helper", model=OpenAIResponsesModel(MODEL, client))
            session = OpenAIResponsesCompactionSession(
                "s", agents.SQLiteSession("s"), client=client, compaction_mode="input"
            )
            session.model = MODEL
            await agents.Runner.run(agent, "One?", session=session)
            await session.run_compaction({"force": True})
            result = await agents.Runner.run(agent, "Two?", session=session)
            assert result.final_output == SAID[0]  # the first answer is in the summary
            return [item.get("type") for item in await session.get_items()]

    assert asyncio.run(run()) == ["message", "compaction", None, "message"]


def _user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]
