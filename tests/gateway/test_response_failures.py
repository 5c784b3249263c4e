"""Responses that fail, are left or are too many: what the client hears, and what stays behind."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from sessionkv.types import StepPlan
from tests.builders.doors import Hold
from tests.builders.engine import StepGate, engine_config
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
