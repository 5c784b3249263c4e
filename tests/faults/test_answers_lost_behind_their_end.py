"""An engine killed right behind an answer over HTTP loses the conversation that goes on from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders.engine import engine_config
from tests.builders.fake_engine import short_endpoint
from tests.builders.gateway import MODEL, Gateway, gateway
from tests.builders.killable import KillableEngine, Life

ASKED = {"role": "user", "content": "What is the weather in Oslo?"}
MOST = 8


def chat(served: Gateway) -> str | None:
    """The answer's text, None where the client was given none."""
    body = {"model": MODEL, "messages": [ASKED], "max_tokens": MOST}
    answer = served.post("/v1/chat/completions", body)
    if answer.status_code != 200:
        return None
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def messages(served: Gateway) -> str | None:
    """The text of a stream, None where it had no end."""
    body = {"model": MODEL, "messages": [ASKED], "max_tokens": MOST, "stream": True}
    told = list(events(served, "/v1/messages", body))
    if told[-1]["type"] != "message_stop":
        return None
    return "".join(event.get("delta", {}).get("text", "") for event in told)


def events(served: Gateway, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Data of a stream's events."""
    with served.http.stream("POST", path, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def missed(life: Life, text: str) -> str:
    """Why a later engine does not have all of the history when it is sent again."""
    history = [ASKED, {"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
    body = {"model": MODEL, "messages": history, "max_tokens": 1}
    engine = KillableEngine(replace(life, gate=""))
    try:
        assert engine.wait_ready()
        with gateway(life.endpoint) as served:
            answer = served.post("/v1/chat/completions", body).json()
    finally:
        engine.kill()
        engine.reap()
    reason: str = answer["sessionkv"]["cache"]["miss"]["reason"]
    return reason


@pytest.mark.parametrize("ask", [chat, messages])
def test_whoever_saw_the_end_is_found_again(tmp_path: Path, ask: Any) -> None:
    outcomes = []
    with short_endpoint() as endpoint:
        for commit in (3, 9):  # that of the name, and one that does not come: behind the answer
            folder = tmp_path / str(commit)
            folder.mkdir()
            config = engine_config(folder / "store")
            life = Life(folder, endpoint, config, gate="before_commit", passes=commit)
            engine = KillableEngine(life)
            try:
                assert engine.wait_ready()
                with gateway(endpoint) as served:
                    text = ask(served)
                    engine.kill()
            finally:
                engine.kill()
                engine.reap()
            outcomes.append(text if text is None else missed(life, text))
    assert outcomes[-1] is not None
    # The ids are there; their KV was in memory alone.
    assert {outcome for outcome in outcomes if outcome is not None} == {"not_stored"}
