"""Conversations in which a response is being made, and what fails on its way into one."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.builders.doors import Hold
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine

URL = "/v1/conversations"


@pytest.fixture
def held() -> Iterator[tuple[HttpEngine, Hold]]:
    """An engine whose turns go on until the test lets them end."""
    hold = Hold()
    config = engine_config(blocks=4096)
    with http_engine(config, gate=hold.gate, runner={"script": hold.script}) as served:
        yield served, hold
        hold.release()


@contextmanager
def streaming(served: HttpEngine, conversation: str) -> Iterator[http.client.HTTPResponse]:
    """A response under way, whose first event was read."""
    body = {"model": MODEL, "input": "Hi", "conversation": conversation, "stream": True}
    address = httpx.URL(served.url)
    connection = http.client.HTTPConnection(address.host, address.port)
    connection.request(
        "POST", "/v1/responses", json.dumps(body), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    try:
        assert response.readline() == b"event: response.created\n"
        yield response
    finally:
        response.close()
        connection.close()


def last_event(response: http.client.HTTPResponse) -> Any:
    lines = [line for line in response.read().splitlines() if line.startswith(b"data: ")]
    return json.loads(lines[-1].removeprefix(b"data: "))


def test_what_would_come_between_a_response_and_its_question_is_busy(
    held: tuple[HttpEngine, Hold],
) -> None:
    served, hold = held
    conversation = served.post(URL, {}).json()["id"]
    items = {"items": [{"role": "user", "content": "x"}]}
    added = served.post(f"{URL}/{conversation}/items", items).json()["first_id"]
    with streaming(served, conversation) as response:
        question = {"model": MODEL, "input": "Hi", "conversation": conversation}
        for method, path, body in (
            ("POST", f"{URL}/{conversation}/items", items),
            ("DELETE", f"{URL}/{conversation}/items/{added}", None),
            ("POST", "/v1/responses", question),
            ("POST", "/v1/responses", question | {"stream": True}),
        ):
            answer = served.http.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
            assert answer.headers["retry-after"]
        changed = served.post(f"{URL}/{conversation}", {"metadata": {"a": "b"}})
        assert changed.json()["metadata"] == {"a": "b"}
        hold.release()
        assert last_event(response)["type"] == "response.completed"
    assert served.post(f"{URL}/{conversation}/items", items).status_code == 200
    listed = served.http.get(f"{URL}/{conversation}/items").json()
    assert len(listed["data"]) == 4
    assert served.http.get(f"{URL}/{conversation}").json()["metadata"] == {"a": "b"}


def test_a_response_whose_conversation_was_deleted_failed_and_is_not_there(
    held: tuple[HttpEngine, Hold],
) -> None:
    served, hold = held
    conversation = served.post(URL, {}).json()["id"]
    with streaming(served, conversation) as response:
        assert served.http.delete(f"{URL}/{conversation}").status_code == 200
        hold.release()
        last = last_event(response)
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "conversation_not_found"
    assert served.http.get(f"/v1/responses/{last['response']['id']}").status_code == 404
    with served.engine.client() as client:
        assert client.sessions("~") == client.sessions("http:") == []


def test_a_conversation_that_cannot_be_made_leaves_nothing() -> None:
    with http_engine() as served:
        long = {"items": [{"role": "user", "content": "x" * 70_000}]}
        answer = served.post(URL, long)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items")
        with served.engine.client() as client:
            assert client.sessions("http:conv:") == []
