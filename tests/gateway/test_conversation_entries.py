"""A gateway that ends anywhere between a turn and its note: the conversation has what is there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sessionkv.gateway.openai import background
from sessionkv.gateway.openai.conversation_entries import ConversationEntries
from sessionkv.gateway.openai.conversation_store import ConversationStore
from tests.builders.doors import Hold
from tests.builders.engine import SocketEngine, engine_config, socket_engine
from tests.builders.gateway import MODEL, Gateway, gateway

URL = "/v1/conversations"


def ask(served: Gateway, conversation: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": text, "conversation": conversation, "max_output_tokens": 4}
    answer = served.post("/v1/responses", body | fields)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def said(served: Gateway, conversation: str) -> list[str]:
    """Texts of the users' messages."""
    answer = served.http.get(f"{URL}/{conversation}/items", params={"order": "asc"})
    items = answer.json()["data"]
    return [item["content"][0]["text"] for item in items if item["role"] == "user"]


def notes(engine: SocketEngine) -> list[str]:
    with engine.client() as client:
        return [info.name for info in client.sessions("~http:entering:")]


def until_there(served: Gateway, response_id: str) -> None:
    """Until the engine has the response; its gateway still says that it is being made."""
    body = {"model": MODEL, "input": "x", "previous_response_id": response_id, "store": False}
    while served.post("/v1/responses", body).status_code != 200:
        pass


async def _never(*_: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("where", ["before the note", "behind the note"])
@pytest.mark.parametrize("first", ["reads", "adds", "asks"])
def test_what_a_crash_kept_out_is_taken_in_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, first: str
) -> None:
    monkeypatch.setattr(background, "SETTLE_S", 0.05)
    of, name = {
        "before the note": (ConversationStore, "_take_in"),
        "behind the note": (ConversationEntries, "end"),
    }[where]
    with socket_engine(tmp_path, engine_config(blocks=512)) as engine:
        with gateway(engine.endpoint) as left:
            conversation = left.post(URL, {}).json()["id"]
            with monkeypatch.context() as patched:
                patched.setattr(of, name, _never)
                lost = ask(left, conversation, "one", background=True)["id"]
                until_there(left, lost)
                while len(notes(engine)) != 1:
                    pass
        with gateway(engine.endpoint) as served:
            expected = ["one"]
            if first == "adds":
                item = {"role": "user", "content": "by hand"}
                added = served.post(f"{URL}/{conversation}/items", {"items": [item]})
                assert added.status_code == 200
                expected.append("by hand")
            elif first == "asks":
                alone = served.post(URL, {}).json()["id"]
                second = ask(served, conversation, "two")
                only = ask(served, alone, "two")["usage"]["input_tokens"]
                assert second["usage"]["input_tokens"] > only
                expected.append("two")
            assert said(served, conversation) == expected
            status = served.http.get(f"/v1/responses/{lost}").json()["status"]
            assert status in ("completed", "incomplete")  # as its reply ended; not failed
        assert notes(engine) == []


def test_what_never_came_to_be_is_not_taken_in(tmp_path: Path) -> None:
    hold = Hold()
    script, config = {"script": hold.script}, engine_config(blocks=512)
    with socket_engine(tmp_path, config, gate=hold.gate, runner=script) as engine:
        with gateway(engine.endpoint) as served:
            conversation = served.post(URL, {}).json()["id"]
            begun = ask(served, conversation, "one", background=True, max_output_tokens=None)["id"]
            while not notes(engine):
                pass
            assert said(served, conversation) == []
            assert notes(engine) == [f"~http:entering:{conversation}.{begun}"]
            served.http.post(f"/v1/responses/{begun}/cancel")
            assert notes(engine) == []
        # What a crash leaves of one whose turn never ended.
        with engine.client() as client:
            client.open(f"~http:entering:{conversation}.{begun}")
        with gateway(engine.endpoint) as served:
            assert said(served, conversation) == []
            assert notes(engine) == []
        hold.release()
