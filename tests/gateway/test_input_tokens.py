"""How many input tokens a request for a response has: the very number that it reports when run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies, tools_folder
from tests.builders.tool_text import write_tool_text, written_call

URL = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
SAID = (written_call("look", at="Oslo"), "It is cold there.", "Bye.")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_tool_text(tmp_path_factory.mktemp("text"))
    with http_engine(runner={"text_dir": folder, "script": replies(*SAID)}) as engine:
        yield engine


def sessions(served: HttpEngine) -> set[str]:
    with served.engine.client() as client:
        return {info.name for prefix in ("", "~") for info in client.sessions(prefix)}


def run_and_count(served: HttpEngine, **fields: Any) -> dict[str, Any]:
    """A response, whose input tokens were counted before; the question left nothing."""
    body = {"model": MODEL} | fields
    before = sessions(served)
    counted = served.post(f"{URL}/input_tokens", body)
    assert counted.status_code == 200, counted.text
    for _ in range(1000):  # what was made for the question goes behind the answer
        if sessions(served) == before:
            break
    assert sessions(served) == before
    answer: dict[str, Any] = served.post(URL, body).json()
    tokens = answer["usage"]["input_tokens"]
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": tokens}
    return answer


def test_the_count_is_what_the_run_reports(served: HttpEngine) -> None:
    first = run_and_count(served, input="Is it cold?", instructions="Help.", tools=[TOOL])
    (call,) = first["output"]
    assert call["type"] == "function_call"
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "-9"}
    goes_on: dict[str, Any] = {"input": [output], "previous_response_id": first["id"]}
    run_and_count(served, **goes_on, instructions="Help.", tools=[TOOL])
    # Written anew behind other instructions, sent whole, and not kept.
    run_and_count(served, **goes_on, instructions="Help me.", tools=[TOOL])
    whole = [{"role": "user", "content": "Is it cold?"}, call, output]
    run_and_count(served, input=whole, tools=[TOOL])
    run_and_count(served, input=whole, tools=[TOOL], store=False)
    run_and_count(served, **goes_on, tools=[TOOL], store=False)
    conversation = served.post("/v1/conversations", {}).json()["id"]
    for text in ("one", "two"):
        run_and_count(served, input=text, conversation=conversation)
    run_and_count(served, input=[])


def test_what_is_not_stored_is_counted_as_its_turn_finds_its_conversation(tmp_path: Path) -> None:
    call = written_call("look", at="Oslo")
    thoughtful = f"<think>\nIs it cold there?\n</think>\n\nI look.\n{call}"
    runner = {"text_dir": tools_folder(tmp_path), "script": replies(thoughtful, *SAID[1:])}
    body: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "store": False}
    items: list[dict[str, Any]] = [{"role": "user", "content": "Is it cold?"}]
    with http_engine(runner=runner) as served:
        first = run_and_count(served, input=items, **body)
        thoughts, *said = first["output"]
        assert (thoughts["type"], said[-1]["type"]) == ("reasoning", "function_call")
        call_id = said[-1]["call_id"]
        items += [*said, {"type": "function_call_output", "call_id": call_id, "output": "-9"}]
        asked = body | {"input": items}
        helper = {"x-sessionkv-helper": "true"}
        alone = served.post(f"{URL}/input_tokens", asked, headers=helper).json()["input_tokens"]
        second = run_and_count(served, input=items, **body)
        # Its client sends no thoughts: they are put back where the conversation is found.
        put_back = len("<think>\nIs it cold there?\n</think>\n\n")
        assert second["usage"]["input_tokens"] == alone + put_back
        assert second["sessionkv"]["cache"]["miss"]["reason"] == "none"
        helped = served.post(URL, asked, headers=helper).json()
        assert helped["usage"]["input_tokens"] == alone
        items += [*second["output"], {"role": "user", "content": "Thanks."}]
        run_and_count(served, input=items, **body)


@pytest.mark.parametrize("is_stored", [True, False])
def test_what_does_not_fit_is_counted_too(served: HttpEngine, is_stored: bool) -> None:
    body = {"model": MODEL, "input": "x" * 9000, "store": is_stored}
    counted = served.post(f"{URL}/input_tokens", body).json()["input_tokens"]
    refused = served.post(URL, body).json()["error"]
    assert (refused["code"], refused["n_prompt_tokens"]) == ("context_length_exceeded", counted)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-4"}, 404, "model"),
        ({"model": 4}, 400, "model"),
        ({"input": [{"type": "web_search_call"}]}, 400, "input[0].type"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"conversation": "conv_1"}, 404, "conversation"),
        ({"truncation": "auto"}, 400, "truncation"),
    ],
)
def test_what_a_response_refuses_is_refused(
    served: HttpEngine, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = served.post(f"{URL}/input_tokens", {"input": "x", "model": None} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_the_official_clients_ask(served: HttpEngine) -> None:
    options: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": "none"}
    with openai.OpenAI(**options) as client:
        counted = client.responses.input_tokens.count(input="Hello", model=MODEL)

    async def again() -> Any:
        async with openai.AsyncOpenAI(**options) as client:
            return await client.responses.input_tokens.count(input="Hello")

    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == asyncio.run(again()).input_tokens > 5
