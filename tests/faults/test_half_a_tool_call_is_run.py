"""A call that the token limit cut off, presented as one that is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies, tools_folder

CHAT = "/v1/chat/completions"
SAID = '<tool_call>\n{"name": "f", "arguments": {"x": "a long one"}}\n</tool_call>'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = tools_folder(tmp_path_factory.mktemp("text"))
    runner = {"text_dir": folder, "script": replies(SAID)}
    with http_engine(engine_config(blocks=512), runner=runner) as engine:
        yield engine


def whole(served: HttpEngine, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    (choice,) = served.post(CHAT, body).json()["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return choice["finish_reason"], calls


def streamed(served: HttpEngine, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    calls: dict[int, dict[str, Any]] = {}
    reason = ""
    *chunks, _ = served.stream(CHAT, body | {"stream": True})
    for chunk in chunks:
        (choice,) = chunk["choices"]
        for delta in choice["delta"].get("tool_calls", []):
            call = calls.setdefault(delta["index"], {"name": "", "arguments": ""})
            for name in call:
                call[name] += delta["function"].get(name, "")
        reason = choice["finish_reason"] or reason
    return reason, [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize("answer", [whole, streamed])
@pytest.mark.parametrize("cut", range(12, len(SAID) + 1, 7))
def test_a_call_is_complete_or_the_answer_was_cut(
    served: HttpEngine, answer: Any, cut: int
) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Go"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    reason, calls = answer(served, body | {"max_tokens": cut})
    assert reason == "length"
    complete = SAID[:cut].count("}")
    for call in calls:
        if not complete:
            with pytest.raises(ValueError, match=r".*"):
                json.loads(call["arguments"])
    reason, calls = answer(served, body | {"max_tokens": len(SAID) + 1})
    assert reason == "tool_calls"
    assert json.loads(calls[0]["arguments"]) == {"x": "a long one"}


def test_a_broken_call_before_a_good_one_is_no_finished_one(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "f", "arguments": {"x": 1,}}\n</tool_call>\n' + SAID
    runner = {"text_dir": tools_folder(tmp_path), "script": replies(broken)}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Go"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    with http_engine(engine_config(blocks=512), runner=runner) as served:
        for parallel in (True, False):
            for answer in (whole, streamed):
                asked = body | {"parallel_tool_calls": parallel}
                reason, calls = answer(served, asked)
                assert reason != "tool_calls" or all(json.loads(c["arguments"]) for c in calls)
