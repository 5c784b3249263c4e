"""A client that goes away while its answer is computed: the turn ends and its blocks are free."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from sessionkv.types import StepPlan
from tests.builders.apis import ALL, Api
from tests.builders.engine import StepGate
from tests.builders.gateway import HttpEngine, http_engine


class CountingGate(StepGate):
    """Stops at the tenth step and counts those behind it."""

    def __init__(self) -> None:
        self.steps = 0
        super().__init__(when=lambda plan: self.steps >= 10)

    def __call__(self, plan: StepPlan) -> None:
        super().__call__(plan)
        self.steps += 1


def await_cancel(served: HttpEngine) -> None:
    """Until core, which stands at the gate, has been told of it."""
    assert served.engine.building.built is not None
    inbox = served.engine.building.built.inbox
    for _ in range(30_000):
        if any(type(item).__name__ == "CancelTurn" for item in inbox._items):
            return
        threading.Event().wait(0.001)
    raise AssertionError("nobody cancelled the turn")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ALL, ids=repr)
def test_the_turn_ends_with_its_client(api: Api, stream: bool) -> None:
    gate = CountingGate()
    with http_engine(gate=gate, runner={"script": lambda ids: 97}) as served:
        sent = json.dumps(api.body("Hi", stream=stream, limit=1500)).encode()
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = "Host: localhost\r\nContent-Type: application/json\r\n"
            first = f"POST {api.path} HTTP/1.1\r\n{head}Content-Length: {len(sent)}\r\n\r\n"
            client.sendall(first.encode() + sent)
            gate.reached()
        await_cancel(served)
        gate.open()
        with served.engine.client() as client:
            for _ in range(10_000):  # each question is a round through the core
                left = [session.name for session in client.sessions("~")]
                if not client.stats()["ledger"]["sequences"] and not left:
                    break
            assert left == []
        assert gate.steps < 20  # of 1,500
        served.engine.parts.kv.check()
        assert served.engine.parts.kv.ledger().idle
