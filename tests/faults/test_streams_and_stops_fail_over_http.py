"""Held-back text, split characters, stops and token limits, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from sessionkv.text.builtin import END_OF_TEXT, IM_END
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def said(served: HttpEngine, path: str, **fields: Any) -> tuple[str, str, int]:
    """Text, reason and number of tokens, which a stream tells the same."""
    body = {"model": MODEL} | fields
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "Hi"}]
    whole = served.post(path, body).json()
    (choice,) = whole["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    streamed, reason = "", None
    *chunks, done = served.stream(path, body | {"stream": True})
    assert done == "[DONE]"
    for chunk in chunks:
        (piece,) = chunk["choices"]
        streamed += piece["delta"].get("content", "") if path == CHAT else piece["text"]
        reason = piece["finish_reason"] or reason
    assert (streamed, reason) == (text, choice["finish_reason"])
    return text, choice["finish_reason"], whole["usage"]["completion_tokens"]


def test_half_a_character_shows_the_prompt() -> None:
    prompt = [*b"the fox ", *"\u3042".encode()[:2]]
    script = {"script": lambda ids: "\u3042".encode()[2] if len(ids) == len(prompt) else IM_END}
    with http_engine(runner=script) as served:
        text, _, _ = said(served, COMPLETIONS, prompt=prompt)
        assert "fox" not in text
        assert len(text) <= 1


@pytest.mark.parametrize("limit", [None, 3])
def test_held_back_text_is_lost_at_the_end(limit: int | None) -> None:
    with http_engine(runner={"script": replies("aST")}) as served:
        text, reason, _ = said(served, CHAT, stop=["STOP"], max_tokens=limit)
        assert (text, reason) == ("aST", "stop" if limit is None else "length")


def test_a_stop_string_is_shown() -> None:
    with http_engine(runner={"script": replies("one STOP two")}) as served:
        assert said(served, CHAT, stop="STOP")[:2] == ("one ", "stop")
        assert said(served, CHAT, stop=["x", "TOP"])[:2] == ("one S", "stop")


def test_min_tokens_are_ignored_and_an_end_token_counts_for_nothing() -> None:
    with http_engine(runner={"script": replies("ab.cdefg.h")}) as served:
        text, _, count = said(served, CHAT, stop=["."], min_tokens=6)
        assert (text, count) == ("ab.cdefg", 9)
    ends = {"script": lambda ids: END_OF_TEXT if len(ids) == 5 else 65}
    with http_engine(runner=ends) as served:
        assert said(served, COMPLETIONS, prompt=[1, 2, 3]) == ("AA", "stop", 3)
        text, reason, count = said(
            served, COMPLETIONS, prompt=[1, 2, 3], ignore_eos=True, max_tokens=5
        )
        assert (reason, count) == ("length", 5)


@pytest.mark.parametrize("asked", [0, -1, 1, 4, 5, 10_000, 2**64, "4", 1.5, None])
def test_a_limit_past_the_window_hangs_or_lies(asked: Any) -> None:
    with http_engine(engine_config(max_model_len=64)) as served:
        body = {"model": MODEL, "prompt": [1] * 60, "max_tokens": asked, "ignore_eos": True}
        if asked is None:
            body["prompt"] = [1] * 40
        answer = served.post(COMPLETIONS, body)
        if asked in (1, 4, None):
            choice = answer.json()["choices"][0]
            assert choice["finish_reason"] == "length"
            assert answer.json()["usage"]["completion_tokens"] == (asked or 16)
            return
        assert answer.status_code == 400
        error = answer.json()["error"]
        if asked in (5, 10_000):
            assert error["code"] == "context_length_exceeded"
            assert (error["n_prompt_tokens"], error["max_tokens"], error["n_ctx"]) == (
                60,
                asked,
                64,
            )
        else:
            assert error["param"] == "max_tokens"
        assert served.post(COMPLETIONS, body | {"max_tokens": 1}).status_code == 200
