"""A resent history whose thoughts were edited in a field of their own is an edited history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sessionkv.text.follow import Followed, follow_ids
from sessionkv.text.history import StoredMessage
from sessionkv.text.model import TextModel
from sessionkv.text.root import RootText
from sessionkv.types import MissReason
from tests.builders import text as built
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, http_engine, replies, tools_folder

ROOT = RootText(None, None, 0.0)
CALL = '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>'
SAID = "<think>\nplan A\n</think>\n\nWell.\n" + CALL
ASKED: dict[str, Any] = {"role": "user", "content": "go"}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c", "content": "rain"}


@pytest.fixture
def text(tmp_path: Path) -> TextModel:
    return TextModel.load(tools_folder(tmp_path))


def sent(reasoning: str | None, content: str = "Well.") -> list[dict[str, Any]]:
    call = {"id": "c", "function": {"name": "look", "arguments": '{"n":1}'}}
    reply: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
    return [ASKED, reply | ({} if reasoning is None else {"reasoning_content": reasoning}), RESULT]


def followed(text: TextModel, messages: list[dict[str, Any]]) -> tuple[Followed, tuple[int, ...]]:
    """What a session makes of them whose reply has its thoughts in its text, and its log."""
    prompt = text.full(ROOT, built.read(ASKED))
    sampled = built.reply(text, SAID)
    reply = text.close_reply(sampled).ids(sampled)
    log = prompt + reply
    said = built.read({"role": "assistant", "content": SAID})[0]
    stored = [
        StoredMessage(built.read(ASKED)[0], 1, len(prompt)),
        StoredMessage(said, 1, len(log), reply),
    ]
    return follow_ids(text, ROOT, built.read(*messages), stored=stored, log=log), log


@pytest.mark.parametrize(
    "messages",
    [
        sent("plan B"),
        sent(None, "<think>\nplan B\n</think>\n\nWell."),
        sent(None, "<think>\n</think>\n\nWell."),
    ],
)
def test_an_edit_has_the_ids_of_one_who_never_saw_the_conversation(
    text: TextModel, messages: list[dict[str, Any]]
) -> None:
    found, log = followed(text, messages)
    assert found.ids == follow_ids(text, ROOT, built.read(*messages)).ids
    assert found.ids[: len(log)] != log
    assert (found.miss.reason, found.miss.message) == (MissReason.HISTORY_EDITED, 1)


@pytest.mark.parametrize(
    "messages",
    [
        sent("plan A"),
        sent(" plan A\n"),
        sent(None),
        sent(""),
        sent(None, "<think>\nplan A\n</think>\n\nWell."),
    ],
)
def test_the_same_thoughts_or_none_are_the_whole_log(
    text: TextModel, messages: list[dict[str, Any]]
) -> None:
    found, log = followed(text, messages)
    assert found.ids[: len(log)] == log
    assert found.miss.reason is MissReason.NONE


def test_a_warm_gateway_answers_an_edit_as_a_fresh_one(tmp_path: Path) -> None:
    runner = {"text_dir": tools_folder(tmp_path), "script": replies(SAID)}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    def ask(served: Any, messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
        body = {"model": MODEL, "messages": messages, "tools": [tool], "temperature": 0}
        answer = served.post("/v1/chat/completions", body | {"max_tokens": max_tokens})
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    with http_engine(engine_config(blocks=1024), runner=runner) as warm:
        reply = ask(warm, [ASKED], 200)["choices"][0]["message"]
        assert reply["reasoning_content"] == "plan A"
        result = RESULT | {"tool_call_id": reply["tool_calls"][0]["id"]}
        edited = [ASKED, reply | {"reasoning_content": "another plan"}, result]
        found = ask(warm, edited, 8)
    with http_engine(engine_config(blocks=1024), runner=runner) as fresh:
        expected = ask(fresh, edited, 8)
    assert found["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert found["sessionkv"]["cache"]["miss"]["reason"] == "history_edited"
