"""The Responses API with the clients that people have: each holds a conversation with a tool.

Clients that take seconds to import are imported where they are used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies
from tests.builders.tool_text import write_tool_text, written_call

TOOL: Any = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
SAID = (written_call("look", city="Oslo"), "It is cold in Oslo.", "You are welcome.")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_tool_text(tmp_path_factory.mktemp("text"))
    with http_engine(runner={"text_dir": folder, "script": replies(*SAID)}) as engine:
        yield engine


@pytest.fixture
def client(served: HttpEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_makes_streams_reads_and_deletes(client: openai.OpenAI) -> None:
    asked = "Is it cold?"
    first = client.responses.create(model=MODEL, input=asked, tools=[TOOL], instructions="Help.")
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Oslo"}
    with client.responses.stream(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "-9"}],
        tools=[TOOL],
        instructions="Help.",
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        second = stream.get_final_response()
    assert text == second.output_text == SAID[1]
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(second.id).output_text == SAID[1]
    listed = client.responses.input_items.list(second.id)
    assert [item.type for item in listed] == ["function_call_output"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


@pytest.mark.parametrize("stored", [True, False])
def test_the_agents_sdk_runs_a_tool_and_goes_on(served: HttpEngine, stored: bool) -> None:
    import agents
    from agents.models.openai_responses import OpenAIResponsesModel

    looked = []

    def look(city: str) -> str:
        """Look."""
        looked.append(city)
        return "-9"

    async def run() -> tuple[Any, Any]:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            agent = agents.Agent(
                name="helper",
                instructions="Help.",
                tools=[agents.function_tool(look)],
                model=OpenAIResponsesModel(MODEL, client),
                model_settings=agents.ModelSettings(store=stored),
            )
            first = await agents.Runner.run(agent, "Is it cold?")
            if stored:
                second = agents.Runner.run_streamed(
                    agent, "Thanks.", previous_response_id=first.last_response_id
                )
            else:
                thanks: Any = {"role": "user", "content": "Thanks."}
                second = agents.Runner.run_streamed(agent, [*first.to_input_list(), thanks])
            async for _ in second.stream_events():
                pass
            return first, second

    first, second = asyncio.run(run())
    assert looked == ["Oslo"]
    assert (first.final_output, second.final_output) == (SAID[1], SAID[2])
    usage = second.context_wrapper.usage
    assert usage.input_tokens_details.cached_tokens > 0


def test_the_official_client_keeps_a_conversation(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(metadata={"topic": "weather"})
    asked: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "conversation": conversation.id}
    first = client.responses.create(input="Is it cold?", **asked)
    (call,) = first.output
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "-9"}
    second = client.responses.create(input=[output], **asked)
    assert second.output_text == SAID[1]
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
    kinds = [item.type for item in client.conversations.items.list(conversation.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "weather"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_the_agents_sdk_keeps_its_session_in_a_conversation(served: HttpEngine) -> None:
    import agents
    from agents.models.openai_responses import OpenAIResponsesModel

    async def run() -> list[str]:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            model = OpenAIResponsesModel(MODEL, client)
            tools: Any = [agents.function_tool(lambda city: "-9", name_override="look")]
            agent = agents.Agent(name="helper", tools=tools, model=model)
            session = agents.OpenAIConversationsSession(openai_client=client)
            texts = []
            for said in ("Is it cold?", "Thanks."):
                result = await agents.Runner.run(agent, said, session=session)
                texts.append(str(result.final_output))
            kinds = [item.get("type") for item in await session.get_items()]
            assert kinds == [
                "message", "function_call", "function_call_output", "message",
                "message", "message",
            ]  # fmt: skip
            await session.clear_session()
            return texts

    assert asyncio.run(run()) == [SAID[1], SAID[2]]


def test_langchain_sends_only_what_is_new(served: HttpEngine) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def look(city: str) -> str:
        """Look."""
        return "-9" if city == "Oslo" else "20"

    with httpx.Client() as http:
        model = ChatOpenAI(
            model=MODEL,
            base_url=f"{served.url}/v1",
            api_key="none",  # type: ignore[arg-type]
            use_responses_api=True,
            use_previous_response_id=True,
            http_client=http,
        ).bind_tools([look])
        third = _converse(model, look)
    listed = served.http.get(f"/v1/responses/{third.response_metadata['id']}/input_items").json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Thanks."]


def _converse(model: Any, look: Any) -> Any:
    from langchain_core.messages import HumanMessage, ToolMessage

    messages: list[Any] = [HumanMessage("Is it cold?")]
    first = model.invoke(messages)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("look", {"city": "Oslo"})
    messages += [first, ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"])]
    second = model.invoke(messages)
    assert second.text == SAID[1]
    assert second.usage_metadata["input_token_details"]["cache_read"] > 0
    third = model.invoke([*messages, second, HumanMessage("Thanks.")])
    assert third.text == SAID[2]
    return third
