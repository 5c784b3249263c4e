"""Responses that fail, are left or are too many: what the client hears, and what stays behind."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from sessionkv import AsyncClient
from sessionkv.client.options import TurnOptions
from sessionkv.engine.calls import CallDesk
from sessionkv.errors import PreviousResponseNotFound
from sessionkv.gateway.conversations import Conversations
from sessionkv.gateway.openai.response_body import KeptResponse
from sessionkv.gateway.openai.response_ids import PASSING
from sessionkv.gateway.openai.response_passing import PassingResponses
from sessionkv.gateway.openai.response_store import ResponseStore
from sessionkv.gateway.openai.response_turn import Plan
from sessionkv.gateway.pieces import Pieces
from sessionkv.ipc.messages import Node
from sessionkv.types import StepPlan
from sessionkv.types.reply_style import ReplyStyle
from tests.builders.doors import Hold
from tests.builders.engine import StepGate, engine_config, socket_engine
from tests.builders.gateway import MODEL, HttpEngine, http_engine

URL = "/v1/responses"
EVENTS: TypeAdapter[object] = TypeAdapter(ResponseStreamEvent)
ENDLESS = {"model": MODEL, "input": "Hi", "ignore_eos": True}


def heads(served: HttpEngine) -> set[str]:
    with served.engine.client() as client:
        return {session.name for session in client.sessions("~")}


def await_heads(served: HttpEngine, count: int) -> None:
    for _ in range(2000):
        if len(heads(served)) == count:
            return
    raise AssertionError(heads(served))


@pytest.fixture
def held() -> Iterator[tuple[HttpEngine, Hold]]:
    """An engine whose turns go on until the test lets them end."""
    hold = Hold()
    config = engine_config(blocks=4096)
    with http_engine(config, gate=hold.gate, runner={"script": hold.script}) as served:
        yield served, hold
        hold.release()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_no_turn_and_no_session(
    held: tuple[HttpEngine, Hold], stream: bool
) -> None:
    served, _ = held
    body = ENDLESS | {"stream": stream, "max_output_tokens": 1500}
    address = httpx.URL(served.url)
    connection = http.client.HTTPConnection(address.host, address.port)
    connection.request(
        "POST", URL, json.dumps(body), {"content-type": "application/json", "host": "localhost"}
    )
    response = connection.getresponse() if stream else None
    if response is not None:
        assert response.readline().startswith(b"event: response.created")
    await_heads(served, 1)
    if response is not None:
        response.close()
    connection.close()
    await_heads(served, 0)
    with served.engine.client() as client:
        assert client.stats()["requests_running"] == 0


class Failing:
    """Fails the steps of an engine once it is told to."""

    def __init__(self) -> None:
        self.fails = threading.Event()
        self.steps = 0

    def __call__(self, plan: StepPlan) -> None:
        self.steps += 1
        if self.fails.is_set() and self.steps > 8:
            raise RuntimeError("the device is gone")


def test_a_turn_that_fails_on_the_way_ends_the_stream_with_one_event() -> None:
    failing = Failing()
    failing.fails.set()
    with http_engine(gate=failing) as served:
        events = served.stream(URL, ENDLESS | {"stream": True, "max_output_tokens": 500})
        for event in events:
            EVENTS.validate_python(event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        last = events[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert "device" not in last["response"]["error"]["message"]
        assert sum(event["type"] == "response.failed" for event in events) == 1
        await_heads(served, 0)
        failing.steps = 0
        answer = served.post(URL, ENDLESS | {"max_output_tokens": 500})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        await_heads(served, 0)
        failing.fails.clear()
        assert served.post(URL, ENDLESS | {"max_output_tokens": 5}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_is_refused_with_the_numbers(stream: bool) -> None:
    with http_engine(engine_config(blocks=64)) as served:
        body = {"model": MODEL, "input": "x" * 300, "stream": stream}
        answer = served.post(URL, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["n_prompt_tokens"] > error["n_ctx"]
        await_heads(served, 0)


def test_a_stream_begins_before_its_prompt_is_computed() -> None:
    steps = itertools.count()
    gate = StepGate(lambda plan: next(steps) > 0)  # of many that the prompt takes
    with http_engine(engine_config(blocks=512, step_tokens=32), gate=gate) as served:
        body = {"model": MODEL, "input": "x" * 400, "stream": True, "max_output_tokens": 3}
        with served.http.stream("POST", URL, json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: response.created"
            gate.reached()
            gate.open()
            assert [line for line in lines if line.startswith("event: ")][-1] == (
                "event: response.incomplete"
            )


def test_many_at_once_from_one_response_are_all_there() -> None:
    with http_engine(engine_config(blocks=2048)) as served:
        first = served.post(URL, ENDLESS | {"max_output_tokens": 8}).json()
        bodies = [
            {
                "model": MODEL,
                "input": f"number {i}",
                "previous_response_id": first["id"],
                "stream": True,
                "max_output_tokens": 8,
                "ignore_eos": True,
            }
            for i in range(24)
        ]
        with ThreadPoolExecutor(24) as pool:
            streams = list(pool.map(lambda body: served.stream(URL, body), bodies))
        for events in streams:
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            body = events[-1]["response"]
            assert body["usage"]["output_tokens"] == 8
            assert body["usage"]["input_tokens_details"]["cached_tokens"] > 0
            assert served.http.get(f"{URL}/{body['id']}").json()["output"] == body["output"]
        assert len(heads(served)) == 25


def test_what_is_not_stored_is_gone_with_the_last_event() -> None:
    with http_engine() as served:
        first = served.post(URL, ENDLESS | {"max_output_tokens": 4}).json()
        before = heads(served)
        unstored = ENDLESS | {
            "store": False,
            "stream": True,
            "max_output_tokens": 4,
            "previous_response_id": first["id"],
        }
        with served.http.stream("POST", URL, json=unstored) as response:
            for line in response.iter_lines():
                if line == "event: response.incomplete":
                    assert heads(served) == before
                    break
            else:
                raise AssertionError("the response never ended")


def test_what_an_earlier_run_left_of_unstored_responses_is_deleted() -> None:
    with http_engine() as served:
        with served.engine.client() as client:
            client.open(f"{PASSING}0:resp_{'0' * 32}")
        assert served.http.get(f"{URL}/resp_{'0' * 32}").status_code == 404
        await_heads(served, 0)


def test_a_response_that_was_deleted_meanwhile_is_told_by_its_own_name(tmp_path: Path) -> None:
    async def run(endpoint: str) -> None:
        tasks = set()
        async with AsyncClient(endpoint) as client:
            store = ResponseStore(
                client,
                ReplyStyle(),
                lambda work: tasks.add(asyncio.ensure_future(work)),
                pieces=Pieces(),
                run="test",
                passing=PassingResponses(Conversations(client), {}),
            )
            base, name = f"~http:resp_{'0' * 32}", f"~http:resp_{'1' * 32}"
            kept = KeptResponse({"id": f"resp_{'1' * 32}"})
            messages = [{"role": "user", "content": "x"}]
            plan = Plan(name, base, None, (), messages, kept, is_stored=True)
            with pytest.raises(PreviousResponseNotFound, match=f"resp_{'0' * 32}"):
                async for _ in store.run(plan, TurnOptions(), lambda: False):
                    pass
            await asyncio.gather(*tasks)

    with socket_engine(tmp_path) as engine:
        asyncio.run(run(engine.endpoint))


def test_a_conversation_of_any_length_is_read_with_one_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    answer = CallDesk._node

    def counted(desk: CallDesk, tenant: str, request: Node) -> object:
        asked.append(request.session)
        return answer(desk, tenant, request)

    monkeypatch.setattr(CallDesk, "_node", counted)
    with http_engine(engine_config(blocks=2048)) as served:
        conversation = served.post("/v1/conversations", {}).json()["id"]
        body = ENDLESS | {"max_output_tokens": 4, "conversation": conversation}
        for _ in range(6):
            last = served.post(URL, body).json()
        asked.clear()
        url = f"/v1/conversations/{conversation}/items"
        assert len(served.http.get(url, params={"limit": 100}).json()["data"]) == 12
        assert len(asked) == 2  # how it began, and its last response with all before
        asked.clear()
        other = ENDLESS | {"max_output_tokens": 4, "instructions": "Be brief."}
        assert "id" in served.post(URL, other | {"previous_response_id": last["id"]}).json()
        assert len(asked) == 2  # the response, and all that it goes on from
