"""Anthropic's own client, and PydanticAI's over it, hold conversations with the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.builders.agent_text import call, write_agent_text
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

TOOL: Any = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLING = "<think>\nWhich city?\n</think>\n\nI look.\n" + call("look", '{"city":"Oslo","n":2}')
ANSWER, LAST = "It is cold.", "You are welcome."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_agent_text(tmp_path_factory.mktemp("text"))
    runner = {"text_dir": folder, "script": replies(CALLING, ANSWER, LAST)}
    with http_engine(engine_config(blocks=2048, host_blocks=2048), runner=runner) as engine:
        yield engine


@pytest.fixture
def client(served: HttpEngine) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="local", max_retries=0) as made:
        yield made


def total(usage: Any) -> int:
    created, read = usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    return int(usage.input_tokens + created + read)


def fields(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 400,
        "messages": messages,
        "tools": [TOOL],
        "thinking": {"type": "adaptive"},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        **more,
    }


def test_an_agent_asks_calls_a_tool_and_answers(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it cold in Oslo?"}]
    first = client.messages.create(**fields(messages))
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"
    use: Any = first.content[-1]
    assert use.input == {"city": "Oslo", "n": 2}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "-9"}
    messages += [first.to_param(), {"role": "user", "content": [result]}]
    second = client.messages.create(**fields(messages))
    assert [block.text for block in second.content if block.type == "text"] == [ANSWER]
    # All but the last token sampled, which is computed by the turn after it; also that the call
    # was written in another JSON than the template's.
    known = total(first.usage) + first.usage.output_tokens - 1
    assert second.usage.cache_read_input_tokens == known
    counted = client.messages.count_tokens(
        model=MODEL,
        messages=messages,
        tools=[TOOL],
        system="Be brief.",
    )
    assert counted.input_tokens == total(second.usage)


def test_a_stream_tells_what_was_cached_first_and_everything_in_the_end(
    client: anthropic.Anthropic,
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it cold in Bergen?"}]
    with client.messages.stream(**fields(messages)) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert kinds[-1] == "message_stop"
    use: Any = first.content[-1]
    assert (use.type, use.input) == ("tool_use", {"city": "Oslo", "n": 2})
    messages += [
        first.to_param(),
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id}]},
    ]
    with client.messages.stream(**fields(messages)) as stream:
        start: Any = next(event for event in stream if event.type == "message_start")
        text = stream.get_final_text()
        second = stream.get_final_message()
    assert text == ANSWER
    assert start.message.usage.cache_read_input_tokens >= total(first.usage)
    assert start.message.usage.cache_read_input_tokens == second.usage.cache_read_input_tokens


def test_the_model_is_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).display_name == MODEL


def test_errors_are_the_clients_own_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**fields([{"role": "user", "content": "x"}], model="other"))
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    asked = fields([{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]"):
        client.messages.create(**asked)


def test_diagnostics_are_read_by_the_client(client: anthropic.Anthropic) -> None:
    asked = fields([{"role": "user", "content": "Why?"}])
    first = client.messages.create(**asked, diagnostics={"previous_message_id": None})
    assert first.diagnostics is None
    asked["system"] = "Be long."
    second = client.messages.create(**asked, diagnostics={"previous_message_id": first.id})
    assert second.diagnostics is not None
    assert second.diagnostics.cache_miss_reason is not None
    assert second.diagnostics.cache_miss_reason.type == "system_changed"


def test_pydantic_ai_runs_a_tool_and_goes_on(served: HttpEngine) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    asked: list[tuple[str, int]] = []

    async def talk() -> tuple[str, str, int]:
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="local") as made:
            model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=made))
            agent = Agent(model, system_prompt="Be brief.")

            @agent.tool_plain
            def look(city: str, n: int) -> str:
                """Looks."""
                asked.append((city, n))
                return "-9"

            first = await agent.run("Is it cold?")
            async with agent.run_stream(
                "Thank you.", message_history=first.all_messages()
            ) as stream:
                second = await stream.get_output()
            return first.output, second, stream.usage.cache_read_tokens

    first, second, cached = asyncio.run(talk())
    assert asked == [("Oslo", 2)]
    assert (first, second) == (ANSWER, LAST)
    assert cached > 0
