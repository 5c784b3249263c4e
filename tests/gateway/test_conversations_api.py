"""Conversations over HTTP: items and responses are added to one by its name, and stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.conversations import Conversation, ConversationItem, ConversationItemList
from pydantic import TypeAdapter

from sessionkv.client.results import NodeInfo
from sessionkv.gateway.openai.response_ids import session_of
from tests.builders.engine import engine_config, socket_engine
from tests.builders.gateway import MODEL, Gateway, HttpEngine, gateway, http_engine, replies

URL = "/v1/conversations"
ITEM: TypeAdapter[Any] = TypeAdapter(ConversationItem)
SAID = ("Hello there.", "And again.", "Third.", "Fourth.")
MISSING = "conv_" + "0" * 32


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(runner={"script": replies(*SAID)}) as engine:
        yield engine


def create(served: Gateway, **fields: Any) -> str:
    body = served.post(URL, fields).json()
    Conversation.model_validate(body)
    return str(body["id"])


def ask(served: Gateway, conversation: Any, text: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": text, "conversation": conversation} | fields
    if fields.get("stream"):
        value: dict[str, Any] = served.stream("/v1/responses", body)[-1]["response"]
        return value
    answer = served.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    value = answer.json()
    return value


def listed(served: Gateway, conversation: str, **params: Any) -> list[dict[str, Any]]:
    answer = served.http.get(
        f"{URL}/{conversation}/items", params={"order": "asc", "limit": 100} | params
    )
    assert answer.status_code == 200, answer.text
    ConversationItemList.model_validate(answer.json())
    found: list[dict[str, Any]] = answer.json()["data"]
    for item in found:
        ITEM.validate_python(item)
    return found


def texts(served: Gateway, conversation: str) -> list[str]:
    return [item["content"][0]["text"] for item in listed(served, conversation)]


def node_of(served: HttpEngine, body: dict[str, Any]) -> NodeInfo:
    with served.engine.client() as client:
        return client.session(session_of(body["id"])).node()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_added_and_go_on_from_each_other(served: HttpEngine, stream: bool) -> None:
    conversation = create(served, metadata={"a": "b"})
    first = ask(served, conversation, "one", stream=stream)
    assert first["conversation"] == {"id": conversation}
    second = ask(served, {"id": conversation}, "two", stream=stream)
    assert texts(served, conversation) == ["one", SAID[0], "two", SAID[1]]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert second["sessionkv"]["cache"]["miss"]["reason"] == "none"
    assert node_of(served, second).parent == first["sessionkv"]["node"]
    ids = [item["id"] for item in listed(served, conversation)]
    assert ids[1] == first["output"][0]["id"]
    assert served.http.get(f"{URL}/{conversation}/items/{ids[1]}").json()["id"] == ids[1]
    newest = served.http.get(f"{URL}/{conversation}/items", params={"limit": 1}).json()
    assert (newest["last_id"], newest["has_more"]) == (ids[-1], True)


def test_items_that_are_added_by_hand_are_part_of_it(served: HttpEngine) -> None:
    start = [{"role": "developer", "content": "Be kind."}, user("zero")]
    conversation = create(served, items=start)
    assert texts(served, conversation) == ["Be kind.", "zero"]
    first = ask(served, conversation, "one")
    node = node_of(served, first)
    assert (node.system, [m["content"] for m in node.messages]) == ("Be kind.", ["zero", "one"])
    added = served.post(f"{URL}/{conversation}/items", {"items": [user("between")]}).json()
    ConversationItemList.model_validate(added)
    second = ask(served, conversation, "two")
    node = node_of(served, second)
    assert [m["content"] for m in node.messages] == ["between", "two"]
    assert node.parent == first["sessionkv"]["node"]
    assert texts(served, conversation) == [
        "Be kind.", "zero", "one", SAID[0], "between", "two", SAID[1],
    ]  # fmt: skip
    own = served.http.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in own] == ["two"]


def test_what_was_deleted_is_not_said_again(served: HttpEngine) -> None:
    conversation = create(served)
    ask(served, conversation, "one")
    ask(served, conversation, "two")
    url = f"{URL}/{conversation}/items"
    served.post(url, {"items": [user("three"), user("four")]})
    items = listed(served, conversation)
    # Of what was added since, the rest goes on from where it was.
    deleted = served.http.delete(f"{url}/{items[4]['id']}")
    assert deleted.json()["id"] == conversation
    assert served.http.get(f"{url}/{items[4]['id']}").status_code == 404
    third = ask(served, conversation, "five")
    assert [m["content"] for m in node_of(served, third).messages] == ["four", "five"]
    # What was said earlier changes all that follows it.
    served.http.delete(f"{url}/{items[0]['id']}")
    served.http.delete(f"{url}/{items[1]['id']}")
    fourth = ask(served, conversation, "six")
    said = [message["content"] for message in node_of(served, fourth).messages]
    assert said == ["two", SAID[1], "four", "five", SAID[2], "six"]
    assert texts(served, conversation) == [*said, fourth["output"][0]["content"][0]["text"]]
    fifth = ask(served, conversation, "seven")
    assert node_of(served, fifth).parent == fourth["sessionkv"]["node"]


def test_a_conversation_is_updated_and_deleted(served: HttpEngine) -> None:
    conversation = create(served, metadata={"a": "b"})
    first = ask(served, conversation, "one")
    updated = served.post(f"{URL}/{conversation}", {"metadata": {"c": "d"}}).json()
    assert updated["metadata"] == {"c": "d"}
    assert served.http.get(f"{URL}/{conversation}").json() == updated
    assert texts(served, conversation) == ["one", SAID[0]]
    deleted = served.http.delete(f"{URL}/{conversation}").json()
    assert deleted == {"id": conversation, "object": "conversation.deleted", "deleted": True}
    assert served.http.get(f"{URL}/{conversation}").status_code == 404
    assert served.http.get(f"/v1/responses/{first['id']}").status_code == 200
    with served.engine.client() as client:
        assert not [s for s in client.sessions("http:conv:") if conversation in s.name]


@pytest.mark.parametrize("conversation", [MISSING, "conv_1", "x"])
def test_a_conversation_that_is_not_there_is_not_found(
    served: HttpEngine, conversation: str
) -> None:
    item = {"items": [user("x")]}
    for method, path, body in (
        ("GET", "", None),
        ("POST", "", {"metadata": {}}),
        ("DELETE", "", None),
        ("GET", "/items", None),
        ("POST", "/items", item),
        ("GET", "/items/msg_1", None),
        ("DELETE", "/items/msg_1", None),
    ):
        answer = served.http.request(method, f"{URL}/{conversation}{path}", json=body)
        assert answer.status_code == 404, (method, path)
        assert answer.json()["error"]["code"] == "conversation_not_found"
    body = {"model": MODEL, "input": "x", "conversation": conversation}
    for stream in (False, True):
        answer = served.post("/v1/responses", body | {"stream": stream})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "conversation")


def test_items_that_cannot_be_kept_are_refused(served: HttpEngine) -> None:
    conversation = create(served)
    url = f"{URL}/{conversation}/items"
    for items, param in (
        ([], "items"),
        ([user("x")] * 21, "items"),
        ([{"type": "web_search_call"}], "items[0].type"),
        ([user("x" * 70_000)], "items"),
    ):
        answer = served.post(url, {"items": items})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert served.http.get(f"{url}/msg_1").json()["error"]["code"] == "item_not_found"
    answer = served.post(
        "/v1/responses",
        {"model": MODEL, "input": "x", "conversation": conversation, "store": False},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "store")
    assert listed(served, conversation) == []


def test_a_conversation_is_there_after_a_restart(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "store", blocks=128)
    script = {"script": replies(*SAID)}
    with socket_engine(tmp_path, config, runner=script) as engine, gateway(engine.endpoint) as http:
        conversation = create(http, metadata={"a": "b"}, items=[user("zero")])
        ask(http, conversation, "one")
        before = listed(http, conversation)
    with socket_engine(tmp_path, config, runner=script) as engine, gateway(engine.endpoint) as http:
        assert http.http.get(f"{URL}/{conversation}").json()["metadata"] == {"a": "b"}
        assert listed(http, conversation) == before
        again = ask(http, conversation, "two")
        assert again["output"][0]["content"][0]["text"] == SAID[1]
