"""Requests of the shapes in which agents send them, and what is made of each.

What the agents say in them is left out; which fields, blocks and headers there are is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sessionkv.gateway.conversations import NAMES
from tests.builders.agent_text import call, write_agent_text
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
WINDOW = 4096
SAID = ("It is so.", "You are welcome.")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_agent_text(tmp_path_factory.mktemp("text"))
    runner = {"text_dir": folder, "script": replies(*SAID)}
    config = engine_config(blocks=4096, host_blocks=4096, max_model_len=WINDOW)
    with http_engine(config, runner=runner) as engine:
        yield engine


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
                        "properties": {"title": {"type": "string", "maxLength": 8}},
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
