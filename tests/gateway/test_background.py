"""Responses that are made in the background: asked for again, followed, cancelled, never lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from sessionkv.gateway.openai import background
from tests.builders.doors import Hold
from tests.builders.engine import engine_config, socket_engine
from tests.builders.gateway import MODEL, Gateway, HttpEngine, gateway, http_engine, replies
from tests.builders.tenants import KEYS, access

URL = "/v1/responses"
MISSING = "resp_" + "0" * 32
SERVICE = "the-gateways-own"


@pytest.fixture
def held() -> Iterator[tuple[HttpEngine, Hold]]:
    """An engine whose turns go on until the test lets them end."""
    hold = Hold()
    config = engine_config(blocks=4096)
    with http_engine(config, gate=hold.gate, runner={"script": hold.script}) as served:
        yield served, hold
        hold.release()


def begin(served: Gateway, text: str = "Hi", status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": text, "background": True, "instructions": "Be brief."}
    headers = fields.pop("headers", {})
    answer = served.post(URL, body | fields, headers=headers)
    assert answer.status_code == status, answer.text
    value: dict[str, Any] = answer.json()
    return value


def get(served: Gateway, response_id: str, **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = served.http.get(f"{URL}/{response_id}", **options).json()
    return body


def ended(served: Gateway, response_id: str, **options: Any) -> dict[str, Any]:
    """Asked for until it has ended, as clients do it."""
    while (body := get(served, response_id, **options))["status"] in ("queued", "in_progress"):
        Response.model_validate(body)
    return body


def follow(served: Gateway, response_id: str, **params: Any) -> list[Any]:
    lines = served.http.get(f"{URL}/{response_id}", params={"stream": True} | params).text
    return [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: ")]


def names(served: HttpEngine) -> list[str]:
    with served.engine.client() as client:
        return [info.name for prefix in ("", "~") for info in client.sessions(prefix)]


def await_names(served: HttpEngine, *expected: str) -> None:
    for _ in range(2000):
        if sorted(names(served)) == sorted(expected):
            return
    raise AssertionError(names(served))


def test_it_answers_at_once_and_is_there_later(held: tuple[HttpEngine, Hold]) -> None:
    served, hold = held
    body = begin(served, metadata={"a": "b"})
    Response.model_validate(body)
    assert (body["status"], body["background"], body["output"]) == ("queued", True, [])
    response_id = body["id"]
    while get(served, response_id)["status"] == "queued":
        pass
    assert get(served, response_id)["status"] == "in_progress"
    refused = served.post(URL, {"model": MODEL, "input": "x", "previous_response_id": response_id})
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    hold.release()
    whole = ended(served, response_id)
    assert (whole["status"], whole["background"], whole["metadata"]) == (
        "completed", True, {"a": "b"},
    )  # fmt: skip
    assert whole["instructions"] == "Be brief."
    assert whole["usage"]["output_tokens"] > 0
    await_names(served, f"~http:{response_id}")
    # It ended by itself: to cancel it changes nothing.
    cancelled = served.http.post(f"{URL}/{response_id}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "completed")


def test_one_that_is_cancelled_ends_at_once(held: tuple[HttpEngine, Hold]) -> None:
    served, _ = held
    with served.http.stream(
        "POST", URL, json={"model": MODEL, "input": "Hi", "background": True, "stream": True}
    ) as response:
        lines = response.iter_lines()
        body = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))["response"]
    with served.engine.client() as client:
        while not client.stats()["requests_running"]:
            pass
        cancelled = served.http.post(f"{URL}/{body['id']}/cancel").json()
        assert client.stats()["requests_running"] == 0
    Response.model_validate(cancelled)
    assert cancelled["status"] == "cancelled"
    await_names(served, f"~http:ended:{body['id']}")
    kinds = [event["type"] for event in follow(served, body["id"])]
    assert (kinds[:2], kinds[-1]) == (
        ["response.created", "response.queued"],
        "response.cancelled",
    )
    again = served.http.post(f"{URL}/{body['id']}/cancel").json()
    assert again["status"] == get(served, body["id"])["status"] == "cancelled"
    assert served.http.delete(f"{URL}/{body['id']}").status_code == 200
    assert served.http.get(f"{URL}/{body['id']}").status_code == 404
    assert names(served) == []


def test_one_that_is_deleted_on_the_way_leaves_nothing(held: tuple[HttpEngine, Hold]) -> None:
    served, _ = held
    body = begin(served)
    assert served.http.delete(f"{URL}/{body['id']}").status_code == 200
    assert served.http.get(f"{URL}/{body['id']}").status_code == 404
    await_names(served)


def test_in_a_conversation_it_is_there_when_it_has_ended(held: tuple[HttpEngine, Hold]) -> None:
    served, hold = held
    conversation = served.post("/v1/conversations", {}).json()["id"]
    items = f"/v1/conversations/{conversation}/items"
    body = begin(served, conversation=conversation)
    busy = begin(served, status=409, conversation=conversation)
    assert busy["error"]["code"] == "session_busy"
    cancelled = served.http.post(f"{URL}/{body['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert served.http.get(items).json()["data"] == []
    hold.release()
    ended(served, begin(served, conversation=conversation)["id"])
    assert len(served.http.get(items).json()["data"]) == 2


SAID = ("Hello there.", "And again.")


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(engine_config(blocks=512), runner={"script": replies(*SAID)}) as engine:
        yield engine


def test_its_stream_is_resumed_where_it_was_left(served: HttpEngine) -> None:
    body = {"model": MODEL, "input": "Hi", "background": True, "stream": True}
    events = served.stream(URL, body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "queued", "in_progress"]
    assert kinds[-1] == "completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response_id = events[0]["response"]["id"]
    assert follow(served, response_id) == events
    assert follow(served, response_id, starting_after=4) == events[5:]
    assert follow(served, response_id, starting_after=10_000) == []
    second = served.post(URL, {"model": MODEL, "input": "x", "previous_response_id": response_id})
    assert second.json()["output"][0]["content"][0]["text"] == SAID[1]
    for other in (second.json()["id"], begin(served)["id"]):  # neither is a stream to be resumed
        refused = served.http.get(f"{URL}/{other}", params={"stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def test_what_is_wrong_with_a_request_is_told_at_once(served: HttpEngine) -> None:
    for fields, status, param in (
        ({"store": False}, 400, "store"),
        ({"previous_response_id": MISSING}, 400, "previous_response_id"),
        ({"input": []}, 400, "input"),
        ({"headers": {"x-sessionkv-helper": "true"}}, 400, "background"),
        ({"metadata": {"sessionkv_helper": "true"}}, 400, "background"),
        ({"input": [{"type": "web_search_call"}]}, 400, "input[0].type"),
        ({"conversation": "conv_1"}, 404, "conversation"),
    ):
        error = begin(served, status=status, **fields)["error"]
        assert error["param"] == param


def test_one_that_fails_says_why(served: HttpEngine) -> None:
    body = ended(served, begin(served, "x" * 9000)["id"])
    assert (body["status"], body["error"]["code"]) == ("failed", "context_length_exceeded")
    assert body["error"]["n_prompt_tokens"] > 9000


def test_nobody_has_more_of_them_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MAX_OF_TENANT", 1)
    monkeypatch.setattr(background, "MAX_RUNNING", 2)
    owner, other, third, *_ = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
    keys, hold = access().with_service(SERVICE), Hold()
    config, script = engine_config(blocks=512), {"script": hold.script}
    with (
        socket_engine(tmp_path, config, gate=hold.gate, runner=script, access=keys) as engine,
        gateway(engine.endpoint, key=SERVICE) as served,
    ):
        first = begin(served, headers=owner)
        full = begin(served, status=429, headers=owner)
        assert (full["error"]["code"], full["error"]["running"]) == ("overloaded", 1)
        second = begin(served, headers=other)
        # Two places are no share for each of three; it is told of its own alone.
        assert begin(served, status=429, headers=third)["error"]["running"] == 0
        # Nobody else finds it, or ends it.
        for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            answer = served.http.request(method, f"{URL}/{first['id']}{path}", headers=other)
            assert answer.status_code == 404
        served.http.post(f"{URL}/{first['id']}/cancel", headers=owner)
        third_one = begin(served, headers=third)
        hold.release()
        assert ended(served, second["id"], headers=other)["status"] == "completed"
        assert ended(served, third_one["id"], headers=third)["status"] == "completed"


def test_events_of_streams_that_ended_are_forgotten_when_they_are_too_many(
    served: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": MODEL, "input": "Hi", "background": True, "stream": True}
    first = served.stream(URL, body)[0]["response"]["id"]
    monkeypatch.setattr(background, "MAX_KEPT_BYTES", 0)
    second = served.stream(URL, body)[0]["response"]["id"]
    for response_id in (first, second):
        assert ended(served, response_id)["status"] == "completed"
        while served.http.get(f"{URL}/{response_id}", params={"stream": True}).status_code != 400:
            pass  # its end is still being noted


class Settling:
    """A run whose turn is there already, and whose last event comes when it is let."""

    id, is_streamed, is_settling = MISSING, True, True

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.settled = 0

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        await self.let.wait()
        yield {"type": "response.completed", "response": {"status": "completed"}}

    async def settle(self, body: dict[str, Any]) -> None:
        self.settled += 1


def test_one_that_is_about_to_be_there_is_not_cancelled_any_more() -> None:
    async def cancel() -> tuple[Any, int]:
        run: Any = Settling()
        first = {"type": "response.created", "response": {"status": "queued"}}
        response = background.BackgroundResponse(run, run.events(), first)
        cancelling = asyncio.ensure_future(response.cancel())
        await asyncio.sleep(0)
        run.let.set()
        await cancelling
        return response.body, run.settled

    assert asyncio.run(cancel()) == ({"status": "completed"}, 1)


def test_a_gateway_that_ends_says_nothing_of_what_it_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hold = Hold()
    config = engine_config(blocks=512)
    with socket_engine(tmp_path, config, gate=hold.gate, runner={"script": hold.script}) as engine:
        with gateway(engine.endpoint) as first:
            left = begin(first)["id"]
            hold.wait_going()
            with gateway(engine.endpoint) as second:  # which does not make it, and knows it is made
                assert get(second, left)["status"] == "in_progress"
        with engine.client() as client:
            assert [info.name for info in client.sessions("~")] == [f"~http:begun:{left}"]
        hold.release()
    assert [record.message for record in caplog.records if "could not" in record.message] == []


def test_what_a_gateway_left_has_failed(tmp_path: Path) -> None:
    hold = Hold()
    config = engine_config(blocks=512)
    with socket_engine(tmp_path, config, gate=hold.gate, runner={"script": hold.script}) as engine:
        with gateway(engine.endpoint) as first:
            body = begin(first)
            assert begin(first, status=200)["status"] == "queued"
        with gateway(engine.endpoint) as second:
            left = get(second, body["id"])
            Response.model_validate(left)
            assert (left["status"], left["error"]["code"]) == ("failed", "server_error")
            assert (left["instructions"], left["background"]) == ("Be brief.", True)
            cancelled = second.http.post(f"{URL}/{body['id']}/cancel")
            assert cancelled.json() == left
            assert second.http.delete(f"{URL}/{body['id']}").status_code == 200
            assert second.http.get(f"{URL}/{body['id']}").status_code == 404
        hold.release()


def test_the_official_clients_make_and_follow_them(served: HttpEngine) -> None:
    options: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": "none"}
    with openai.OpenAI(**options) as client:
        begun = client.responses.create(model=MODEL, input="Hi", background=True)
        assert begun.status == "queued"
        assert [item.type for item in client.responses.input_items.list(begun.id)] == ["message"]
        while (body := client.responses.retrieve(begun.id)).status != "completed":
            pass
        assert body.output_text == SAID[0]
        assert [item.type for item in client.responses.input_items.list(begun.id)] == ["message"]
        with client.responses.create(
            model=MODEL, input="Hi", background=True, stream=True
        ) as events:
            begun = next(event.response for event in events if event.type == "response.queued")
        with client.responses.retrieve(begun.id, stream=True, starting_after=1) as events:
            assert next(iter(events)).sequence_number == 2
            assert [event.type for event in events][-1] == "response.completed"
        assert client.responses.cancel(begun.id).status == "completed"

    async def follow() -> list[str]:
        async with openai.AsyncOpenAI(**options) as client:
            stream = await client.responses.create(
                model=MODEL, input="Hi", background=True, stream=True
            )
            return [event.type async for event in stream]

    assert asyncio.run(follow())[-1] == "response.completed"
