"""Frames sent without waiting for answers: taken in order, answered once each, paged lists."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sessionkv import LimitsConfig
from tests.builders.engine import SocketEngine, engine_config, greedy, oracle, socket_engine
from tests.builders.fake_engine import short_endpoint
from tests.builders.wire_client import WireClient

SHORT = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def engine() -> Iterator[SocketEngine]:
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        config = engine_config(blocks=1024, limits=LimitsConfig(missed_heartbeats=1000))
        with socket_engine(folder, config) as engine:
            yield engine


@pytest.fixture
def wire(engine: SocketEngine) -> Iterator[WireClient]:
    with WireClient(engine.endpoint, hello=False) as wire:
        yield wire


def turn(number: int, **fields: Any) -> dict[str, Any]:
    return {"session": "a", "tokens": [number], "sampling": SHORT, "when_busy": "queue", **fields}


def test_a_whole_conversation_in_one_go(wire: WireClient) -> None:
    wire.send("hello", 0)
    wire.send("open", 1, session="a")
    for number in range(5):
        wire.send("turn", 10 + number, **turn(number))
    wire.send("stats", 2)
    replies = {}
    while len(replies) < 8:
        reply = wire.receive()
        assert reply["id"] not in replies
        replies[reply["id"]] = reply
    log: list[int] = []
    for number in range(5):
        log.append(number)
        expected = oracle(log, greedy(3))
        assert replies[10 + number]["tokens"] == expected
        log += expected
    nodes = [replies[10 + number]["node"] for number in range(5)]
    assert nodes == sorted(nodes, key=lambda node: int(node[2:]))


def test_what_a_terminal_reply_reports_is_done_for_what_comes_after_it(wire: WireClient) -> None:
    wire.call("hello", 0)
    wire.call("open", 1, session="a")
    for number in range(20):
        done = wire.call("turn", 2, **turn(number))
        info = wire.call("info", 3, session="a")["value"]
        assert (info["node"], info["turns"]) == (done["node"], number + 1)
        fork = wire.call("fork", 4, session="a", name=f"f{number}")["value"]
        assert fork["node"] == done["node"]


def test_deleting_right_behind_a_turn_and_opening_anew(wire: WireClient) -> None:
    wire.call("hello", 0)
    for number in range(10):
        wire.send("open", 1, session="a")
        wire.send("turn", 2, **turn(number))
        wire.send("turn", 3, **turn(number))
        wire.send("close", 4, session="a", keep=False)
        ends = {}
        while len(ends) < 4:
            reply = wire.receive()
            ends[reply["id"]] = reply
        assert (ends[1]["t"], ends[4]["t"]) == ("result", "result")
        for request_id in (2, 3):
            assert ends[request_id].get("code", "turn_cancelled") == "turn_cancelled"
        assert wire.call("info", 5, session="a")["code"] == "session_not_found"


def test_lists_page_by_name_and_bytes_are_told_of_one_session_only(wire: WireClient) -> None:
    wire.call("hello", 0)
    names = ["a", "b1", "b2", "b3", "ü"]
    for name in names:
        wire.call("open", 1, session=name)
    found, after = [], None
    while True:
        page = wire.call("list", 2, limit=2, **({"after": after} if after else {}))["value"]
        assert len(page["sessions"]) <= 2
        assert all("bytes" not in session for session in page["sessions"])
        found += [session["name"] for session in page["sessions"]]
        after = page["next"]
        if after is None:
            break
    assert found == names
    page = wire.call("list", 3, prefix="b", after="b1", limit=1)["value"]
    assert ([s["name"] for s in page["sessions"]], page["next"]) == (["b2"], "b2")
    assert "bytes" in wire.call("info", 4, session="a")["value"]
    for fields in ({"limit": 0}, {"limit": 10_001}, {"prefix": 3}, {"after": ""}):
        assert wire.call("list", 5, **fields)["code"] == "invalid_request"


def test_unknown_fields_are_ignored_and_nil_is_absent(wire: WireClient) -> None:
    wire.call("hello", 0, colour="red", client=None)
    wire.call("open", 1, session="a", system=None, tools=None, history=None, colour=[1, {"x": 2}])
    reply = wire.call(
        "turn", 2, **turn(1, text=None, messages=None, stream=None, deadline_s=None,
                          idempotency_key=None, priority=None, attempt=None, colour="red")
    )  # fmt: skip
    assert reply["tokens"] == oracle([1], greedy(3))
    sampling = {**SHORT, "temperature": 0, "seed": None, "stop": None, "logprobs": None, "mood": 1}
    assert wire.call("turn", 3, **turn(2, sampling=sampling))["t"] == "done"
