"""Clients as they are installed, each holding a conversation with streaming and tools.

What the model says is scripted; what is asked, parsed, sent back and found again is real.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies, tools_folder

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'
ANSWER, LAST = "It rains in Oslo.", "Yes, I am sure."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[HttpEngine]:
    runner = {"text_dir": tools_folder(tmp_path), "script": replies(CALL, ANSWER, LAST)}
    with http_engine(engine_config(blocks=2048), runner=runner) as engine:
        yield engine


def newly_computed(usage: dict[str, Any] | Any) -> int:
    """Prompt tokens that were not found."""
    return int(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)


def test_openai_streams_calls_a_tool_and_finds_its_conversation(served: HttpEngine) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]

        def turn() -> Any:
            with client.chat.completions.stream(
                model=MODEL,
                messages=messages,
                tools=[TOOL],
                stream_options={"include_usage": True},
            ) as stream:
                for _ in stream:
                    pass
                answer = stream.get_final_completion()
            messages.append(answer.choices[0].message.to_dict())
            return answer

        first = turn()
        (call,) = first.choices[0].message.tool_calls
        assert first.choices[0].finish_reason == "tool_calls"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        second = turn()
        assert second.choices[0].message.content == ANSWER
        messages.append({"role": "user", "content": "Sure?"})
        third = turn()
        assert third.choices[0].message.content == LAST
        assert newly_computed(second.usage) < 60 < second.usage.prompt_tokens
        assert newly_computed(third.usage) < 60


def test_openai_async_completions_models_and_errors(served: HttpEngine) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            answer = await client.completions.create(model=MODEL, prompt="ab", max_tokens=3, n=2)
            assert len(answer.choices) == 2
            with pytest.raises(openai.NotFoundError) as caught:
                await client.chat.completions.create(
                    model="gpt-4", messages=[{"role": "user", "content": "x"}]
                )
            assert caught.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "x" * 9000}]
                )
            assert refused.value.code == "context_length_exceeded"

    asyncio.run(talk())


def test_pydantic_ai_runs_a_tool_and_streams(served: HttpEngine) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    asked = []

    async def talk() -> None:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none")
        async with client:
            model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, instructions="Be brief.")

            @agent.tool_plain
            def weather(city: str) -> str:
                """The weather of a city."""
                asked.append(city)
                return "rain"

            first = await agent.run("What is the weather in Oslo?")
            assert first.output == ANSWER
            async with agent.run_stream("Sure?", message_history=first.all_messages()) as stream:
                assert "".join([text async for text in stream.stream_text(delta=True)]) == LAST
                usage = stream.usage
                assert usage.input_tokens - usage.cache_read_tokens < 60 < usage.input_tokens

    asyncio.run(talk())
    assert asked == ["Oslo"]


def test_langchain_runs_a_tool_and_streams(served: HttpEngine) -> None:
    import httpx
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    with httpx.Client() as http:
        model = ChatOpenAI(
            model=MODEL,
            base_url=f"{served.url}/v1",
            api_key="none",
            stream_usage=True,
            http_client=http,
            use_responses_api=False,
        ).bind_tools([TOOL])
        history: list[Any] = [HumanMessage("What is the weather in Oslo?")]
        first = model.invoke(history)
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
        history += [first, ToolMessage("rain", tool_call_id=call["id"])]
        pieces = list(model.stream(history))
        second = pieces[0]
        for piece in pieces[1:]:
            second += piece
        assert second.content == ANSWER
        usage = second.usage_metadata
        assert usage is not None
        assert usage["input_tokens"] - usage["input_token_details"]["cache_read"] < 60
        third = model.invoke([*history, second, HumanMessage("Sure?")])
        assert third.content == LAST


def test_the_llm_command_line_goes_on_with_a_conversation(
    served: HttpEngine, tmp_path: Path
) -> None:
    user = tmp_path / "llm"
    user.mkdir()
    (user / "extra-openai-models.yaml").write_text(
        f"- model_id: served\n  model_name: {MODEL}\n  api_base: {served.url}/v1\n"
    )
    environ = os.environ | {"LLM_USER_PATH": str(user), "OPENAI_API_KEY": "none"}

    def llm(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *args],
            env=environ, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert llm("-m", "served", "What is the weather in Oslo?") == CALL
    assert llm("-c", "And now?") == ANSWER
    with served.engine.client() as client:
        last = max(client.sessions("~http:"), key=lambda info: info.turns)
        assert last.turns == 2
        assert last.last_cache is not None
        assert last.last_cache.computed_tokens < 60
